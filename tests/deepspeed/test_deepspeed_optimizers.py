"""Sections ``optimizer`` and ``scheduler`` of DeepSpeed's JSON: names, defaults, refusals."""

from typing import Any

import pytest
import torch
from torch import nn

from zero_compile.config.deepspeed.config import parse
from zero_compile.deepspeed.optimizers import make_optimizer, make_scheduler
from zero_runtime.errors import OptionError, UnsupportedError


def made(kind: str, **params: Any) -> torch.optim.Optimizer:
    section = parse({"optimizer": {"type": kind, "params": params}}).optimizer
    return make_optimizer(section, [nn.Parameter(torch.ones(2))])


@pytest.mark.parametrize(
    ("kind", "params", "expected", "decay"),
    [
        ("Adam", {}, "AdamW", 0.0),
        ("Adam", {"adam_w_mode": False, "weight_decay": 0.1}, "Adam", 0.1),
        ("AdamW", {"weight_decay": 3e-7, "betas": [0.8, 0.999]}, "AdamW", 3e-7),
        ("adamw", {"torch_adam": True}, "AdamW", 0.01),
        ("Adagrad", {"lr": 0.1}, "Adagrad", 0.0),
        ("SGD", {"lr": 0.1, "momentum": 0.9}, "SGD", 0.0),
        ("Lion", {}, "Lion", 0.0),
        ("RMSprop", {}, "RMSprop", 0.0),
    ],
)
def test_optimizers_by_deepspeeds_names(
    kind: str, params: Any, expected: str, decay: float
) -> None:
    optimizer = made(kind, **params)
    assert type(optimizer).__name__ == expected
    assert optimizer.defaults["weight_decay"] == decay
    for name in params.keys() - {"adam_w_mode", "torch_adam"}:
        given = params[name]
        assert optimizer.defaults[name] == (tuple(given) if isinstance(given, list) else given)


@pytest.mark.parametrize(
    ("kind", "params", "error", "message"),
    [
        ("OneBitAdam", {}, UnsupportedError, "averages compressed gradients itself"),
        ("OneBitLamb", {}, UnsupportedError, "averages compressed gradients itself"),
        ("ZeroOneAdam", {}, UnsupportedError, "averages compressed gradients itself"),
        ("Lamb", {}, UnsupportedError, "norm of each whole parameter"),
        ("Muon", {}, UnsupportedError, "orthogonalises whole matrices"),
        ("MuAdamW", {}, UnsupportedError, "pass it as optimizer="),
        ("Adafactor", {}, OptionError, "none of .*AdamW.*elementwise"),
        ("Adam", {"bias_correction": False}, UnsupportedError, "always corrects"),
        ("Adam", {"max_grad_norm": 1.0}, OptionError, "give gradient_clipping"),
        ("Adam", {"weight_dekay": 0.1}, OptionError, "Did you mean 'weight_decay'"),
        ("SGD", {"lr": -1.0}, OptionError, "Invalid learning rate"),
        ("Lion", {"betas": [0.9, 1.5]}, OptionError, r"betas \(0.9, 1.5\)"),
    ],
)
def test_optimizers_that_are_not_there_say_why(
    kind: str, params: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        made(kind, **params)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"type": "WarmUpLR"}, "unknown scheduler.type 'WarmUpLR'. Did you mean 'WarmupLR'"),
        (
            {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}},
            "total_num_steps must be",
        ),
        ({"type": "WarmupLR", "params": {"warmup_steps": 3}}, "Did you mean 'warmup_num_steps'"),
        (
            {"type": "WarmupLR", "params": {"warmup_type": "cubic"}},
            "'log' or 'linear', got 'cubic'",
        ),
        (
            {"type": "WarmupLR", "params": {"warmup_num_steps": 0}},
            "a positive number of steps, got 0",
        ),
        (
            {"type": "WarmupLR", "params": {"warmup_max_lr": [1, 2]}},
            "2 values for 1 parameter groups",
        ),
    ],
)
def test_wrong_schedules_are_named(section: Any, message: str) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    with pytest.raises(OptionError, match=message):
        make_scheduler(parse({"scheduler": section}).scheduler, optimizer)


def test_schedules_of_torch_can_be_named() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    section = parse({"scheduler": {"type": "StepLR", "params": {"step_size": 3}}}).scheduler
    assert isinstance(make_scheduler(section, optimizer), torch.optim.lr_scheduler.StepLR)
