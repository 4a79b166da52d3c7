"""Everything that only a GPU can show, in one table: ``python -m tools.gpu_check``.

Each check runs in a process of its own, so that one that hangs or breaks the GPU's context fails
alone; those that measure speed run last and one by one. ``tools/gpu_check.sh`` builds the extensions
first. Exit status: 0 if nothing failed, 1 if a check did, 2 if there is no GPU.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from typing import Annotated, NamedTuple

import torch
import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .gpu_check_list import CHECKS, ROOT, Check, NotHere

NO_GPU = 2
COMPILE_THREADS = 4  # of each check
AT_ONCE = max(1, min(4, (os.cpu_count() or 1) // COMPILE_THREADS))  # checks


class Verdict(StrEnum):
    """How a check ended."""

    PASSED = "passed"
    FAILED = "FAILED"
    NOT_HERE = "not possible here"


class Outcome(NamedTuple):
    """What became of a check."""

    name: str
    verdict: Verdict
    seconds: float
    found: str
    """In words; of a failure, the reason on the first line and details after it."""


def main(
    only: Annotated[list[str] | None, typer.Option(help="run this check; may be repeated")] = None,
    seconds: Annotated[float, typer.Option(min=1, help="for all checks together")] = 200.0,
    device: Annotated[str, typer.Option(help="cuda, or cpu to try the checks themselves")] = "cuda",
    inside: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Run the checks and show what each of them found."""
    chosen = _chosen(only)
    place = _device(device)
    if place is None:
        print(f"gpu_check: no CUDA GPU: torch {torch.__version__} finds none, nothing was checked")
        raise typer.Exit(NO_GPU)
    if inside:
        print(json.dumps(_inside(chosen[0], place)))
        return
    outcomes = _all(chosen, device, time.monotonic() + seconds)
    _show(outcomes, place)
    raise typer.Exit(int(any(each.verdict is Verdict.FAILED for each in outcomes)))


def _chosen(names: Sequence[str] | None) -> list[Check]:
    known = {check.name: check for check in CHECKS}
    wrong = [name for name in names or () if name not in known]
    if wrong:
        print(f"gpu_check: no check {wrong[0]!r}; there are {', '.join(known)}")
        raise typer.Exit(1)
    return [known[name] for name in names] if names else list(CHECKS)


def _device(kind: str) -> torch.device | None:
    if kind == "cuda":
        return torch.device("cuda", 0) if torch.cuda.is_available() else None
    return torch.device(kind)


# ------------------------------------------------------------------------------ one check


def _inside(check: Check, device: torch.device) -> tuple[Verdict, str]:
    """Run a check in this process."""
    try:
        return Verdict.PASSED, check.run(device)
    except NotHere as reason:
        return Verdict.NOT_HERE, str(reason)
    except AssertionError as error:
        return Verdict.FAILED, str(error)
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        return Verdict.FAILED, f"{type(error).__name__}: {first}\n{traceback.format_exc()}"


def _outside(check: Check, device: str, deadline: float) -> Outcome:
    """Run a check in a process of its own."""
    start = time.monotonic()
    if start >= deadline:
        return Outcome(check.name, Verdict.FAILED, 0.0, "no time was left for it")
    command = [sys.executable, "-m", f"{__package__}.gpu_check", "--inside", "--device", device]
    environment = {"TORCHINDUCTOR_COMPILE_THREADS": str(COMPILE_THREADS), **os.environ}
    with _process([*command, "--only", check.name], environment) as process:
        try:
            output, errors = process.communicate(timeout=deadline - start)
        except subprocess.TimeoutExpired:
            found = f"not done after {deadline - start:.0f} s"
            return Outcome(check.name, Verdict.FAILED, time.monotonic() - start, found)
    verdict, found = _parse(output, errors, process.returncode)
    return Outcome(check.name, verdict, time.monotonic() - start, found)


@contextlib.contextmanager
def _process(command: list[str], environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A process that is gone at the end, and what it started too."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command, stdout=pipe, stderr=pipe, text=True, cwd=ROOT, env=environment, process_group=0
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _parse(output: str, errors: str, status: int) -> tuple[Verdict, str]:
    lines = output.strip().splitlines()
    try:
        verdict, found = json.loads(lines[-1])
        return Verdict(verdict), found
    except (IndexError, ValueError):
        last = (errors.strip().splitlines() or ["nothing was printed"])[-1]
        return Verdict.FAILED, f"ended with status {status}: {last}\n{errors[-4000:]}"


# ------------------------------------------------------------------------------ all of them


def _all(checks: Sequence[Check], device: str, deadline: float) -> list[Outcome]:
    together = [check for check in checks if not check.alone]
    with ThreadPoolExecutor(AT_ONCE) as threads:
        outcomes = list(threads.map(lambda check: _outside(check, device, deadline), together))
    return outcomes + [_outside(check, device, deadline) for check in checks if check.alone]


def _show(outcomes: Sequence[Outcome], device: torch.device) -> None:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
    console = Console(width=None if sys.stdout.isatty() else 160)
    table = Table(title=f"{name}, torch {torch.__version__}", box=box.SIMPLE, pad_edge=False)
    for heading in ("check", "verdict", "s", "found"):
        table.add_column(heading, justify="right" if heading == "s" else "left")
    for each in outcomes:
        first = (each.found.splitlines() or [""])[0]
        table.add_row(each.name, str(each.verdict), f"{each.seconds:.1f}", escape(first))
    console.print(table)
    failed = [each for each in outcomes if each.verdict is Verdict.FAILED]
    for each in failed:
        print(f"--- {each.name} FAILED\n{each.found}")
    print(f"gpu_check: {len(outcomes) - len(failed)} of {len(outcomes)} checks did not fail")


if __name__ == "__main__":
    typer.run(main)
