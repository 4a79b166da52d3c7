"""Proves that a program reads no buffer too early, writes or frees none too early, and leaks none.

What happens before what is kept as vector clocks (Fidge, 1988; Mattern, 1989): per operation, how
many operations of each channel have surely ended when it starts. Channels are few, so a clock is
small and a proof nearly linear in the program.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from zero_compile.simulator.order import Needs, execution_order, needs_of, refuse
from zero_compile.simulator.program import Program
from zero_runtime.ir.plan import Channel

_COLUMN = {channel: column for column, channel in enumerate(Channel)}


@dataclass
class _Uses:
    """The operations that use one buffer, by index, in an order of execution.

    Dictionaries are ordered sets; ``touching`` holds those that read or write.
    """

    takes: list[int] = field(default_factory=list)
    frees: list[int] = field(default_factory=list)
    reads: dict[int, None] = field(default_factory=dict)
    writes: dict[int, None] = field(default_factory=dict)
    touching: dict[int, None] = field(default_factory=dict)


class _Before:
    """Answers whether an operation has surely ended when another starts."""

    def __init__(self, program: Program, needs: list[Needs], order: list[int]) -> None:
        self._column = [_COLUMN[op.channel] for op in program.ops]
        self._turn = _turns(self._column)
        self._clocks: list[tuple[int, ...]] = [()] * len(needs)
        for i in order:
            self._clocks[i] = self._clock(needs[i])

    def _clock(self, need: Needs) -> tuple[int, ...]:
        clock = [0] * len(_COLUMN)
        for earlier in need.all:
            clock = list(map(max, clock, self._clocks[earlier]))
            column = self._column[earlier]
            clock[column] = max(clock[column], self._turn[earlier])
        return tuple(clock)

    def __call__(self, first: int, second: int) -> bool:
        return self._clocks[second][self._column[first]] >= self._turn[first]


def _turns(columns: list[int]) -> list[int]:
    """How many operations of its channel have ended once each has: 1 for the first."""
    counts = [0] * len(_COLUMN)
    turns = []
    for column in columns:
        counts[column] += 1
        turns.append(counts[column])
    return turns


def prove_order(program: Program) -> None:
    """Returns if ``program`` is sound whatever its operations' durations.

    Raises:
        PlanError: it is not. The message lists the faults, each with operations, buffer and reason:
            deadlocks, and where there are none, buffers read before they are written, written or
            freed while in use, used after they are freed, or not taken and freed exactly once.
    """
    needs = needs_of(program)
    order = execution_order(program, needs)
    before = _Before(program, needs, order)
    names = [op.name for op in program.ops]
    faults = []
    for buffer, uses in _uses(program, order).items():
        balance = list(_unbalanced(names, buffer, uses))
        faults += balance or list(_unordered(names, buffer, uses, before))
    refuse(program, faults)


def _uses(program: Program, order: list[int]) -> dict[str, _Uses]:
    uses: dict[str, _Uses] = defaultdict(_Uses)
    for i in order:
        op = program.ops[i]
        for buffer in op.takes:
            uses[buffer.name].takes.append(i)
        for name in op.frees:
            uses[name].frees.append(i)
        for name in op.reads:
            uses[name].reads[i] = uses[name].touching[i] = None
        for name in op.writes:
            uses[name].writes[i] = uses[name].touching[i] = None
    return uses


def _unbalanced(names: list[str], buffer: str, uses: _Uses) -> Iterator[str]:
    if not uses.takes:
        users = dict.fromkeys([*uses.touching, *uses.frees])
        yield f"{buffer} is used by {_listed(names, list(users))}, but no operation takes it"
    if len(uses.takes) > 1:
        yield f"{buffer} is taken more than once, by {_listed(names, uses.takes)}"
    if uses.takes and not uses.frees:
        yield f"{buffer}, taken by {_listed(names, uses.takes)}, is never freed"
    if len(uses.frees) > 1:
        yield f"{buffer} is freed more than once, by {_listed(names, uses.frees)}"


def _listed(names: list[str], ops: list[int]) -> str:
    return " and ".join(names[i] for i in ops)


def _unordered(names: list[str], buffer: str, uses: _Uses, before: _Before) -> Iterator[str]:
    """Faults of a buffer that is taken once and freed once."""
    yield from _untaken(names, buffer, uses, before)
    yield from _too_early(names, buffer, uses, before)
    yield from _overwritten(names, buffer, uses, before)
    (free,) = uses.frees
    for i in dict.fromkeys([*uses.takes, *uses.touching]):
        if i != free and before(free, i):
            yield f"{names[i]} uses {buffer}, which {names[free]} has freed before"
        elif i != free and not before(i, free):
            yield f"{names[free]} frees {buffer} while {names[i]} may still use it"


def _untaken(names: list[str], buffer: str, uses: _Uses, before: _Before) -> Iterator[str]:
    (take,) = uses.takes
    for i in uses.touching:
        if i != take and not before(take, i):
            yield f"{names[i]} uses {buffer}, which {names[take]} may not have taken yet"


def _too_early(names: list[str], buffer: str, uses: _Uses, before: _Before) -> Iterator[str]:
    """Each read against the write before it. Without any write, what takes the buffer fills it."""
    write = None
    for i in uses.touching if uses.writes else ():
        if i in uses.reads and i not in uses.writes and (write is None or not before(write, i)):
            writer = names[next(iter(uses.writes)) if write is None else write]
            yield f"{names[i]} reads {buffer}, which {writer} may not have written yet"
        if i in uses.writes:
            write = i


def _overwritten(names: list[str], buffer: str, uses: _Uses, before: _Before) -> Iterator[str]:
    """Each write against the write before it and the reads between: the rest follows from those."""
    since: list[int] = []
    for i in uses.touching:
        if i not in uses.writes:
            since.append(i)
            continue
        for other in since:
            if not before(other, i):
                doing = "write" if other in uses.writes else "read"
                yield f"{names[i]} overwrites {buffer} while {names[other]} may still {doing} it"
        since = [i]
