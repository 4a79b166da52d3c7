"""When each transfer of a graph, or of a whole step, happens: the schedule as names of graph nodes.

Forward and backward are one problem: their units follow each other, so a gather for backward may
start in forward, and a bucket may be kept from one to the other where memory allows.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import NamedTuple

from zero_compile.scheduler.evaluate import held_bytes, peak_bytes
from zero_compile.scheduler.feed_reads import solve_fed, staging_bytes, unfed
from zero_compile.scheduler.pose_problem import Posed
from zero_compile.scheduler.problem import STAGING_SLOTS, Gather, Problem, Reduce, Schedule

_NONE: Mapping[int, int] = {}


@dataclass(frozen=True)
class Early:
    """A gather whose bucket the next graph uses: started here, before node ``before``."""

    bucket: int
    dtype: str
    before: str | None


@dataclass(frozen=True)
class Departure:
    """A bucket's shard sets out from NVMe, or from the host, before node ``before``."""

    bucket: int
    before: str | None


@dataclass(frozen=True)
class GraphSchedule:
    """One graph's decisions. Nodes are named: "" is the beginning of the graph, None its end.

    Gathers and reductions go by their number in the graph. ``starts``: gather to the node it starts
    before. ``waits``: reduction to the node it is waited for before. ``carried_in``: gathers whose
    bucket arrives gathered, or on its way. ``kept``: buckets whose gathered memory outlives the graph.
    ``early``: gathers for the next graph. ``reads`` and ``fetches``: shards that set out here, in the
    order of their gathers; ``sent``: the buckets of those for the next graph, in that order. ``fetched``:
    gathers whose shard was fetched, or ``read``, in the graph before, or is on its way.
    """

    starts: Mapping[int, str | None] = field(default_factory=dict)
    waits: Mapping[int, str | None] = field(default_factory=dict)
    carried_in: frozenset[int] = frozenset()
    kept: frozenset[int] = frozenset()
    early: tuple[Early, ...] = ()
    fetches: tuple[Departure, ...] = ()
    reads: tuple[Departure, ...] = ()
    sent: tuple[int, ...] = ()
    fetched: frozenset[int] = frozenset()
    read: frozenset[int] = frozenset()

    @property
    def carried_out(self) -> frozenset[int]:
        """Buckets that the next graph finds gathered, or on their way."""
        return self.kept | {e.bucket for e in self.early}


@dataclass(frozen=True)
class Limits:
    """Bytes. ``total`` holds for activations, gradients and buckets; ``gathered`` for buckets alone."""

    total: int | None = None
    gathered: int | None = None
    ahead: int | None = None
    """The most bytes gathered, or on their way, that nothing has used yet, beside the next bucket."""
    keep: bool = False
    """Whether memory that is left may keep buckets from forward to backward."""
    persistent: frozenset[int] = frozenset()
    """Buckets kept from forward to backward before all others, as far as a limit that is given allows."""
    slots: int = STAGING_SLOTS
    """Shards that have room on the host between NVMe and the device."""
    tiles: frozenset[int] = frozenset()
    """Buckets that are tiles of a larger weight."""

    @property
    def unset(self) -> bool:
        """Whether nothing is said of memory."""
        return self.total is None and self.gathered is None


@dataclass(frozen=True)
class Joined:
    """One problem of two graphs. ``owners[i]`` are the gathers, in forward's and backward's own
    numbers, that the problem's gather ``i`` serves.
    """

    problem: Problem
    owners: tuple[tuple[int | None, int | None], ...]


def plan_graph(posed: Posed, limits: Limits) -> GraphSchedule:
    """The schedule of a graph that runs alone.

    Raises:
        PlanError: a bucket does not fit within the limits.
    """
    problem = replace(posed.problem(None), slots=limits.slots)
    caps = _more(_caps(posed, limits), staging_bytes(problem))
    bound = within(_ahead(_starting(problem, limits), limits), caps, limits.total)
    solved = solve_fed(_one_reduction_under_way(bound) if limits.unset else bound)
    starts = {i: _anchor(posed, start) for i, start in enumerate(solved.gather_starts)}
    waits = {k: _anchor(posed, w) for k, w in enumerate(solved.reduce_waits)}
    fetches = [(i, _anchor(posed, solved.fetch_start(i))) for i in problem.fetched]
    reads = [(i, _anchor(posed, solved.read_start(i))) for i in problem.read]
    return GraphSchedule(
        starts,
        waits,
        fetches=tuple(Departure(posed.gathers[i].bucket, anchor) for i, anchor in fetches),
        reads=tuple(Departure(posed.gathers[i].bucket, anchor) for i, anchor in reads),
    )


def plan_step(
    forward: Posed, backward: Posed, limits: Limits
) -> tuple[GraphSchedule, GraphSchedule]:
    """The schedules of forward and of the backward that follows it.

    Raises:
        PlanError: a bucket does not fit within the limits.
    """
    joined = join(forward, backward, limits)
    solved = solve_fed(joined.problem)
    seamless = _seamless(forward, backward, joined, solved)
    if seamless:
        joined = join(forward, backward, limits, seamless)
        solved = solve_fed(joined.problem)
    return split(forward, backward, joined, solved)


def _seamless(forward: Posed, backward: Posed, joined: Joined, solved: Schedule) -> dict[int, int]:
    """Buckets that would be gathered again the moment they are released: to keep them costs nothing."""
    mates = {j: i for i, j in _mates(forward, backward).items()}
    found = {}
    for (_, j), start in zip(joined.owners, solved.gather_starts, strict=True):
        i = mates.get(j) if j is not None else None
        if i is not None and j is not None and start == forward.gathers[i].last + 1:
            found[i] = j
    return found


def join(
    forward: Posed, backward: Posed, limits: Limits, seamless: Mapping[int, int] = _NONE
) -> Joined:
    """Forward and backward as one problem, with the buckets kept between them merged.

    ``seamless`` are further gathers to keep: forward's number to backward's.
    """
    shift = len(forward.compute)
    whole = replace(_concatenated(forward, backward), slots=limits.slots)
    caps = _more([*_caps(forward, limits), *_caps(backward, limits)], staging_bytes(whole))
    if limits.unset:
        # What is kept in any case comes on top of what may be gathered ahead.
        always = _persistent(forward, _mates(forward, backward), limits)
        caps = _more(caps, sum(forward.gathers[i].bytes for i in always))
    bound = within(_starting(whole, limits), caps, limits.total)
    if limits.unset:
        bound = _one_reduction_under_way(bound)
    kept = {**seamless, **_kept(forward, backward, unfed(bound), limits)}
    released = {gather.bucket: gather.last + 1 for gather in forward.gathers}
    gathers: list[Gather] = []
    owners: list[tuple[int | None, int | None]] = []
    for i, gather in enumerate(forward.gathers):
        mate = kept.get(i)
        last = gather.last if mate is None else backward.gathers[mate].last + shift
        gathers.append(replace(gather, last=last))
        owners.append((i, mate))
    served = set(kept.values())
    for j, gather in enumerate(backward.gathers):
        if j not in served:
            # Not before forward has released the bucket: it is in one place at a time.
            after = released.get(gather.bucket, 0)
            moved = _shifted(gather, shift)
            gathers.append(replace(moved, earliest=max(moved.earliest, after)))
            owners.append((None, j))
    return Joined(_ahead(replace(bound, gathers=tuple(gathers)), limits), tuple(owners))


def least_memory(forward: Posed, backward: Posed, limits: Limits) -> list[int]:
    """Bytes that a step of two graphs holds at each unit, with each bucket there only while it is used.

    Under a limit on everything, what :func:`join` reserves for reductions and for shards counts too.
    """
    return _least_held(unfed(_starting(_concatenated(forward, backward), limits)))


def split(
    forward: Posed, backward: Posed, joined: Joined, schedule: Schedule
) -> tuple[GraphSchedule, GraphSchedule]:
    """A solution of the joined problem as one schedule a graph."""
    shift = len(forward.compute)
    starts: tuple[dict[int, str | None], dict[int, str | None]] = ({}, {})
    gather_cache, kept = set(), set()
    early: list[Early] = []
    for (i, j), position in zip(joined.owners, schedule.gather_starts, strict=True):
        if i is not None:
            starts[0][i] = _anchor(forward, position)
            if j is not None:
                kept.add(forward.gathers[i].bucket)
                gather_cache.add(j)
        elif j is not None and position >= shift:
            starts[1][j] = _anchor(backward, position - shift)
        elif j is not None:
            anchor = _anchor(forward, position)
            early.append(Early(backward.gathers[j].bucket, backward.dtypes[j], anchor))
            gather_cache.add(j)
    waits = {k: _anchor(backward, w - shift) for k, w in enumerate(schedule.reduce_waits)}
    fetches = _sent(forward, backward, joined, joined.problem.fetched, schedule.fetch_start)
    reads = _sent(forward, backward, joined, joined.problem.read, schedule.read_start)
    sent = (fetches.before | reads.before) - gather_cache
    return (
        GraphSchedule(
            starts[0],
            kept=frozenset(kept),
            early=tuple(early),
            fetches=fetches.forward,
            reads=reads.forward,
            sent=tuple(backward.gathers[j].bucket for j in sorted(sent)),
        ),
        GraphSchedule(
            starts[1],
            waits,
            frozenset(gather_cache),
            fetches=fetches.backward,
            reads=reads.backward,
            fetched=fetches.before - gather_cache,
            read=reads.before - gather_cache,
        ),
    )


class _Sent(NamedTuple):
    """Shards that set out in either graph; ``before``: gathers of backward whose shard did in forward."""

    forward: tuple[Departure, ...]
    backward: tuple[Departure, ...]
    before: frozenset[int]


def _sent(
    forward: Posed,
    backward: Posed,
    joined: Joined,
    gathers: Sequence[int],
    start: Callable[[int], int],
) -> _Sent:
    shift = len(forward.compute)
    here: list[Departure] = []
    there: list[Departure] = []
    before = set()
    for index in gathers:
        i, j = joined.owners[index]
        bucket, position = joined.problem.gathers[index].bucket, start(index)
        if position >= shift:
            there.append(Departure(bucket, _anchor(backward, position - shift)))
        else:
            here.append(Departure(bucket, _anchor(forward, position)))
            if i is None and j is not None:
                before.add(j)
    return _Sent(tuple(here), tuple(there), frozenset(before))


def within(problem: Problem, caps: Sequence[int | None], total: int | None) -> Problem:
    """The problem under a limit on everything, and under ``caps`` on buckets alone, one a unit.

    Both become one limit: what buckets may not use at a unit counts as live there.
    """
    if all(cap is None for cap in caps):
        return replace(problem, limit=total)
    free = [
        _least(cap, None if total is None else total - live)
        for cap, live in zip(caps, problem.live, strict=True)
    ]
    roof = max((live + room for live, room in zip(problem.live, free, strict=True)), default=0)
    live = tuple(roof - room for room in free)
    return replace(problem, live=live, limit=roof)


def _more(caps: Sequence[int | None], extra: int) -> list[int | None]:
    return [None if cap is None else cap + extra for cap in caps]


def _least(cap: int | None, room: int | None) -> int:
    known = [size for size in (cap, room) if size is not None]
    assert known
    return min(known)


def _caps(posed: Posed, limits: Limits) -> list[int | None]:
    """What buckets may take at each unit: the limit given, or with a budget nothing but the budget.

    With neither, what the simplest overlap takes: the next bucket gathered while one is used, one
    reduction under way. Where transfers are slower than compute, more would hide nothing more.
    """
    cap = limits.gathered
    if limits.unset:
        cap = _one_ahead_peak(posed)
    return [cap] * len(posed.compute)


def _starting(problem: Problem, limits: Limits) -> Problem:
    """Under a limit on everything: the memory of a reduction counts where its gradients are complete.

    It is taken there even if it is waited for, and returned, before anything else runs.
    """
    if limits.total is None:
        return problem
    live = list(problem.live)
    for reduction in problem.reductions:
        live[reduction.ready] += reduction.bytes
    return replace(problem, live=tuple(live))


def _one_reduction_under_way(problem: Problem) -> Problem:
    """The problem with each reduction waited for, at the latest, where the next one starts."""
    following = [r.ready + 1 for r in problem.reductions[1:]]
    pairs = zip_longest(problem.reductions, following)
    return replace(problem, reductions=tuple(replace(r, latest=latest) for r, latest in pairs))


def _one_ahead_peak(posed: Posed) -> int:
    starts = [0, *(g.first for g in posed.gathers)][: len(posed.gathers)]
    starts = [max(s, g.earliest) for s, g in zip(starts, posed.gathers, strict=True)]
    end = len(posed.compute)
    ready = [r.ready + 1 for r in posed.reductions]
    waits = [*ready[1:], end][: len(ready)]
    bare = replace(posed.problem(None), live=(0,) * end)
    return peak_bytes(bare, Schedule(tuple(starts), tuple(waits)))


def _ahead(problem: Problem, limits: Limits) -> Problem:
    """The problem with each gather held back until not too much is gathered before it and unused."""
    gathers = _apart(problem.gathers, limits.tiles)
    if limits.ahead is None:
        return replace(problem, gathers=tuple(gathers))
    oldest, waiting = 0, 0
    for i, gather in enumerate(gathers):
        waiting += gather.bytes
        while waiting > limits.ahead and oldest < i:
            waiting -= gathers[oldest].bytes
            oldest += 1
        earliest = gathers[oldest - 1].first if oldest else 0
        gathers[i] = replace(gather, earliest=max(gather.earliest, earliest))
    return replace(problem, gathers=tuple(gathers))


def _apart(gathers: Sequence[Gather], tiles: Set[int]) -> list[Gather]:
    """Tiles held back until the last but one is released: one is used while the next is on its way."""
    free = [0, 0]
    found = []
    for gather in gathers:
        if gather.bucket in tiles:
            earliest = min(gather.first, max(gather.earliest, free[-2]))
            gather = replace(gather, earliest=earliest)
            free.append(gather.last + 1)
        found.append(gather)
    return found


def _anchor(posed: Posed, position: int) -> str | None:
    return posed.anchors[position] if position < len(posed.anchors) else None


def _concatenated(forward: Posed, backward: Posed) -> Problem:
    shift = len(forward.compute)
    gathers = (*forward.gathers, *(_shifted(g, shift) for g in backward.gathers))
    reductions: tuple[Reduce, ...] = tuple(
        replace(r, ready=r.ready + shift) for r in backward.reductions
    )
    compute, live = (*forward.compute, *backward.compute), (*forward.live, *backward.live)
    beginning = ("the beginning of forward", "the beginning of backward")
    names = (beginning[0], *forward.anchors[1:], beginning[1], *backward.anchors[1:])
    return Problem(compute, live, gathers, reductions, names=names)


def _shifted(gather: Gather, shift: int) -> Gather:
    earliest = gather.earliest + shift if gather.earliest else 0
    return replace(gather, first=gather.first + shift, last=gather.last + shift, earliest=earliest)


# ------------------------------------------------------------------------------ keeping


def _kept(forward: Posed, backward: Posed, bound: Problem, limits: Limits) -> dict[int, int]:
    """Which gathers of forward serve backward too: forward's number to backward's.

    Persistent buckets come first, as far as they fit. Without memory to spend, what is left is the bucket
    that forward uses last and backward first: to hold that costs nothing. With it, those that save most
    seconds a byte for the shortest time come first.
    """
    mates = _mates(forward, backward)
    always = _persistent(forward, mates, limits)
    room = _Room(forward, backward, bound)
    kept = room.keep(always, bound.limit)
    rest = {i: j for i, j in mates.items() if i not in always}
    if not limits.keep:
        turn = {i: j for i, j in rest.items() if _turns(forward, i, j)}
        return kept | room.keep(turn, bound.limit)
    # Room stays free for the largest bucket, so that the next one can still be gathered ahead, and for
    # one reduction under way.
    return kept | room.keep(rest, bound.limit, _spare(bound))


def _spare(problem: Problem) -> list[int]:
    next_one = max((g.bytes for g in problem.gathers), default=0)
    spare = [next_one] * len(problem.compute)
    ends = [*(r.ready + 1 for r in problem.reductions[1:]), len(problem.compute)]
    for reduction, end in zip(problem.reductions, ends, strict=False):
        for k in range(reduction.ready + 1, end):
            spare[k] += reduction.bytes
    return spare


def _persistent(forward: Posed, mates: Mapping[int, int], limits: Limits) -> dict[int, int]:
    return {i: j for i, j in mates.items() if forward.gathers[i].bucket in limits.persistent}


def _mates(forward: Posed, backward: Posed) -> dict[int, int]:
    """Buckets that each graph gathers once, in one dtype: forward's number to backward's."""
    ours, theirs = _gathered_once(forward), _gathered_once(backward)
    return {ours[key]: theirs[key] for key in ours if key in theirs}


def _gathered_once(posed: Posed) -> dict[tuple[int, str], int]:
    times = Counter(gather.bucket for gather in posed.gathers)
    keyed = zip(posed.gathers, posed.dtypes, strict=True)
    return {(g.bucket, dtype): i for i, (g, dtype) in enumerate(keyed) if times[g.bucket] == 1}


def _turns(forward: Posed, i: int, j: int) -> bool:
    ended = max(g.last for g in forward.gathers)
    return j == 0 and forward.gathers[i].last == ended


class _Room:
    """Bytes held at each unit by buckets at their uses, and by those kept so far."""

    def __init__(self, forward: Posed, backward: Posed, bound: Problem) -> None:
        self._forward = forward
        self._backward = backward
        self._held = _least_held(bound)

    def keep(
        self, mates: Mapping[int, int], most: int | None, spare: Sequence[int] = ()
    ) -> dict[int, int]:
        """Those that fit within ``most`` bytes between their uses, the worthiest first.

        ``spare`` bytes stay free at each unit; none given: nothing.
        """
        first, second = self._forward.gathers, self._backward.gathers
        shift, kept = len(self._forward.compute), {}
        for i, j in sorted(mates.items(), key=lambda m: _worth(first[m[0]], second[m[1]], shift)):
            between = range(first[i].last + 1, second[j].first + shift)
            needed = max(
                (self._held[k] + first[i].bytes + (spare[k] if spare else 0) for k in between),
                default=0,
            )
            if most is None or needed <= most or not between:
                for k in between:
                    self._held[k] += first[i].bytes
                kept[i] = j
        return kept


def _worth(first: Gather, second: Gather, shift: int) -> tuple[float, int]:
    """Sorts by seconds saved a byte, then by how soon backward wants it."""
    seconds = first.seconds + first.fetch + first.read
    saved = seconds / first.bytes if first.bytes else 0.0
    return -round(saved, 15), second.first + shift - first.last


def _least_held(problem: Problem) -> list[int]:
    """Bytes at each unit if every bucket is held from its first to its last use, and reductions not at all."""
    starts = tuple(gather.first for gather in problem.gathers)
    at_once = tuple(reduction.ready + 1 for reduction in problem.reductions)
    return held_bytes(problem, Schedule(starts, at_once))
