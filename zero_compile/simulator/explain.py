"""Why a bucket starts, stays and goes when it does, in sentences."""

from collections.abc import Iterator
from dataclasses import replace

from zero_compile.analysis.resident_memory import gib
from zero_compile.scheduler.evaluate import Times, evaluate, held_bytes
from zero_compile.scheduler.problem import Schedule
from zero_compile.simulator.read_back import Scheduled


def explain(scheduled: Scheduled, bucket: int) -> list[str]:
    """Lines on each gather, its shard and each reduction of the bucket; none if the step has no such bucket."""
    times = evaluate(scheduled.problem, scheduled.schedule)
    lines: list[str] = []
    for i, gather in enumerate(scheduled.problem.gathers):
        if gather.bucket == bucket:
            lines += _gather(scheduled, times, i)
    for j, reduction in enumerate(scheduled.problem.reductions):
        if reduction.bucket == bucket:
            lines.append(_reduction(scheduled, times, j))
    return lines


def _gather(scheduled: Scheduled, times: Times, i: int) -> Iterator[str]:
    gather = scheduled.problem.gathers[i]
    start = scheduled.schedule.gather_starts[i]
    begin, end, used = times.gather_begins[i], times.gather_ends[i], times.starts[gather.first]
    yield (
        f"gather of {gib(gather.bytes)}: starts before {_node(scheduled, start)}, on its way from "
        f"{_ms(begin)} to {_ms(end)}, first used by {_node(scheduled, gather.first)} at {_ms(used)}"
    )
    if gather.fetch:
        yield f"  {_shard(scheduled, times, i)}"
    yield f"  not later, because {_not_later(scheduled, times, i)}"
    yield f"  not earlier, because {_not_earlier(scheduled, times, i)}"
    yield f"  stays until {_node(scheduled, gather.last)}{_stays(scheduled, i)}"


def _shard(scheduled: Scheduled, times: Times, i: int) -> str:
    gather, schedule = scheduled.problem.gathers[i], scheduled.schedule
    ways = [("copied to the device", schedule.fetch_start(i), times.fetch_begins, times.fetch_ends)]
    if gather.read:
        ways.insert(
            0, ("read from NVMe", schedule.read_start(i), times.read_begins, times.read_ends)
        )
    told = ", then ".join(
        f"{way} from {_ms(begins[i])} to {_ms(ends[i])}, set out before {_node(scheduled, start)}"
        for way, start, begins, ends in ways
    )
    late = times.gather_issues[i] - _reached(schedule, times, i)
    return f"its shard of {gib(gather.shard)}: {told}" + (
        f": compute waits {_ms(late)} for it" if late > 1e-12 else ""
    )


def _reached(schedule: Schedule, times: Times, i: int) -> float:
    """When the host comes to the gather."""
    start = schedule.gather_starts[i]
    if i and schedule.gather_starts[i - 1] == start:
        return times.gather_issues[i - 1]
    return times.issued[start]


def _not_later(scheduled: Scheduled, times: Times, i: int) -> str:
    gather = scheduled.problem.gathers[i]
    if scheduled.schedule.gather_starts[i] >= gather.first:
        return "it stands at its first use"
    ready = times.ends[gather.first - 1] if gather.first else 0.0
    late = times.gather_ends[i] - ready
    if late > 1e-12:
        return f"it arrives {_ms(late)} after compute is ready for it: compute waits"
    following = i + 1 < len(scheduled.problem.gathers)
    if following and times.gather_ends[i] > times.gather_begins[i + 1] - 1e-12:
        other = scheduled.problem.gathers[i + 1].bucket
        return f"the gather of bucket {other} follows on the same channel at once"
    if _moved(scheduled, i, +1) > _exposed(scheduled):
        return "one unit later it would arrive after its first use"
    return "a later start would not free memory at any peak"


def _not_earlier(scheduled: Scheduled, times: Times, i: int) -> str:
    start = scheduled.schedule.gather_starts[i]
    if start <= scheduled.problem.gathers[i].earliest:
        return "nothing runs before" if start == 0 else "its bucket is still in its earlier place"
    if i and start <= scheduled.schedule.gather_starts[i - 1]:
        other = scheduled.problem.gathers[i - 1].bucket
        return f"gathers keep the order of their uses and bucket {other} starts here as well"
    if i and times.gather_begins[i] <= times.gather_ends[i - 1] + 1e-12:
        other = scheduled.problem.gathers[i - 1].bucket
        return f"the channel carries bucket {other} until {_ms(times.gather_ends[i - 1])}"
    limit = scheduled.problem.limit
    if limit is not None:
        held = held_bytes(scheduled.problem, scheduled.schedule)[start - 1]
        needed = held + scheduled.problem.gathers[i].bytes
        if needed > limit:
            where = _node(scheduled, start - 1)
            return f"at {where} it would take {gib(needed)} of {gib(limit)}"
    return "it is hidden as it is, and would hold memory for longer"


def _stays(scheduled: Scheduled, i: int) -> str:
    gather = scheduled.problem.gathers[i]
    if gather.first < scheduled.shift <= gather.last:
        return ", kept from forward to backward, which saves gathering it again"
    return ", its last reader"


def _reduction(scheduled: Scheduled, times: Times, j: int) -> str:
    reduction, wait = scheduled.problem.reductions[j], scheduled.schedule.reduce_waits[j]
    end = len(scheduled.problem.compute)
    where = "at the end" if wait >= end else f"before {_node(scheduled, wait)}"
    return (
        f"reduction of {gib(reduction.moved or reduction.bytes)}: starts after "
        f"{_node(scheduled, reduction.ready)}, whose unit completes its gradients, ends at "
        f"{_ms(times.reduce_ends[j])}, is waited for {where}, where it has ended or its memory is needed"
        + _evicted(times, j)
    )


def _evicted(times: Times, j: int) -> str:
    if j not in times.evict_ends:
        return ""
    return f"; goes to the host from {_ms(times.evict_begins[j])} to {_ms(times.evict_ends[j])}"


def _moved(scheduled: Scheduled, i: int, by: int) -> float:
    starts = list(scheduled.schedule.gather_starts)
    starts[i] += by
    moved = replace(scheduled.schedule, gather_starts=tuple(starts))
    return _exposed(replace(scheduled, schedule=moved))


def _exposed(scheduled: Scheduled) -> float:
    return sum(evaluate(scheduled.problem, scheduled.schedule).stalls)


def _node(scheduled: Scheduled, unit: int) -> str:
    phase = "forward" if unit < scheduled.shift else "backward"
    name = scheduled.nodes[unit] if unit < len(scheduled.nodes) else "the end"
    return f"{name or 'the beginning'} ({phase})"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"
