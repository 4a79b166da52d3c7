"""What one rank needs for a step, from the plan: on the device, in host memory, on NVMe.

Where DeepSpeed's estimates multiply the number of parameters, this plans the model's step with fake
tensors: padding, buckets gathered ahead, activations and buffers are those of the plan.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from torch import nn

from zero_compile.analysis.resident_memory import STATE_BYTES
from zero_compile.api.preview import Preview, preview
from zero_runtime.ir.plan import BucketPlan, Stage, Tier
from zero_runtime.ir.timeline import Category

_MASTER_BYTES = 4


class MemoryEstimate(NamedTuple):
    """Bytes of one rank. All but ``host`` and ``nvme`` are the device's, at the step's fullest moment."""

    parameters: int
    gradients: int
    """Those that are reduced, and those that wait for it."""
    optimizer: int
    gathered: int
    """Buckets in use and on their way."""
    activations: int
    other: int
    """Gradients that are being reduced, and shards on their way from the host."""
    host: int
    """State that lives there, and buffers for what passes through."""
    nvme: int

    @property
    def device(self) -> int:
        """All of the device's together."""
        return sum(self[:6])


def estimate_memory(
    make_model: Callable[[], tuple[nn.Module, tuple[Any, ...], Mapping[str, Any]]],
    *,
    world_size: int,
    stage: int = 3,
    options: Mapping[str, Any] | None = None,
) -> MemoryEstimate:
    """Plan a training step of ``model(*args, **kwargs)``, which ``make_model`` returns, and add up.

    Nothing is allocated: ``make_model`` runs on fake tensors. The optimizer is taken for Adam, with
    8 bytes of state a parameter.

    Raises:
        OptionError, PlanError, ZeroError: as compiling the model with these options would.
    """
    planned = preview(make_model, world_size=world_size, stage=stage, options=options)
    samples = [sample for graph in planned.graphs for sample in graph.timeline.memory]
    held = max((s.held for s in samples), key=lambda held: sum(held.values()), default={})
    kept = planned.resident
    padding = _padding(planned)
    return MemoryEstimate(
        kept.shards + padding.parameters,
        held.get(Category.GRADIENTS, 0) + padding.gradients,
        kept.optimizer + padding.optimizer,
        held.get(Category.GATHERED, 0),
        held.get(Category.ACTIVATIONS, 0),
        held.get(Category.REDUCING, 0) + held.get(Category.STAGING, 0),
        *_elsewhere(planned),
    )


class _Bytes(NamedTuple):
    parameters: int
    gradients: int
    optimizer: int


def _buckets(planned: Preview) -> Iterable[BucketPlan]:
    """Each bucket once, by what lies in it."""
    plans = (plan for graph in planned.graphs for plan in graph.plans)
    return {bucket.slots: bucket for plan in plans for bucket in plan.buckets}.values()


def _of(planned: Preview, bucket: BucketPlan, elements: float) -> _Bytes:
    """Bytes of so many of a bucket's elements, wherever they are."""
    trained = any(slot.trainable for slot in bucket.slots)
    size = bucket.torch_dtype.itemsize
    state = STATE_BYTES + (_MASTER_BYTES if planned.policy.master_weights else 0)
    return _Bytes(
        round(size * elements), round(size * elements * trained), round(state * elements * trained)
    )


def _padding(planned: Preview) -> _Bytes:
    """What lies at the ends of buckets on the device."""
    total = [0, 0, 0]
    for bucket in _buckets(planned):
        used = sum(slot.numel for slot in bucket.slots)
        found = _of(planned, bucket, bucket.chunk - used / bucket.world_size)
        whole = planned.stage is not Stage.PARAMETERS
        here = (
            bucket.residence.parameters is Tier.DEVICE and not whole,
            bucket.residence.optimizer is Tier.DEVICE,
            bucket.residence.optimizer is Tier.DEVICE,
        )
        total = [t + f * h for t, f, h in zip(total, found, here, strict=True)]
    return _Bytes(*total)


def _elsewhere(planned: Preview) -> tuple[int, int]:
    """Bytes in host memory and on NVMe: state, and the largest buffers as often as there are some."""
    host = nvme = shard = state = 0
    for bucket in _buckets(planned):
        mine = _of(planned, bucket, bucket.chunk)
        where = bucket.residence
        if where.parameters is Tier.HOST:
            host += mine.parameters
        elif where.parameters is Tier.NVME:
            nvme, shard = nvme + mine.parameters, max(shard, mine.parameters)
        if where.optimizer is not Tier.DEVICE:
            host += mine.gradients
        if where.optimizer is Tier.HOST:
            host += mine.optimizer
        elif where.optimizer is Tier.NVME:
            nvme, state = nvme + mine.optimizer, max(state, mine.optimizer)
    offload = planned.offload
    return host + offload.slots * shard + offload.sets * state, nvme
