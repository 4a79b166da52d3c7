"""What a training step of a model would do on any number of ranks, planned without memory or network.

The model's parameters are fake tensors, the other ranks are imagined, and nothing runs but the
compiler: Dynamo, AOTAutograd and the planner.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.fx import GraphModule

from zero_compile import pipeline
from zero_compile.analysis.fx_graph import output_node
from zero_compile.analysis.resident_memory import Resident
from zero_compile.backend import GraphCompiler, JointPartitioner, phase_of
from zero_compile.capture.captured_graph import Capture
from zero_compile.config.options import Options, parse
from zero_compile.lowering import Lowering
from zero_compile.simulator.program import Program
from zero_compile.simulator.prove_order import prove_order
from zero_compile.simulator.read_back import Scheduled
from zero_compile.simulator.simulate import simulate
from zero_runtime import compat
from zero_runtime.comm.transports import Group
from zero_runtime.errors import OptionError, ZeroError
from zero_runtime.ir.placement import Offload
from zero_runtime.ir.plan import Channel, Plan, Stage, StatePolicy
from zero_runtime.ir.timeline import Category, Event, Timeline

#: Makes the model and its example inputs (positional, by name), called where tensors are fake.
MakeModel = Callable[[], tuple[nn.Module, Sequence[Any], Mapping[str, Any]]]


class Traffic(NamedTuple):
    """Bytes one rank sends in a step, by channel."""

    all_gather: int
    reduce_scatter: int

    @property
    def total(self) -> int:
        """Both together."""
        return self.all_gather + self.reduce_scatter


@dataclass(frozen=True)
class GraphPreview:
    """One Dynamo graph: forward, and backward if it trains."""

    name: str
    plans: tuple[Plan, ...]
    scheduled: Scheduled
    program: Program
    timeline: Timeline
    code: Mapping[str, str]
    """The lowered graphs as text, by phase."""


@dataclass(frozen=True)
class Preview:
    """A whole model's step on one of ``world_size`` ranks."""

    world_size: int
    stage: Stage
    parameters: int
    resident: Resident
    policy: StatePolicy
    offload: Offload
    graphs: tuple[GraphPreview, ...]

    @property
    def traffic(self) -> Traffic:
        """What one rank sends in forward and backward: a ring moves ``(N - 1) / N`` of each bucket.

        At stages 1 and 2 the optimizer's update gathers each bucket once more, which is not counted.
        """
        moved = {Channel.ALL_GATHER: 0, Channel.REDUCE_SCATTER: 0}
        for graph in self.graphs:
            for op in graph.program.ops:
                if op.channel in moved:
                    moved[op.channel] += op.bytes
        share = (self.world_size - 1) / self.world_size
        return Traffic(*(round(share * moved[c]) for c in moved))

    @property
    def peak(self) -> int:
        """The most bytes held at once."""
        return max((g.timeline.peak for g in self.graphs), default=0)

    @property
    def seconds(self) -> float:
        """Predicted seconds of the step, the optimizer's update not included."""
        return sum(g.timeline.seconds for g in self.graphs)


def preview(
    make_model: MakeModel,
    *,
    world_size: int,
    stage: int = 3,
    options: Mapping[str, Any] | None = None,
    train: bool = True,
    checked: bool = True,
) -> Preview:
    """Plan a step of the model that ``make_model`` builds, on one of ``world_size`` ranks.

    ``checked`` also proves each plan free of races and deadlocks.

    Raises:
        OptionError: wrong options, or a budget that does not hold the model.
        PlanError: a bucket does not fit within the budget.
        ZeroError: no graph with parameters was compiled.
    """
    if stage not in tuple(Stage):
        raise OptionError(f"stage {stage!r}: ZeRO has the stages 1, 2 and 3")
    if world_size < 1:
        raise OptionError(f"a world has at least one rank, got {world_size}")
    settings = parse(options, stage=stage)
    with compat.compiling_apart(), compat.fake_tensors() as fake, torch.set_grad_enabled(train):
        with compat.FakeConversions(fake):
            model, args, kwargs = make_model()
        watcher = _Watcher(model, settings, Stage(stage), Group(None, 0, world_size))
        with compat.backend_errors():
            torch.compile(model, backend=watcher)(*args, **kwargs)
    if not watcher.lowerings:
        raise ZeroError("Dynamo compiled no graph with parameters of this model: nothing to show.")
    parameters = sum(p.numel() for p in model.parameters())
    first = watcher.lowerings[0]
    kept = first.resident
    graphs = tuple(_graph(lowering, world_size, checked) for lowering in watcher.lowerings)
    return Preview(world_size, Stage(stage), parameters, kept, first.policy, first.offload, graphs)


def _graph(lowering: Lowering, world_size: int, checked: bool) -> GraphPreview:
    scheduled, kept = lowering.scheduled(), lowering.resident
    resident = (
        (Category.SHARDS, kept.shards),
        (Category.OPTIMIZER, kept.optimizer),
        (Category.GRADIENTS, kept.gradients),
    )
    program = scheduled.program(lowering.name, world_size, resident)
    if checked:
        prove_order(program)
    timeline = _readable(simulate(program), lowering.name, next(iter(lowering.plans.values())))
    code = {str(phase): str(gm.graph) for phase, gm in lowering.graphs.items()}
    return GraphPreview(
        lowering.name, tuple(lowering.plans.values()), scheduled, program, timeline, code
    )


def _readable(timeline: Timeline, name: str, plan: Plan) -> Timeline:
    """The simulation's names replaced by those of nodes and parameters."""
    events = tuple(replace(e, name=_event_name(e, plan)) for e in timeline.events)
    return replace(timeline, name=name, events=events)


def _event_name(event: Event, plan: Plan) -> str:
    if event.bucket is None:
        return event.node or "the beginning"
    slots = plan.buckets[event.bucket].slots
    others = f" and {len(slots) - 1} more" if len(slots) > 1 else ""
    return f"{slots[0].name}{others}"


class _Watcher:
    """A Dynamo backend that plans every graph and runs none."""

    def __init__(self, model: nn.Module, settings: Options, stage: Stage, group: Group) -> None:
        self._model = model
        self._settings = settings
        self._stage = stage
        self._group = group
        self.lowerings: list[Lowering] = []

    def __call__(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Any:
        capture = Capture.of(gm, example_inputs, self._settings, self._stage, self._group)
        if not capture.entries:
            return compat.compile_fx(gm, example_inputs, inner_compile=_pretend)
        self._hold_the_rest(capture)
        pipeline.run(pipeline.capture(capture.parameters), gm, verify=self._settings.verify)
        lowering = Lowering(capture, self._settings)
        self.lowerings.append(lowering)
        return compat.compile_fx(
            gm,
            example_inputs,
            inner_compile=_PlanOnly(capture, lowering),
            config_patches={"custom_partitioner_fn": JointPartitioner(lowering)},
        )

    def _hold_the_rest(self, capture: Capture) -> None:
        """A fake parameter cannot say whose it is, so each graph has a session, which knows the whole
        model here as the one session of a real model does; and graphs are numbered here.
        """
        capture.name = f"graph{sum(len(lowering.plans) for lowering in self.lowerings)}"
        for name, parameter in self._model.named_parameters():
            capture.session.claim(name, parameter)


class _PlanOnly(GraphCompiler):
    def __call__(self, gm: GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        self._lowering.graph(gm, phase_of(kwargs))
        return _pretend(gm, example_inputs)


def _pretend(gm: GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
    """What stands for the compiled graph: results of the right shapes."""
    outputs = output_node(gm.graph).args[0]
    assert isinstance(outputs, list | tuple)
    values = [n.meta["val"] if isinstance(n, torch.fx.Node) else n for n in outputs]
    return compat.boxed(lambda args: list(values))
