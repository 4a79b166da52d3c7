"""A loss's own backward under an engine gives the gradients that engine.backward gives."""

from typing import Any

import pytest
import torch
from test_deepspeed_engine import ACCUMULATION, MICRO, assert_same, config, net, with_engine
from torch import nn

import zero_compile
from zero_runtime.errors import ZeroError


@pytest.fixture(autouse=True)
def _compiled_afresh() -> None:
    torch._dynamo.reset()


def _own_backward(engine: Any, loss: torch.Tensor) -> None:
    engine.scale(loss).backward()


class Named(nn.Module):
    """Its output is within others."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {"parts": (self.inner(x),), "input": x}


@pytest.mark.parametrize("precision", [{}, {"fp16": {"enabled": True, "initial_scale_power": 8}}])
def test_a_losss_own_backward_gives_the_gradients_of_the_engines(precision: dict[str, Any]) -> None:
    settings = config(**precision)
    assert_same(with_engine(settings, backward=_own_backward), with_engine(settings))


def test_outputs_are_averaged_wherever_they_are_and_once() -> None:
    engine, *_ = zero_compile.initialize(model=Named(), config=config())
    x = torch.randn(MICRO, 7)
    engine(x)["parts"][0].square().sum().backward()
    found = [p.grad.full_tensor() for p in engine.parameters()]
    engine.zero_grad()
    engine.backward(engine(x)["parts"][0].square().sum())
    assert all(map(torch.allclose, found, [p.grad.full_tensor() for p in engine.parameters()]))
    engine.zero_grad()
    engine.backward(engine(x)["parts"][0].square().sum(), scale_wrt_gas=False)
    doubled = [p.grad.full_tensor() / ACCUMULATION for p in engine.parameters()]
    assert all(map(torch.allclose, found, doubled))


def test_a_float16_loss_that_is_not_scaled_is_refused() -> None:
    engine, *_ = zero_compile.initialize(model=net(), config=config(fp16={"enabled": True}))
    with pytest.raises(
        ZeroError, match=r"not scaled. Use engine.backward\(loss\), or engine.scale"
    ):
        engine(torch.randn(MICRO, 7).half()).float().sum().backward()
