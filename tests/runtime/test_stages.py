"""Stages 1 and 2: the same loop, with less partitioned."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import ranks
import zero_compile
from training import Run, assert_same_training, train
from zero_runtime.sharding.sharded_gradient import ShardedGradient

STAGES = ["zero1", "zero2", "zero3"]


class Model(nn.Module):
    """A tied weight, a scalar, a returned view, and a part that is not compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 33), nn.Linear(33, 6)
        self.scale = nn.Parameter(torch.tensor(0.9))
        self.outside = nn.Linear(6, 6)

    @torch.compiler.disable
    def eager(self, x: torch.Tensor) -> torch.Tensor:
        return self.outside(x) + x @ self.up.weight.t() @ self.down.weight.t()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.down(torch.tanh(self.up(x))) * self.scale
        return self.eager(x), self.up.weight.t()


def _loss(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out, view = model(x)
    return nn.functional.mse_loss(out, y) + 1e-3 * view.square().sum()


def _batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(12, 6, generator=generator), torch.randn(12, 6, generator=generator))
        for _ in range(5)
    ]


def _trained(backend: str) -> tuple[Run, Run]:
    torch.manual_seed(0)
    model = Model()
    make = partial(torch.optim.AdamW, lr=1e-2)
    plain = train(copy.deepcopy(model), _batches(), _loss, lambda m: make(m.parameters()), clip=0.5)
    step = torch.compile(model, backend=backend)
    sharded = train(model, _batches(), _loss, lambda m: make(m.parameters()), clip=0.5, step=step)
    return plain.bare(), sharded.bare()


@pytest.mark.slow
@pytest.mark.parametrize("backend", STAGES)
@pytest.mark.parametrize("size", [2, 3])
def test_every_stage_trains_as_unsharded(backend: str, size: int) -> None:
    for plain, sharded in ranks.run(size, _trained, backend):
        assert_same_training(plain, sharded)


def _held(backend: str) -> tuple[tuple[int, int, int], int, int, bool]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(96, 96) for _ in range(8)))
    compiled = torch.compile(model, backend=backend, options={"bucket_bytes": 1 << 16})
    optimizer = torch.optim.AdamW(model.parameters())
    compiled(torch.randn(4, 96)).square().mean().backward()
    optimizer.step()
    compiled(torch.randn(4, 96))
    report = zero_compile.memory_report(model, optimizer)
    kind = isinstance(model[0].weight.grad, ShardedGradient)
    held = (report.parameters, report.gradients, report.optimizer)
    return held, sum(p.numel() for p in model.parameters()) * 4, report.gathered_peak, kind


@pytest.mark.parametrize(
    ("backend", "shares"), [("zero1", (1, 1, 0.5)), ("zero2", (1, 0.5, 0.5)), ("zero3", (0.5,) * 3)]
)
def test_what_each_stage_holds(backend: str, shares: tuple[float, float, float]) -> None:
    for held, whole, gathered, sharded in ranks.run(2, _held, backend):
        for bytes_held, share, copies in zip(held, shares, (1, 1, 2), strict=True):
            assert bytes_held == pytest.approx(share * copies * whole, rel=0.01)
        assert sharded == (backend != "zero1")
        assert (gathered > 0) == (backend == "zero3")


def _one_rank(backend: str) -> list[float]:
    torch.manual_seed(0)
    model = Model()
    step = torch.compile(model, backend=backend)
    run = train(model, _batches(), _loss, lambda m: torch.optim.AdamW(m.parameters()), step=step)
    return run.losses


def test_one_rank_gives_the_same_bits_at_every_stage() -> None:
    first, second, third = (_one_rank(backend) for backend in STAGES)
    assert first == second == third


def _eager_between_steps(backend: str) -> bool:
    """What is read right after a step is what every rank has updated."""
    torch.manual_seed(0)
    model = nn.Linear(6, 33)
    compiled = torch.compile(model, backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    compiled(torch.ones(2, 6)).sum().backward()
    before = model.weight.detach().clone()
    optimizer.step()
    return bool((model.weight.detach() != before).all())


@pytest.mark.parametrize("backend", STAGES)
def test_parameters_read_after_a_step_are_fresh(backend: str) -> None:
    assert all(ranks.run(2, _eager_between_steps, backend))


def test_a_model_cannot_change_its_stage() -> None:
    model = nn.Linear(2, 2)
    torch.compile(model, backend="zero3")(torch.ones(1, 2))
    with pytest.raises(Exception, match=r'backend="zero3" and now with "zero2"'):
        torch.compile(model, backend="zero2")(torch.ones(1, 2))
