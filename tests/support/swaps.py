"""What tests of swap files share."""

import faulthandler
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from zero_runtime.ir.aio import AioConfig
from zero_runtime.offload.striped_swap import StripedSwap
from zero_runtime.offload.swap_file import PAGE, SwapFile

MIB = 1 << 20
ONE_AT_A_TIME = AioConfig(block_size=PAGE, queue_depth=1)

IMPLEMENTATIONS = ("io_uring", "threads", "python")

Make = Callable[..., SwapFile]


def opener(implementation: str, in_folder: Path) -> Make:
    """Opens swap files of 1 MiB with one of the implementations; skips where it is not there."""
    native = implementation != "python"
    if native:
        pytest.importorskip("zero_runtime._native")
    if implementation == "io_uring":
        skip_without_io_uring(in_folder)

    def open_file(
        config: AioConfig | None = None,
        *,
        folder: Path = in_folder,
        capacity: int = MIB,
        **options: Any,
    ) -> SwapFile:
        backend: Any = implementation if native else None
        return SwapFile(folder, capacity, config, native=native, backend=backend, **options)

    return open_file


def skip_without_io_uring(folder: Path) -> None:
    with SwapFile(folder, PAGE, native=True) as file:
        if not file.mode.startswith("io_uring"):
            pytest.skip(file.mode)


@contextmanager
def time_limit(seconds: float = 120) -> Iterator[None]:
    """End the run, with every thread's traceback, where a wait in C++ never returns."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


@contextmanager
def running(script: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process with the script, from the first line that it prints on; killed at the end."""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        try:
            assert select.select([child.stdout], [], [], 90)[0], "the script printed nothing"
            assert child.stdout.readline() == b"ready\n"
            yield child
        finally:
            child.kill()


def run(script: str, **environment: str) -> str:
    """What a process with the script prints; raises AssertionError, with its errors, if it fails."""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def within(path: str) -> str:
    """A path to a nameless file that this process has open: what `path` was when it had that name."""
    found = [link for link, target in _descriptors() if target == f"{path} (deleted)"]
    assert found, f"{path} is not open"
    return found[0]


def flip(path: str, at: int) -> None:
    """Change one bit of byte `at` of a nameless file that this process has open."""
    with open(within(path), "r+b", buffering=0) as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1]))
        os.fsync(file.fileno())


def held_in(folder: Path) -> list[str]:
    """What lies in a folder and below, and the nameless files there that this process has open.

    Paths within the folder, of nameless ones without what makes their names unique.
    """
    named = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    nameless = {
        os.path.relpath(target, folder)
        for _, target in _descriptors()
        if target.startswith(f"{folder}/") and target.endswith(" (deleted)")
    }
    return sorted([*named, *(re.sub(r"-[0-9a-f]{16}\.swap .*", "", name) for name in nameless)])


def _descriptors() -> Iterator[tuple[str, str]]:
    for number in os.listdir("/proc/self/fd"):
        link = f"/proc/self/fd/{number}"
        with suppress(OSError):  # that of the listing itself
            yield link, os.readlink(link)


def noise(nbytes: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), generator=generator, dtype=torch.uint8)


def read_back(file: SwapFile | StripedSwap, name: str, nbytes: int) -> torch.Tensor:
    out = torch.full((nbytes,), 7, dtype=torch.uint8)
    file.read(name, out).wait()
    return out


def settled(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + 10
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    return condition()
