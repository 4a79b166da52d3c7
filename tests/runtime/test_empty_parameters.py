"""Parameters of no elements train, are clipped, saved and loaded as without partitioning."""

import io
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import ranks
import zero_compile
from training import Run, assert_same_training, train

pytestmark = pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")


class Full(torch.autograd.Function):
    """A gradient that does not depend on the one it is given."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> torch.Tensor:
        return torch.full((3,), 0.5)


class Sparse(nn.Module):
    """Empty parameters at the end, in the middle and as a layer; a scalar; fewer elements than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.none, self.flat = nn.Parameter(torch.empty(0)), nn.Parameter(torch.empty(0, 8))
        self.main = nn.Linear(8, 3)
        self.nothing = nn.Linear(8, 0, bias=False)
        self.scalar, self.one = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.ones(1))
        self.fixed = nn.Parameter(torch.ones(3))
        self.last = nn.Linear(3, 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.main(x * self.scale) * self.scalar + self.one + Full.apply(self.fixed)
        empty = self.nothing(x).sum() * 0 + (self.flat @ x.T).sum() + self.last(y).sum()
        return y.square().mean() + self.none.sum() + empty


class OnlyEmpty(nn.Module):
    """Nothing but a scalar beside what is empty, and a bucket without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.empty, self.weight = nn.Linear(8, 0), nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.empty(x).sum() + (x * self.weight).mean()


_HOST = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
WAYS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "zero3": ("zero3", {}, False),
    "built partitioned": ("zero3", {}, True),
    "on the host": ("zero3", _HOST, False),
    "zero2": ("zero2", {}, False),
    "zero1": ("zero1", {}, False),
}


def _train(kind: type[nn.Module], way: str) -> tuple[Run, Run, list[tuple[int, ...]]]:
    backend, options, built = WAYS[way]
    torch.manual_seed(0)
    plain = kind()
    torch.manual_seed(0)
    with zero_compile.Init() if built else nullcontext():
        model = kind()
    batches = [(torch.randn(4, 8),) for _ in range(3)]
    step = torch.compile(model, backend=backend, options=options)

    def loss(model: Any, x: torch.Tensor) -> torch.Tensor:
        return model(x)  # type: ignore[no-any-return]

    def adam(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-2)

    runs = (
        train(plain, batches, loss, adam, clip=0.1),
        train(model, batches, loss, adam, step=step, clip=0.1),
    )
    assert runs[1].optimizer is not None
    saved = io.BytesIO()
    torch.save(runs[1].optimizer.state_dict(), saved)
    saved.seek(0)
    runs[1].optimizer.load_state_dict(torch.load(saved))
    step(*batches[0]).backward()
    norms = [p.grad.norm() for p in model.parameters() if p.grad is not None and not p.numel()]
    assert [float(norm) for norm in norms] == [0.0] * len(norms)
    gradients = [tuple(p.grad.shape) for p in model.parameters() if p.grad is not None]
    return runs[0].bare(), runs[1].bare(), gradients


_CASES = [(Sparse, way) for way in WAYS] + [(OnlyEmpty, "zero3"), (OnlyEmpty, "on the host")]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "way"), _CASES)
def test_parameters_of_no_elements_train_as_unsharded(kind: type[nn.Module], way: str) -> None:
    for plain, sharded, gradients in ranks.run(2, _train, kind, way):
        assert_same_training(plain, sharded)
        assert gradients == [tuple(p.shape) for p in kind().parameters()]


def test_reductions_stay_in_backward(fake_group: Any) -> None:
    fake_group(2)
    model = Sparse()
    compiled = torch.compile(model, backend="zero3")
    compiled(torch.randn(4, 8)).backward()
    forward, backward = zero_compile.plans(model)
    assert not [s for s in forward.steps if "reduce" in s.kind]
    reduced = {
        slot.name
        for s in backward.steps
        if "reduce" in s.kind
        for slot in backward.buckets[s.bucket].slots
    }
    assert reduced == {name for name, _ in model.named_parameters()}
