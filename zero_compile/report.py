"""What a compiled model holds and runs, read from real storages and from its plans."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import nn

from zero_runtime.errors import ZeroError
from zero_runtime.gradient import ShardedGradient
from zero_runtime.plan import Plan
from zero_runtime.recorder import Recorder
from zero_runtime.session import Session, session_of
from zero_runtime.timeline import Timeline


class MemoryReport(NamedTuple):
    """Bytes on this rank, each storage counted once.

    ``optimizer`` includes float32 master weights; ``whole_parameters`` is the unsharded model.
    """

    parameters: int
    gradients: int
    optimizer: int
    gathered_peak: int
    gathered_planned: int
    whole_parameters: int


def sessions(model: nn.Module) -> list[Session]:
    """The sessions that own the model's parameters, in order of first use.

    Raises:
        ZeroError: none does: the model was not compiled with a zero backend, or has not run yet.
    """
    owners = (session_of(p) for p in model.parameters())
    found = list(dict.fromkeys(s for s in owners if s is not None))
    if not found:
        raise ZeroError(
            "no parameter of this model is partitioned. Compile it with "
            'torch.compile(model, backend="zero3") and run one forward first.'
        )
    return found


def plans(model: nn.Module) -> list[Plan]:
    """The plans of the model's graphs, in the order in which they were compiled."""
    return [plan for session in sessions(model) for plan in session.plans]


def timelines(model: nn.Module) -> list[Timeline]:
    """What the model's last step did when, as recorded on this rank: one timeline a session.

    ``python -m tools.dump_schedule --html page.html recorded.json predicted.json`` shows both.

    Raises:
        ZeroError: the model was not compiled with ``options={"record": True}``.
    """
    observers = [session.observer for session in sessions(model)]
    found = [o.timeline("recorded") for o in observers if isinstance(o, Recorder)]
    if not found:
        raise ZeroError(
            'nothing was recorded: compile the model with options={"record": True} and run a step'
        )
    return found


def memory_report(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> MemoryReport:
    """Sum the storages that hold the model's shards, gradients and optimizer state on this rank.

    Raises:
        ZeroError: no parameter of the model is partitioned.
    """
    owners = sessions(model)
    parameters = list(model.parameters())
    buckets = [b for s in owners for b in s.buckets]
    shards = [b.memory for b in buckets]
    masters = [b.stepped for b in buckets if b.has_master]
    states = optimizer.state.values() if optimizer is not None else ()
    state = [v for s in states for v in s.values() if isinstance(v, torch.Tensor)]
    gathered = [s.gathered_bytes() for s in owners]
    return MemoryReport(
        parameters=storage_bytes([*shards, *parameters]),
        gradients=storage_bytes(_local(p.grad) for p in parameters if p.grad is not None),
        optimizer=storage_bytes([*state, *masters]),
        gathered_peak=max(g.peak for g in gathered),
        gathered_planned=max(g.planned for g in gathered),
        whole_parameters=sum(p.numel() * p.element_size() for p in parameters),
    )


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the distinct storages behind ``tensors``."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def _local(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.local if isinstance(gradient, ShardedGradient) else gradient
