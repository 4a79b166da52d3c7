"""When each gather starts and each reduction is waited for: least exposed time, then least memory.

Gathers keep the order of their uses on a serial channel and their releases are fixed, so an earlier
start never delays anything: starting each as early as memory allows exposes least. Walking back from
the times this yields, each start then moves as late as it can without delaying a node, which hides
as much and holds least. Reductions are waited for where they have ended anyway; only where that
breaks the limit does a search decide what to delay (:mod:`zero_compile.scheduler.contention`).
"""

from bisect import bisect_left, bisect_right
from itertools import accumulate, pairwise
from math import ulp

from zero_compile.scheduler import contention
from zero_compile.scheduler.evaluate import evaluate, peak_bytes
from zero_compile.scheduler.problem import Problem, Schedule
from zero_runtime.errors import PlanError


def solve(problem: Problem) -> Schedule:
    """A legal schedule of little exposed time: the least unless reductions compete for memory.

    O((nodes + buckets) log buckets).

    Raises:
        PlanError: the problem is out of order, or not even a bucket gathered right at its use fits
            (the message names bucket, node and bytes).
    """
    _check_order(problem)
    _check_fits(problem)
    earliest = earliest_starts(problem)
    # Reductions as if they held nothing: no legal schedule exposes less than this one.
    relaxed = _in_time(problem, _with_natural_waits(problem, earliest))
    schedule = just_in_time(problem, relaxed)
    if problem.limit is None or peak_bytes(problem, schedule) <= problem.limit:
        return schedule
    return just_in_time(problem, _in_time(problem, contention.search(problem, earliest)))


def _in_time(problem: Problem, schedule: Schedule) -> Schedule:
    """No reduction is waited for later than it may be. To wait sooner never takes memory."""
    pairs = zip(problem.reductions, schedule.reduce_waits, strict=True)
    waits = (
        wait if r.latest is None else min(wait, max(r.latest, r.ready + 1)) for r, wait in pairs
    )
    return Schedule(schedule.gather_starts, tuple(waits))


def just_in_time(problem: Problem, schedule: Schedule) -> Schedule:
    """The latest gather starts at which no compute node runs later than it does in ``schedule``.

    Backwards, each gather must end when its first use begins and when the next gather must begin.
    """
    times = evaluate(problem, schedule)
    starts = list(schedule.gather_starts)
    deadline = float("inf")
    for i in range(len(starts) - 1, -1, -1):
        gather = problem.gathers[i]
        finish = min(times.starts[gather.first], deadline)
        deadline = latest_begin(finish, gather.seconds, times.gather_begins[i])
        latest = bisect_right(times.issued, deadline, starts[i], gather.first + 1) - 1
        starts[i] = max(starts[i], latest)
    return Schedule(tuple(starts), schedule.reduce_waits)


def latest_begin(finish: float, seconds: float, earliest: float) -> float:
    """When something that takes ``seconds`` begins at the latest to end by ``finish``.

    ``earliest`` is a time that is known to do: rounding must neither delay a node by a hair nor lose it.
    """
    begin = finish - seconds
    while begin + seconds > finish:
        begin -= ulp(finish)
    return max(begin, earliest)


def _with_natural_waits(problem: Problem, starts: tuple[int, ...]) -> Schedule:
    """Each reduction waited for at the first position where it has ended, at the latest at the end."""
    end = len(problem.compute)
    times = evaluate(problem, Schedule(starts, (end,) * len(problem.reductions)))
    waits = (
        min(end, bisect_left(times.ends, done, lo=reduction.ready) + 1)
        for reduction, done in zip(problem.reductions, times.reduce_ends, strict=True)
    )
    return Schedule(starts, tuple(waits))


# ------------------------------------------------------------------------------ memory


def earliest_starts(problem: Problem) -> tuple[int, ...]:
    """The earliest position of each gather if reductions held nothing, in bytes of the limit.

    As starts are in order, whoever covers a node before its first use shares it with every gather
    before it that is not yet released. So each node admits gathers up to some index, and a gather
    starts right after the last node before its first use that does not admit it.
    """
    gathers = problem.gathers
    starts = [*(gather.earliest for gather in gathers), 0]
    if problem.limit is None:
        return tuple(accumulate(starts[:-1], max))
    used = [gather.first for gather in gathers]
    for k, admitted in enumerate(_admitted(problem, problem.limit)):
        barred = max(admitted, bisect_right(used, k))
        starts[barred] = max(starts[barred], k + 1)
    return tuple(accumulate(starts[:-1], max))


def _admitted(problem: Problem, limit: int) -> list[int]:
    """How many gathers, in order, each node has memory for (its own and those before included)."""
    count = len(problem.gathers)
    ending = sorted(range(count), key=lambda i: problem.gathers[i].last)
    sums = _Sums(count)
    admitted = [0] * len(problem.compute)
    for k in range(len(problem.compute) - 1, -1, -1):
        while ending and problem.gathers[ending[-1]].last >= k:
            i = ending.pop()
            sums.add(i, problem.gathers[i].bytes)
        admitted[k] = sums.longest_prefix(limit - problem.live[k])
    return admitted


class _Sums:
    """Prefix sums of changing non-negative numbers (Fenwick, 1994): both operations O(log count)."""

    def __init__(self, count: int) -> None:
        self._tree = [0] * (count + 1)
        self._total = 0
        self._top = 1 << count.bit_length() >> 1

    def add(self, index: int, amount: int) -> None:
        """Adds ``amount`` to the number at ``index``."""
        self._total += amount
        index += 1
        while index < len(self._tree):
            self._tree[index] += amount
            index += index & -index

    def longest_prefix(self, most: int) -> int:
        """The length of the longest prefix whose sum is at most ``most``."""
        if self._total <= most:
            return len(self._tree) - 1
        length, step = 0, self._top
        while step:
            if length + step < len(self._tree) and self._tree[length + step] <= most:
                length += step
                most -= self._tree[length]
            step >>= 1
        return length


# ------------------------------------------------------------------------------ what is refused


def _check_order(problem: Problem) -> None:
    nodes = len(problem.compute)
    if len(problem.live) != nodes:
        raise PlanError(f"{len(problem.live)} nodes have a size in memory, but {nodes} a duration")
    for gather in problem.gathers:
        if not 0 <= gather.earliest <= gather.first <= gather.last < nodes:
            raise PlanError(
                f"bucket {gather.bucket} is used from node {gather.first} to node {gather.last} "
                f"of {nodes} nodes"
            )
    for reduction in problem.reductions:
        if not 0 <= reduction.ready < nodes:
            raise PlanError(
                f"the gradients of bucket {reduction.bucket} are ready after node "
                f"{reduction.ready} of {nodes} nodes"
            )
    if any(a.first > b.first for a, b in pairwise(problem.gathers)):
        raise PlanError("gathers are not in the order of their first uses")
    if any(a.ready > b.ready for a, b in pairwise(problem.reductions)):
        raise PlanError("reductions are not in the order in which their gradients are ready")


def _check_fits(problem: Problem) -> None:
    """Gathered only from first to last use, everything must fit: reductions can always be over."""
    if problem.limit is None:
        return
    change = [0] * (len(problem.compute) + 1)
    for gather in problem.gathers:
        change[gather.first] += gather.bytes
        change[gather.last + 1] -= gather.bytes
    gathered = list(accumulate(change[:-1]))
    worst = max(range(len(gathered)), key=lambda k: problem.live[k] + gathered[k], default=0)
    if gathered and problem.live[worst] + gathered[worst] > problem.limit:
        raise PlanError(_does_not_fit(problem, worst, gathered[worst]))


def _does_not_fit(problem: Problem, k: int, gathered: int) -> str:
    needed = problem.live[k] + gathered
    name = f"node {k}" + (f" ({problem.names[k]})" if k < len(problem.names) else "")
    limit = problem.limit or 0
    used = [g for g in problem.gathers if g.first <= k <= g.last]
    if not used:
        return (
            f"{name} needs {needed} bytes of activations and gradients, {needed - limit} more than the "
            f"limit of {limit}; no bucket is used there: raise the limit, or use a smaller batch"
        )
    newest = used[-1]
    others = gathered - newest.bytes
    return (
        f"bucket {newest.bucket} does not fit at {name}: {needed} bytes are needed "
        f"({newest.bytes} for the bucket, {others} for other buckets in use, {problem.live[k]} "
        f"for activations and gradients), {needed - limit} more than the limit of {limit}; raise it, "
        "or use smaller buckets or a smaller batch"
    )
