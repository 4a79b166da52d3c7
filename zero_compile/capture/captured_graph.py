"""One Dynamo graph on its way through the compiler: its parameters, their session and buckets."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.fx import GraphModule, Node

from zero_compile.analysis.casts import narrow_dtype
from zero_compile.analysis.fx_graph import calls, parameter_number, positions
from zero_compile.analysis.resident_memory import Held
from zero_compile.bucketing import LayoutPolicy, Use, group_uses, plan_bucket
from zero_compile.capture.checks import refuse_in_graph, refuse_parameter, refuse_wide
from zero_compile.capture.find_model import (
    compiled_otherwise,
    find_root,
    parameter_names,
    refuse_wrapper,
)
from zero_compile.capture.offload import offload_of, refuse_budgets, refuse_folders
from zero_compile.config.options import Options, parse
from zero_compile.passes.tile_linears import tileable
from zero_compile.tiling import Cut, TilePolicy, cut_of, plan_tiles
from zero_runtime import compat
from zero_runtime.comm.transports import ALONE, Group, current_group, group_of_mesh, group_over
from zero_runtime.eager.construction import construction_of
from zero_runtime.eager.find_leaves import find_leaves, hold_leaves
from zero_runtime.eager.open_session import open_session
from zero_runtime.errors import OptionError, PlanError, UnsupportedError
from zero_runtime.ir import ops
from zero_runtime.ir.placement import Offload
from zero_runtime.ir.plan import BucketPlan, Stage, StatePolicy, TiledPlan, dtype_name
from zero_runtime.ir.strides import dense_stride
from zero_runtime.optim.step_hooks import HOOKS
from zero_runtime.session import Session, session_of
from zero_runtime.sharding.bucket import Bucket
from zero_runtime.sharding.parameter_state import Entry
from zero_runtime.sharding.put_off import puts_off
from zero_runtime.sharding.sharded_gradient import Place
from zero_runtime.sharding.tiled_bucket import Tile, TiledBucket

_DEFAULT_LAYOUT = LayoutPolicy()


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
        self.cuts: dict[int, Cut] = {}
        """Parameters that the graph moves in tiles; those have numbers of their own."""
        self._tiles: list[tuple[int, int]] = []
        """Of each tile, by its number beyond those of parameters: its parameter, which of its tiles."""

    @staticmethod
    def of(
        gm: GraphModule,
        example_inputs: Sequence[Any],
        options: Options,
        stage: Stage = Stage.PARAMETERS,
        group: Group | None = None,
    ) -> "Capture":
        """Claim the parameters among a Dynamo graph's inputs, and watch over the rest of their model.

        ``group`` are the ranks of a new session; None: those that the options name.

        Raises:
            UnsupportedError: a parameter, or what the graph does to one, cannot be partitioned.
        """
        nodes = list(gm.graph.find_nodes(op="placeholder"))
        found = {
            n: p for n, p in zip(nodes, example_inputs, strict=True) if isinstance(p, nn.Parameter)
        }
        root = find_root(list(found.values()))
        if not found and (root is None or not any(True for _ in root.parameters())):
            return Capture(open_session(ALONE, lay_out_rest, StatePolicy()), {}, [], "")
        named = (
            {id(p): name for name, p in parameter_names(root).items()} if root is not None else {}
        )
        names = {node: named.get(id(p)) or _name(node) for node, p in found.items()}
        for node in found:
            compat.guard_identity(node)
        refuse_in_graph(gm, names)
        claimed = set(map(id, found.values()))
        apart = claimed | (compiled_otherwise(root) if root is not None else set())
        rest = (
            {n: p for n, p in parameter_names(root).items() if id(p) not in apart}
            if root is not None
            else {}
        )
        refuse_wide([*found.values(), *rest.values()], options)
        if root is not None:
            find_leaves(root, options.leaf_modules)  # refused before anything changes
        session = _session_for(found.values(), options, stage, group, rest.values())
        construction_of(session).finish(parameter_names(root) if root is not None else {})
        entries = [_claim(session, names[node], p) for node, p in found.items()]
        if root is not None:
            session.guard(_others(session, rest))
            hold_leaves(root, session, options.leaf_modules)
        numbers = {nodes.index(node): number for number, node in enumerate(found)}
        return Capture(session, numbers, entries, f"graph{len(session.plans)}")

    @property
    def bucket_plans(self) -> list[BucketPlan]:
        """The plans of the graph's buckets."""
        return [bucket.plan for bucket in self.buckets]

    @property
    def tile_buckets(self) -> frozenset[int]:
        """Which of the graph's buckets are tiles, by number."""
        return frozenset(n for n, bucket in enumerate(self.buckets) if isinstance(bucket, Tile))

    def cut(self, gm: GraphModule, policy: TilePolicy) -> dict[int, Cut]:
        """Which parameters the graph has to move in tiles: those that lie so, and those that shall. Idempotent."""
        world_size = self.session.group.world_size
        for gather in _by_first_use(gm):
            number = parameter_number(gather)
            if number >= len(self.entries) or number in self.cuts:
                continue
            entry, found = self.entries[number], None
            if not self._wants_bucket(entry):
                plan = entry.future_place.bucket.plan
                found = (plan.dim, plan.sizes) if isinstance(plan, TiledPlan) else None
            elif tileable(gather):
                found = cut_of(_use(number, entry, narrow_dtype(gather)), world_size, policy)
            if found is not None:
                self._cut(number, *found)
        return self.cuts

    def _cut(self, number: int, dim: int, sizes: tuple[int, ...]) -> None:
        first = len(self.entries) + len(self._tiles)
        self.cuts[number] = Cut(dim, sizes, tuple(range(first, first + len(sizes))))
        self._tiles += [(number, tile) for tile in range(len(sizes))]

    def uses(self, gm: GraphModule) -> list[Use]:
        """The parameters that the graph gathers whole, in the order of first use."""
        numbered = [(parameter_number(g), g) for g in _by_first_use(gm)]
        return [
            _use(number, self.entries[number], narrow_dtype(g))
            for number, g in numbered
            if number < len(self.entries)
        ]

    def lay_out(self, gm: GraphModule, policy: LayoutPolicy) -> None:
        """Give every parameter that the graph gathers a bucket, and number the buckets. Idempotent."""
        gathers = [g for g in _by_first_use(gm) if parameter_number(g) not in self.places]
        self._lay_out_tiled(gathers)
        whole = [g for g in gathers if parameter_number(g) < len(self.entries)]
        fresh = [g for g in whole if self._wants_bucket(self.entries[parameter_number(g)])]
        uses = [
            _use(number, self.entries[number], narrow_dtype(g))
            for g in fresh
            for number in [parameter_number(g)]
        ]
        for group in group_uses(uses, policy):
            bucket = self.session.bucket(plan_bucket(group, self.session.group.world_size))
            self.session.adopt(bucket, [self.entries[use.number] for use in group])
        for gather in gathers:
            self._number(parameter_number(gather))

    def _lay_out_tiled(self, gathers: Sequence[Node]) -> None:
        """Each parameter of which ``gathers`` are tiles gets a bucket of its own."""
        numbers = [parameter_number(g) - len(self.entries) for g in gathers]
        for number in dict.fromkeys(self._tiles[n][0] for n in numbers if n >= 0):
            entry, cut = self.entries[number], self.cuts[number]
            if self._wants_bucket(entry):
                world_size = self.session.group.world_size
                plan = plan_tiles(_use(number, entry), world_size, cut.dim, cut.sizes)
                self.session.adopt(self.session.bucket(plan), [entry])

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

    def _wants_bucket(self, entry: Entry) -> bool:
        """Whether a bucket can be chosen for the entry; one of its own, from when it was built, can go."""
        return not entry.placed or construction_of(self.session).movable(entry)

    def _number(self, parameter: int) -> None:
        bucket, slot = self._place(parameter)
        if bucket not in self.buckets:
            self.buckets.append(bucket)
        self.places[parameter] = (self.buckets.index(bucket), bucket.plan.slots.index(slot))

    def _place(self, number: int) -> Place:
        if number < len(self.entries):
            return self.entries[number].future_place
        parameter, which = self._tiles[number - len(self.entries)]
        bucket = self.entries[parameter].future_place.bucket
        assert isinstance(bucket, TiledBucket)
        tile = bucket.tiles[which]
        return Place(tile, tile.plan.slots[0])


def partition(
    model: nn.Module, options: Mapping[str, Any] | None = None, *, stage: int = 3
) -> None:
    """Partition all parameters of ``model`` now, before any graph of it exists.

    For models of which Dynamo compiles little or nothing: eager code gathers each parameter for each
    operation. Options and stage are those of the backends. Call it on every rank.

    Raises:
        OptionError: as for ``torch.compile``, or a stage that ZeRO does not have.
        UnsupportedError: a parameter, or a wrapper around the model, cannot be partitioned.
    """
    if stage not in tuple(Stage):
        raise OptionError(f"stage {stage!r}: ZeRO has the stages 1, 2 and 3")
    settings = parse(options, stage=stage)
    refuse_folders(settings)
    for module in model.modules():
        refuse_wrapper(module)
    named = parameter_names(model)
    refuse_wide(named.values(), settings)
    find_leaves(model, settings.leaf_modules)  # an unknown one is refused before anything changes
    session = _session_for(named.values(), settings, Stage(stage))
    session.guard([_claim(session, name, p) for name, p in named.items()])
    hold_leaves(model, session, settings.leaf_modules)
    session.settle()


def _session_for(
    parameters: Iterable[nn.Parameter],
    options: Options,
    stage: Stage,
    group: Group | None = None,
    rest: Iterable[nn.Parameter] = (),
) -> Session:
    """The session of the parameters, else one of ``rest`` that partitions in this way, else a new one.

    Raises:
        UnsupportedError: ``parameters`` are partitioned in another way than this.
    """
    parameters, rest = list(parameters), list(rest)
    group, policy = group or _group(options), _policy(options, stage)
    known = _owners(parameters)
    others = [session for session in _owners(rest) if session not in known]
    sized = all(session.offload.sized for session in [*known, *others])
    held = [
        Held(p.numel(), dtype_name(p.dtype), p.requires_grad)
        for p in dict.fromkeys([*parameters, *rest])
    ]
    offload = offload_of(options, held if sized else [], policy, group.world_size)
    for session in known:
        _refuse_another_way(session, policy, group, offload)
    known += [s for s in others if not any(_differences(s, policy, group, offload))]
    if known:
        return _united(known)
    session = open_session(group, partial(lay_out_rest, policy=options.layout), policy, offload)
    session.synchronise = not puts_off([*parameters, *rest])
    if isinstance(options.update_in_backward, torch.optim.Optimizer):
        session.updates.meet(HOOKS.offloaded_part(options.update_in_backward))
    return session


def _owners(parameters: Iterable[nn.Parameter]) -> list[Session]:
    owners = dict.fromkeys(session_of(p) for p in parameters)
    return [session for session in owners if session is not None]


def _united(sessions: Sequence[Session]) -> Session:
    """One session for parts of a model that were built partitioned, each by itself."""
    first, *rest = sessions
    for other in rest:
        if first.offload == other.offload and not (first.plans or other.plans):
            construction_of(first).absorb(other)
    return first


def build_session(options: Options) -> Session:
    """A session for a model that is about to be built, whose size is not known yet.

    Raises:
        OptionError: the options place state by the model's size.
        GroupError: several ranks were launched and no process group was initialised.
    """
    refuse_budgets(options)
    refuse_folders(options)
    group, policy = _group(options), _policy(options, Stage.PARAMETERS)
    offload = replace(offload_of(options, [], policy, group.world_size), sized=False)
    session = open_session(group, partial(lay_out_rest, policy=options.layout), policy, offload)
    construction_of(session).begin()
    return session


def _refuse_another_way(
    session: Session, policy: StatePolicy, group: Group, offload: Offload
) -> None:
    difference = next(_differences(session, policy, group, offload), None)
    if difference is not None:
        raise UnsupportedError(difference)


def _differences(
    session: Session, policy: StatePolicy, group: Group, offload: Offload
) -> Iterator[str]:
    """Why the session does not partition in this way, a sentence each."""
    known = session.policy
    if known.stage is not policy.stage:
        yield (
            f'the model is compiled with backend="zero{int(known.stage)}" and now with '
            f'"zero{int(policy.stage)}": a parameter can be partitioned in one way only.'
        )
    for what, before, now in (
        (
            "float32 master weights (options bf16, fp16)",
            known.master_weights,
            policy.master_weights,
        ),
        ("reduce_dtype", known.reduce_dtype, policy.reduce_dtype),
        ("the ranks of group or mesh", _ranks(session.group), _ranks(group)),
        ("what is offloaded", session.offload.what, offload.what),
    ):
        if before != now:
            yield (
                f"the model is partitioned already, and this call differs in {what}: {before} before, "
                f"{now} now. A parameter can be partitioned in one way only: give every torch.compile "
                "and zero_compile.partition of one model the same options."
            )


def _ranks(group: Group) -> str:
    """Which ranks share the model's state, as far as it matters: by number, however the group was made."""
    if group.process_group is None or group.data_ranks == 1:
        return "this rank alone"
    shards, replicas = (
        dist.get_process_group_ranks(g) if g is not None else []
        for g in (group.process_group, group.replicas)
    )
    return f"sharded over {shards}" + (f", replicated over {replicas}" if replicas else "")


def _policy(options: Options, stage: Stage) -> StatePolicy:
    return StatePolicy(stage, options.bf16 or options.fp16, options.reduce_dtype)


def _group(options: Options) -> Group:
    if options.mesh is not None:
        return group_of_mesh(options.mesh)
    return group_over(options.group) if options.group is not None else current_group()


def _claim(session: Session, name: str, parameter: nn.Parameter) -> Entry:
    owner = session_of(parameter)
    if owner is not None:
        return owner.claim(name, parameter)
    refuse_parameter(name, parameter)
    return session.claim(name, parameter)


def _others(session: Session, rest: Mapping[str, nn.Parameter]) -> Iterator[Entry]:
    """Ordinary parameters among ``rest``, which this graph does not use: they stay whole for now."""
    for name, parameter in rest.items():
        if type(parameter) is nn.Parameter and not parameter.is_meta:
            refuse_parameter(name, parameter)
            yield session.claim(name, parameter)


def lay_out_rest(
    entries: Sequence[Entry], world_size: int, *, policy: LayoutPolicy = _DEFAULT_LAYOUT
) -> Iterator[tuple[BucketPlan, list[Entry]]]:
    """Buckets for parameters that no graph has used, in the order of the model."""
    alive = [(number, e) for number, e in enumerate(entries) if e.parameter is not None]
    uses = [_use(number, entry) for number, entry in alive]
    for group in group_uses(uses, policy):
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
