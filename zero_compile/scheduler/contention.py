"""The search for where gathers and reductions compete for memory: delay the one or wait for the other.

A beam search over positions. Reductions end in order and gathers start in order, so a state is how
many of each, and when the channels are free. A wait earlier than memory forces it gains nothing: the
choice at each position is how many gathers have started, and it decides how many reductions must be
over. States are ranked by when everything would end if reductions held no memory from there on,
which no schedule beats.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from operator import attrgetter
from typing import NamedTuple

from zero_compile.scheduler.problem import Problem, Schedule

#: States expanded per search, about: the width of the beam is what this leaves for each position,
#: so that a large graph takes a second and a small one is searched thoroughly.
EFFORT = 20_000
NARROWEST, WIDEST = 2, 64

#: How many starts at one position are tried one by one, beside those that fill the memory.
MOST_EXTRA = 5


class _Choice(NamedTuple):
    """At ``position``, ``gathers`` have started and ``reductions`` are over; and the one before."""

    position: int
    gathers: int
    reductions: int
    before: "_Choice | None"


class _State(NamedTuple):
    """Before a position: when the nodes so far end, what has started, when the channels are free.

    Gather ``i`` of a batch ``(stop, offset)`` arrives ``offset`` after the sum of the seconds of the
    gathers up to it; batches are in order and end before gather ``stop``. ``ends`` are those of the
    reductions under way. ``bound`` is the earliest end of everything.
    """

    bound: float
    now: float
    gathers: int
    reductions: int
    gathers_free: float
    reductions_free: float
    batches: tuple[tuple[int, float], ...]
    ends: tuple[float, ...]
    choice: _Choice | None


class _Tables(NamedTuple):
    """Sums over the problem. ``rest[k]`` is the compute from node ``k`` on.

    ``room[k]`` is what gathers started so far, less reductions over so far, may amount to at ``k``.
    The last three are what bounds the end: after the channel is free, after gathers may start,
    after gradients are ready.
    """

    problem: Problem
    rest: list[float]
    sent: list[float]
    gathered: list[int]
    reduced: list[int]
    room: list[int]
    least: list[int]
    most: list[int]
    ready: list[int]
    gathers_chain: list[float]
    starts_chain: list[float]
    reduce_rest: list[float]
    ready_chain: list[float]


def search(problem: Problem, earliest: Sequence[int]) -> Schedule:
    """The best schedule found within :data:`EFFORT`; legal whenever the problem has a legal one.

    ``earliest`` are the positions before which gathers do not fit whatever reductions do.
    """
    tables = _tables(problem, earliest)
    nodes = len(problem.compute)
    width = min(WIDEST, max(NARROWEST, EFFORT // max(1, nodes)))
    states = [_State(0.0, 0.0, 0, 0, 0.0, 0.0, (), (), None)]
    for k in range(nodes):
        states = _advance(tables, k, states, width)
    states = [_issue_reductions(tables, nodes, state) for state in states]
    best = min(states, key=lambda s: max([s.now, *s.ends]))
    return _schedule_of(problem, best.choice)


def _advance(tables: _Tables, k: int, states: list[_State], width: int) -> list[_State]:
    arrived = [_issue_reductions(tables, k, state) for state in states]
    found = [
        _run(tables, k, state, started)
        for state in arrived
        for started in _options(tables, k, state, width)
    ]
    # Of equal bounds, the one whose gathers are over first leaves the most for those to come.
    found.sort(key=attrgetter("bound", "gathers_free", "now"))
    return _undominated(found, width) if len(found) > 1 else found


def _undominated(found: list[_State], width: int) -> list[_State]:
    kept: list[_State] = []
    same: dict[tuple[int, ...], list[list[float]]] = {}
    for state in found:
        times = [state.now, state.gathers_free, state.reductions_free, *state.ends]
        times += [offset for _, offset in state.batches]
        stops = [stop for stop, _ in state.batches]
        rivals = same.setdefault((state.gathers, state.reductions, *stops), [])
        if any(_no_later(rival, times) for rival in rivals):
            continue
        rivals.append(times)
        kept.append(state)
        if len(kept) == width:
            break
    return kept


def _no_later(one: list[float], other: list[float]) -> bool:
    return len(one) == len(other) and all(a <= b for a, b in zip(one, other, strict=True))


def _options(tables: _Tables, k: int, state: _State, width: int) -> list[int]:
    """How many gathers may have started at node ``k``; of a long range, some.

    Those are few more than must; as many as fit without waiting, and one more; in a wide
    beam, all that can fit.
    """
    least, most = max(state.gathers, tables.least[k]), tables.most[k]
    if least == most:
        return [least]
    over = state.reductions + bisect_right(state.ends, state.now)
    free = bisect_right(tables.gathered, tables.room[k] + tables.reduced[over]) - 1
    some = {*range(least, least + min(width, MOST_EXTRA)), free, free + 1}
    if width > NARROWEST:
        some.add(most)
    return [count for count in sorted(some) if least <= count <= most]


def _issue_reductions(tables: _Tables, k: int, state: _State) -> _State:
    issued = state.reductions + len(state.ends)
    if issued == tables.ready[k]:
        return state
    free, ends = state.reductions_free, list(state.ends)
    for reduction in tables.problem.reductions[issued : tables.ready[k]]:
        free = max(free, state.now) + reduction.seconds
        ends.append(free)
    return state._replace(reductions_free=free, ends=tuple(ends))


def _run(tables: _Tables, k: int, state: _State, started: int) -> _State:
    """After node ``k``, before which ``started`` gathers have started."""
    over = bisect_right(state.ends, state.now)
    forced = bisect_left(tables.reduced, tables.gathered[started] - tables.room[k])
    over = max(over, forced - state.reductions)
    now = max(state.now, state.ends[over - 1]) if over else state.now
    batches, free, begin = state.batches, state.gathers_free, 0.0
    if started > state.gathers:
        begin = max(now, free)
        free = begin + tables.sent[started] - tables.sent[state.gathers]
        batches = (*batches, (started, begin - tables.sent[state.gathers]))
    needed = tables.least[k]
    while batches and batches[0][0] < needed:
        batches = batches[1:]
    if needed and tables.problem.gathers[needed - 1].first == k:
        now = max(now, batches[0][1] + tables.sent[needed])
    now += tables.problem.compute[k]
    reductions, choice = state.reductions + over, state.choice
    if over or started > state.gathers:
        choice = _Choice(k, started, reductions, choice)
    bound = max(state.bound, _bound(tables, k + 1, now, started, free, state))
    if started > state.gathers:
        sent = begin - tables.sent[state.gathers]
        bound = max(bound, sent + tables.gathers_chain[state.gathers])
    return _State(
        bound,
        now,
        started,
        reductions,
        free,
        state.reductions_free,
        batches,
        state.ends[over:],
        choice,
    )


def _bound(tables: _Tables, k: int, now: float, started: int, free: float, before: _State) -> float:
    issued = before.reductions + len(before.ends)
    rest = now + tables.rest[k]
    return max(
        rest,
        max(now, free) - tables.sent[started] + tables.gathers_chain[started],
        rest + tables.starts_chain[started],
        before.reductions_free + tables.reduce_rest[issued],
        rest + tables.ready_chain[issued],
    )


def _schedule_of(problem: Problem, choice: _Choice | None) -> Schedule:
    starts = [0] * len(problem.gathers)
    waits = [len(problem.compute)] * len(problem.reductions)
    while choice is not None:
        before = choice.before
        gathers, reductions = (before.gathers, before.reductions) if before else (0, 0)
        for i in range(gathers, choice.gathers):
            starts[i] = choice.position
        for j in range(reductions, choice.reductions):
            waits[j] = choice.position
        choice = before
    return Schedule(tuple(starts), tuple(waits))


# ------------------------------------------------------------------------------ tables


def _tables(problem: Problem, earliest: Sequence[int]) -> _Tables:
    gathers, reductions = problem.gathers, problem.reductions
    nodes = range(len(problem.compute))
    rest = _suffix_sums(problem.compute)
    sent = [0.0, *accumulate(g.seconds for g in gathers)]
    chain = [sent[i + 1] + rest[g.first] for i, g in enumerate(gathers)]
    gathers_chain = _suffix_max(chain)
    starts = [gathers_chain[i] - sent[i] - rest[e] for i, e in enumerate(earliest)]
    reduce_rest = _suffix_sums([r.seconds for r in reductions])
    ready = [reduce_rest[j] - rest[r.ready + 1] for j, r in enumerate(reductions)]
    first, readiness = [g.first for g in gathers], [r.ready for r in reductions]
    reduced = [0, *accumulate(r.bytes for r in reductions)]
    issued = [bisect_left(readiness, k) for k in range(len(nodes) + 1)]
    return _Tables(
        problem,
        rest,
        sent,
        gathered=[0, *accumulate(g.bytes for g in gathers)],
        reduced=reduced,
        room=_room(problem, [reduced[count] for count in issued]),
        least=[bisect_right(first, k) for k in nodes],
        most=[bisect_right(earliest, k) for k in nodes],
        ready=issued,
        gathers_chain=gathers_chain,
        starts_chain=_suffix_max(starts),
        reduce_rest=reduce_rest,
        ready_chain=_suffix_max(ready),
    )


def _room(problem: Problem, issued: list[int]) -> list[int]:
    assert problem.limit is not None
    released = [0] * (len(problem.compute) + 1)
    for gather in problem.gathers:
        released[gather.last + 1] += gather.bytes
    sums = zip(problem.live, accumulate(released), issued, strict=False)
    return [problem.limit - live + back - reducing for live, back, reducing in sums]


def _suffix_sums(values: Sequence[float]) -> list[float]:
    return [0.0, *accumulate(reversed(values))][::-1]


def _suffix_max(values: Sequence[float]) -> list[float]:
    return [float("-inf"), *accumulate(reversed(values), max)][::-1]
