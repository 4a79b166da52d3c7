"""A timeline as a trace that Perfetto and chrome://tracing open."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from zero_runtime.ir.plan import Channel
from zero_runtime.ir.timeline import Event, Timeline

from .measures import used_categories, used_channels

#: A thread id for each channel, in the order the lanes are shown.
_LANES = {channel: number for number, channel in enumerate(Channel)}


def chrome_trace(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """The Trace Event Format as JSON-able data: a process a timeline, a thread a channel.

    Times are microseconds; memory is a counter in bytes, a series a category; an instant event
    marks each moment at which the budget begins to be exceeded.
    """
    events = [event for pid, timeline in enumerate(timelines) for event in _process(pid, timeline)]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _process(pid: int, timeline: Timeline) -> Iterator[dict[str, Any]]:
    yield from _metadata(pid, timeline)
    for event in timeline.events:
        yield _complete(pid, event)
    yield from _counters(pid, timeline)
    yield from _over_budget(pid, timeline)


def _metadata(pid: int, timeline: Timeline) -> Iterator[dict[str, Any]]:
    title = f"{timeline.name} ({timeline.source}, {timeline.world_size} ranks)"
    yield _named("process_name", pid, 0, {"name": title})
    yield _named("process_sort_index", pid, 0, {"sort_index": pid})
    for channel in used_channels(timeline):
        lane = _LANES[channel]
        yield _named("thread_name", pid, lane, {"name": str(channel)})
        yield _named("thread_sort_index", pid, lane, {"sort_index": lane})


def _named(name: str, pid: int, tid: int, args: dict[str, str | int]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": args}


def _complete(pid: int, event: Event) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": event.name,
        "cat": event.phase,
        "pid": pid,
        "tid": _LANES[event.channel],
        "ts": _microseconds(event.start),
        "dur": _microseconds(event.end - event.start),
        "args": {
            "phase": event.phase,
            "node": event.node,
            "bucket": event.bucket,
            "bytes": event.bytes,
            "stall_us": _microseconds(event.stall),
        },
    }


def _counters(pid: int, timeline: Timeline) -> Iterator[dict[str, Any]]:
    """Every counter event names every category: a viewer takes a missing one for unchanged."""
    categories = used_categories(timeline)
    for sample in timeline.memory:
        held = {str(category): sample.held.get(category, 0) for category in categories}
        time = _microseconds(sample.time)
        yield {"ph": "C", "name": "memory", "pid": pid, "tid": 0, "ts": time, "args": held}


def _over_budget(pid: int, timeline: Timeline) -> Iterator[dict[str, Any]]:
    if timeline.budget is None:
        return
    totals = [(sample.time, sample.total) for sample in timeline.memory]
    for (_, before), (time, total) in pairwise([(0.0, 0), *totals]):
        if before <= timeline.budget < total:
            yield {
                "ph": "i",
                "s": "p",
                "name": "over budget",
                "pid": pid,
                "tid": 0,
                "ts": _microseconds(time),
                "args": {"held": total, "budget": timeline.budget},
            }


def _microseconds(seconds: float) -> float:
    """To the picosecond: enough for any clock, and it keeps float noise out of the file."""
    return round(seconds * 1e6, 6)
