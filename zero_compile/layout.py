"""Which parameters share a bucket: by order of first use, up to a size, one gather dtype each.

Ranks must agree on this, so it follows from the graph's parameters alone: never from activation
shapes, never from measured times.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from zero_runtime.plan import ALIGNMENT, BucketPlan, Slot, dtype_name


class Use(NamedTuple):
    """A parameter as a graph uses it: ``dtype`` stored, ``gather_dtype`` moved."""

    number: int
    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    numel: int
    dtype: torch.dtype
    gather_dtype: torch.dtype
    device: torch.device
    trainable: bool

    @property
    def kind(self) -> tuple[torch.dtype, torch.dtype, torch.device, bool]:
        """Only parameters of one kind may share a bucket."""
        return self.dtype, self.gather_dtype, self.device, self.trainable

    @property
    def gathered_bytes(self) -> int:
        """What gathering the parameter moves."""
        return self.numel * self.gather_dtype.itemsize


#: A bucket may exceed its size by this factor, so that a layer's bias joins its weight.
_SLACK = 1.125


MiB = 1 << 20


def group_uses(uses: Sequence[Use], bucket_bytes: int | None) -> list[list[Use]]:
    """Groups of uses, one a bucket, ordered by first use. Frozen and trainable never mix."""
    bucket_bytes = bucket_bytes or default_bucket_bytes(uses)
    groups: list[list[Use]] = []
    open_groups: dict[object, list[Use]] = {}
    for use in uses:
        group = open_groups.get(use.kind)
        if group is None or _full(group, use, bucket_bytes):
            group = open_groups[use.kind] = []
            groups.append(group)
        group.append(use)
    return groups


def plan_bucket(group: Sequence[Use], world_size: int) -> BucketPlan:
    """Slots at aligned offsets, padded to equal aligned chunks a rank."""
    slots, offset = [], 0
    for use in group:
        slots.append(Slot(use.name, use.shape, use.stride, use.trainable, offset, use.numel))
        offset += _round_up(use.numel, ALIGNMENT)
    chunk = _round_up(-(-offset // world_size), ALIGNMENT)
    first = group[0]
    return BucketPlan(dtype_name(first.dtype), str(first.device), world_size, chunk, tuple(slots))


def default_bucket_bytes(uses: Iterable[Use]) -> int:
    """A sixteenth of the whole, so that two buckets at once stay a small part of it.

    Below 1 MiB a message costs its latency; above 16 MiB bandwidth no longer grows.
    """
    total = sum(use.gathered_bytes for use in uses)
    return min(max(total // 16, MiB), 16 * MiB)


def _full(group: Sequence[Use], use: Use, bucket_bytes: int) -> bool:
    held = sum(member.gathered_bytes for member in group)
    return held + use.gathered_bytes > bucket_bytes * _SLACK


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
