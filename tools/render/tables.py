"""A timeline as tables for the terminal, and the units that all renderings share."""

from bisect import bisect_right
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from zero_runtime.ir.timeline import Event, Timeline

from .measures import (
    at_peak,
    exposed_by_channel,
    most_of_each,
    overlap_efficiency,
    traffic,
    used_categories,
)

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_TIMES = ((1e-6, "ns", 1e9), (1e-3, "µs", 1e6), (1.0, "ms", 1e3), (float("inf"), "s", 1.0))


def si_bytes(count: float) -> str:
    """Bytes with a binary prefix and three digits: ``1536`` is ``"1.50 KiB"``; the sign is kept."""
    value, unit = float(count), 0
    while abs(value) >= 999.5 and unit < len(_BINARY) - 1:
        value, unit = value / 1024, unit + 1
    return f"{_three_digits(value) if unit else f'{value:.0f}'} {_BINARY[unit]}"


def seconds_text(seconds: float) -> str:
    """Seconds in the unit that suits, with three digits: ``0.0015`` is ``"1.50 ms"``."""
    if not seconds:
        return "0 s"
    unit, scale = next((u, s) for limit, u, s in _TIMES if abs(seconds) < limit * 0.9995)
    return f"{_three_digits(seconds * scale)} {unit}"


def percent(share: float | None) -> str:
    """A share as a percentage; None is a dash."""
    return "–" if share is None else f"{share:.1%}"  # noqa: RUF001


def channel_text(channel: str | None) -> str:
    """A channel for readers: ``"all_gather"`` is ``"all gather"``; None is ``"no transfer"``."""
    return "no transfer" if channel is None else channel.replace("_", " ")


def summary(timeline: Timeline) -> Table:
    """Step time, exposed time by channel, overlap, traffic, and memory at the peak."""
    table = Table(title=Text(_title(timeline)), show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for rows in (_time_rows(timeline), _traffic_rows(timeline), _memory_rows(timeline)):
        for name, value in rows:
            table.add_row(name, value)
        table.add_section()
    return table


def steps(timeline: Timeline, most: int | None = None) -> Table:
    """One row an event, by start; ``most`` limits the rows (None: all).

    ``held`` is the memory held, all categories together, when the event starts.
    """
    table = Table(title=Text(_title(timeline)))
    for heading in ("start", "channel", "step", "bucket", "bytes", "takes", "stall", "held"):
        table.add_column(heading, justify="left" if heading in ("channel", "step") else "right")
    events = sorted(timeline.events, key=lambda event: event.start)
    times = [sample.time for sample in timeline.memory]
    for event in events[:most]:
        table.add_row(*_step_cells(event), _held_at(timeline, times, event.start))
    if most is not None and len(events) > most:
        table.caption = f"{len(events) - most:,} more"
    return table


def _title(timeline: Timeline) -> str:
    return f"{timeline.name}: {timeline.source}, {timeline.world_size} ranks"


def _time_rows(timeline: Timeline) -> list[tuple[str, str]]:
    share = timeline.exposed / timeline.seconds if timeline.seconds else None
    blamed = exposed_by_channel(timeline).items()
    return [
        ("step time", seconds_text(timeline.seconds)),
        ("exposed", f"{seconds_text(timeline.exposed)} ({percent(share)})"),
        *((f"  {channel_text(channel)}", seconds_text(waited)) for channel, waited in blamed),
        ("overlap efficiency", percent(overlap_efficiency(timeline))),
    ]


def _traffic_rows(timeline: Timeline) -> list[tuple[str, str]]:
    return [
        (channel_text(channel), f"{moved.steps:,} steps, {si_bytes(moved.bytes)}")
        for channel, moved in traffic(timeline).items()
    ]


def _memory_rows(timeline: Timeline) -> list[tuple[str, str]]:
    held, most = at_peak(timeline), most_of_each(timeline)
    budget = "none" if timeline.budget is None else si_bytes(timeline.budget)
    return [
        ("peak memory", si_bytes(timeline.peak)),
        *(
            (
                f"  {category}",
                f"{si_bytes(held.get(category, 0))} (most {si_bytes(most[category])})",
            )
            for category in used_categories(timeline)
        ),
        ("budget", budget),
    ]


def _step_cells(event: Event) -> tuple[str | Text, ...]:
    return (
        f"{event.start * 1e3:,.3f} ms",
        channel_text(event.channel),
        Text(event.name),
        "" if event.bucket is None else str(event.bucket),
        si_bytes(event.bytes) if event.bytes else "",
        seconds_text(event.end - event.start),
        seconds_text(event.stall) if event.stall else "",
    )


def _held_at(timeline: Timeline, times: Sequence[float], time: float) -> str:
    index = bisect_right(times, time) - 1
    return si_bytes(timeline.memory[index].total) if index >= 0 else ""


def _three_digits(value: float) -> str:
    size = abs(value)
    return f"{value:.{2 if size < 9.995 else 1 if size < 99.95 else 0}f}"
