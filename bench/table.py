"""Statistics over measurements, and their table. Pure functions: nothing here measures."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rich import box
from rich.table import Table

MIB = 2**20
NOTHING = "-"


@dataclass(frozen=True)
class Measurement:
    """What one contender did in one round, the slowest and largest of its ranks."""

    contender: str
    processes: int
    losses: tuple[float, ...]  # of every step, warm-up included, averaged over the ranks
    first_step_seconds: float  # compiles
    step_seconds: tuple[float, ...]  # the timed steps
    peak_bytes: int  # while the timed steps ran, or of the whole life if it could not be reset
    life_peak_bytes: int
    peak_was_reset: bool

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "Measurement":
        sequences = {name: tuple(data[name]) for name in ("losses", "step_seconds")}
        return Measurement(**{**data, **sequences})


class Summary(NamedTuple):
    """All rounds of one contender."""

    processes: int
    tokens_per_second: float
    step_min: float
    step_median: float  # of the rounds' medians
    step_max: float
    peak_bytes: int
    first_step_cold: float
    first_step_warm: float | None  # later rounds find the compiler's cache filled
    loss_difference: float | None


class Row(NamedTuple):
    """A contender in the table: measured, failed, or measured with rounds that failed."""

    name: str
    what: str
    summary: Summary | None
    failures: tuple[str, ...] = ()


def relative_difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    """The largest over the steps."""
    return max(abs(a - b) / abs(b) for a, b in zip(losses, reference, strict=True))


def summarize(
    rounds: Sequence[Measurement], tokens_per_step: int, reference: Sequence[float] | None
) -> Summary:
    steps = [seconds for measured in rounds for seconds in measured.step_seconds]
    median = statistics.median(statistics.median(measured.step_seconds) for measured in rounds)
    warm = [measured.first_step_seconds for measured in rounds[1:]]
    return Summary(
        processes=rounds[0].processes,
        tokens_per_second=tokens_per_step / median,
        step_min=min(steps),
        step_median=median,
        step_max=max(steps),
        peak_bytes=max(measured.peak_bytes for measured in rounds),
        first_step_cold=rounds[0].first_step_seconds,
        first_step_warm=statistics.median(warm) if warm else None,
        loss_difference=None
        if reference is None
        else max(relative_difference(measured.losses, reference) for measured in rounds),
    )


def ratio(mine: float | None, base: float | None) -> str:
    return NOTHING if mine is None or base is None else f"{mine / base:.2f}"


def seconds_cell(summary: Summary) -> str:
    cold = f"{summary.first_step_cold:.1f}"
    warm = summary.first_step_warm
    return cold if warm is None else f"{cold} / {warm:.1f}"


def difference_cell(difference: float | None) -> str:
    return NOTHING if difference is None else f"{difference:.1e}"


def milliseconds_cell(summary: Summary) -> str:
    low, middle, high = (
        f"{seconds * 1e3:.0f}"
        for seconds in (summary.step_min, summary.step_median, summary.step_max)
    )
    return f"{low} / {middle} / {high}"


# Each column: its heading, and its cell from a summary and the one that ratios are taken against.
Cell = Callable[[Summary, Summary | None], str]
COLUMNS: dict[str, Cell] = {
    "ranks": lambda s, _: str(s.processes),
    "tokens/s": lambda s, _: f"{s.tokens_per_second:,.0f}",
    "speed\n÷ {base}": lambda s, b: ratio(s.tokens_per_second, b and b.tokens_per_second),
    "step ms\nmin / median / max": lambda s, _: milliseconds_cell(s),
    "peak\nMiB": lambda s, _: f"{s.peak_bytes / MIB:,.0f}",
    "peak\n÷ {base}": lambda s, b: ratio(s.peak_bytes, b and b.peak_bytes),
    "first step s\ncold / warm": lambda s, _: seconds_cell(s),
    "loss\ndifference": lambda s, _: difference_cell(s.loss_difference),
}


def headings(base: str) -> list[str]:
    """With the line breaks that keep the columns as narrow as their figures."""
    return ["contender", *(heading.format(base=base) for heading in COLUMNS)]


def cells(row: Row, base: Summary | None) -> list[str]:
    if row.summary is None:
        return [row.name, "failed", *[NOTHING] * (len(COLUMNS) - 1)]
    return [row.name, *(cell(row.summary, base) for cell in COLUMNS.values())]


def base_summary(rows: Sequence[Row], base: str) -> Summary | None:
    return next((row.summary for row in rows if row.name == base), None)


def notes(rows: Sequence[Row]) -> list[str]:
    """What each contender is, and every failure: none is hidden."""
    described = [f"{row.name}: {row.what}" for row in rows]
    failed = [f"{row.name} failed: {failure}" for row in rows for failure in row.failures]
    return described + failed


def render_rich(rows: Sequence[Row], base: str, title: str) -> Table:
    table = Table(title=title, box=box.SIMPLE, pad_edge=False)
    for index, heading in enumerate(headings(base)):
        table.add_column(heading, justify="right" if index else "left", no_wrap=True)
    for row in rows:
        table.add_row(*cells(row, base_summary(rows, base)))
    return table


def markdown_line(texts: Sequence[str]) -> str:
    return "| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |"


def render_markdown(rows: Sequence[Row], base: str) -> str:
    heading = [text.replace("\n", " ") for text in headings(base)]
    lines = [
        markdown_line(heading),
        markdown_line(["---", *["---:"] * (len(heading) - 1)]),
        *(markdown_line(cells(row, base_summary(rows, base))) for row in rows),
    ]
    return "\n".join([*lines, "", *(f"- {note}" for note in notes(rows))])


def peak_note(measurements: Sequence[Measurement]) -> str:
    """Which peak the table shows; a mixture is never compared silently."""
    if not measurements:
        return "Nothing was measured."
    kinds = {measured.peak_was_reset for measured in measurements}
    if kinds == {True}:
        return "Peak: VmHWM, reset after warm-up, largest rank and round."
    if kinds == {False}:
        return "Peak: VmHWM since the process started (it could not be reset), largest rank."
    return "Peak: of mixed kinds; some processes could not reset VmHWM. Do not compare."


# ---- solo: two backends in one process


@dataclass(frozen=True)
class Solo:
    """Step times and losses of two backends that took turns in one process."""

    seconds: Mapping[str, Sequence[float]]
    losses: Mapping[str, Sequence[float]]


class SoloSummary(NamedTuple):
    names: tuple[str, str]
    medians: tuple[float, float]
    step_ratio: float  # median over pairs of turns: the machine's mood hits both of a pair
    bitwise: bool
    first_differing_step: int | None


def summarize_solo(solo: Solo) -> SoloSummary:
    mine, other = solo.seconds
    pairs = zip(solo.seconds[mine], solo.seconds[other], strict=True)
    losses = zip(solo.losses[mine], solo.losses[other], strict=True)
    differing = [step for step, (a, b) in enumerate(losses) if a != b]
    return SoloSummary(
        names=(mine, other),
        medians=(statistics.median(solo.seconds[mine]), statistics.median(solo.seconds[other])),
        step_ratio=statistics.median(a / b for a, b in pairs),
        bitwise=not differing,
        first_differing_step=differing[0] if differing else None,
    )


def equality(summary: SoloSummary) -> str:
    if summary.bitwise:
        return "bitwise equal"
    return f"differ from step {summary.first_differing_step}"


def solo_lines(summary: SoloSummary, compile_seconds: Mapping[str, Sequence[float]]) -> list[str]:
    """The summary as sentences; `compile_seconds`: first steps of fresh processes, cold."""
    (mine, other), (mine_ms, other_ms) = summary.names, (t * 1e3 for t in summary.medians)
    first = {name: statistics.median(times) for name, times in compile_seconds.items() if times}
    both = mine in first and other in first
    compiling = ratio(first[mine], first[other]) if both else NOTHING
    shown = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in first.items())
    return [
        f"step time {mine} ÷ {other}: {summary.step_ratio:.3f} "
        f"(medians {mine_ms:.1f} and {other_ms:.1f} ms)",
        f"first step, cold caches, {mine} ÷ {other}: {compiling} ({shown or 'not measured'})",
        f"losses: {equality(summary)}",
    ]
