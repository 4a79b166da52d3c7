"""One Dynamo graph on its way through the compiler: its parameters, their session and buckets."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from zero_compile.fx_graph import calls, parameter_number, positions
from zero_compile.layout import Use, group_uses, plan_bucket
from zero_compile.leaves import hold_leaves
from zero_compile.options import Options, parse
from zero_compile.passes.sink_casts import narrow_dtype
from zero_compile.refusals import refuse_in_graph, refuse_parameter, refuse_wide
from zero_compile.root import find_root, parameter_names
from zero_runtime import compat, ops
from zero_runtime.bucket import Bucket
from zero_runtime.buffers import dense_stride
from zero_runtime.collectives import ALONE, Group, current_group, group_of_mesh, group_over
from zero_runtime.entry import Entry
from zero_runtime.errors import PlanError, UnsupportedError
from zero_runtime.plan import BucketPlan, Policy, Stage
from zero_runtime.session import Session, session_of


class Capture:
    """Parameters are numbered in the order of the graph's inputs, buckets in the order of first use."""

    def __init__(
        self, session: Session, parameters: dict[int, int], entries: Sequence[Entry], name: str
    ) -> None:
        self.session = session
        self.name = name
        self.parameters = parameters
        """Input position to parameter number."""
        self.entries = entries
        """By parameter number."""
        self.buckets: list[Bucket] = []
        self.places: dict[int, tuple[int, int]] = {}
        """Parameter number to (bucket, slot)."""

    @staticmethod
    def of(
        gm: GraphModule,
        example_inputs: Sequence[Any],
        options: Options,
        stage: Stage = Stage.PARAMETERS,
    ) -> "Capture":
        """Claim the parameters among a Dynamo graph's inputs, and watch over the rest of their model.

        Raises:
            UnsupportedError: a parameter, or what the graph does to one, cannot be partitioned.
        """
        nodes = list(gm.graph.find_nodes(op="placeholder"))
        found = {
            n: p for n, p in zip(nodes, example_inputs, strict=True) if isinstance(p, nn.Parameter)
        }
        root = find_root(list(found.values()))
        if not found and (root is None or not any(True for _ in root.parameters())):
            return Capture(Session(ALONE, lay_out_rest, Policy()), {}, [], "")
        named = (
            {id(p): name for name, p in parameter_names(root).items()} if root is not None else {}
        )
        names = {node: named.get(id(p)) or _name(node) for node, p in found.items()}
        for node in found:
            compat.guard_identity(node)
        refuse_in_graph(gm, names)
        known = [*found.values(), *(root.parameters() if root is not None else ())]
        refuse_wide(known, options)
        session = _session_for(known, options, stage)
        entries = [_claim(session, names[node], p) for node, p in found.items()]
        if root is not None:
            session.guard(_others(session, root, set(map(id, found.values()))))
            hold_leaves(root, session, options.leaf_modules)
            session.rescue(root)
        numbers = {nodes.index(node): number for number, node in enumerate(found)}
        return Capture(session, numbers, entries, f"graph{len(session.plans)}")

    @property
    def bucket_plans(self) -> list[BucketPlan]:
        """The plans of the graph's buckets."""
        return [bucket.plan for bucket in self.buckets]

    def lay_out(self, gm: GraphModule, bucket_bytes: int | None) -> None:
        """Give every parameter that the graph gathers a bucket, and number the buckets. Idempotent."""
        gathers = [g for g in _by_first_use(gm) if parameter_number(g) not in self.places]
        fresh = [g for g in gathers if not self.entries[parameter_number(g)].placed]
        uses = [
            _use(number, self.entries[number], narrow_dtype(g))
            for g in fresh
            for number in [parameter_number(g)]
        ]
        for group in group_uses(uses, bucket_bytes):
            bucket = Bucket(
                plan_bucket(group, self.session.group.world_size),
                self.session.group,
                self.session.policy,
            )
            self.session.adopt(bucket, [self.entries[use.number] for use in group])
        for gather in gathers:
            self._number(parameter_number(gather))

    def bound(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """``compiled``, refusing to run on other parameters than those it was compiled for."""
        expected = [(i, self.entries[n]) for i, n in self.parameters.items()]

        def run(*args: Any) -> Any:
            for position, entry in expected:
                if args[position] is not entry.parameter:
                    raise PlanError(
                        f"a graph compiled for {entry.name} was called with another parameter. "
                        "Please report it."
                    )
            return compiled(*args)

        return run

    def _number(self, parameter: int) -> None:
        bucket, slot = self.entries[parameter].place
        if bucket not in self.buckets:
            self.buckets.append(bucket)
        self.places[parameter] = (self.buckets.index(bucket), bucket.plan.slots.index(slot))


def partition(
    model: nn.Module, options: Mapping[str, Any] | None = None, *, stage: int = 3
) -> None:
    """Partition all parameters of ``model`` now, before any graph of it exists.

    For models of which Dynamo compiles little or nothing: eager code gathers each parameter for each
    operation. Options and stage are those of the backends. Call it on every rank.

    Raises:
        OptionError: as for ``torch.compile``.
        UnsupportedError: a parameter, or a wrapper around the model, cannot be partitioned.
    """
    settings = parse(options)
    named = parameter_names(model)
    session = _session_for(named.values(), settings, Stage(stage))
    session.guard([_claim(session, name, p) for name, p in named.items()])
    hold_leaves(model, session, settings.leaf_modules)
    session.rescue(model)
    session.settle()


def _session_for(parameters: Iterable[nn.Parameter], options: Options, stage: Stage) -> Session:
    owners = (session_of(p) for p in parameters)
    known = next((s for s in owners if s is not None), None)
    if known is None:
        lay_out = partial(lay_out_rest, bucket_bytes=options.bucket_bytes)
        return Session(_group(options), lay_out, _policy(options, stage))
    if known.stage is not stage:
        raise UnsupportedError(
            f'the model is compiled with backend="zero{int(known.stage)}" and now with '
            f'"zero{int(stage)}": a parameter can be partitioned in one way only.'
        )
    return known


def _policy(options: Options, stage: Stage) -> Policy:
    return Policy(stage, options.bf16 or options.fp16, options.reduce_dtype)


def _group(options: Options) -> Group:
    if options.mesh is not None:
        return group_of_mesh(options.mesh)
    return group_over(options.group) if options.group is not None else current_group()


def _claim(session: Session, name: str, parameter: nn.Parameter) -> Entry:
    owner = session_of(parameter)
    if owner is not None:
        return owner.claim(name, parameter)
    refuse_parameter(name, parameter)
    if compat.autograd_holds(parameter):
        raise UnsupportedError(
            f"{name} is part of an autograd graph that was made before the compiled model first ran. If "
            "code that is not compiled uses it earlier in the same forward, run the model once under "
            "torch.no_grad() before training: later uses then gather it. If an earlier loss is still "
            "referenced, drop it (del loss)."
        )
    return session.claim(name, parameter)


def _others(session: Session, root: nn.Module, claimed: set[int]) -> Iterator[Entry]:
    """Ordinary parameters of the model that this graph does not use."""
    for name, parameter in parameter_names(root).items():
        if (
            id(parameter) not in claimed
            and type(parameter) is nn.Parameter
            and not parameter.is_meta
        ):
            yield _claim(session, name, parameter)


def lay_out_rest(
    entries: Sequence[Entry], world_size: int, *, bucket_bytes: int | None = None
) -> Iterator[tuple[BucketPlan, list[Entry]]]:
    """Buckets for parameters that no graph has used, in the order of the model."""
    alive = [(number, e) for number, e in enumerate(entries) if e.parameter is not None]
    uses = [_use(number, entry) for number, entry in alive]
    for group in group_uses(uses, bucket_bytes):
        yield plan_bucket(group, world_size), [entries[use.number] for use in group]


def _use(number: int, entry: Entry, gather_dtype: torch.dtype | None = None) -> Use:
    parameter = entry.parameter
    assert parameter is not None
    return Use(
        number,
        entry.name,
        tuple(parameter.shape),
        dense_stride(parameter),
        parameter.numel(),
        parameter.dtype,
        gather_dtype or parameter.dtype,
        parameter.device,
        parameter.requires_grad,
    )


def _by_first_use(gm: GraphModule) -> list[Node]:
    order = positions(gm.graph)
    first = lambda g: min((order[u] for u in g.users), default=order[g])  # noqa: E731
    return sorted(calls(gm.graph, ops.gather), key=first)


def _name(placeholder: Node) -> str:
    """``L['self']._modules['up']._parameters['weight']`` as ``up.weight``."""
    source = compat.source_of(placeholder)
    if source is None:
        return placeholder.name
    text = source.name if isinstance(source.name, str) else source.name()
    parts = re.findall(r"_(?:modules|parameters)\['([^']+)'\]", text)
    return ".".join(parts) or text
