"""When shards set out from NVMe and from the host: in time for their gathers, and no earlier.

The walk of :mod:`zero_compile.scheduler.solve_starts`, two channels further out: reads overlap with fetches,
fetches with gathers, gathers with compute (Rajbhandari et al., ZeRO-Infinity, 2021). Gathers are
placed first, as if all shards were on the device. Then reads and fetches start as early as staging
slots and device memory allow: orders are fixed and channels serial, so that delays gathers least.
Walking back from the times this yields, ``finish(b) = min(start of what it feeds, start(b + 1) on its
channel)`` and ``start(b) = finish(b) - seconds(b)``: the latest starts that hide as much. Where a
channel is too slow to hide all, starts stay as early as they may.
"""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate

from zero_compile.scheduler.evaluate import Times, evaluate, held_bytes
from zero_compile.scheduler.issue import gathered_before
from zero_compile.scheduler.problem import Gather, Problem, Schedule
from zero_compile.scheduler.solve_starts import earliest_starts, latest_begin, solve


def solve_fed(problem: Problem) -> Schedule:
    """Where gathers start and reductions are waited for, and where shards set out before that.

    Raises:
        PlanError: as :func:`solve`; never because of a slow channel, or of too few slots.
    """
    return feed(problem, solve(unfed(problem)))


def staging_bytes(problem: Problem) -> int:
    """Device memory that stays free for shards that come and go: the largest of each."""
    coming = (g.shard for g in problem.gathers if g.fetch and not g.in_place)
    going = (r.shard for r in problem.reductions if r.evict)
    return max(coming, default=0) + max(going, default=0)


def unfed(problem: Problem) -> Problem:
    """The problem as if all shards were on the device, with room left for those that come and go."""
    staging = staging_bytes(problem)
    if not staging and not problem.fetched:
        return problem
    gathers = (replace(g, fetch=0.0, read=0.0, shard=0) for g in problem.gathers)
    live = tuple(size + staging for size in problem.live)
    return replace(problem, live=live, gathers=tuple(gathers))


def feed(problem: Problem, schedule: Schedule) -> Schedule:
    """``schedule`` with the latest starts of fetches and reads that delay no gather.

    No gather is issued later than if every read started as early as the slots allow.
    """
    if not problem.fetched:
        return schedule
    return _just_in_time(problem, _as_early_as_may_be(problem, schedule))


def _as_early_as_may_be(problem: Problem, schedule: Schedule) -> Schedule:
    reads = _earliest_reads(problem, schedule)
    return _with(schedule, _earliest_fetches(problem, schedule, reads), reads)


def _with(schedule: Schedule, fetches: Mapping[int, int], reads: Mapping[int, int]) -> Schedule:
    starts = list(enumerate(schedule.gather_starts))
    return replace(
        schedule,
        fetch_starts=tuple(fetches.get(i, start) for i, start in starts),
        read_starts=tuple(reads.get(i, start) for i, start in starts),
    )


def _earliest_reads(problem: Problem, schedule: Schedule) -> dict[int, int]:
    """A slot is free once the gather whose shard was in it starts, a bucket read once it is gathered."""
    before, reads = gathered_before(problem), problem.read
    earliest = []
    for turn, i in enumerate(reads):
        holder = reads[turn - problem.slots] if turn >= problem.slots else -1
        free_after = max(holder, before[i])
        earliest.append(schedule.gather_starts[free_after] if free_after >= 0 else 0)
    return dict(zip(reads, accumulate(earliest, max), strict=True))


def _earliest_fetches(
    problem: Problem, schedule: Schedule, reads: Mapping[int, int]
) -> dict[int, int]:
    """Fetched shards hold memory as gathered buckets do: up to the gather instead of the last use."""
    starts, before = schedule.gather_starts, gathered_before(problem)
    held = held_bytes(problem, Schedule(starts, schedule.reduce_waits))
    live, shards = list(held), []
    for i in problem.fetched:
        gather, start = problem.gathers[i], starts[i]
        free = starts[before[i]] if before[i] >= 0 else 0
        earliest = max(free, reads.get(i, 0))
        shards.append(Gather(i, gather.fetch, gather.shard, start, start - 1, earliest))
        if start and not gather.in_place:  # while it is copied, the bucket is there as well
            live[start - 1] = max(live[start - 1], held[start])
    fetching = replace(problem, live=tuple(live), gathers=tuple(shards), reductions=())
    return dict(zip(problem.fetched, earliest_starts(fetching), strict=True))


def _just_in_time(problem: Problem, schedule: Schedule) -> Schedule:
    """The latest starts at which no gather is issued later than it is in ``schedule``."""
    times = evaluate(problem, schedule)
    fetches: dict[int, int] = {}
    reads: dict[int, int] = {}
    fetch_by = read_by = float("inf")
    for i in reversed(problem.fetched):
        gather, start = problem.gathers[i], schedule.gather_starts[i]
        finish = min(times.gather_issues[i], fetch_by)
        fetch_by = latest_begin(finish, gather.fetch, times.fetch_begins[i])
        fetches[i] = _latest(times, fetch_by, schedule.fetch_start(i), start)
        if gather.read:
            read_by = latest_begin(min(fetch_by, read_by), gather.read, times.read_begins[i])
            reads[i] = _latest(times, read_by, schedule.read_start(i), start)
    return _with(schedule, fetches, reads)


def _latest(times: Times, begin: float, earliest: int, gather_start: int) -> int:
    """The last position before the gather's at which everything else is issued by ``begin``."""
    return max(earliest, bisect_right(times.behind, begin, earliest, gather_start) - 1)
