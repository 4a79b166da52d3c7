"""What a schedule costs, straight from the rules of execution; nothing here knows how it was found.

At position ``k`` the host does, in this order: issue the reductions whose gradients node ``k - 1``
completed, wait for the reductions due at ``k`` (which returns their memory) and send what they yield
to the host where it belongs there, issue the gathers due at ``k``, run node ``k``. Gathers follow the
waits because they may need the memory those return. A gather whose shard is not there yet makes the
host wait for it; :mod:`zero_compile.scheduler.issue` says where reads and fetches come among gathers.
At the end everything that is on its way to the host has arrived.
"""

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from zero_compile.scheduler.issue import Issue, Kind, issue_order
from zero_compile.scheduler.problem import Problem, Schedule


class Times(NamedTuple):
    """Seconds since the start; ``starts`` and ``ends`` are of the compute nodes.

    ``issued[k]`` is when the gathers of position ``k`` are issued, ``issued[n]`` when all is done that
    is not on its way to the host. ``behind[k]`` is when they all are issued, after waits for shards, and
    ``gather_issues`` when each is. ``stalls`` are the waits of compute in order, those for reductions,
    for shards and for gathers apart. Dictionaries go by gather or reduction.
    """

    issued: list[float]
    starts: list[float]
    ends: list[float]
    gather_begins: list[float]
    gather_ends: list[float]
    reduce_ends: list[float]
    stalls: list[float]
    behind: list[float]
    gather_issues: list[float]
    fetch_begins: dict[int, float]
    fetch_ends: dict[int, float]
    read_begins: dict[int, float]
    read_ends: dict[int, float]
    evict_begins: dict[int, float]
    evict_ends: dict[int, float]


def evaluate(problem: Problem, schedule: Schedule) -> Times:
    """When everything happens. O(nodes + buckets).

    Each channel is serial, first in first out: an operation begins at the later of its issue and
    the end of the one before it.
    """
    times = Times([], [], [], [], [], [], [], [], [], {}, {}, {}, {}, {}, {})
    waits = _by_position(schedule.reduce_waits)
    arrived = 0
    now = 0.0
    for k, issues in enumerate(issue_order(problem, schedule)):
        _issue_reductions(problem, times, k, now)
        due = waits.get(k, ())
        now = _stall(times, now, [times.reduce_ends[j] for j in due])
        _evict(problem, times, due, now)
        times.issued.append(now)
        for issue in issues:
            now = _issue(problem, times, issue, now)
        times.behind.append(now)
        if k < len(problem.compute):
            needed = arrived
            while needed < len(problem.gathers) and problem.gathers[needed].first == k:
                needed += 1
            now = _stall(times, now, times.gather_ends[arrived:needed])
            arrived = needed
            times.starts.append(now)
            now += problem.compute[k]
            times.ends.append(now)
    _stall(times, now, list(times.evict_ends.values()))
    return times


def _by_position(positions: Sequence[int]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = defaultdict(list)
    for index, position in enumerate(positions):
        found[position].append(index)
    return found


def _stall(times: Times, now: float, needs: Sequence[float]) -> float:
    until = max(needs, default=now)
    if until <= now:
        return now
    times.stalls.append(until - now)
    return until


def _issue_reductions(problem: Problem, times: Times, k: int, now: float) -> None:
    ends = times.reduce_ends
    while len(ends) < len(problem.reductions) and problem.reductions[len(ends)].ready < k:
        begin = max(now, ends[-1]) if ends else now
        ends.append(begin + problem.reductions[len(ends)].seconds)


def _evict(problem: Problem, times: Times, reductions: Sequence[int], now: float) -> None:
    for j in reductions:
        if problem.reductions[j].evict:
            times.evict_begins[j] = max(now, _last(times.evict_ends))
            times.evict_ends[j] = times.evict_begins[j] + problem.reductions[j].evict


def _issue(problem: Problem, times: Times, issue: Issue, now: float) -> float:
    """When the host is past it."""
    i = issue.gather
    gather = problem.gathers[i]
    if issue.kind is Kind.READ:
        times.read_begins[i] = max(now, _last(times.read_ends))
        times.read_ends[i] = times.read_begins[i] + gather.read
    elif issue.kind is Kind.FETCH:
        on_host = times.read_ends.get(i, 0.0)
        times.fetch_begins[i] = max(now, _last(times.fetch_ends), on_host)
        times.fetch_ends[i] = times.fetch_begins[i] + gather.fetch
    else:
        now = _stall(times, now, [times.fetch_ends[i]] if gather.fetch else [])
        ends = times.gather_ends
        begin = max(now, ends[-1]) if ends else now
        times.gather_issues.append(now)
        times.gather_begins.append(begin)
        ends.append(begin + gather.seconds)
    return now


def _last(ends: dict[int, float]) -> float:
    """When a channel is free: its last operation's end."""
    return ends[next(reversed(ends))] if ends else 0.0


def exposed_seconds(problem: Problem, schedule: Schedule) -> float:
    """Seconds in which compute waits for a transfer, the wait at the end included."""
    return sum(evaluate(problem, schedule).stalls)


def held_bytes(problem: Problem, schedule: Schedule) -> list[int]:
    """Bytes held while each node runs: live, fetched, gathered and reducing.

    What is on its way to the host after its wait does not count.
    """
    change = [0] * (len(problem.compute) + 1)
    for start, gather in zip(schedule.gather_starts, problem.gathers, strict=True):
        change[start] += gather.bytes
        change[gather.last + 1] -= gather.bytes
    for i in problem.fetched:
        change[schedule.fetch_start(i)] += problem.gathers[i].shard
        change[schedule.gather_starts[i]] -= problem.gathers[i].shard
    for wait, reduction in zip(schedule.reduce_waits, problem.reductions, strict=True):
        change[reduction.ready + 1] += reduction.bytes
        change[wait] -= reduction.bytes
    return [live + moving for live, moving in zip(problem.live, accumulate(change), strict=False)]


def peak_bytes(problem: Problem, schedule: Schedule) -> int:
    """The most bytes held at any node."""
    return max(held_bytes(problem, schedule), default=0)
