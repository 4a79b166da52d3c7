"""Whole processes with state on NVMe: one that is killed in a step, and two in one folder."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = """
import sys, torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
nvme = {"device": "nvme", "nvme_path": sys.argv[1]}
options = {"offload_param": nvme, "offload_optimizer": nvme, "bucket_bytes": 1 << 14}
compiled = torch.compile(model, backend="zero3", options=options)
for step in range(int(sys.argv[2])):
    loss = compiled(torch.ones(4, 64)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step < 3:
        print(loss.item(), flush=True)
"""


def start(folder: Path, steps: int) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(folder), str(steps)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_a_run_killed_in_a_step_leaves_nothing_that_the_next_one_trips_over(tmp_path: Path) -> None:
    killed = start(tmp_path, 1 << 30)
    assert killed.stdout is not None
    losses = [killed.stdout.readline() for _ in range(3)]
    time.sleep(0.05)
    killed.send_signal(signal.SIGKILL)
    killed.wait(60)
    assert not list(tmp_path.iterdir())
    output, errors = start(tmp_path, 3).communicate(timeout=120)
    assert output.splitlines() == [line.strip() for line in losses], errors
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_two_runs_share_a_folder(tmp_path: Path) -> None:
    first = start(tmp_path, 1 << 30)
    try:
        assert first.stdout is not None
        losses = [first.stdout.readline() for _ in range(3)]
        output, errors = start(tmp_path, 3).communicate(timeout=120)
        assert first.poll() is None
    finally:
        first.kill()
        first.wait(60)
    assert output.splitlines() == [line.strip() for line in losses], errors


@pytest.mark.slow
@pytest.mark.parametrize("gone", ["missing", "file"])
def test_a_folder_that_is_none_is_an_error_that_says_which(tmp_path: Path, gone: str) -> None:
    folder = tmp_path / gone
    if gone == "file":
        folder.write_text("")
    run = start(folder, 1)
    _, errors = run.communicate(timeout=120)
    assert run.returncode != 0
    assert "OptionError" in errors
    assert f"nvme_path {str(folder)!r}" in errors
