"""World size 1: what partitioning costs when there is nothing to partition.

As a worker (`python -m bench.solo SETTINGS RESULT`) it trains two models in one process, one
compiled with zero3 and one with Inductor, and lets them take turns step by step.
"""

import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from bench import launch
from bench.contenders import CONTENDERS, REFERENCE, ZERO3
from bench.settings import Settings
from bench.table import Solo
from bench.worker import guarded, pool_for, set_up, timed

NAMES = (ZERO3, REFERENCE)
# Only in the fresh processes that measure compilation: nothing may be found compiled.
COLD = {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}


def take_turns(settings: Settings) -> Solo:
    pool = pool_for(settings)
    steps = {name: CONTENDERS[name].prepare(settings) for name in NAMES}
    turns = [
        {name: timed(step, pool.rows(index, 0, 1)) for name, step in steps.items()}
        for index in range(settings.warmup + settings.steps)
    ]
    return Solo(
        seconds={name: [turn[name][1] for turn in turns[settings.warmup :]] for name in NAMES},
        losses={name: [turn[name][0] for turn in turns] for name in NAMES},
    )


def compare(settings: Settings, timeout: float) -> Solo:
    with tempfile.TemporaryDirectory(prefix="bench-cache-") as cache:
        environment = launch.common_environment(settings.malloc, Path(cache))
        arguments = ["bench.solo", settings.to_json()]
        return Solo(**launch.run(arguments, ranks=0, environment=environment, timeout=timeout))


def compile_seconds(name: str, settings: Settings, timeout: float) -> float:
    """The first step in a fresh process, with nothing compiled before."""
    brief = replace(settings, warmup=1, steps=1)
    with tempfile.TemporaryDirectory(prefix="bench-cache-") as cache:
        environment = launch.common_environment(settings.malloc, Path(cache)) | COLD
        arguments = ["bench.worker", name, brief.to_json()]
        result = launch.run(arguments, ranks=0, environment=environment, timeout=timeout)
    return float(result["first_step_seconds"])


def compare_compilation(
    settings: Settings, rounds: int, timeout: float, report: Callable[[str], None]
) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in NAMES}
    for index in range(rounds):
        for name in NAMES:
            report(f"compiling, round {index + 1} of {rounds}: {name}")
            seconds[name].append(compile_seconds(name, settings, timeout))
    return seconds


def main(settings: str, result: str) -> None:
    set_up()
    Path(result).write_text(json.dumps(asdict(take_turns(Settings.from_json(settings)))))


if __name__ == "__main__":
    guarded(lambda: main(*sys.argv[1:]))
