"""Which parameters share a bucket: by order of first use, up to a size, one gather dtype each.

Ranks must agree on this, so it follows from the graph's parameters alone: never from activation
shapes, never from measured times.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from zero_runtime.ir.plan import ALIGNMENT, BucketPlan, Slot, dtype_name


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


@dataclass(frozen=True)
class LayoutPolicy:
    """How large buckets are.

    ``bucket_bytes``: gathered bytes; None: a part of the whole. ``elements``: a further limit, None for
    none. ``small``: parameters of at most so many elements share buckets with their like only.
    ``saturating_bytes``: from here on a larger message gains no bandwidth; the cap of the default size.
    """

    bucket_bytes: int | None = None
    elements: int | None = None
    small: int = 0
    saturating_bytes: int = 16 << 20


#: A bucket may exceed its size by this factor, so that a layer's bias joins its weight.
_SLACK = 1.125


MiB = 1 << 20


def group_uses(uses: Sequence[Use], policy: LayoutPolicy) -> list[list[Use]]:
    """Groups of uses, one a bucket, ordered by first use. Frozen and trainable never mix."""
    size = policy.bucket_bytes or default_bucket_bytes(uses, policy.saturating_bytes)
    groups: list[list[Use]] = []
    open_groups: dict[object, list[Use]] = {}
    for use in uses:
        kind = (use.kind, use.numel <= policy.small)
        group = open_groups.get(kind)
        if group is None or _full(group, use, size, policy.elements):
            group = open_groups[kind] = []
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


def default_bucket_bytes(uses: Iterable[Use], saturating_bytes: int = 16 * MiB) -> int:
    """A sixteenth of the whole, so that two buckets at once stay a small part of it.

    Below 1 MiB a message costs its latency; above ``saturating_bytes`` bandwidth no longer grows.
    """
    total = sum(use.gathered_bytes for use in uses)
    return min(max(total // 16, MiB), max(saturating_bytes, MiB))


def _full(group: Sequence[Use], use: Use, bucket_bytes: int, most: int | None) -> bool:
    held = sum(member.gathered_bytes for member in group)
    elements = sum(member.numel for member in group) + use.numel
    too_many = most is not None and elements > most
    return too_many or held + use.gathered_bytes > bucket_bytes * _SLACK


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
