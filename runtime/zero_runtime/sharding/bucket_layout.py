"""How the parameters of a bucket lie in it, and which of their elements this rank has."""

import torch

from zero_runtime.comm.transports import Group
from zero_runtime.ir.plan import (
    BucketPlan,
    Slot,
    Stage,
    StatePolicy,
    Tier,
    reduce_dtype,
    reduced_numel,
    reducing_bytes,
)
from zero_runtime.ir.strides import in_memory_order
from zero_runtime.memory.buffers import flat_buffer


class BucketLayout:
    """A bucket's plan as one rank sees it: views and sizes, and no memory of its own."""

    plan: BucketPlan
    serial: int
    """Which bucket of its process group it is."""

    def __init__(self, plan: BucketPlan, group: Group, policy: StatePolicy) -> None:
        self.plan = plan
        self.policy = policy
        self.stage = policy.stage
        self.device = torch.device(plan.device)
        self.group = group

    @property
    def stays_whole(self) -> bool:
        """Whether every rank holds all elements between steps: stages 1 and 2."""
        return self.stage is not Stage.PARAMETERS

    @property
    def has_master(self) -> bool:
        """Whether the bucket keeps float32 copies of 16-bit shards."""
        dtype = self.plan.torch_dtype
        return self.policy.master_weights and dtype.is_floating_point and dtype.itemsize == 2

    @property
    def steps_on_host(self) -> bool:
        """Whether its optimizer state, and so its step, are in host memory."""
        return self.plan.residence.optimizer is not Tier.DEVICE

    @property
    def lives_on_host(self) -> bool:
        """Whether its shard is off the device."""
        return self.plan.residence.parameters is not Tier.DEVICE

    @property
    def evicts(self) -> bool:
        """Whether reduced gradients leave the device."""
        return self.steps_on_host and self.stage is not Stage.OPTIMIZER

    @property
    def gradient_dtype(self) -> torch.dtype:
        """What gradients present themselves as: float16 ones with float32 masters are float32 once their
        loss scale is taken out, and GradScaler takes it out of such only.
        """
        dtype = self.plan.torch_dtype
        return torch.float32 if self.has_master and dtype is torch.float16 else dtype

    @property
    def reduce_dtype(self) -> torch.dtype:
        """What gradients are packed, sent and averaged in."""
        return reduce_dtype(self.plan, self.policy)

    @property
    def reducing_bytes(self) -> int:
        """Memory that one reduction occupies until it is complete."""
        return reducing_bytes(self.plan, self.policy)

    def name_of(self, what: str) -> str:
        """How ``what`` of this bucket is called on NVMe, and in messages about it."""
        first, last = self.plan.slots[0].name, self.plan.slots[-1].name
        return (
            f"{what} of bucket {self.serial} ({first if first == last else f'{first} to {last}'})"
        )

    def part_of(self, slot: Slot, whole: torch.Tensor) -> torch.Tensor:
        """This rank's elements of ``whole`` (of the slot's logical shape), flat."""
        first = self.plan.chunk_range(self.group.rank).start - slot.offset
        owned = self.plan.owned(slot, self.group.rank)
        start = max(0, first)
        return in_memory_order(whole, slot.stride)[start : start + len(owned)]

    def local(self, slot: Slot, flat: torch.Tensor) -> torch.Tensor:
        """The slot's part of ``flat`` ``[chunk]`` (the shard, or a gradient of it): a view, maybe empty."""
        owned = self.plan.owned(slot, self.group.rank)
        return flat[owned.start : owned.start + len(owned)]

    def whole(self, slot: Slot, gathered: torch.Tensor) -> torch.Tensor:
        """The slot's parameter as a view of ``gathered`` ``[padded]``."""
        return gathered.as_strided(slot.shape, slot.stride, gathered.storage_offset() + slot.offset)

    def spread(self, slot: Slot, local: torch.Tensor) -> torch.Tensor:
        """``local`` (this rank's elements of the slot) at its place in zeros, as a gather arrives."""
        padded = local.new_zeros(self.plan.padded)
        self.local(slot, self._own_part(padded)).copy_(local)
        return padded

    def taken_out(self, slot: Slot, gathered: torch.Tensor) -> torch.Tensor:
        """As :meth:`whole`, of memory that belongs to nobody else. ``gathered`` is not used afterwards."""
        whole = self.whole(slot, gathered)
        if len(self.plan.slots) > 1 or self.group.world_size == 1:
            return whole.clone()
        return whole.data

    def _own_part(self, padded: torch.Tensor) -> torch.Tensor:
        return padded.narrow(0, self.group.rank * self.plan.chunk, self.plan.chunk)

    def _flat(self, numel: int) -> torch.Tensor:
        return flat_buffer(numel, self.plan.torch_dtype, self.device)

    def empty_shard(self) -> torch.Tensor:
        """Uninitialised memory for one reduced gradient of the bucket, as :meth:`start_reduce` gives it."""
        return self._flat(reduced_numel(self.plan, self.stage))
