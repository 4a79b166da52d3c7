"""Which saved tensors leave the device after their last use in forward, and when they come back.

A tensor may leave as soon as it is computed; the device has its memory back at its *wait*, which is
behind its last use and where the copy is complete; it gets memory again at its *reload*, which is as
late as still has it there for its first use in backward. Both channels are serial, first in first
out. Tensors whose transfers are hidden by compute cost nothing: those of most bytes held for the
longest time come first. Without a memory limit all of them leave that lower the peak. With one, as
many as it needs; where hidden transfers are not enough, compute waits for others.

Positions count the units of forward and then of backward: position ``k`` is the moment before unit
``k``, ``shift`` the end of forward and the beginning of backward.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from zero_compile.scheduler.decide_schedule import Limits, least_memory
from zero_compile.scheduler.pose_problem import Posed
from zero_runtime.ir.plan import Tier

Bytes = npt.NDArray[np.int64]


class Candidate(NamedTuple):
    """A saved tensor that may leave at position ``ready``; forward touches it last in unit ``last``,
    backward first in unit ``first``. Seconds: to the host and back; to NVMe and back, where it goes there.
    """

    name: str
    bytes: int
    ready: int
    last: int
    first: int
    out: float
    back: float
    write: float = 0.0
    read: float = 0.0


class Stay(NamedTuple):
    """Positions: the copy sets out, its memory is free, it is read from NVMe, it gets memory again."""

    start: int
    wait: int
    recall: int
    reload: int


@dataclass(frozen=True)
class Move:
    """A saved tensor's time off the device, as names of nodes: "" is the beginning of a graph, None its end.

    ``start`` and ``wait`` are nodes of forward, ``recall`` and ``reload`` of backward; what is meant is
    the place before each.
    """

    name: str
    tier: Tier
    start: str | None
    wait: str | None
    recall: str | None
    reload: str | None


@dataclass(frozen=True)
class Course:
    """A step: seconds of each unit, and bytes that are held there at the least, saved tensors included.

    ``fetches`` are transfers that use the way back anyway: (by when they are over, seconds). Times are
    seconds since the beginning.
    """

    compute: tuple[float, ...]
    held: tuple[int, ...]
    shift: int
    fetches: tuple[tuple[float, float], ...] = ()

    @cached_property
    def times(self) -> list[float]:
        """When each position is reached if nothing is waited for."""
        return [0.0, *np.cumsum(self.compute).tolist()]


# ------------------------------------------------------------------------------ when


class Itinerary(NamedTuple):
    """``stays`` by name; ``hidden``: whether nothing ever waits, and each gives memory back at all."""

    stays: Mapping[str, Stay]
    hidden: bool


def itinerary(
    course: Course,
    leaving: Sequence[Candidate],
    pressed: AbstractSet[str] = frozenset(),
    crowded: Sequence[int] = (),
) -> Itinerary:
    """When each of ``leaving`` sets out and comes back. O(n log units).

    Those of ``pressed`` are waited for before the first ``crowded`` unit behind their last use, and set
    out for the way back behind the last one before their first use, whatever that costs.
    """
    waits, over, hidden = _departures(course, leaving)
    returns, in_time = _returns(course, leaving, over)
    stays = {}
    for c in leaving:
        wait, (recall, reload) = waits[c.name], returns[c.name]
        if c.name in pressed:
            after = bisect_right(crowded, c.last)
            before = bisect_left(crowded, c.first) - 1
            if after <= before:
                wait = min(wait, crowded[after])
                reload = max(reload, crowded[before] + 1)
        stays[c.name] = Stay(c.ready, wait, min(recall, reload), reload)
    useful = all(stay.wait < stay.reload for stay in stays.values())
    return Itinerary(stays, hidden and in_time and useful)


def _departures(
    course: Course, leaving: Iterable[Candidate]
) -> tuple[dict[str, int], dict[str, float], bool]:
    """(where each is waited for, when it is where it goes to, whether all waits are for nothing)."""
    times, shift, hidden = course.times, course.shift, True
    waits: dict[str, int] = {}
    over: dict[str, float] = {}
    free = written = 0.0
    for c in sorted(leaving, key=lambda c: (c.ready, c.first)):
        free = max(times[c.ready], free) + c.out
        wait = bisect_left(times, free, lo=c.last + 1)
        hidden = hidden and wait <= shift
        waits[c.name] = min(wait, shift)
        written = max(written, times[waits[c.name]]) + c.write if c.write else free
        over[c.name] = written if c.write else free
    return waits, over, hidden


def _returns(
    course: Course, leaving: Iterable[Candidate], over: Mapping[str, float]
) -> tuple[dict[str, tuple[int, int]], bool]:
    """(where each sets out from NVMe and from the host, whether all of them are back in time).

    The latest starts, found backwards: each ends by its first use, and by the next one's beginning.
    """
    times, shift, in_time = course.times, course.shift, True
    jobs: list[tuple[float, float, Candidate | None]] = [
        (times[c.first], c.back, c) for c in leaving
    ]
    jobs += [(deadline, seconds, None) for deadline, seconds in course.fetches]
    found = {}
    begin = read_begin = float("inf")
    for deadline, seconds, c in sorted(jobs, key=lambda job: job[0], reverse=True):
        begin = min(deadline, begin) - seconds
        if c is None:
            continue
        leaves, reload = begin, _at(course, begin)
        if c.read:  # whoever sends it on waits for it to be read
            leaves = read_begin = min(times[reload], read_begin) - c.read
        in_time = in_time and leaves >= max(times[shift], over[c.name])
        found[c.name] = _at(course, leaves), reload
    return found, in_time


def _at(course: Course, time: float) -> int:
    """The last position of backward that is reached by ``time``, or its first one."""
    return max(course.shift, bisect_right(course.times, time) - 1)


# ------------------------------------------------------------------------------ which


def choose(
    course: Course, candidates: Sequence[Candidate], limit: int | None = None, spare: int = 0
) -> dict[str, Stay]:
    """The tensors that leave, and when.

    ``limit`` bytes are what the step may hold, of which hidden transfers leave ``spare`` bytes free if
    they can. Without a limit: all that are hidden and lower the peak.
    """
    worth = {
        c.name: c.bytes * (course.times[c.first] - course.times[c.last + 1]) for c in candidates
    }
    ranked = sorted(candidates, key=lambda c: (-worth[c.name], c.ready, c.name))
    ranked = [c for c in ranked if worth[c.name] > 0]
    if limit is None:
        chosen = _that_matter(course, _all_hidden(course, ranked))
        return dict(itinerary(course, chosen).stays)
    return _Fitting(course, ranked, limit, spare).run()


def _all_hidden(course: Course, ranked: Sequence[Candidate]) -> list[Candidate]:
    """As many as are hidden together, each tried after those that are worth more.

    Fewer transfers are never later, so whole stretches are tried at once and halved where they fail.
    """
    taken: list[Candidate] = []
    pending = [[c for c in ranked if itinerary(course, [c]).hidden]]
    while pending:
        some = pending.pop()
        if not some:
            continue
        if itinerary(course, [*taken, *some]).hidden:
            taken += some
        elif len(some) > 1:
            half = len(some) // 2
            pending += [some[half:], some[:half]]
    return taken


def _that_matter(course: Course, chosen: Sequence[Candidate]) -> list[Candidate]:
    """Without those that could stay and leave the peak as low, the least worthy first.

    The others may then be away for longer, so that still fewer do.
    """
    while True:
        stays = itinerary(course, chosen).stays
        held = _left(course, chosen, stays)
        kept = _without_idle(chosen, stays, held, int(held.max(initial=0)))
        if len(kept) == len(chosen):
            return kept
        chosen = kept


def _without_idle(
    chosen: Sequence[Candidate], stays: Mapping[str, Stay], held: Bytes, most: int
) -> list[Candidate]:
    kept = list(chosen)
    for c in reversed(chosen):
        away = held[stays[c.name].wait : stays[c.name].reload]
        if not away.size or int(away.max()) + c.bytes <= most:
            away += c.bytes
            kept.remove(c)
    return kept


def _left(course: Course, chosen: Iterable[Candidate], stays: Mapping[str, Stay]) -> Bytes:
    """Bytes held at each unit while ``chosen`` are away."""
    held = np.array(course.held, dtype=np.int64)
    for c in chosen:
        held[stays[c.name].wait : stays[c.name].reload] -= c.bytes
    return held


class _Fitting:
    """As few as it takes to hold no more than a limit."""

    def __init__(self, course: Course, ranked: Sequence[Candidate], limit: int, spare: int) -> None:
        self._course = course
        self._ranked = ranked
        self._limit = limit
        self._target = limit - spare
        self._crowded = [k for k, held in enumerate(course.held) if held > limit]
        self._chosen: list[Candidate] = []
        self._pressed: set[str] = set()

    def run(self) -> dict[str, Stay]:
        """Hidden ones first; then those that are pressed, as far as that is of use."""
        self._add_hidden()
        if self._excess(self._chosen, self._pressed, self._limit):
            self._press()
        self._drop_idle()
        return dict(self._stays(self._chosen, self._pressed))

    def _add_hidden(self) -> None:
        excess = self._excess([], set(), self._target)
        for c in self._ranked:
            if not excess:
                return
            more = [*self._chosen, c]
            when = itinerary(self._course, more)
            lower = self._above(more, when.stays, self._target) if when.hidden else excess
            if lower < excess:
                self._chosen, excess = more, lower

    def _press(self) -> None:
        excess = self._excess(self._chosen, self._pressed, self._limit)
        for c in self._ranked:
            if not excess:
                return
            more = self._chosen if c in self._chosen else [*self._chosen, c]
            pressed = {*self._pressed, c.name}
            lower = self._excess(more, pressed, self._limit)
            if lower < excess:
                self._chosen, self._pressed, excess = more, pressed, lower
        if excess:  # one at a time they may delay each other by as much as they free
            self._chosen, self._pressed = list(self._ranked), {c.name for c in self._ranked}

    def _drop_idle(self) -> None:
        """The least worthy first. Without a transfer, others are no later."""
        rank = {c.name: i for i, c in enumerate(self._ranked)}
        self._chosen.sort(key=lambda c: rank[c.name])
        stays = self._stays(self._chosen, self._pressed)
        held = _left(self._course, self._chosen, stays)
        most = max(int(held.max(initial=0)), self._target)
        self._chosen = _without_idle(self._chosen, stays, held, most)

    def _stays(self, chosen: Sequence[Candidate], pressed: AbstractSet[str]) -> Mapping[str, Stay]:
        return itinerary(self._course, chosen, pressed, self._crowded).stays

    def _excess(self, chosen: Sequence[Candidate], pressed: AbstractSet[str], most: int) -> int:
        return self._above(chosen, self._stays(chosen, pressed), most)

    def _above(self, chosen: Sequence[Candidate], stays: Mapping[str, Stay], most: int) -> int:
        """Bytes above ``most``, summed over units."""
        return int(np.maximum(_left(self._course, chosen, stays) - most, 0).sum())


# ------------------------------------------------------------------------------ graphs


def course_of(forward: Posed, backward: Posed, limits: Limits) -> Course:
    """What two graphs that are one step do, with buckets gathered no longer than they are used."""
    compute, shift = (*forward.compute, *backward.compute), len(forward.compute)
    times = [0.0, *np.cumsum(compute).tolist()]
    fetches = tuple(
        (max(0.0, times[g.first + shift] - g.seconds), g.fetch) for g in backward.gathers if g.fetch
    )
    return Course(compute, tuple(least_memory(forward, backward, limits)), shift, fetches)


def plan_activations(
    forward: Posed,
    backward: Posed,
    limits: Limits,
    tier: Tier,
    candidates: Sequence[Candidate],
) -> tuple[Move, ...]:
    """Which of ``candidates`` leave the device, in that order; they are numbered so."""
    spare = max((g.bytes for g in (*forward.gathers, *backward.gathers)), default=0)
    course = course_of(forward, backward, limits)
    stays = choose(course, candidates, limits.total, spare)
    leaving = sorted((c for c in candidates if c.name in stays), key=lambda c: (c.ready, c.first))
    before: Callable[[int], str | None] = lambda k: _anchor(forward, k)  # noqa: E731
    behind: Callable[[int], str | None] = lambda k: _anchor(backward, k - course.shift)  # noqa: E731
    return tuple(
        Move(c.name, tier, before(s.start), before(s.wait), behind(s.recall), behind(s.reload))
        for c in leaving
        for s in [stays[c.name]]
    )


def _anchor(posed: Posed, position: int) -> str | None:
    return posed.anchors[position] if position < len(posed.anchors) else None
