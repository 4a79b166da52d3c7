"""Plays a program: when each operation runs on its channel, and what memory is held meanwhile."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

from zero_compile.simulator.order import Needs, execution_order, needs_of
from zero_compile.simulator.program import Op, Program
from zero_runtime.errors import PlanError
from zero_runtime.ir.plan import Channel
from zero_runtime.ir.timeline import Category, Event, Sample, Source, Timeline


class _Run(NamedTuple):
    """When an operation was issued (with its channel's turn or not), started and ended."""

    issued: float
    start: float
    end: float
    stall: float


class _Change(NamedTuple):
    """Memory taken or returned, in the order in which one causes the other."""

    time: float
    rank: int
    bytes: int
    category: Category


def simulate(program: Program) -> Timeline:
    """The program's timeline; events are in issue order.

    An event's ``stall`` is what its channel stood idle for want of an operation in ``after``. Where
    memory rises and falls at one moment, a sample shows the height it reached.

    Raises:
        PlanError: the program deadlocks, or returns memory that it did not take.
    """
    needs = needs_of(program)
    order = execution_order(program, needs)
    runs = _play(program, needs, order)
    return Timeline(
        program.name,
        Source.PREDICTED,
        program.world_size,
        tuple(_event(op, runs[i]) for i, op in enumerate(program.ops)),
        tuple(_samples(program, _changes(program, order, runs))),
        program.budget,
    )


def _play(program: Program, needs: list[Needs], order: list[int]) -> dict[int, _Run]:
    runs: dict[int, _Run] = {}
    for i in order:
        need = needs[i]
        issued = 0.0 if need.compute is None else runs[need.compute].end
        turn = issued if need.channel is None else max(issued, runs[need.channel].end)
        start = max([turn, *(runs[earlier].end for earlier in need.after)])
        if program.ops[i].channel is Channel.COMPUTE:
            issued = start
        runs[i] = _Run(issued, start, start + program.ops[i].seconds, start - turn)
    return runs


def _event(op: Op, run: _Run) -> Event:
    return Event(
        op.name, op.channel, run.start, run.end, op.phase, op.bucket, op.bytes, run.stall, op.node
    )


# ------------------------------------------------------------------------------ memory


def _changes(program: Program, order: list[int], runs: dict[int, _Run]) -> list[_Change]:
    buffers = {buffer.name: buffer for op in program.ops for buffer in op.takes}
    changes = []
    for rank, i in enumerate(order):
        op, run = program.ops[i], runs[i]
        changes += [_Change(run.issued, rank, b.bytes, b.category) for b in op.takes if b.bytes]
        for name in op.frees:
            if name not in buffers:
                raise PlanError(f"{op.name} frees {name}, which no operation takes")
            buffer = buffers[name]
            if buffer.bytes:
                changes.append(_Change(run.end, rank, -buffer.bytes, buffer.category))
    return sorted(changes, key=attrgetter("time", "rank"))


def _samples(program: Program, changes: Iterable[_Change]) -> Iterator[Sample]:
    held = defaultdict(int, program.resident)
    yield Sample(0.0, dict(held))
    for time, together in groupby(changes, key=attrgetter("time")):
        rising = False
        for change in together:
            if rising and change.bytes < 0:
                yield Sample(time, dict(held))
            held[change.category] += change.bytes
            rising = change.bytes > 0
        yield Sample(time, dict(held))


# ------------------------------------------------------------------------------ summaries


def exposed_by_channel(program: Program, timeline: Timeline) -> dict[Channel, float]:
    """Seconds in which compute waited, by the channel whose operation came last; none that are 0."""
    ops = {op.name: op for op in program.ops}
    ends = {event.name: event.end for event in timeline.events}
    exposed: dict[Channel, float] = defaultdict(float)
    for event in timeline.events:
        after = ops[event.name].after
        if event.channel is Channel.COMPUTE and event.stall > 0 and after:
            exposed[ops[max(after, key=ends.__getitem__)].channel] += event.stall
    return dict(exposed)


def overlap_efficiency(timeline: Timeline) -> float:
    """The part of all transfer time that compute hides: ``1 - exposed / transfers``; 1 without any.

    Transfers of several channels at one time count each, so this may exceed what one channel hides.
    """
    moving = sum(e.end - e.start for e in timeline.events if e.channel is not Channel.COMPUTE)
    return 1.0 - timeline.exposed / moving if moving > 0 else 1.0


def peak_by_category(timeline: Timeline) -> dict[Category, int]:
    """The most bytes each category held, each at its own time; none that are 0."""
    peaks: dict[Category, int] = defaultdict(int)
    for sample in timeline.memory:
        for category, size in sample.held.items():
            peaks[category] = max(peaks[category], size)
    return {category: size for category, size in peaks.items() if size}
