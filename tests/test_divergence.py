"""Ranks that are about to run different things get an error, not a hang and not a wrong number."""

import time

import pytest
import ranks
import torch
import torch.distributed as dist
from torch import nn

from zero_runtime.errors import DivergenceError


class Experts(nn.Module):
    """Two branches; ``choice`` says which one runs."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 4)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor, choice: int) -> torch.Tensor:
        return self.experts[choice](self.gate(x))


class Routed(Experts):
    """The choice depends on data, so each expert is a graph of its own."""

    def forward(self, x: torch.Tensor, choice: int) -> torch.Tensor:
        x = self.gate(x)
        torch._dynamo.graph_break()
        return self.experts[choice](x)


def _chosen(kind: type[Experts]) -> tuple[str, float]:
    torch.manual_seed(0)
    model = kind()
    compiled = torch.compile(model, backend="zero3")
    x = torch.randn(2, 4)
    with torch.no_grad():
        for choice in (0, 1):
            compiled(x, choice)
    dist.barrier()
    began = time.monotonic()
    try:
        compiled(x, dist.get_rank()).sum().backward()
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - began
    return "no error", 0.0


@pytest.mark.parametrize("kind", [Experts, Routed])
def test_ranks_that_choose_different_experts_are_both_told(kind: type[Experts]) -> None:
    for message, seconds in ranks.run(2, _chosen, kind):
        assert message.startswith("DivergenceError"), message
        assert "ranks " in message
        assert "experts.0" in message
        assert "experts.1" in message
        assert seconds < 60


def test_ranks_that_read_different_parameters_eagerly_are_both_told() -> None:
    for message in ranks.run(2, _trained_then_read):
        assert message.startswith("DivergenceError"), message
        assert "experts.0.weight" in message
        assert "experts.1.weight" in message


def _trained_then_read() -> str:
    torch.manual_seed(0)
    model = Experts()
    compiled = torch.compile(model, backend="zero3")
    for choice in (0, 1):
        compiled(torch.randn(2, 4), choice).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    dist.barrier()
    try:
        model.experts[dist.get_rank()].weight.detach()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _generation() -> str:
    """Rank 1 stops generating early and trains; rank 0 still generates."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    compiled = torch.compile(model, backend="zero3")
    x = torch.randn(2, 4)
    compiled(x).sum().backward()
    with torch.no_grad():
        compiled(x)
    dist.barrier()
    try:
        with torch.no_grad():
            for _ in range(3 - dist.get_rank()):
                compiled(x)
        compiled(x).sum().backward()
    except DivergenceError as error:
        return str(error)
    return "no error"


def test_generation_that_ends_at_different_lengths_is_told() -> None:
    for message in ranks.run(2, _generation):
        assert "inference graph" in message
        assert "forward graph" in message


def _third_rank_differs() -> str:
    torch.manual_seed(0)
    model = Experts()
    compiled = torch.compile(model, backend="zero3")
    with torch.no_grad():
        for choice in (0, 1):
            compiled(torch.randn(2, 4), choice)
    dist.barrier()
    try:
        with torch.no_grad():
            compiled(torch.randn(2, 4), int(dist.get_rank() == 2))
    except DivergenceError as error:
        return str(error)
    return "no error"


def test_of_three_ranks_all_learn_that_one_differs() -> None:
    for message in ranks.run(3, _third_rank_differs):
        assert "ranks " in message
        assert "2" in message


def _own_shapes() -> list[float]:
    """Different batch sizes, hence recompilation on one rank only, are legitimate."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    compiled = torch.compile(model, backend="zero3")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(4):
        rows = 3 + step * dist.get_rank()
        loss = compiled(torch.ones(rows, 4)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


def test_ranks_with_different_batch_sizes_train_together() -> None:
    first, second = ranks.run(2, _own_shapes)
    assert first == pytest.approx(second, rel=1e-5)
    assert first[-1] < first[0]


def _own_seed(rest: bool) -> str:
    """Each rank builds another model; ``rest``: only in what no graph uses."""
    torch.manual_seed(0 if rest else dist.get_rank())
    model = nn.Sequential(nn.Linear(4, 4))
    if rest:
        model.spare = nn.Parameter(torch.full((3,), float(dist.get_rank())))
    compiled = torch.compile(model, backend="zero3")
    try:
        compiled(torch.ones(2, 4)).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    except DivergenceError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("rest", [False, True])
def test_ranks_that_built_different_models_are_told(rest: bool) -> None:
    for message in ranks.run(2, _own_seed, rest):
        assert "initial bits" in message
        assert "same seed" in message
        assert ("spare" if rest else "0.weight") in message
