"""What a schedule costs, straight from the rules of execution; nothing here knows how it was found.

At position ``k`` the host does, in this order: issue the reductions whose gradients node ``k - 1``
completed, wait for the reductions due at ``k`` (which returns their memory), issue the gathers due at
``k``, run node ``k``. Gathers follow the waits because they may need the memory those return.
"""

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from zero_compile.planner.problem import Problem, Schedule


class Times(NamedTuple):
    """Seconds since the start; ``starts`` and ``ends`` are of the compute nodes.

    ``issued[k]`` is when the gathers of position ``k`` are issued, ``issued[n]`` when all is done.
    ``stalls`` are the waits of compute in order, those for reductions apart from those for gathers.
    """

    issued: list[float]
    starts: list[float]
    ends: list[float]
    gather_begins: list[float]
    gather_ends: list[float]
    reduce_ends: list[float]
    stalls: list[float]


def evaluate(problem: Problem, schedule: Schedule) -> Times:
    """When everything happens. O(nodes + buckets).

    Each channel is serial, first in first out: an operation begins at the later of its issue and
    the end of the one before it.
    """
    times = Times([], [], [], [], [], [], [])
    waits = _by_position(schedule.reduce_waits)
    arrived = 0
    now = 0.0
    for k in range(len(problem.compute) + 1):
        _issue_reductions(problem, times, k, now)
        now = _stall(times, now, [times.reduce_ends[j] for j in waits.get(k, ())])
        times.issued.append(now)
        _issue_gathers(problem, schedule, times, k, now)
        if k < len(problem.compute):
            needed = arrived
            while needed < len(problem.gathers) and problem.gathers[needed].first == k:
                needed += 1
            now = _stall(times, now, times.gather_ends[arrived:needed])
            arrived = needed
            times.starts.append(now)
            now += problem.compute[k]
            times.ends.append(now)
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


def _issue_gathers(problem: Problem, schedule: Schedule, times: Times, k: int, now: float) -> None:
    starts, ends = schedule.gather_starts, times.gather_ends
    while len(ends) < len(starts) and starts[len(ends)] <= k:
        begin = max(now, ends[-1]) if ends else now
        times.gather_begins.append(begin)
        ends.append(begin + problem.gathers[len(ends)].seconds)


def exposed_seconds(problem: Problem, schedule: Schedule) -> float:
    """Seconds in which compute waits for a gather or a reduction, the wait at the end included."""
    return sum(evaluate(problem, schedule).stalls)


def held_bytes(problem: Problem, schedule: Schedule) -> list[int]:
    """Bytes held while each node runs: live, gathered and reducing."""
    change = [0] * (len(problem.compute) + 1)
    for start, gather in zip(schedule.gather_starts, problem.gathers, strict=True):
        change[start] += gather.bytes
        change[gather.last + 1] -= gather.bytes
    for wait, reduction in zip(schedule.reduce_waits, problem.reductions, strict=True):
        change[reduction.ready + 1] += reduction.bytes
        change[wait] -= reduction.bytes
    return [live + moving for live, moving in zip(problem.live, accumulate(change), strict=False)]


def peak_bytes(problem: Problem, schedule: Schedule) -> int:
    """The most bytes held at any node."""
    return max(held_bytes(problem, schedule), default=0)
