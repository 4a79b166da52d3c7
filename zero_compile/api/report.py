"""What a compiled model holds and runs, read from real storages and from its plans."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import nn

from zero_runtime.errors import ZeroError
from zero_runtime.ir.plan import Plan, Tier
from zero_runtime.ir.timeline import Timeline
from zero_runtime.offload.tiered_tensor import TieredTensor
from zero_runtime.recorder import Recorder
from zero_runtime.session import Session, session_of
from zero_runtime.sharding.sharded_gradient import ShardedGradient, SpentGradient


class MemoryReport(NamedTuple):
    """Bytes on this rank, each storage counted once.

    ``parameters``, ``gradients`` and ``optimizer`` are on the device; ``optimizer`` includes float32 master
    weights. ``host`` is what is kept of all three in host memory, ``nvme`` what swap files hold.
    ``whole_parameters`` is the unsharded model.
    """

    parameters: int
    gradients: int
    optimizer: int
    gathered_peak: int
    gathered_planned: int
    whole_parameters: int
    host: int = 0
    nvme: int = 0


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

    ``python -m zero_compile.tools.dump_schedule --html page.html recorded.json predicted.json`` shows both.

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
    buckets = [bucket for session in owners for bucket in session.buckets]
    weights, masters = zip(*(bucket.tiered_tensors for bucket in buckets), strict=True)
    states = _Sides.of(_states(parameters, optimizer))
    gradients = _Sides.of(_gradients(parameters))
    gathered = [session.gathered_bytes() for session in owners]
    return MemoryReport(
        parameters=storage_bytes([*_held(weights, here=True), *parameters]),
        gradients=storage_bytes(gradients.device),
        optimizer=storage_bytes([*states.device, *_held(masters, here=True)]),
        gathered_peak=max(g.peak for g in gathered),
        gathered_planned=max(g.planned for g in gathered),
        whole_parameters=sum(p.numel() * p.element_size() for p in parameters),
        host=storage_bytes(
            [*gradients.host, *states.host, *_held((*weights, *masters), here=False)]
        ),
        nvme=sum(
            memory_tiers.swapped_bytes
            for session in owners
            for memory_tiers in session.all_memory_tiers
        ),
    )


class _Sides(NamedTuple):
    """Tensors by where they are."""

    device: list[torch.Tensor]
    host: list[torch.Tensor]

    @staticmethod
    def of(placed: Iterable[tuple[torch.Tensor, bool]]) -> "_Sides":
        pairs = list(placed)
        return _Sides([t for t, off in pairs if not off], [t for t, off in pairs if off])


def _held(tiered_tensors: Iterable[TieredTensor], *, here: bool) -> list[torch.Tensor]:
    """What shelves have in memory: on the device, or (``here`` off) on the host."""
    return [
        tiered_tensor.held
        for tiered_tensor in tiered_tensors
        if tiered_tensor.held is not None and (tiered_tensor.tier is Tier.DEVICE) is here
    ]


def _states(
    parameters: Iterable[nn.Parameter], optimizer: torch.optim.Optimizer | None
) -> Iterator[tuple[torch.Tensor, bool]]:
    """Optimizer state in memory, and whether it is off the device."""
    for parameter in parameters if optimizer is not None else ():
        session = session_of(parameter)
        entry = session.entry(parameter) if session is not None else None
        off = entry is not None and entry.placed and entry.place.bucket.steps_on_host
        assert optimizer is not None
        for value in optimizer.state.get(parameter, {}).values():
            if isinstance(value, torch.Tensor):
                yield value, off


def _gradients(parameters: Iterable[nn.Parameter]) -> Iterator[tuple[torch.Tensor, bool]]:
    """Gradients, and whether they are off the device."""
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(gradient, ShardedGradient):
            yield gradient.local, gradient.place.bucket.evicts
        elif gradient is not None and not isinstance(gradient, SpentGradient):
            yield gradient, False


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the distinct storages behind ``tensors``."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())
