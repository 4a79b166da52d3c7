"""Train a model with and without partitioning on the same data, for comparisons."""

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

Batch = tuple[torch.Tensor, ...]
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


class Run(NamedTuple):
    """What a training run leaves behind. Losses are means over ranks."""

    losses: list[float]
    norms: list[float]
    parameters: dict[str, torch.Tensor]
    model: nn.Module | None
    optimizer: torch.optim.Optimizer | None

    def bare(self) -> "Run":
        """Without what cannot travel between processes."""
        return self._replace(model=None, optimizer=None)


def world() -> tuple[int, int]:
    """(rank, world size); one rank alone without a process group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def mine(batch: Batch) -> Batch:
    """This rank's rows of a global batch."""
    rank, size = world()
    return tuple(t.chunk(size)[rank] for t in batch)


def train(
    model: nn.Module,
    batches: Sequence[Batch],
    loss_of: Callable[..., torch.Tensor],
    make_optimizer: MakeOptimizer,
    *,
    step: Any = None,
    clip: float | None = None,
) -> Run:
    """Stock loop: forward, backward, clip, step, zero_grad.

    ``step`` is the compiled, partitioned model; without it ``model`` trains eagerly on whole batches.
    """
    optimizer = make_optimizer(model)
    losses, norms = [], []
    for batch in batches:
        loss = loss_of(step, *mine(batch)) if step is not None else loss_of(model, *batch)
        loss.backward()
        if clip is not None:
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_over_ranks(loss) if step is not None else float(loss.detach()))
    return Run(losses, norms, whole_parameters(model), model, optimizer)


def against_unsharded(
    model: nn.Module,
    batches: Sequence[Batch],
    loss_of: Callable[..., torch.Tensor],
    make_optimizer: MakeOptimizer,
    *,
    clip: float | None = None,
    **compile_options: Any,
) -> tuple[Run, Run]:
    """(unsharded, partitioned), both from the same weights and data."""
    plain = train(copy.deepcopy(model), batches, loss_of, make_optimizer, clip=clip)
    step = torch.compile(model, backend="zero3", **compile_options)
    return plain, train(model, batches, loss_of, make_optimizer, step=step, clip=clip)


def copy_weights(source: nn.Module, target: nn.Module) -> None:
    """In place, also into a partitioned model."""
    with torch.no_grad():
        for theirs, ours in zip(source.parameters(), target.parameters(), strict=True):
            ours.copy_(theirs)


def whole_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter gathered (collective)."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def mean_over_ranks(loss: torch.Tensor) -> float:
    value = loss.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(value)
        value /= dist.get_world_size()
    return float(value)


def relative(expected: Sequence[float], found: Sequence[float]) -> float:
    """The largest relative difference."""
    return max(abs(a - b) / max(abs(a), 1e-12) for a, b in zip(expected, found, strict=True))


def assert_same_training(plain: Run, sharded: Run, tolerance: float = 1e-5) -> None:
    """Losses, norms and final parameters agree."""
    assert relative(plain.losses, sharded.losses) < tolerance, (plain.losses, sharded.losses)
    if plain.norms:
        assert relative(plain.norms, sharded.norms) < tolerance, (plain.norms, sharded.norms)
    for name, expected in plain.parameters.items():
        torch.testing.assert_close(
            sharded.parameters[name],
            expected,
            rtol=1e-4,
            atol=2e-5,
            msg=lambda m, n=name: f"{n}: {m}",
        )
