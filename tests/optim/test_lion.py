"""Lion's update, on whole tensors; on shards it is tested with the engine."""

from typing import Any

import pytest
import torch
from torch import nn

from zero_runtime.errors import OptionError
from zero_runtime.optim.lion import Lion


def test_lion_follows_its_formula() -> None:
    parameter = nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
    optimizer = Lion([parameter], lr=0.1, betas=(0.9, 0.5), weight_decay=0.2)
    value, momentum = parameter.detach().clone(), torch.zeros(3)
    for gradient in (torch.tensor([1.0, -1.0, 0.0]), torch.tensor([-20.0, 0.1, 0.0])):
        parameter.grad = gradient.clone()
        optimizer.step()
        direction = (0.9 * momentum + 0.1 * gradient).sign()
        value = value - 0.1 * (direction + 0.2 * value)
        momentum = 0.5 * momentum + 0.5 * gradient
        torch.testing.assert_close(parameter.detach(), value)
        torch.testing.assert_close(optimizer.state[parameter]["exp_avg"], momentum)
    assert optimizer.step(lambda: 3.0) == 3.0


@pytest.mark.parametrize("wrong", [{"lr": -1.0}, {"weight_decay": -0.1}, {"betas": (0.9, 1.0)}])
def test_lion_refuses_what_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="Lion"):
        Lion([nn.Parameter(torch.ones(1))], **wrong)
