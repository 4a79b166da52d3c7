"""A scheduled step read back from its graphs, whoever scheduled it: for simulation, tools and tests."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch.fx import Graph, Node

from zero_compile.analysis.costs import kernels_before
from zero_compile.analysis.fx_graph import bucket_number, calls
from zero_compile.scheduler.decide_schedule import GraphSchedule
from zero_compile.scheduler.pose_problem import Posed
from zero_compile.scheduler.problem import STAGING_SLOTS, Gather, Problem, Reduce, Schedule
from zero_compile.simulator.build_program import build_program
from zero_compile.simulator.program import Op, Program
from zero_runtime.ir import ops
from zero_runtime.ir.timeline import Category


@dataclass(frozen=True)
class Half:
    """One scheduled graph: its nodes, the problem it poses, and what was decided for it."""

    graph: Graph
    posed: Posed
    schedule: GraphSchedule


@dataclass(frozen=True)
class Scheduled:
    """A problem with the schedule that its graphs have. ``shift`` is backward's first unit."""

    problem: Problem
    schedule: Schedule
    nodes: tuple[str, ...]
    shift: int

    def program(
        self, name: str, world_size: int, resident: tuple[tuple[Category, int], ...] = ()
    ) -> Program:
        """What a rank does, for simulation and proof; ``resident`` is memory held throughout."""
        laid = build_program(
            self.problem, self.schedule, name, "step", world_size=world_size, nodes=self.nodes
        )
        budget = self.problem.limit
        if budget is not None:
            budget += sum(size for _, size in resident)
        ops_ = tuple(self._phased(op) for op in laid.ops)
        return replace(laid, ops=ops_, resident=resident, budget=budget)

    def _phased(self, op: Op) -> Op:
        """The phase follows from the unit for compute, and from the node it serves for transfers."""
        kind, index = op.name.split(".")[1], int(op.name.split(".")[2])
        unit = {
            "all_gather": lambda: self.schedule.gather_starts[index],
            "shard": lambda: self.schedule.gather_starts[index],
            "fetch": lambda: self.schedule.fetch_start(index),
            "read": lambda: self.schedule.read_start(index),
            "reduce_scatter": lambda: self.problem.reductions[index].ready,
            "evict": lambda: self.schedule.reduce_waits[index],
        }.get(kind, lambda: index)()
        return replace(op, phase="forward" if unit < self.shift else "backward")


class _Walk(NamedTuple):
    """A graph's nodes at the units of a problem. ``starts``: those of gathers, by their index there."""

    graph: Graph
    units: Mapping[Node, int]
    shift: int
    starts: Mapping[Node, int]


def read_graph(half: Half, limit: int | None = None, slots: int = STAGING_SLOTS) -> Scheduled:
    """A graph that runs alone. ``slots`` shards have room on the host between NVMe and the device."""
    units = kernels_before(half.graph)
    waits = calls(half.graph, ops.all_gather_wait)
    starts = [
        min(units[w.all_input_nodes[0]], g.first) for w, g in _with(waits, half.posed.gathers)
    ]
    problem = replace(half.posed.problem(limit), slots=slots)
    schedule = Schedule(tuple(starts), tuple(_reduce_waits(half.graph, units)))
    owners = {wait.all_input_nodes[0]: i for i, wait in enumerate(waits)}
    walk = _Walk(half.graph, units, 0, owners)
    schedule = _with_departures(problem, schedule, [walk])
    return Scheduled(problem, schedule, half.posed.anchors, len(half.posed.compute))


def read_step(
    forward: Half, backward: Half, limit: int | None = None, slots: int = STAGING_SLOTS
) -> Scheduled:
    """Forward and the backward that follows it; ``slots`` as for :func:`read_graph`."""
    shift = len(forward.posed.compute)
    units, later = kernels_before(forward.graph), kernels_before(backward.graph)
    early = {bucket_number(s): s for s in _early_starts(forward.graph)}
    ours: dict[Node, int] = {}
    theirs: dict[Node, int] = {}
    mates = _mates(forward, backward)
    gathers: list[Gather] = []
    starts: list[int] = []
    released = {gather.bucket: gather.last + 1 for gather in forward.posed.gathers}
    for i, (wait, gather) in enumerate(_with(_waits(forward), forward.posed.gathers)):
        last = gather.last
        if i in mates:
            last = backward.posed.gathers[mates[i]].last + shift
        ours[wait.all_input_nodes[0]] = len(gathers)
        gathers.append(replace(gather, last=last))
        starts.append(min(units[wait.all_input_nodes[0]], gather.first))
    for j, (wait, gather) in enumerate(_with(_waits(backward), backward.posed.gathers)):
        if j in mates.values():
            continue
        # Not before forward has released the bucket, nor backward its own last use of it.
        after = gather.earliest + shift if gather.earliest else released.get(gather.bucket, 0)
        first, last = gather.first + shift, gather.last + shift
        if j in backward.schedule.carried_in:
            ours[early[gather.bucket]] = len(gathers)
            starts.append(units[early[gather.bucket]])
        else:
            theirs[wait.all_input_nodes[0]] = len(gathers)
            starts.append(shift + min(later[wait.all_input_nodes[0]], gather.first))
        gathers.append(replace(gather, first=first, last=last, earliest=after))
    problem = Problem(
        (*forward.posed.compute, *backward.posed.compute),
        (*forward.posed.live, *backward.posed.live),
        tuple(gathers),
        tuple(_moved(r, shift) for r in backward.posed.reductions),
        limit,
        slots=slots,
    )
    waits = tuple(shift + w for w in _reduce_waits(backward.graph, later))
    nodes = (*forward.posed.anchors, *backward.posed.anchors)
    walks = (
        _Walk(forward.graph, units, 0, ours),
        _Walk(backward.graph, later, shift, theirs),
    )
    schedule = _with_departures(problem, Schedule(tuple(starts), waits), walks)
    return Scheduled(problem, schedule, nodes, shift)


def _waits(half: Half) -> list[Node]:
    return calls(half.graph, ops.all_gather_wait)


def _with(waits: list[Node], gathers: tuple[Gather, ...]) -> list[tuple[Node, Gather]]:
    return list(zip(waits, gathers, strict=True))


def _moved(reduction: Reduce, shift: int) -> Reduce:
    return replace(reduction, ready=reduction.ready + shift)


def _mates(forward: Half, backward: Half) -> dict[int, int]:
    """Gathers of forward whose bucket is kept, and those of backward that find it."""
    takers = {backward.posed.gathers[j].bucket: j for j in backward.schedule.carried_in}
    buckets = [gather.bucket for gather in forward.posed.gathers]
    return {buckets.index(b): takers[b] for b in forward.schedule.kept if b in takers}


def _early_starts(graph: Graph) -> list[Node]:
    return [start for start in calls(graph, ops.all_gather_start) if not start.users]


def _with_departures(problem: Problem, schedule: Schedule, walks: Iterable[_Walk]) -> Schedule:
    if not problem.fetched:
        return schedule
    walks = list(walks)
    return replace(
        schedule,
        fetch_starts=_departures(schedule.gather_starts, walks, ops.fetch_start),
        read_starts=_departures(schedule.gather_starts, walks, ops.read_start),
    )


def _departures(starts: tuple[int, ...], walks: Iterable[_Walk], target: Any) -> tuple[int, ...]:
    """Where each gather's shard sets out: at a node of its own, or where the gather starts."""
    found = list(starts)
    out: dict[int, int] = {}
    for walk in walks:
        for node in walk.graph.nodes:
            if node.target is target:
                out[bucket_number(node)] = walk.shift + walk.units[node]
            elif node in walk.starts:
                index = walk.starts[node]
                found[index] = min(out.pop(bucket_number(node), starts[index]), starts[index])
    return tuple(found)


def _reduce_waits(graph: Graph, units: dict[Node, int]) -> list[int]:
    """Each at the unit it stands in front of; none before the unit after its start."""
    found = []
    for start in calls(graph, ops.reduce_scatter_start):
        (wait,) = start.users
        found.append(max(units[wait], units[start]))
    return found
