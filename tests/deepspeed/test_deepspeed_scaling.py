"""float16's loss scale halves, waits, grows and gives up as DeepSpeed's does."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from zero_compile.config.deepspeed.sections import Fp16
from zero_compile.deepspeed.scaling import LossScale
from zero_runtime.errors import ZeroError


class Scales:
    """A loss scale on one parameter, fed with gradients that overflow or not."""

    def __init__(self, **section: Any) -> None:
        self.scale = LossScale(Fp16(enabled=True, **section), "cpu")
        self.parameter = nn.Parameter(torch.ones(1))
        self.optimizer = torch.optim.SGD([self.parameter], lr=0.0)

    def after(self, pattern: str) -> list[float]:
        """Scales after each step; ``x`` overflows."""
        seen = []
        for mark in pattern:
            factor = math.inf if mark == "x" else 1.0
            self.scale.scale((self.parameter * factor).sum()).backward()
            self.scale.unscale(self.optimizer)
            assert self.scale.step(self.optimizer) == (mark != "x")
            self.optimizer.zero_grad()
            seen.append(self.scale.value)
        return seen


def test_the_second_overflow_halves_the_scale() -> None:
    scales = Scales(initial_scale_power=4, hysteresis=2)
    assert scales.after("x..x.x") == [16, 16, 16, 8, 8, 4], "hysteresis stays used up"


def test_growth_restores_hysteresis() -> None:
    scales = Scales(initial_scale_power=4, hysteresis=2, loss_scale_window=3)
    assert scales.after("xx...x") == [16, 8, 8, 8, 16, 16]


def test_consecutive_hysteresis_is_restored_by_each_good_step() -> None:
    scales = Scales(initial_scale_power=4, hysteresis=2, consecutive_hysteresis=True)
    assert scales.after("x.x.xx") == [16, 16, 16, 16, 16, 8]


def test_a_fixed_scale_stays_and_skips() -> None:
    assert Scales(loss_scale=128.0, loss_scale_window=1).after(".xx..") == [128.0] * 5


def test_an_overflow_at_the_smallest_scale_is_an_error() -> None:
    scales = Scales(initial_scale_power=2, hysteresis=1, min_loss_scale=3.0)
    assert scales.after("x") == [3.0]
    with pytest.raises(ZeroError, match=r"min_loss_scale = 3\. Look for"):
        scales.after("x")
