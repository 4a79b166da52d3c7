"""sizing: the formula gives the planner's peaks, and the largest batch is the largest."""

import re
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest
import sympy  # type: ignore[import-untyped]
import torch

from tools.models import Shape
from tools.sizing import Wanted, _search, formula, largest_batch
from zero_runtime.errors import OptionError, PlanError

SCRIPT = """
import torch
from torch import nn

def make(batch, sequence):
    layers = [nn.Linear(64, 64, bias=False) for _ in range(4)]
    return nn.Sequential(*layers), (torch.randn(batch, sequence, 64),)
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("models") / "four_linears.py"
    path.write_text(SCRIPT)
    return f"{path}:make"


def wanted(
    target: str, batch: int = 1, stage: int = 3, ranks: int = 4, **settings: object
) -> Wanted:
    options = {"hardware": "h100", "bucket_bytes": 1, **settings}
    return Wanted(target, Shape(batch, 8, torch.float32), ranks, stage, options)


@cache
def peak(target: str, batch: int, stage: int = 3, ranks: int = 4) -> int:
    return wanted(target, batch, stage, ranks).plan().peak


def evaluated(text: str, batch: int, ranks: int) -> float:
    (expression,) = re.findall(r"stage \d: (.*)", text)
    symbols = {name: sympy.Symbol(name, positive=True) for name in "BN"}
    found = sympy.sympify(expression, locals=symbols)
    return float(found.subs({symbols["B"]: batch, symbols["N"]: ranks}))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_formula_gives_the_planned_peak(script: str, stage: int) -> None:
    one = wanted(script, 64, stage)
    text = formula(one, one.plan())
    assert evaluated(text, 64, 4) == peak(script, 64, stage)
    assert evaluated(text, 128, 4) == pytest.approx(peak(script, 128, stage), rel=0.01)
    assert evaluated(text, 256, 4) == pytest.approx(peak(script, 256, stage), rel=0.02)
    assert "a sequence" in text


@pytest.mark.parametrize("stage", [1, 3])
def test_the_formula_divides_by_the_ranks_what_the_stage_divides(script: str, stage: int) -> None:
    one = wanted(script, 64, stage)
    text = formula(one, one.plan())
    parameters = 4 * 64 * 64
    divided = (12 if stage == 3 else 8) * parameters
    fewer = evaluated(text, 64, 4) - evaluated(text, 64, 8)
    assert fewer == pytest.approx(divided / 4 - divided / 8)


def test_the_formula_leaves_a_budget_out(script: str) -> None:
    tight = wanted(script, 4, device_memory=250_000)
    free = wanted(script, 4)
    assert formula(tight, free.plan()) == formula(free, free.plan())


def test_the_largest_batch_fits_and_one_more_does_not(script: str) -> None:
    budget = peak(script, 40) + 500
    text = largest_batch(wanted(script, device_memory=str(budget)))
    found = re.fullmatch(rf"largest batch a rank in {budget}: (\d+) x 8 tokens", text)
    assert found is not None
    best = int(found[1])
    assert best >= 40
    assert wanted(script, best, device_memory=budget).plan().peak <= budget
    with suppress(PlanError):
        assert wanted(script, best + 1, device_memory=budget).plan().peak > budget


def test_not_one_sequence_fits(script: str) -> None:
    with pytest.raises(OptionError, match=r"not one sequence of 8 tokens fits 60kB: a step takes"):
        largest_batch(wanted(script, device_memory="60kB"))


def test_the_largest_batch_needs_a_budget(script: str) -> None:
    with pytest.raises(OptionError, match="--largest-batch needs --device-memory"):
        largest_batch(wanted(script))


@pytest.mark.parametrize("most", [0, 1, 2, 3, 17, 99, 100, 101, 119, 500, 5000])
@pytest.mark.parametrize("guess", [1, 2, 20, 100, 1000])
def test_the_search_finds_the_largest(most: int, guess: int) -> None:
    asked: list[int] = []

    def fits(batch: int) -> bool:
        assert batch > 0
        asked.append(batch)
        return batch <= most

    assert _search(guess, fits) == most
    assert len(asked) <= 30


def test_a_good_guess_asks_little() -> None:
    asked = _count(lambda batch: batch <= 103)
    assert asked(100) <= 6


def _count(fits: Callable[[int], bool]) -> Callable[[int], int]:
    def ask(guess: int) -> int:
        asked = []
        _search(guess, lambda batch: asked.append(batch) is None and fits(batch))
        return len(asked)

    return ask


def test_another_batch_keeps_everything_else(script: str) -> None:
    one = wanted(script, device_memory=10**6)
    other = one.of(7, device_memory=None, schedule="on_demand")
    assert other.shape == Shape(7, 8, torch.float32)
    assert other.settings == {"hardware": "h100", "bucket_bytes": 1, "schedule": "on_demand"}
    assert one.settings["device_memory"] == 10**6


def test_a_script_is_named_by_its_path(script: str) -> None:
    assert Path(script.rpartition(":")[0]).is_file()
