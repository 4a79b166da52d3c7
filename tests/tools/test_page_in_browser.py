"""The page of timelines, as a headless browser without network shows it."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import pytest

from timelines import demo
from tools.render.page import page as page_text
from zero_runtime.ir.plan import Channel
from zero_runtime.ir.timeline import Event, Source, Timeline

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext, Page

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=f"none of {', '.join(NAMES)} is installed")

FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


class Opened:
    """A page in a tab, with what the browser complained about."""

    def __init__(self, tab: "Page", path: Path) -> None:
        self.tab = tab
        self.complaints: list[str] = []
        tab.on("console", lambda message: self.complaints.append(message.text))
        tab.on("pageerror", lambda error: self.complaints.append(str(error)))
        tab.on("requestfailed", lambda request: self.complaints.append(request.url))
        tab.goto(path.as_uri())

    @property
    def range(self) -> tuple[float, float]:
        """The seconds in view."""
        data = self.tab.locator("#timelines").evaluate("main => ({...main.dataset})")
        return float(data["start"]), float(data["end"])

    def place(self, time: float, lane: str, number: int = 0) -> tuple[float, float]:
        """Where a moment of a lane is drawn in the window."""
        section = self.tab.locator(f'[data-timeline="{number}"]')
        section.scroll_into_view_if_needed()
        label = section.locator(f'[data-lane="{lane}"]').bounding_box()
        canvas = section.locator("canvas").bounding_box()
        assert label is not None
        assert canvas is not None
        width = self.tab.evaluate("number => plotWidth(charts[number])", number)
        start, end = self.range
        x = canvas["x"] + (time - start) / (end - start) * width
        return x, label["y"] + label["height"] / 2

    def hover(self, event: Event, number: int = 0) -> str:
        """The tooltip over the middle of a step."""
        self.tab.mouse.move(*self.place((event.start + event.end) / 2, event.channel, number))
        tooltip = self.tab.locator("#tooltip")
        tooltip.wait_for(state="visible")
        return str(tooltip.inner_text())


class Window(NamedTuple):
    """Opens pages in one browser."""

    context: "BrowserContext"
    folder: Path

    def open(self, *timelines: Timeline) -> Opened:
        path = self.folder / "page.html"
        path.write_text(page_text(timelines, "a step", {"schedule": "one ahead"}), "utf-8")
        return Opened(self.context.new_page(), path)


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Window]:
    profile, folder = (tmp_path_factory.mktemp(name) for name in ("profile", "pages"))
    with sync_api.sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            profile, executable_path=CHROMIUM, headless=True, args=list(FLAGS), offline=True
        )
        yield Window(context, folder)
        context.close()


def some_event(timeline: Timeline, channel: Channel, number: int) -> Event:
    return [event for event in timeline.events if event.channel is channel][number]


def test_hover_shows_the_step_under_the_pointer(window: Window) -> None:
    plan, measured = demo(), demo(jitter=1)
    opened = window.open(plan, measured)
    for channel in (Channel.COMPUTE, Channel.ALL_GATHER, Channel.DEVICE_TO_HOST):
        for number, timeline in enumerate((plan, measured)):
            event = some_event(timeline, channel, 3)
            text = opened.hover(event, number)
            assert event.name in text
            assert event.node in text
            assert f"{event.start * 1e3:.3f} ms" in text
    assert "384 MiB" in opened.hover(some_event(plan, Channel.ALL_GATHER, 2))
    assert not opened.complaints


def test_the_wheel_zooms_a_drag_pans_and_a_double_click_resets(window: Window) -> None:
    plan = demo()
    opened = window.open(plan, demo(jitter=1))
    whole = opened.range
    event = some_event(plan, Channel.COMPUTE, 5)
    opened.hover(event)
    opened.tab.mouse.wheel(0, -600)
    opened.tab.wait_for_function("view.end - view.start < 0.6 * (full.end - full.start)")
    start, end = opened.range
    assert whole[0] < start < event.start < event.end < end < whole[1]
    assert event.name in opened.hover(event)

    x, y = opened.place((start + end) / 2, "compute")
    opened.tab.mouse.move(x, y)
    opened.tab.mouse.down()
    opened.tab.mouse.move(x + 40, y, steps=4)
    opened.tab.mouse.up()
    assert opened.range[0] < start
    assert opened.range[1] - opened.range[0] == pytest.approx(end - start)

    opened.tab.mouse.dblclick(x, y)
    assert opened.range == whole
    assert not opened.complaints


def test_keys_zoom_and_go_from_step_to_step(window: Window) -> None:
    plan = demo()
    opened = window.open(plan)
    whole = opened.range
    canvas = opened.tab.locator("canvas")
    canvas.focus()
    for key in ("n", "n", "ArrowDown"):
        canvas.press(key)
    assert "layers.2.gather" in opened.tab.locator("#tooltip").inner_text()
    canvas.press("+")
    assert opened.range[1] - opened.range[0] < whole[1] - whole[0]
    canvas.press("Home")
    canvas.press("Escape")
    assert opened.range == whole
    assert opened.tab.locator("#tooltip").is_hidden()
    assert not opened.complaints


def test_a_wait_in_the_list_brings_its_step_into_view(window: Window) -> None:
    plan = demo()
    opened = window.open(plan)
    longest = max(plan.events[9:], key=lambda event: event.stall)
    opened.tab.get_by_role("button", name=longest.name).click()
    start, end = opened.range
    assert start < longest.start - longest.stall < longest.end < end < plan.seconds


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_names_are_shown_as_they_are(window: Window, scheme: Literal["light", "dark"]) -> None:
    name = "</script><script>console.log('broken out')</script><b>&amp;"
    event = Event(name, Channel.COMPUTE, 0.0, 1.0, name, stall=0.0, node=name)
    opened = window.open(Timeline(name, Source.MEASURED, 1, (event,), ()))
    opened.tab.emulate_media(color_scheme=scheme)
    assert opened.hover(event).startswith(name)
    assert opened.tab.locator(".timeline h2").inner_text().startswith(name)
    assert not opened.complaints


def test_an_empty_timeline_and_forty_thousand_steps_are_drawn(window: Window) -> None:
    assert not window.open(Timeline("nothing", Source.PREDICTED, 1, (), ())).complaints
    large = demo(layers=5000, jitter=2)
    opened = window.open(large)
    opened.hover(large.events[20_000])
    took = opened.tab.evaluate(
        "(() => { const since = performance.now(); charts.forEach(draw); return performance.now() - since; })()"
    )
    assert took < 250, "a frame takes about 10 ms; a busy machine may be slower, not that much"
    assert not opened.complaints
