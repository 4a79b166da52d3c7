"""Real graphs at every stage of the pipeline, recorded in one process on a fake process group.

``record`` compiles a model like the zero3 backend does and keeps a copy of each graph before and
after each stage; the graphs then run uncompiled, which costs no Inductor time.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves

from zero_compile import backend, pipeline
from zero_compile.analysis.casts import narrow_dtype
from zero_compile.analysis.fx_graph import calls, parameter_number
from zero_compile.bucketing import LayoutPolicy, Use, group_uses, plan_bucket
from zero_compile.capture.captured_graph import Capture
from zero_compile.config.options import Options, parse
from zero_compile.lowering import Lowered, Lowering, Run
from zero_compile.passes.insert import insert_call
from zero_runtime import compat
from zero_runtime.ir import ops
from zero_runtime.ir.plan import BucketPlan, Phase, Plan, Residence, Tier

#: AOTAutograd's graphs differ between versions of torch; snapshots show those of this one.
snapshot = pytest.mark.skipif(
    compat.torch_version != (2, 13), reason="graph snapshots are of torch 2.13"
)

CAPTURED, JOINT = "captured", "joint"
FORWARD, BACKWARD, INFERENCE = str(Phase.FORWARD), str(Phase.BACKWARD), str(Phase.INFERENCE)


@contextmanager
def fake_world(world_size: int) -> Iterator[None]:
    """A process group of ``world_size`` ranks of which only rank 0 exists."""
    torch._dynamo.reset()  # what earlier tests made dynamic must not show in these graphs
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        torch._dynamo.reset()


class Recording:
    """Graphs by (which graph, stage); each look at one gives a fresh copy to take apart."""

    def __init__(self, run_backward: bool) -> None:
        self.run_backward = run_backward
        self.plans: dict[str, Plan] = {}
        self.captures: list[Capture] = []
        self._shots: dict[tuple[str, str], tuple[GraphModule, GraphModule, Callable[..., Any]]] = {}

    def before(self, stage: str, graph: str) -> GraphModule:
        """The graph that the stage was given."""
        return copy_of(self._shots[graph, stage][0])

    def after(self, stage: str, graph: str) -> GraphModule:
        """The graph that the stage returned."""
        return copy_of(self._shots[graph, stage][1])

    def scheduled(self, graph: str) -> GraphModule:
        """The graph that is handed to Inductor."""
        return self.after("release_after_last_reader", graph)

    def stage(self, stage: str, graph: str) -> Callable[[GraphModule], GraphModule]:
        """The stage itself, with its options bound."""
        return self._shots[graph, stage][2]

    @property
    def buckets(self) -> list[BucketPlan]:
        """The first graph's buckets."""
        return self.captures[0].bucket_plans

    @property
    def places(self) -> Mapping[int, tuple[int, int]]:
        """The first graph's parameter numbers to (bucket, slot)."""
        return self.captures[0].places

    def run(self, stages: Sequence[Callable[..., Any]], gm: GraphModule, graph: str) -> GraphModule:
        """Run stages as the pipeline does, keeping copies."""
        for stage in stages:
            before = copy_of(gm)
            gm = pipeline.run([stage], gm)
            name = (stage.func if isinstance(stage, partial) else stage).__name__
            self._shots.setdefault((graph, name), (before, copy_of(gm), stage))
        return gm


class _Compiler(backend.GraphCompiler):
    """Runs the lowered graphs as they are."""

    def __init__(
        self, capture: Capture, lowering: Lowering, recording: Recording, runs: bool
    ) -> None:
        super().__init__(capture, lowering)
        self._recording = recording
        self._runs = runs

    def compile(self, lowered: Lowered, example_inputs: Sequence[Any], kwargs: Any) -> Any:
        phase = lowered.plan.phase
        for planned, plan in self._lowering.plans.items():
            self._recording.plans.setdefault(str(planned), plan)
        stop = phase is Phase.BACKWARD and not self._recording.run_backward
        run = _stop if stop or not self._runs else lowered.graph
        return lambda args: run(*args)


class _Lowering(Lowering):
    """Gives all buckets a residence once they are laid out."""

    def __init__(
        self, capture: Capture, options: Options, run: Run, residence: Residence | None
    ) -> None:
        super().__init__(capture, options, run)
        self._everywhere = residence

    def _lay_out(self, gm: GraphModule) -> None:
        super()._lay_out(gm)
        for bucket in self._capture.buckets if self._everywhere is not None else ():
            bucket.plan = replace(bucket.plan, residence=self._everywhere)


class _Compiled(Exception):  # noqa: N818
    """Everything there is to record has been compiled."""


def _stop(*_: Any) -> None:
    raise _Compiled


def record(
    model: nn.Module,
    *inputs: Any,
    world_size: int = 2,
    train: bool = True,
    infer: bool = False,
    run_backward: bool = False,
    residence: Residence | None = None,
    **options: Any,
) -> Recording:
    """Compile and run a forward that trains, or one without gradients, or both in this order.

    Of the first the backward graph is compiled too, and run if ``run_backward``. With a ``residence``,
    which every bucket gets, nothing is run.
    """
    recording = Recording(run_backward)
    settings = parse({"schedule": "one_ahead", **options})

    def recording_backend(gm: GraphModule, example_inputs: Sequence[Any]) -> Any:
        capture = Capture.of(gm, example_inputs, settings)
        recording.captures.append(capture)
        recording.run(pipeline.capture(capture.parameters), gm, CAPTURED)
        lowering = _Lowering(capture, settings, recording.run, residence)
        compiled = compat.compile_fx(
            gm,
            example_inputs,
            inner_compile=_Compiler(capture, lowering, recording, runs=residence is None),
            config_patches={"custom_partitioner_fn": backend.JointPartitioner(lowering)},
        )
        capture.session.partition()
        return compiled

    with fake_world(world_size):
        compiled = torch.compile(model, backend=recording_backend)
        if train:
            with suppress(_Compiled):
                outputs = tree_leaves(compiled(*inputs))
                sum(x.sum() for x in outputs if x.grad_fn is not None).backward()
        if infer:
            with torch.no_grad(), suppress(_Compiled):
                compiled(*inputs)
    return recording


def copy_of(gm: GraphModule) -> GraphModule:
    """The same nodes in a graph of their own; metadata is shared, but not the dicts that hold it."""
    graph = torch.fx.Graph()
    output = graph.graph_copy(gm.graph, values := {}, return_output_node=True)
    assert isinstance(output, tuple)
    graph.output(output[0]).meta = dict(output[1].meta)
    for node, copied in values.items():
        copied.name = node.name
    return GraphModule(gm, graph)


# ------------------------------------------------------------------------------ models


class TinyGpt(nn.Module):
    """One pre-norm block between an embedding and logits that share a weight; returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.norm1 = nn.LayerNorm(16)
        self.qkv = nn.Linear(16, 48, bias=False)
        self.out = nn.Linear(16, 16, bias=False)
        self.norm2 = nn.LayerNorm(16)
        self.up = nn.Linear(16, 64)
        self.down = nn.Linear(64, 16)
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        x = x + self.out(self._attention(self.norm1(x)))
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())

    def _attention(self, x: torch.Tensor) -> torch.Tensor:
        heads = [t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1)]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        return mixed.transpose(1, 2).flatten(2)


class Autocast(nn.Module):
    """Another model under bfloat16 autocast."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.inner(x)


def make_mlp() -> nn.Module:
    """Three linears, each a bucket of its own at 512 bytes."""
    linears = [nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 4)]
    return nn.Sequential(linears[0], nn.ReLU(), linears[1], nn.ReLU(), linears[2])


@cache
def mlp(
    world_size: int = 2, schedule: str = "one_ahead", residence: Residence | None = None
) -> Recording:
    """The MLP trained and then evaluated, three buckets."""
    options = {"bucket_bytes": 512, "schedule": schedule, "residence": residence}
    return record(make_mlp(), torch.randn(3, 8), world_size=world_size, infer=True, **options)


@cache
def gpt() -> Recording:
    """The GPT block trained and then evaluated, several buckets."""
    tokens = torch.zeros(2, 4, dtype=torch.int64)
    return record(TinyGpt(), tokens, tokens, infer=True, bucket_bytes=2048)


# ------------------------------------------------------------------------------ small graphs by hand


def traced(function: Callable[..., Any], *inputs: torch.Tensor) -> GraphModule:
    """An aten graph of ``function`` with fake values, as the passes of the lowering see it."""
    gm = make_fx(function, tracing_mode="fake")(*inputs)
    gm.graph.eliminate_dead_code()
    gm.recompile()
    return gm


#: Everything on NVMe, and everything on the host.
NVME, HOST = Residence(Tier.NVME, Tier.NVME), Residence(Tier.HOST, Tier.HOST)


def laid_out(
    gm: GraphModule,
    bucket_bytes: int = 1 << 20,
    world_size: int = 2,
    residence: Residence = Residence(),  # noqa: B008
) -> tuple[list[BucketPlan], dict[int, tuple[int, int]]]:
    """Buckets for the parameters that a graph gathers, in the order of its gathers, and the places."""
    groups = group_uses([_use(g) for g in calls(gm.graph, ops.gather)], LayoutPolicy(bucket_bytes))
    places = {
        use.number: (bucket, slot)
        for bucket, group in enumerate(groups)
        for slot, use in enumerate(group)
    }
    plans = [plan_bucket(group, world_size) for group in groups]
    return [replace(plan, residence=residence) for plan in plans], places


def _use(gather: Node) -> Use:
    value = gather.all_input_nodes[0].meta["val"]
    return Use(
        parameter_number(gather),
        f"p{parameter_number(gather)}",
        tuple(value.shape),
        value.stride(),
        value.numel(),
        value.dtype,
        narrow_dtype(gather) or value.dtype,
        value.device,
        True,
    )


def lowered(
    function: Callable[..., Any], *inputs: torch.Tensor, world_size: int = 2, **options: Any
) -> GraphModule:
    """The scheduled graph of ``function``, unverified. It calls ``ops.gather`` and ``ops.reduce`` itself."""
    gm, settings = traced(function, *inputs), parse({"schedule": "one_ahead", **options})
    buckets, places = laid_out(gm, settings.bucket_bytes, world_size)
    return pipeline.run(lower(buckets, places, settings.schedule), gm, verify=False)


def lower(buckets: Any, places: Any, schedule: str = "one_ahead") -> list[Any]:
    """All stages between AOTAutograd and Inductor, for a schedule that needs no planner."""
    return [*pipeline.bucket(buckets, places), *pipeline.schedule(schedule)]


def call_before(node: Node, target: Any, *args: Any) -> Node:
    """Insert a call, its fake value computed, in front of a node."""
    with node.graph.inserting_before(node):
        return insert_call(node.graph, target, *args)


def named(gm: GraphModule, name: str) -> Node:
    """The graph's node of that name."""
    return next(n for n in gm.graph.nodes if n.name == name)


def index(gm: GraphModule, node: Node) -> int:
    """The node's place in execution order."""
    return list(gm.graph.nodes).index(node)


def names(gm: GraphModule) -> list[str]:
    """The names of the graph's nodes, in order."""
    return [n.name for n in gm.graph.nodes]


# ------------------------------------------------------------------------------ printing


def text(gm: GraphModule) -> str:
    """One line a node: ``name = target(arguments)``; placeholders with dtype and shape."""
    return "\n".join(_line(node) for node in gm.graph.nodes) + "\n"


def _line(node: Node) -> str:
    if node.op == "placeholder":
        return f"{node.name}: {_type(node)}"
    if node.op == "output":
        return f"return {_value(node.args[0])}"
    arguments = [_value(a) for a in node.args] + [
        f"{k}={_value(v)}" for k, v in node.kwargs.items()
    ]
    tag = "  # recompute" if "recompute" in node.meta else ""
    return f"{node.name} = {_target(node.target)}({', '.join(arguments)}){tag}"


def _type(node: Node) -> str:
    value = node.meta.get("val", node.meta.get("example_value"))
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"{_value(value.dtype)}{list(value.shape)}"


def _target(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return str(target).removesuffix(".default")
    return target if isinstance(target, str) else target.__name__


def _value(value: Any) -> str:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, list | tuple):
        return f"[{', '.join(_value(v) for v in value)}]"
    return str(value)
