"""Tests of bench/swap.py: the statistics, and one small run."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from bench.swap import (
    BACKENDS,
    BUCKET,
    MIB,
    PLAIN,
    WORK,
    Plain,
    Row,
    Timed,
    measure,
    render,
    summarize,
)
from swaps import skip_without_io_uring, time_limit


def printed(rows: list[Row]) -> str:
    console = Console(width=120, file=io.StringIO())
    with console.capture() as capture:
        console.print(render(rows, "title"))
    return capture.get()


def test_ratios_are_taken_within_a_round() -> None:
    found = [
        Timed(PLAIN, (1.0, 2.0, 3.0)),
        Timed("io_uring", (2.0, 2.0, 1.0)),
        Timed("threads", (1.0, 1.0, 1.0)),
        Timed(PLAIN, (10.0, 20.0, 30.0)),
        Timed("io_uring", (5.0, 20.0, 30.0)),
        Timed("threads", (1.0, 1.0, 1.0)),
    ]
    rows = {(row.contender, row.work): row for row in summarize(found, 4)}
    assert rows["io_uring", "read"].ratios == (0.5, 2.0)
    assert rows["io_uring", "read and write back"].ratios == (3.0, 1.0)
    assert rows[PLAIN, "write"].ratios == (1.0, 1.0)
    one_way = 4 * BUCKET / MIB
    assert rows["threads", "read"].rate == one_way
    assert rows["threads", "read and write back"].rate == 2 * one_way


def test_the_table_says_what_misses_the_goal() -> None:
    slow, fast = Row("threads", "read", 100.0, (0.5, 0.6)), Row("io_uring", "read", 1000.0, (0.9,))
    lines = [line for line in printed([slow, fast]).splitlines() if "read" in line]
    assert "below 0.85" in lines[0]
    assert lines[1].rstrip().endswith("yes")
    assert "1,000" in lines[1]


def test_all_contenders_move_all_buckets(tmp_path: Path) -> None:
    pytest.importorskip("zero_runtime._native")
    skip_without_io_uring(tmp_path)
    try:
        Plain(tmp_path / "probe", 1).close()
    except OSError as error:
        pytest.skip(f"no O_DIRECT here: {error}")
    with time_limit():
        found = measure(tmp_path, 2, 1, lambda line: None)
    assert [timed.contender for timed in found] == [PLAIN, *BACKENDS]
    assert all(len(timed.seconds) == len(WORK) and min(timed.seconds) > 0 for timed in found)
    assert not list(tmp_path.glob("*.swap"))
