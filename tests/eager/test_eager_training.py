"""Parameters that only code outside the graphs trains: their gradients are the graphs' kind from the first step on."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ranks
from training import mine, whole_parameters
from zero_runtime.sharding.sharded_gradient import ShardedGradient


class Broken(nn.Module):
    """Two graphs; ``gain`` and ``shift`` are used between them only."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 3)
        self.gain, self.shift = nn.Parameter(torch.ones(9)), nn.Parameter(torch.zeros(9))

    @torch.compiler.disable
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) * self.gain + self.shift

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.between(self.up(x)))  # type: ignore[no-any-return]


def _unscale(parameters: list[Any]) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=0.5)
    scaler.scale(torch.ones(()))
    scaler.unscale_(torch.optim.SGD(parameters, lr=0.0))


LOOKS: dict[str, Callable[[list[Any]], Any]] = {
    "clip_foreach": lambda ps: nn.utils.clip_grad_norm_(ps, 0.1, foreach=True),
    "clip_value": lambda ps: nn.utils.clip_grad_value_(ps, 0.01, foreach=True),
    "scaler": _unscale,
    "foreach": lambda ps: torch._foreach_mul_([p.grad for p in ps], 0.5),
}


def _trained(how: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    plain = Broken()
    model = copy.deepcopy(plain)
    batches = [torch.randn(8, 6) for _ in range(3)]
    for net, step in ((plain, plain), (model, torch.compile(model, backend="zero3"))):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for x in batches:
            (rows,) = (x,) if step is plain else mine((x,))
            step(rows).square().mean().backward()
            LOOKS[how](list(net.parameters()))
            optimizer.step()
            optimizer.zero_grad()
    return whole_parameters(plain), whole_parameters(model)


@pytest.mark.parametrize("how", LOOKS)
def test_all_gradients_of_the_first_step_can_be_worked_on_together(how: str) -> None:
    for expected, trained in ranks.run(2, _trained, how):
        torch.testing.assert_close(trained, expected)


def _first_gradients(stage: int, twice: bool) -> dict[str, tuple[bool, torch.Tensor]]:
    torch.manual_seed(0)
    model, x = Broken(), torch.randn(8, 6)
    step = torch.compile(model, backend=f"zero{stage}")
    for rows in mine((x,))[0].chunk(2 if twice else 1):
        step(rows).square().sum().backward()
    gradients = {n: p.grad for n, p in model.named_parameters()}
    return {
        n: (True, g.full_tensor()) if isinstance(g, ShardedGradient) else (False, g)
        for n, g in gradients.items()
    }


@pytest.mark.parametrize("twice", [False, True], ids=["once", "accumulated"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_after_the_first_backward_all_gradients_are_of_one_kind(stage: int, twice: bool) -> None:
    torch.manual_seed(0)
    model, x = Broken(), torch.randn(8, 6)
    model(x).square().sum().div(2).backward()
    for found in ranks.run(2, _first_gradients, stage, twice):
        for name, p in model.named_parameters():
            sharded, gradient = found[name]
            assert sharded is (stage > 1)
            torch.testing.assert_close(gradient, p.grad)


def _half() -> list[tuple[torch.dtype, float]]:
    """float16 under a scaler, whose ``unscale_`` takes gradients that show themselves as float32."""
    torch.manual_seed(0)
    model = Broken().half()
    before = model.gain.detach().clone()
    step = torch.compile(model, backend="zero3", options={"fp16": True})
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(step(torch.randn(4, 6).half()).float().square().mean()).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-2, foreach=True)
    scaler.step(optimizer)
    assert norm > 1e-2
    assert not torch.equal(model.gain, before)
    return [(p.grad.dtype, float(p.grad.norm())) for p in model.parameters()]  # type: ignore[union-attr]


def test_gradients_of_float16_are_of_one_kind_too() -> None:
    for found in ranks.run(2, _half):
        assert {dtype for dtype, _ in found} == {torch.float32}
        assert sum(norm**2 for _, norm in found) ** 0.5 == pytest.approx(1e-2, rel=1e-3)
