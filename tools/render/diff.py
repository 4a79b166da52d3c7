"""Two timelines compared: times, memory, traffic, and which transfers begin earlier or later."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

from rich.table import Table
from rich.text import Text

from zero_runtime.ir.plan import Channel
from zero_runtime.ir.timeline import Timeline

from .measures import (
    Traffic,
    at_peak,
    exposed_by_channel,
    overlap_efficiency,
    traffic,
    used_categories,
    used_channels,
)
from .tables import channel_text, percent, seconds_text, si_bytes

#: Shifts shorter than this (seconds) are noise.
_NOTICEABLE = 1e-9


class Transfer(NamedTuple):
    """The ``occurrence``-th time (from 0) that a bucket is moved over a channel in a phase."""

    phase: str
    channel: Channel
    bucket: int
    occurrence: int

    def __str__(self) -> str:
        again = f" #{self.occurrence + 1}" if self.occurrence else ""
        return f"{channel_text(self.channel)} of bucket {self.bucket}{again} ({self.phase})"


class Move(NamedTuple):
    """When a transfer starts in either timeline, in seconds; None: the timeline has no such transfer."""

    transfer: Transfer
    before: float | None
    after: float | None

    @property
    def shift(self) -> float | None:
        """Seconds later (negative: earlier); None for what is added or removed."""
        return None if self.before is None or self.after is None else self.after - self.before

    def __str__(self) -> str:
        if self.shift is None:
            return "added" if self.before is None else "removed"
        return f"{seconds_text(abs(self.shift))} {'later' if self.shift > 0 else 'earlier'}"


class Row(NamedTuple):
    """A quantity in both timelines as text, and how it changed."""

    name: str
    before: str
    after: str
    change: str


def diff(a: Timeline, b: Timeline, most: int = 20) -> Table:
    """What changes from ``a`` to ``b``, with the ``most`` largest shifts of transfers."""
    table = Table(title=Text(f"{a.name} ({a.source}) → {b.name} ({b.source})"))
    for heading in ("", "a", "b", "change"):
        table.add_column(heading, justify="right" if heading else "left")
    found = moves(a, b)
    sections = (_time_rows, _traffic_rows, _memory_rows)
    for rows in (*(list(section(a, b)) for section in sections), _move_rows(found[:most])):
        for row in rows:
            table.add_row(*map(Text, row))
        table.add_section()
    if len(found) > most:
        table.caption = f"{len(found) - most:,} more transfers start at another time"
    return table


def diff_text(a: Timeline, b: Timeline) -> str:
    """The same in one line, for a log."""
    found = moves(a, b)
    kinds = Counter(str(move).split()[-1] for move in found)
    moved = ", ".join(f"{kinds[kind]} {kind}" for kind in ("earlier", "later", "added", "removed"))
    return (
        f"step {_arrow(a.seconds, b.seconds, seconds_text)}; "
        f"exposed {_arrow(a.exposed, b.exposed, seconds_text)}; "
        f"peak {_arrow(a.peak, b.peak, si_bytes)}; transfers: {moved}"
    )


def moves(a: Timeline, b: Timeline) -> list[Move]:
    """Transfers that do not start at the same time: those in one only, then by size of the shift."""
    before, after = starts(a), starts(b)
    both = (Move(key, before.get(key), after.get(key)) for key in before | after)
    found = [move for move in both if move.shift is None or abs(move.shift) > _NOTICEABLE]
    return sorted(found, key=lambda move: (move.shift is not None, -abs(move.shift or 0.0)))


def starts(timeline: Timeline) -> dict[Transfer, float]:
    """When each transfer of a bucket starts, in seconds."""
    seen: Counter[tuple[str, Channel, int]] = Counter()
    result = {}
    for event in sorted(timeline.events, key=lambda event: event.start):
        if event.bucket is not None and event.channel is not Channel.COMPUTE:
            key = (event.phase, event.channel, event.bucket)
            result[Transfer(*key, seen[key])] = event.start
            seen[key] += 1
    return result


def _time_rows(a: Timeline, b: Timeline) -> Iterator[Row]:
    yield _row("step time", a.seconds, b.seconds, seconds_text)
    yield _row("exposed", a.exposed, b.exposed, seconds_text)
    before, after = exposed_by_channel(a), exposed_by_channel(b)
    for channel in (*used_channels(a, b), None):
        if channel in before or channel in after:
            waited = (before.get(channel, 0.0), after.get(channel, 0.0))
            yield _row(f"  {channel_text(channel)}", *waited, seconds_text)
    shares = (percent(overlap_efficiency(a)), percent(overlap_efficiency(b)))
    yield Row("overlap efficiency", *shares, "")


def _traffic_rows(a: Timeline, b: Timeline) -> Iterator[Row]:
    before, after, none = traffic(a), traffic(b), Traffic(0, 0, 0.0)
    for channel in used_channels(a, b):
        x, y = before.get(channel, none), after.get(channel, none)
        yield _row(f"{channel_text(channel)} steps", x.steps, y.steps, "{:,.0f}".format)
        if channel is not Channel.COMPUTE:
            yield _row(f"{channel_text(channel)} bytes", x.bytes, y.bytes, si_bytes)


def _memory_rows(a: Timeline, b: Timeline) -> Iterator[Row]:
    yield _row("peak memory", a.peak, b.peak, si_bytes)
    before, after = at_peak(a), at_peak(b)
    for category in used_categories(a, b):
        held = (before.get(category, 0), after.get(category, 0))
        yield _row(f"  {category}", *held, si_bytes)


def _move_rows(found: list[Move]) -> list[Row]:
    def start(time: float | None) -> str:
        return "" if time is None else seconds_text(time)

    return [Row(str(m.transfer), start(m.before), start(m.after), str(m)) for m in found]


def _row(name: str, before: float, after: float, text: Callable[[float], str]) -> Row:
    return Row(name, text(before), text(after), _change(before, after, text))


def _change(before: float, after: float, text: Callable[[float], str]) -> str:
    change = after - before
    if abs(change) < 1e-12:
        return "="
    ratio = f" ({change / before:+.1%})" if before else ""
    return f"{'+' if change > 0 else '-'}{text(abs(change))}{ratio}"


def _arrow(before: float, after: float, text: Callable[[float], str]) -> str:
    return f"{text(before)} → {text(after)}, {_change(before, after, text)}"
