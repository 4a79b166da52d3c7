"""DeepSpeed's learning rate schedules follow their closed formulas, step by step."""

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from zero_compile.deepspeed.schedules import (
    LRRangeTest,
    OneCycle,
    Schedule,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
)
from zero_runtime.errors import OptionError

#: Rates before the first step and after each step: index 0 is iteration -1.
STEPS = 30


def adam(lr: float = 0.5, groups: int = 1) -> torch.optim.Optimizer:
    return torch.optim.Adam(
        [{"params": [nn.Parameter(torch.ones(1))]} for _ in range(groups)], lr=lr
    )


def run(schedule: Schedule, steps: int = STEPS) -> list[float]:
    """The first group's rate, as the optimizer sees it."""
    rates = [float(schedule.optimizer.param_groups[0]["lr"])]
    for _ in range(steps):
        schedule.optimizer.step()
        schedule.step()
        rates.append(float(schedule.optimizer.param_groups[0]["lr"]))
        assert rates[-1] == schedule.get_last_lr()[0]
    return rates


def expect(rates: list[float], formula: Callable[[int], float]) -> None:
    assert rates == pytest.approx([formula(i) for i in range(-1, len(rates) - 1)], rel=1e-12)


@pytest.mark.parametrize("kind", ["log", "linear"])
@pytest.mark.parametrize("steps", [1, 10])
def test_warmup(kind: str, steps: int) -> None:
    n = max(2, steps)
    rates = run(WarmupLR(adam(), 0.1, 0.9, steps, kind))

    def formula(i: int) -> float:
        if i < 0:
            return 0.1
        gamma = math.log(i + 1) / math.log(n) if kind == "log" else i / n
        return 0.1 + 0.8 * min(1.0, gamma if i < n else 1.0)

    expect(rates, formula)


def test_warmup_ends_by_default_at_the_optimizers_rate() -> None:
    assert run(WarmupLR(adam(0.25), warmup_num_steps=4))[-1] == 0.25
    assert run(WarmupDecayLR(adam(0.25), 100, warmup_num_steps=4), 5)[-1] == pytest.approx(0.001)


def test_warmup_then_linear_decay() -> None:
    rates = run(WarmupDecayLR(adam(), 20, 0.1, 0.9, 5, "linear"))

    def formula(i: int) -> float:
        gamma = i / 5 if i < 5 else (20 - i) / 15
        return 0.1 + 0.8 * max(0.0, gamma)

    expect(rates, formula)
    assert rates[6] == pytest.approx(0.9)
    assert rates[-1] == pytest.approx(0.1)


@pytest.mark.parametrize("kind", ["log", "linear"])
def test_warmup_then_cosine(kind: str) -> None:
    rates = run(WarmupCosineLR(adam(0.5), 20, 0.2, 6, 0.01, kind))

    def formula(i: int) -> float:
        if i < 0:
            return 0.0
        if i < 6:
            gamma = math.log(i + 1) / math.log(6) if kind == "log" else i / 6
            return 0.5 * (0.2 + 0.8 * gamma)
        x = min(1.0, (i - 5) / 14)
        return 0.5 * (0.01 + 0.99 * (1 + math.cos(math.pi * x)) / 2)

    expect(rates, formula)
    assert rates[-1] == pytest.approx(0.005)


@pytest.mark.parametrize("staircase", [False, True])
def test_range_test(staircase: bool) -> None:
    rates = run(LRRangeTest(adam(), 0.01, 4, 2.0, staircase))
    expect(rates, lambda i: 0.01 * (1 + 2 * ((i + 1) // 4 if staircase else (i + 1) / 4)))


def test_one_cycle_and_decay() -> None:
    optimizer = adam()
    schedule = OneCycle(
        optimizer,
        0.1,
        0.5,
        decay_lr_rate=0.5,
        cycle_first_step_size=4,
        cycle_second_step_size=6,
        decay_step_size=2,
        cycle_min_mom=0.8,
        cycle_max_mom=0.9,
        decay_mom_rate=-0.01,
    )

    def height(i: int) -> float:
        k = i + 1
        return 0.0 if k == 10 else k / 4 if k <= 4 else (10 - k) / 6

    def decayed(i: int) -> float:
        return (i - 10 + 1) / 2

    rates, momenta = [], []
    for _ in range(20):
        rates.append(optimizer.param_groups[0]["lr"])
        momenta.append(optimizer.param_groups[0]["betas"])
        optimizer.step()
        schedule.step()
    expect(rates, lambda i: 0.1 + 0.4 * height(i) if i < 10 else 0.1 / (1 + 0.5 * decayed(i)))
    assert momenta[0] == (0.8, 0.99), "DeepSpeed begins at the minimum"
    expected = [
        0.9 - 0.1 * height(i) if i < 10 else 0.9 * (1 - 0.01 * decayed(i)) for i in range(19)
    ]
    assert [first for first, _ in momenta[1:]] == pytest.approx(expected)
    assert max(rates) == pytest.approx(0.5)


def test_one_cycle_in_stairs() -> None:
    schedule = OneCycle(
        adam(), 0.0, 1.0, cycle_first_step_size=8, cycle_first_stair_count=2, decay_step_size=0
    )
    rates = run(schedule, 20)
    assert rates[:9] == [0.0] * 4 + [0.5] * 4 + [1.0]
    assert rates[9:17] == [0.5] * 4 + [0.0] * 4
    assert rates[17:] == [0.0] * 4, "then it stays at the minimum, without decay"


def test_one_cycle_leaves_an_optimizer_without_betas_alone() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.7)
    with pytest.warns(UserWarning, match="SGD has no betas"):
        schedule = OneCycle(optimizer, 0.1, 0.5)
    run(schedule, 3)
    assert optimizer.param_groups[0]["momentum"] == 0.7


CASES: dict[str, Callable[[Any], Schedule]] = {
    "range": lambda o: LRRangeTest(o, 0.01, 4),
    "cycle": lambda o: OneCycle(o, 0.1, 0.5, 0.1, 4, decay_step_size=3),
    "warmup": lambda o: WarmupLR(o, 0.1, 0.9, 5),
    "decay": lambda o: WarmupDecayLR(o, 20, 0.1, 0.9, 5),
    "cosine": lambda o: WarmupCosineLR(o, 20, warmup_num_steps=5),
}


@pytest.mark.parametrize("name", CASES)
def test_a_schedule_resumes_from_its_state(name: str) -> None:
    straight = run(CASES[name](adam()), 12)
    first = CASES[name](adam())
    run(first, 7)
    second = CASES[name](adam())
    second.load_state_dict(first.state_dict())
    assert second.last_batch_iteration == 6
    assert run(second, 5)[1:] == straight[8:]


def test_a_schedule_can_begin_in_the_middle() -> None:
    straight = run(WarmupCosineLR(adam(), 20, warmup_num_steps=5), 12)
    later = WarmupCosineLR(adam(), 20, warmup_num_steps=5, last_batch_iteration=6)
    assert later.last_batch_iteration == 6
    assert run(later, 3) == straight[7:11]


def test_groups_may_have_rates_of_their_own() -> None:
    optimizer = adam(groups=2)
    schedule = WarmupLR(optimizer, [0.0, 0.1], [1.0, 0.5], 4, "linear")
    run(schedule, 3)
    assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([0.5, 0.3])
    with pytest.raises(OptionError, match="3 values for 2 parameter groups"):
        LRRangeTest(adam(groups=2), [1.0, 2.0, 3.0])


def test_a_rate_that_is_a_tensor_stays_one() -> None:
    optimizer = torch.optim.Adam([nn.Parameter(torch.ones(1))], lr=torch.tensor(0.5))
    rate = optimizer.param_groups[0]["lr"]
    schedule = WarmupCosineLR(optimizer, 10, warmup_num_steps=2)
    run(schedule, 3)
    assert optimizer.param_groups[0]["lr"] is rate
    assert 0 < float(rate) < 0.5


def test_a_total_shorter_than_the_warmup_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="total_num_steps 3 is less than warmup_num_steps 5"):
        WarmupDecayLR(adam(), 3, warmup_num_steps=5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        WarmupDecayLR(adam(), 5, warmup_num_steps=5)
