"""The tool that measures this machine."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from tools import calibrate
from zero_compile.analysis import hardware
from zero_runtime.errors import GroupError


def invoke(*arguments: str) -> tuple[int, str]:
    app = typer.Typer()
    app.command()(calibrate.main)
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})
    return result.exit_code, result.output


def test_a_quick_run_writes_a_profile_that_loads(tmp_path: Path) -> None:
    output, start, threads = tmp_path / "mine.json", time.monotonic(), torch.get_num_threads()
    arguments = ["--quick", "--output", str(output), "--folder", str(tmp_path), "--name", "mine"]
    code, shown = invoke(*arguments)
    assert code == 0, shown
    assert time.monotonic() - start < 60  # under 10 s on two idle cores
    assert "matmul bfloat16" in shown
    assert torch.get_num_threads() == threads
    profile = hardware.load(output)
    assert profile.name == "mine"
    assert "measured by tools/calibrate.py" in profile.source
    assert set(profile.sustained.model_dump().values()) == {1.0}
    for link in (profile.intra_node, profile.host_to_device, profile.nvme_read, profile.nvme_write):
        assert 1e6 < link.bandwidth < 1e12
        assert 0 < link.latency < 1
    assert min(profile.peaks.model_dump().values()) > 1e6
    assert profile.memory_bandwidth > 1e8
    assert profile.launch_seconds > 0
    assert [p.name for p in tmp_path.iterdir()] == ["mine.json"]  # nothing left of the measurement


def test_an_output_that_cannot_be_written_is_refused_before_measuring(tmp_path: Path) -> None:
    for output, message in ((tmp_path, "is a folder"), (tmp_path / "a" / "b", "does not exist")):
        code, shown = invoke("--output", str(output))
        assert code == 2
        assert message in shown


def test_a_missing_folder_is_refused_before_measuring(tmp_path: Path) -> None:
    code, shown = invoke("--output", str(tmp_path / "x.json"), "--folder", str(tmp_path / "none"))
    assert code == 2
    assert "none does not exist" in shown


def test_a_rank_that_fails_is_reported_by_its_last_line() -> None:
    rank = subprocess.Popen(
        [sys.executable, "-c", "raise SystemExit('no loopback')"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with pytest.raises(GroupError, match=r"127\.0\.0\.1 failed: no loopback"):
        calibrate.output_of(rank)


def test_a_link_from_two_times() -> None:
    link = calibrate.link_of(small=1e-3, large=3e-3, nbytes=2e6)
    assert (link.latency, link.bandwidth) == (1e-3, pytest.approx(1e9))


def test_the_table_shows_every_figure() -> None:
    rows = calibrate.profile_table(hardware.load("h200")).row_count
    assert rows == 12
