"""Timelines as one HTML page that needs nothing else: no server, no network, no other file."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

from zero_runtime.ir.plan import Channel
from zero_runtime.ir.timeline import Category, Event, Timeline

from .measures import (
    at_peak,
    exposed_by_channel,
    overlap_efficiency,
    used_categories,
    used_channels,
)
from .tables import channel_text, percent, seconds_text, si_bytes

_TEMPLATE = Path(__file__).with_name("page.html")


def page(timelines: Sequence[Timeline], title: str, facts: Mapping[str, str]) -> str:
    """One page with the timelines below each other on a shared time axis; ``facts`` are shown as given.

    Raises:
        ValueError: ``timelines`` is empty.
    """
    if not timelines:
        raise ValueError("a page needs at least one timeline")
    parts = {
        "title": escape(title),
        "cards": "".join(map(_card, timelines)),
        "exposed": _exposed_table(timelines),
        "memory": _memory_table(timelines),
        "facts": _facts_table(facts),
        "data": _script_safe(json.dumps(page_data(timelines), separators=(",", ":"))),
    }
    # One pass, so that no text of a user's model is taken for a placeholder.
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _TEMPLATE.read_text("utf-8"))


# ------------------------------------------------------------------------------ data for the script


def page_data(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """What the page's script draws: columns of seconds and bytes, and indices into ``strings``."""
    strings: dict[str, int] = {}
    categories = used_categories(*timelines)
    channels = used_channels(*timelines)
    return {
        "timelines": [_timeline_data(t, channels, categories, strings) for t in timelines],
        "categories": categories,
        "strings": list(strings),
    }


def _timeline_data(
    timeline: Timeline,
    channels: Iterable[Channel],
    categories: Iterable[Category],
    strings: dict[str, int],
) -> dict[str, Any]:
    lanes = [_lane(timeline, channel, strings) for channel in channels]
    return {
        "name": timeline.name,
        "source": timeline.source,
        "ranks": timeline.world_size,
        "budget": timeline.budget,
        "phases": _phases(timeline),
        "lanes": lanes,
        "memory": {
            "time": [_rounded(sample.time) for sample in timeline.memory],
            "held": [[s.held.get(category, 0) for s in timeline.memory] for category in categories],
        },
    }


def _lane(timeline: Timeline, channel: Channel, strings: dict[str, int]) -> dict[str, Any]:
    """The channel's events by start, a list a field."""
    events = sorted(_on(timeline, channel), key=lambda event: event.start)

    def column(text: Callable[[Event], str]) -> list[int]:
        return [strings.setdefault(text(event), len(strings)) for event in events]

    return {
        "channel": channel,
        "title": channel_text(channel),
        "start": [_rounded(event.start) for event in events],
        "end": [_rounded(event.end) for event in events],
        "stall": [_rounded(event.stall) for event in events],
        "bytes": [event.bytes for event in events],
        "bucket": [event.bucket for event in events],
        "name": column(lambda event: event.name),
        "node": column(lambda event: event.node),
        "phase": column(lambda event: event.phase),
    }


def _phases(timeline: Timeline) -> list[dict[str, Any]]:
    """Runs of compute in one phase: a ribbon above the lanes."""
    events = sorted(_on(timeline, Channel.COMPUTE), key=lambda event: event.start)
    runs = ((phase, list(run)) for phase, run in groupby(events, key=lambda event: event.phase))
    return [
        {
            "phase": phase,
            "start": _rounded(run[0].start),
            "end": _rounded(max(event.end for event in run)),
        }
        for phase, run in runs
    ]


def _on(timeline: Timeline, channel: Channel) -> Iterable[Event]:
    return (event for event in timeline.events if event.channel is channel)


def _rounded(seconds: float) -> float:
    """To the nanosecond: more digits would only make the page longer."""
    return round(seconds, 9)


def _script_safe(text: str) -> str:
    """JSON that cannot end the script element it stands in, nor open a comment there."""
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


# ------------------------------------------------------------------------------ summary


def _card(timeline: Timeline) -> str:
    share = timeline.exposed / timeline.seconds if timeline.seconds else None
    budget = "no budget" if timeline.budget is None else f"of {si_bytes(timeline.budget)}"
    figures = (
        _figure("step time", seconds_text(timeline.seconds), f"{timeline.world_size} ranks"),
        _figure("exposed", seconds_text(timeline.exposed), f"{percent(share)} of the step"),
        _figure("overlap", percent(overlap_efficiency(timeline)), "of transfer time hidden"),
        _figure("peak memory", si_bytes(timeline.peak), budget, _over(timeline)),
    )
    heading = f"{escape(timeline.name)} <small>{escape(timeline.source)}</small>"
    return f'<article class="card"><h2>{heading}</h2><dl>{"".join(figures)}</dl></article>'


def _figure(name: str, value: str, note: str, css: str = "") -> str:
    number, _, unit = escape(value).partition(" ")
    text = f'{number}<span class="unit">{unit}</span>'
    return f'<div class="{css}"><dt>{name}</dt><dd>{text}</dd><dd class="note">{note}</dd></div>'


def _over(timeline: Timeline) -> str:
    return "over" if timeline.budget is not None and timeline.peak > timeline.budget else ""


def _exposed_table(timelines: Sequence[Timeline]) -> str:
    waits = [exposed_by_channel(timeline) for timeline in timelines]
    channels = [c for c in (*Channel, None) if any(c in wait for wait in waits)]
    rows = [
        (_swatch(channel or "idle", channel_text(channel)), [w.get(channel, 0.0) for w in waits])
        for channel in channels
    ]
    total = [timeline.exposed for timeline in timelines]
    return _table("Exposed time", "channel", timelines, rows, total, seconds_text)


def _memory_table(timelines: Sequence[Timeline]) -> str:
    peaks = [at_peak(timeline) for timeline in timelines]
    rows = [
        (_swatch(f"held-{category}", category), [peak.get(category, 0) for peak in peaks])
        for category in used_categories(*timelines)
    ]
    total = [timeline.peak for timeline in timelines]
    return _table("Memory at the peak", "category", timelines, rows, total, si_bytes)


def _table(
    title: str,
    first: str,
    timelines: Sequence[Timeline],
    rows: Sequence[tuple[str, Sequence[float]]],
    total: Sequence[float],
    text: Callable[[float], str],
) -> str:
    """A column a timeline; behind each number a bar, as long as its share of the largest total."""
    head = "".join(f'<th scope="col">{escape(t.source)}</th>' for t in timelines)
    largest = max(total) or 1.0
    body = "".join(
        f'<tr><th scope="row">{name}</th>{"".join(_bar(v, largest, text) for v in values)}</tr>'
        for name, values in rows
    )
    foot = "".join(f"<td>{text(value)}</td>" for value in total)
    return _panel(
        f"<caption>{title}</caption>"
        f'<thead><tr><th scope="col">{first}</th>{head}</tr></thead><tbody>{body}</tbody>'
        f'<tfoot><tr><th scope="row">together</th>{foot}</tr></tfoot>'
    )


def _panel(table: str) -> str:
    return f'<div class="panel"><table>{table}</table></div>'


def _bar(value: float, largest: float, text: Callable[[float], str]) -> str:
    return f'<td style="--share:{value / largest:.1%}">{text(value)}</td>'


def _swatch(colour: str, text: str) -> str:
    return f'<i class="swatch" style="background:var(--{colour})"></i>{escape(text)}'


def _facts_table(facts: Mapping[str, str]) -> str:
    if not facts:
        return ""
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td class="text">{escape(value)}</td></tr>'
        for name, value in facts.items()
    )
    return _panel(f"<caption>Facts</caption><tbody>{rows}</tbody>")
