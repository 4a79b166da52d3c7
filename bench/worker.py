"""One process of one contender: `python -m bench.worker CONTENDER SETTINGS RESULT`.

The launcher starts it, with torchrun's environment variables when it is one of several ranks.
"""

import datetime
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from bench.contenders import CONTENDERS, Contender, Step
from bench.data import Pool, make_pool
from bench.launch import REASON
from bench.memory import peak_bytes, reset_peak
from bench.model import SIZES
from bench.settings import Settings
from bench.table import Measurement


def ranks() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def over_ranks(values: list[float], operation: Any) -> list[float]:
    shared = torch.tensor(values, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(shared, op=operation)
    return shared.tolist()


def pool_for(settings: Settings) -> Pool:
    return make_pool(SIZES[settings.size].vocabulary, settings.global_batch, settings.seq)


def timed(step: Step, batch: tuple[Tensor, Tensor]) -> tuple[float, float]:
    """Loss and seconds of one step; reading the loss waits for it."""
    start = time.perf_counter()
    loss = step(*batch).item()
    return loss, time.perf_counter() - start


def measure(contender: Contender, settings: Settings) -> Measurement:
    rank, world = ranks()
    pool = pool_for(settings)
    step = contender.prepare(settings)

    def train(first: int, last: int) -> list[tuple[float, float]]:
        return [timed(step, pool.rows(index, rank, world)) for index in range(first, last)]

    warm = train(0, settings.warmup)
    start_peak = peak_bytes()
    was_reset = reset_peak()
    steady = train(settings.warmup, settings.warmup + settings.steps)
    losses, seconds = zip(*warm, *steady, strict=True)
    slowest = over_ranks(list(seconds), dist.ReduceOp.MAX)
    peak, life = over_ranks([peak_bytes(), max(start_peak, peak_bytes())], dist.ReduceOp.MAX)
    return Measurement(
        contender=contender.name,
        processes=world,
        losses=tuple(total / world for total in over_ranks(list(losses), dist.ReduceOp.SUM)),
        first_step_seconds=slowest[0],
        step_seconds=tuple(slowest[settings.warmup :]),
        peak_bytes=int(peak),
        life_peak_bytes=int(life),
        peak_was_reset=was_reset,
    )


def leave(code: int) -> NoReturn:
    """End without interpreter shutdown, in which PyTorch with gloo sometimes aborts."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def guarded(work: Callable[[], None]) -> NoReturn:
    """Run a worker; the last line it leaves on stderr after an error is the reason."""
    try:
        work()
    except BaseException as error:
        traceback.print_exc()
        first_line = next(iter(str(error).strip().splitlines()), "")
        print(f"{REASON}{type(error).__name__}: {first_line}", file=sys.stderr)
        leave(1)
    leave(0)


def set_up() -> None:
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=5))


def main(name: str, settings: str, result: str) -> None:
    set_up()
    measurement = measure(CONTENDERS[name], Settings.from_json(settings))
    if ranks()[0] == 0:
        Path(result).write_text(json.dumps(asdict(measurement)))
    if dist.is_initialized():
        # Nobody leaves while another rank still talks to it.
        dist.barrier()


if __name__ == "__main__":
    guarded(lambda: main(*sys.argv[1:]))
