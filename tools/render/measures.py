"""What is read off a timeline: exposed time by channel, overlap, bytes moved, memory at the peak."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from zero_runtime.ir.plan import Channel
from zero_runtime.ir.timeline import Category, Event, Sample, Timeline

#: From the channel nearest to compute to the farthest: the order in which a wait is blamed.
TRANSFERS = tuple(channel for channel in Channel if channel is not Channel.COMPUTE)


class Span(NamedTuple):
    """Seconds from ``start`` to ``end``."""

    start: float
    end: float


class Traffic(NamedTuple):
    """How many operations a channel ran, and the bytes and seconds of all together."""

    steps: int
    bytes: int
    seconds: float


def used_channels(*timelines: Timeline) -> tuple[Channel, ...]:
    """Channels on which anything happens, compute first."""
    used = {event.channel for timeline in timelines for event in timeline.events}
    return tuple(channel for channel in Channel if channel in used)


def used_categories(*timelines: Timeline) -> tuple[Category, ...]:
    """Categories of which anything is ever held, in the order they are stacked."""
    samples = (sample for timeline in timelines for sample in timeline.memory)
    used = {category for sample in samples for category, held in sample.held.items() if held}
    return tuple(category for category in Category if category in used)


def traffic(timeline: Timeline) -> dict[Channel, Traffic]:
    """Counts, bytes and seconds of each used channel."""
    groups: dict[Channel, list[Event]] = {channel: [] for channel in used_channels(timeline)}
    for event in timeline.events:
        groups[event.channel].append(event)
    return {
        channel: Traffic(
            len(events), sum(e.bytes for e in events), sum(e.end - e.start for e in events)
        )
        for channel, events in groups.items()
    }


def exposed_by_channel(timeline: Timeline) -> dict[Channel | None, float]:
    """Seconds that compute waited, by the channel that was busy meanwhile; None: no channel was.

    When several were, the one nearest to compute is blamed, so that the parts add up to
    ``timeline.exposed``. Channels that are to blame for nothing are left out.
    """
    waits = merged(Span(e.start - e.stall, e.start) for e in _on(timeline, Channel.COMPUTE))
    exposed: dict[Channel | None, float] = {}
    for channel in TRANSFERS:
        busy = merged(Span(e.start, e.end) for e in _on(timeline, channel))
        exposed[channel] = length(common(waits, busy))
        waits = without(waits, busy)
    exposed[None] = length(waits)
    # Differences of floats leave crumbs: a picosecond is nothing.
    return {channel: seconds for channel, seconds in exposed.items() if seconds > 1e-12}


def overlap_efficiency(timeline: Timeline) -> float | None:
    """The share of the time with transfers under way in which compute ran too; None: no transfers."""
    moving = merged(
        Span(e.start, e.end) for e in timeline.events if e.channel is not Channel.COMPUTE
    )
    computing = merged(Span(e.start, e.end) for e in _on(timeline, Channel.COMPUTE))
    total = length(moving)
    return length(common(moving, computing)) / total if total else None


def at_peak(timeline: Timeline) -> Mapping[Category, int]:
    """Bytes by category at the first moment at which the most is held."""
    peak: Sample | None = max(timeline.memory, key=lambda sample: sample.total, default=None)
    return peak.held if peak else {}


def most_of_each(timeline: Timeline) -> dict[Category, int]:
    """The most bytes each category ever holds; the moments differ, so the sum means nothing."""
    most: Counter[Category] = Counter()
    for sample in timeline.memory:
        most |= Counter(sample.held)
    return dict(most)


def merged(spans: Iterable[Span]) -> list[Span]:
    """The same seconds as disjoint spans in order; empty spans vanish."""
    result: list[Span] = []
    for span in sorted(span for span in spans if span.end > span.start):
        if result and span.start <= result[-1].end:
            result[-1] = Span(result[-1].start, max(result[-1].end, span.end))
        else:
            result.append(span)
    return result


def common(a: list[Span], b: list[Span]) -> list[Span]:
    """The seconds in both; the arguments and the result are disjoint and in order."""
    result, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        both = Span(max(a[i].start, b[j].start), min(a[i].end, b[j].end))
        if both.end > both.start:
            result.append(both)
        if a[i].end < b[j].end:
            i += 1
        else:
            j += 1
    return result


def without(a: list[Span], b: list[Span]) -> list[Span]:
    """The seconds in ``a`` but not in ``b``; the arguments and the result are disjoint, in order."""
    edges = [float("-inf"), *(edge for span in b for edge in span), float("inf")]
    return common(a, [Span(*pair) for pair in zip(edges[::2], edges[1::2], strict=True)])


def length(spans: Iterable[Span]) -> float:
    """Seconds of disjoint spans together."""
    return sum(span.end - span.start for span in spans)


def _on(timeline: Timeline, channel: Channel) -> Iterable[Event]:
    return (event for event in timeline.events if event.channel is channel)
