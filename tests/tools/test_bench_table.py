"""Statistics and rendering of the benchmark's table, on made-up numbers."""

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from bench import table

LOSSES = (4.0, 3.0, 2.0)


def measurement(name: str = "zero3", **changes: Any) -> table.Measurement:
    usual = table.Measurement(
        contender=name,
        processes=2,
        losses=LOSSES,
        first_step_seconds=9.0,
        step_seconds=(0.1, 0.2, 0.3),
        peak_bytes=100 * table.MIB,
        life_peak_bytes=200 * table.MIB,
        peak_was_reset=True,
    )
    return replace(usual, **changes)


def rows() -> list[table.Row]:
    zero3 = table.summarize([measurement()], 1000, LOSSES)
    peer = measurement("fsdp2", step_seconds=(0.4,), peak_bytes=150 * table.MIB)
    fsdp2 = table.summarize([peer], 1000, LOSSES)
    return [
        table.Row("zero3", "ours", zero3),
        table.Row("fsdp2", "theirs", fsdp2, ("round 2: it broke",)),
        table.Row("deepspeed", "theirs too", None, ("round 1: deepspeed is not installed",)),
    ]


def test_speed_is_the_median_of_round_medians() -> None:
    slow = measurement(step_seconds=(0.5, 0.6, 9.0))
    fast = measurement(step_seconds=(0.1, 0.2, 0.3))
    summary = table.summarize([fast, slow, fast], 1000, LOSSES)
    assert summary.step_median == pytest.approx(0.2)
    assert summary.tokens_per_second == pytest.approx(5000)
    assert (summary.step_min, summary.step_max) == (0.1, 9.0)


def test_peak_is_the_largest_and_only_the_first_round_is_cold() -> None:
    first = measurement(first_step_seconds=30.0, peak_bytes=5)
    later = [measurement(first_step_seconds=s, peak_bytes=p) for s, p in ((3.0, 7), (5.0, 6))]
    summary = table.summarize([first, *later], 1000, None)
    assert summary.peak_bytes == 7
    assert (summary.first_step_cold, summary.first_step_warm) == (30.0, 4.0)
    assert table.seconds_cell(summary) == "30.0 / 4.0"


def test_one_round_has_no_warm_first_step() -> None:
    summary = table.summarize([measurement()], 1000, None)
    assert summary.first_step_warm is None
    assert table.seconds_cell(summary) == "9.0"


def test_loss_difference_is_the_largest_of_steps_and_rounds() -> None:
    off = measurement(losses=(4.0, 3.3, 2.1))
    summary = table.summarize([measurement(), off], 1000, LOSSES)
    assert summary.loss_difference == pytest.approx(0.1)
    assert table.summarize([off], 1000, None).loss_difference is None


def test_losses_of_another_number_of_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        table.relative_difference((1.0,), (1.0, 2.0))


def test_markdown_shows_ratios_and_every_failure() -> None:
    lines = table.render_markdown(rows(), "zero3").splitlines()
    heading, zero3, fsdp2, deepspeed = (lines[i].strip("| ").split(" | ") for i in (0, 2, 3, 4))
    speed, peak = heading.index("speed ÷ zero3"), heading.index("peak ÷ zero3")
    assert (zero3[speed], zero3[peak]) == ("1.00", "1.00")
    assert (fsdp2[speed], fsdp2[peak]) == ("0.50", "1.50")
    assert deepspeed[1] == "failed"
    assert "- fsdp2 failed: round 2: it broke" in lines
    assert "- deepspeed failed: round 1: deepspeed is not installed" in lines


def test_every_markdown_line_has_the_same_cells() -> None:
    lines = table.render_markdown(rows(), "zero3").splitlines()[:5]
    assert len({line.count("|") for line in lines}) == 1


def test_without_the_base_there_are_no_ratios() -> None:
    row = rows()[1]
    cells = dict(zip(table.headings("zero3"), table.cells(row, None), strict=True))
    assert cells["speed\n÷ zero3"] == cells["peak\n÷ zero3"] == table.NOTHING
    assert cells["tokens/s"] == "2,500"


def test_rich_table_holds_the_same_cells() -> None:
    console = Console(width=200, file=io.StringIO())
    console.print(table.render_rich(rows(), "zero3", "title"))
    wanted = table.cells(rows()[1], rows()[0].summary)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert [cell for cell in wanted if cell not in text] == []


@pytest.mark.parametrize(
    ("resets", "word"),
    [((), "Nothing"), ((True, True), "reset after"), ((False,), "since"), ((True, False), "not")],
)
def test_the_kind_of_peak_is_stated(resets: tuple[bool, ...], word: str) -> None:
    note = table.peak_note([measurement(peak_was_reset=reset) for reset in resets])
    assert word in note


def test_measurement_survives_json() -> None:
    data = {**vars(measurement()), "losses": list(LOSSES), "step_seconds": [0.1, 0.2, 0.3]}
    assert table.Measurement.from_json(data) == measurement()


def solo(losses: tuple[float, ...]) -> table.Solo:
    return table.Solo(
        seconds={"zero3": (0.2, 0.3, 9.0), "inductor": (0.1, 0.2, 3.0)},
        losses={"zero3": losses, "inductor": LOSSES},
    )


def test_solo_ratio_is_the_median_over_pairs() -> None:
    summary = table.summarize_solo(solo(LOSSES))
    assert summary.names == ("zero3", "inductor")
    assert summary.step_ratio == pytest.approx(2.0)
    assert summary.bitwise


def test_solo_names_the_first_step_that_differs() -> None:
    summary = table.summarize_solo(solo((4.0, 3.0000001, 2.5)))
    assert not summary.bitwise
    lines = table.solo_lines(summary, {"zero3": [8.0, 12.0], "inductor": [5.0]})
    assert lines[-1] == "losses: differ from step 1"
    assert "2.00 (zero3 10.0 s, inductor 5.0 s)" in lines[1]
