"""Run a function on several gloo ranks. Processes are kept between calls: starting them is slow."""

import atexit
import datetime
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._inductor import config as inductor

_SECONDS = 240
#: Inherited by the ranks before they import torch: one thread each, loopback only, and an allocator
#: that returns freed memory, so that resident memory shows what is held and not what was.
_ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 20),
}
_pools: dict[int, "Pool"] = {}


def run(
    world_size: int, function: Callable[..., Any], *args: Any, seconds: float = _SECONDS
) -> list[Any]:
    """``function(*args)`` on every rank of a gloo group, results in rank order.

    ``function`` must be importable. An exception on any rank fails the call with every traceback;
    ranks that do not answer in time are killed.
    """
    pool = _pools.get(world_size)
    if pool is None:
        pool = _pools[world_size] = Pool(world_size)
    try:
        return pool.run(function, args, seconds)
    except BaseException:
        _pools.pop(world_size).close()
        raise


class Pool:
    """``world_size`` processes that wait for work."""

    def __init__(self, world_size: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        self._connections: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, rank, world_size, store), daemon=True
            )
            with mock.patch.dict(os.environ, _ENVIRONMENT):
                process.start()
            self._connections.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], seconds: float) -> list[Any]:
        for connection in self._connections:
            connection.send((function, args, inductor.fallback_by_default))
        answers = [_answer(c, seconds) for c in self._connections]
        failures = [f"--- rank {r}\n{text}" for r, (ok, text) in enumerate(answers) if not ok]
        if failures:
            raise AssertionError("\n".join(failures))
        return [value for _, value in answers]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()


def _answer(connection: Connection, seconds: float) -> tuple[bool, Any]:
    if not connection.poll(seconds):
        return False, f"no answer within {seconds} s"
    try:
        return connection.recv()  # type: ignore[no-any-return]
    except EOFError:
        return False, "the process died"


def _serve(connection: Connection, rank: int, world_size: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=90),
    )
    while True:
        try:
            function, args, inductor.fallback_by_default = connection.recv()
        except EOFError:
            os._exit(0)
        torch._dynamo.reset()
        torch.manual_seed(0)
        try:
            answer = True, function(*args)
        except BaseException:
            answer = False, traceback.format_exc()
        sys.stdout.flush()
        connection.send(answer)


@atexit.register
def _close() -> None:
    for pool in _pools.values():
        pool.close()
