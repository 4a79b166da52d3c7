"""Tests of tools/gpu_check.sh and tools/gpu_check.py: what they say, and how they end, without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tools import gpu_check, gpu_check_list
from tools.gpu_check import Outcome, Verdict
from tools.gpu_check_list import CHECKS, Check, NotHere

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command in the repository's root, with no GPU to be seen."""
    python_path = os.pathsep.join([str(ROOT), str(ROOT / "runtime")])
    hidden = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": python_path, "PYTHON": sys.executable}
    return subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **hidden, **environment},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def driver(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, "-m", "tools.gpu_check", *arguments, **environment)


# ------------------------------------------------------------------------------ how it ends


def test_without_a_gpu_the_script_says_so_and_ends_with_2() -> None:
    done = run("bash", "tools/gpu_check.sh")
    assert done.returncode == 2
    assert f"no CUDA GPU: torch {torch.__version__} finds none" in done.stderr
    assert done.stdout == ""


def test_without_a_gpu_the_driver_says_so_and_ends_with_2() -> None:
    done = driver()
    assert done.returncode == 2
    assert "no CUDA GPU" in done.stdout


def test_a_python_without_pytorch_is_named(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    python.chmod(0o755)
    done = run("bash", "tools/gpu_check.sh", PYTHON=str(python))
    assert done.returncode == 1
    assert f"{python} has no PyTorch" in done.stderr


def test_an_unknown_check_is_refused_with_the_names_of_all() -> None:
    done = driver("--only", "trainign")
    assert done.returncode == 1
    assert "no check 'trainign'" in done.stdout
    assert all(check.name in done.stdout for check in CHECKS)


@pytest.mark.slow
def test_a_check_that_fails_is_named_and_the_others_still_run() -> None:
    """Without the C++ extension one check fails; the one after it needs a GPU."""
    done = driver(
        *("--device", "cpu", "--only", "extensions", "--only", "bandwidth"),
        ZERO_RUNTIME_NO_NATIVE="1",
    )
    assert done.returncode == 1, done.stderr
    assert "--- extensions FAILED\nthe C++ extension was not built" in done.stdout
    assert "not possible here" in done.stdout
    assert "1 of 2 checks did not fail" in done.stdout


def test_a_check_that_takes_too_long_is_ended() -> None:
    done = driver("--device", "cpu", "--only", "training", "--seconds", "1")
    assert done.returncode == 1, done.stderr
    assert "--- training FAILED\nnot done after 1 s" in done.stdout


# ------------------------------------------------------------------------------ one check


def check_that(error: Exception | None) -> Check:
    def act(_: torch.device) -> str:
        if error is not None:
            raise error
        return "all well"

    return Check("it", act)


@pytest.mark.parametrize(
    ("error", "verdict", "found"),
    [
        (None, Verdict.PASSED, "all well"),
        (NotHere("no disk"), Verdict.NOT_HERE, "no disk"),
        (AssertionError("5 GB/s, expected 20"), Verdict.FAILED, "5 GB/s, expected 20"),
        (KeyError("x"), Verdict.FAILED, "KeyError: 'x'"),
    ],
    ids=["passes", "not here", "asserts", "raises"],
)
def test_how_a_check_ends_becomes_its_verdict(
    error: Exception | None, verdict: Verdict, found: str
) -> None:
    ended = gpu_check._inside(check_that(error), CPU)
    assert (ended[0], ended[1].splitlines()[0]) == (verdict, found)


def test_a_process_that_dies_is_a_failure_with_its_last_words() -> None:
    verdict, found = gpu_check._parse("", "starting\nCUDA error: an illegal access\n", -6)
    assert verdict is Verdict.FAILED
    assert found.startswith("ended with status -6: CUDA error: an illegal access\n")
    said = json.dumps([Verdict.NOT_HERE, "why"])
    assert gpu_check._parse(f"noise\n{said}\n", "", 0) == (Verdict.NOT_HERE, "why")


def test_the_table_has_a_row_for_each_check(capsys: pytest.CaptureFixture[str]) -> None:
    outcomes = [
        Outcome("one", Verdict.PASSED, 1.25, "loss [5]"),
        Outcome("two", Verdict.FAILED, 0.5, "first\nsecond"),
    ]
    gpu_check._show(outcomes, CPU)
    shown = capsys.readouterr().out
    rows = [line.split() for line in shown.splitlines() if line.lstrip().startswith(("one", "two"))]
    assert rows == [["one", "passed", "1.2", "loss", "[5]"], ["two", "FAILED", "0.5", "first"]]
    assert "--- two FAILED\nfirst\nsecond\n" in shown


# ------------------------------------------------------------------------------ the checks


def test_training_is_compared_with_the_unsharded_model() -> None:
    assert "off by" in gpu_check_list.training(CPU)


def test_losses_that_differ_or_do_not_fall_are_failures() -> None:
    with pytest.raises(AssertionError, match=r"expected 5\.00000, 4\.00000"):
        gpu_check_list._same([5.0, 4.0], [5.0, 4.01])
    with pytest.raises(AssertionError, match="nothing was learnt"):
        gpu_check_list._same([5.0, 5.0], [5.0, 5.0])


def test_the_host_optimizer_is_compared_with_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    def that_does_nothing(*arguments: object) -> bool:
        return True

    monkeypatch.setattr(gpu_check_list, "adam_step", that_does_nothing)
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        gpu_check_list.host_optimizer_speed(CPU)
