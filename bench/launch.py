"""Start the processes of one measurement, watch over them, and say why it failed if it did."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
REASON = "bench failed: "
LOW_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "1048576", "MALLOC_TRIM_THRESHOLD_": "1048576"}


class LaunchError(Exception):
    """A measurement that did not come to its end; the message is the reason."""


class Rank(NamedTuple):
    process: subprocess.Popen[bytes]
    log: Path


def common_environment(malloc: str, cache: Path) -> dict[str, str]:
    environment = {
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        # Helper processes would take the cores that the other ranks compile on.
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    return environment | (LOW_MALLOC if malloc == "low" else {})


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def group_environment(rank: int, world: int, port: int) -> dict[str, str]:
    """What torchrun sets."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def start(arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> Rank:
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            cwd=ROOT,
            env=os.environ | dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            start_new_session=True,  # so that its helpers can be ended with it
        )
    return Rank(process, log)


def stop(ranks: Sequence[Rank]) -> None:
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(rank.process.pid, signal.SIGKILL)
        rank.process.wait()


def reason(rank: Rank) -> str:
    lines = rank.log.read_text(errors="replace").strip().splitlines()
    named = [line.removeprefix(REASON) for line in lines if line.startswith(REASON)]
    last = (named or lines or ["no output"])[-1]
    return f"{last} (exit code {rank.process.returncode})"


def wait(ranks: Sequence[Rank], timeout: float) -> None:
    """Until all ranks end well; the first that fails, or the clock, ends the measurement."""
    deadline = time.monotonic() + timeout
    while True:
        codes = [rank.process.poll() for rank in ranks]
        failed = [rank for rank, code in zip(ranks, codes, strict=True) if code]
        if failed:
            raise LaunchError(reason(failed[0]))
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > deadline:
            raise LaunchError(f"no result within {timeout:.0f} s")
        time.sleep(0.05)


def run(
    arguments: Sequence[str], *, ranks: int, environment: Mapping[str, str], timeout: float
) -> dict[str, Any]:
    """Run `python -m ARGUMENTS RESULT` on so many ranks (0: one process, no process group)."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        result = Path(folder) / "result.json"
        started: list[Rank] = []
        try:
            for rank in range(max(ranks, 1)):
                group = group_environment(rank, ranks, port) if ranks else {}
                log = Path(folder) / f"rank{rank}.log"
                started.append(start([*arguments, str(result)], {**environment, **group}, log))
            wait(started, timeout)
        finally:
            stop(started)
        return json.loads(result.read_text())  # type: ignore[no-any-return]
