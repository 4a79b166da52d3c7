"""Timelines as tables, comparisons, traces and pages."""

import json
import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console, RenderableType

from timelines import MIB, demo
from tools.render.diff import Move, Transfer, diff, diff_text, moves
from tools.render.measures import (
    Span,
    at_peak,
    common,
    exposed_by_channel,
    merged,
    most_of_each,
    overlap_efficiency,
    traffic,
    without,
)
from tools.render.page import page
from tools.render.tables import seconds_text, si_bytes, steps, summary
from tools.render.trace import chrome_trace
from zero_runtime.ir.plan import Channel
from zero_runtime.ir.timeline import Category, Event, Sample, Source, Timeline

#: A name that breaks out of a script, a tag, an attribute, a placeholder and rich's markup.
HOSTILE = "</script><img src=x onerror=alert(1)>\"'&<!--{{data}}[red]\u2028"

EMPTY = Timeline("nothing", Source.PREDICTED, 1, (), ())


def shown(thing: RenderableType) -> str:
    console = Console(width=140, color_system=None)
    with console.capture() as capture:
        console.print(thing)
    return capture.get()


def event(channel: Channel, start: float, end: float, **more: Any) -> Event:
    return Event(f"{channel} at {start:g}", channel, start, end, "forward", **more)


def timeline(
    *events: Event, memory: tuple[Sample, ...] = (), budget: int | None = None
) -> Timeline:
    return Timeline("small", Source.PREDICTED, 2, events, memory, budget)


def hostile() -> Timeline:
    bad = replace(event(Channel.COMPUTE, 0, 1), name=HOSTILE, node=HOSTILE, phase=HOSTILE)
    return replace(timeline(bad), name=HOSTILE)


# ------------------------------------------------------------------------------ units


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "0.98 KiB"),
        (1536, "1.50 KiB"),
        (10 * MIB, "10.0 MiB"),
        (999 * MIB, "999 MiB"),
        (1000 * MIB, "0.98 GiB"),
        (-384 * MIB, "-384 MiB"),
        (2.0**65, "32768 PiB"),
    ],
)
def test_bytes_have_three_digits_and_a_binary_prefix(count: float, text: str) -> None:
    assert si_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (5e-9, "5.00 ns"),
        (1e-6, "1.00 µs"),
        (9.9996e-4, "1.00 ms"),
        (0.0123, "12.3 ms"),
        (0.9999, "1.00 s"),
        (75, "75.0 s"),
        (-0.002, "-2.00 ms"),
    ],
)
def test_seconds_have_three_digits_in_the_unit_that_suits(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


# ------------------------------------------------------------------------------ measures


def test_spans_are_merged_intersected_and_subtracted() -> None:
    spans = merged([Span(4, 5), Span(0, 2), Span(1, 3), Span(7, 7)])
    assert spans == [Span(0, 3), Span(4, 5)]
    assert common(spans, [Span(2, 4.5)]) == [Span(2, 3), Span(4, 4.5)]
    assert without(spans, [Span(1, 2), Span(4, 9)]) == [Span(0, 1), Span(2, 3)]
    assert without(spans, []) == spans


def test_a_wait_is_blamed_on_the_busy_channel_nearest_to_compute() -> None:
    waits = timeline(
        event(Channel.NVME_READ, 1, 3),
        event(Channel.ALL_GATHER, 2, 4),
        event(Channel.COMPUTE, 5, 6, stall=5.0),
    )
    assert exposed_by_channel(waits) == {
        Channel.ALL_GATHER: 2,
        Channel.NVME_READ: 1,
        None: 2,
    }


def test_blame_adds_up_to_what_is_exposed() -> None:
    measured = demo(jitter=1)
    assert sum(exposed_by_channel(measured).values()) == pytest.approx(measured.exposed)


def test_overlap_is_the_share_of_transfer_time_under_compute() -> None:
    both = (event(Channel.ALL_GATHER, 0, 4), event(Channel.REDUCE_SCATTER, 2, 4))
    assert overlap_efficiency(timeline(*both, event(Channel.COMPUTE, 3, 9))) == 0.25
    assert overlap_efficiency(timeline(event(Channel.COMPUTE, 0, 1))) is None


def test_memory_at_the_peak_and_the_most_of_each() -> None:
    samples = (
        Sample(0, {Category.SHARDS: 5}),
        Sample(1, {Category.SHARDS: 2, Category.GATHERED: 9}),
        Sample(2, {Category.GATHERED: 4}),
    )
    held = timeline(memory=samples)
    assert at_peak(held) == {Category.SHARDS: 2, Category.GATHERED: 9}
    assert most_of_each(held) == {Category.SHARDS: 5, Category.GATHERED: 9}
    assert at_peak(EMPTY) == most_of_each(EMPTY) == {}


# ------------------------------------------------------------------------------ tables


def test_the_summary_names_times_channels_and_memory() -> None:
    text = shown(summary(demo()))
    for words in ("step time", "overlap efficiency", "reduce scatter", "activations", "4.00 GiB"):
        assert words in text


def test_steps_are_listed_by_start_up_to_a_limit() -> None:
    text = shown(steps(demo(), most=3))
    assert text.index("layers.0.load") < text.index("layers.0.gather") < text.index("61 more")
    assert "48.0 MiB" in text
    assert "more" not in shown(steps(demo()))


def test_names_are_no_markup_and_an_empty_timeline_has_tables() -> None:
    assert "[red]" in shown(steps(hostile()))
    assert "[red]" in shown(summary(hostile()))
    assert "0 s" in shown(summary(EMPTY))
    assert shown(steps(EMPTY))


# ------------------------------------------------------------------------------ diff


def test_a_diff_finds_what_starts_earlier_or_later_is_added_or_removed() -> None:
    def gather(bucket: int, start: float) -> Event:
        return event(Channel.ALL_GATHER, start, start + 1, bucket=bucket)

    before = timeline(gather(0, 0), gather(1, 1), gather(1, 5), gather(2, 7))
    after = timeline(gather(0, 0), gather(1, 3), gather(1, 4.5), gather(3, 9))

    def transfer(bucket: int, occurrence: int = 0) -> Transfer:
        return Transfer("forward", Channel.ALL_GATHER, bucket, occurrence)

    assert moves(before, after) == [
        Move(transfer(2), 7, None),
        Move(transfer(3), None, 9),
        Move(transfer(1), 1, 3),
        Move(transfer(1, 1), 5, 4.5),
    ]
    text = shown(diff(before, after))
    for words in ("removed", "added", "2.00 s later", "bucket 1 #2 (forward)", "500 ms earlier"):
        assert words in text
    assert diff_text(before, after).endswith("1 earlier, 1 later, 1 added, 1 removed")


def test_a_diff_shows_times_traffic_and_memory_and_cuts_long_lists() -> None:
    text = shown(diff(demo(), demo(jitter=3, ahead=2), most=4))
    for words in ("step time", "all gather bytes", "6.00 GiB", "gathered", "+384 MiB (+50.0%)"):
        assert words in text
    assert "more transfers start at another time" in text


def test_a_timeline_does_not_differ_from_itself() -> None:
    same = demo()
    assert moves(same, same) == []
    assert "0 earlier, 0 later" in diff_text(same, same)
    assert shown(diff(EMPTY, EMPTY))


# ------------------------------------------------------------------------------ trace


def trace_events(*timelines: Timeline) -> list[dict[str, Any]]:
    """After a round trip through JSON, as a viewer reads them."""
    events: list[dict[str, Any]] = json.loads(json.dumps(chrome_trace(timelines)))["traceEvents"]
    return events


def test_a_trace_has_a_process_a_timeline_and_a_named_thread_a_channel() -> None:
    events = trace_events(demo(), demo(jitter=1))
    names = [e for e in events if e["name"] == "process_name"]
    assert [(e["pid"], e["args"]["name"]) for e in names] == [
        (0, "step (predicted, 8 ranks)"),
        (1, "step (measured, 8 ranks)"),
    ]
    threads = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert threads == {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"}
    assert len(threads) == 10


def test_a_trace_has_every_event_in_microseconds_with_what_is_known_of_it() -> None:
    waited = event(Channel.ALL_GATHER, 0.25, 0.5, bucket=3, bytes=64, stall=0.125, node="mm")
    (complete,) = (e for e in trace_events(timeline(waited)) if e["ph"] == "X")
    assert (complete["ts"], complete["dur"], complete["cat"]) == (250_000, 250_000, "forward")
    assert complete["args"] == {
        "phase": "forward",
        "node": "mm",
        "bucket": 3,
        "bytes": 64,
        "stall_us": 125_000,
    }
    assert sum(e["ph"] == "X" for e in trace_events(demo())) == len(demo().events)


def test_a_trace_counts_memory_and_marks_where_it_begins_to_exceed_the_budget() -> None:
    totals = (5, 11, 12, 9, 20)
    samples = tuple(Sample(i, {Category.SHARDS: total}) for i, total in enumerate(totals))
    events = trace_events(timeline(memory=samples, budget=10))
    counters = [e for e in events if e["ph"] == "C"]
    assert [e["args"]["shards"] for e in counters] == list(totals)
    assert [e["ts"] for e in events if e["ph"] == "i"] == [1_000_000, 4_000_000]


# ------------------------------------------------------------------------------ page


def embedded(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found
    data: dict[str, Any] = json.loads(found[1])
    return data


def test_a_page_embeds_every_step_and_sample() -> None:
    plan = demo()
    data = embedded(page([plan], "a title", {}))
    (drawn,) = data["timelines"]
    lanes = {lane["channel"]: lane for lane in drawn["lanes"]}
    assert {c: len(lane["start"]) for c, lane in lanes.items()} == Counter(
        e.channel for e in plan.events
    )
    gather = next(e for e in plan.events if e.channel is Channel.ALL_GATHER)
    lane = lanes["all_gather"]
    assert data["strings"][lane["name"][0]] == gather.name
    assert (lane["start"][0], lane["bytes"][0], lane["bucket"][0]) == (
        pytest.approx(gather.start),
        gather.bytes,
        gather.bucket,
    )
    totals = [sum(held) for held in zip(*drawn["memory"]["held"], strict=True)]
    assert totals == [sample.total for sample in plan.memory]


def test_a_page_sums_up_above_the_timelines() -> None:
    text = page([demo(), demo(jitter=1)], "a title", {"policy": "stage 3"})
    for words in ("<title>a title</title>", "stage 3", "predicted", "measured", "of 4.00 GiB"):
        assert words in text
    assert traffic(demo()).keys() == {
        Channel(c["channel"]) for c in embedded(text)["timelines"][0]["lanes"]
    }


def test_nothing_in_a_name_is_taken_for_markup() -> None:
    text = page([hostile()], HOSTILE, {HOSTILE: HOSTILE})
    assert text.count("</script>") == page([demo()], "", {}).count("</script>")
    assert "<img" not in text
    assert HOSTILE in embedded(text)["strings"]


def test_a_page_refers_to_nothing_outside() -> None:
    text = page([demo()], "a title", {})
    assert not re.search(r"https?://|//\w+\.\w+/|\b(src|href)\s*=|@import|url\(", text)


def test_a_page_of_forty_thousand_steps_is_small() -> None:
    plan = demo(layers=5000)
    assert len(plan.events) == 40_000
    assert len(page([plan], "large", {})) < 15e6


def test_a_page_needs_a_timeline_but_not_a_step() -> None:
    assert embedded(page([EMPTY], "", {}))["timelines"][0]["lanes"] == []
    with pytest.raises(ValueError, match="at least one timeline"):
        page([], "", {})
