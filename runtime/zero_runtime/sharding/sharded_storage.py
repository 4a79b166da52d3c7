"""Where this rank's elements of a bucket live between their uses, and what the optimizer steps on."""

from collections.abc import Callable

import torch

from zero_runtime.comm.transports import Group
from zero_runtime.ir.plan import BucketPlan, Slot, StatePolicy, Tier
from zero_runtime.offload.memory_tiers import MemoryTiers, Moving
from zero_runtime.offload.tiered_tensor import TieredTensor
from zero_runtime.sharding.bucket_layout import BucketLayout


class ShardedStorage(BucketLayout):
    """The shard and its float32 masters, on the tiers that the plan names."""

    def __init__(
        self,
        plan: BucketPlan,
        group: Group,
        policy: StatePolicy,
        memory_tiers: MemoryTiers,
        serial: int,
    ) -> None:
        super().__init__(plan, group, policy)
        self.serial = serial
        self.memory_tiers = memory_tiers
        numel = plan.padded if self.stays_whole else plan.chunk
        self._weights = self._tiered_tensor(
            "weights", numel, plan.torch_dtype, plan.residence.parameters
        )
        self._masters = self._tiered_tensor(
            "masters", plan.chunk, torch.float32, plan.residence.optimizer
        )
        self._given = False
        """Whether parameters were given values since masters last followed them."""
        self._fetching: Moving | None = None
        self._stepped: torch.Tensor | None = None

    def _tiered_tensor(self, what: str, numel: int, dtype: torch.dtype, tier: Tier) -> TieredTensor:
        return TieredTensor(self.memory_tiers, self.name_of(what), numel, dtype, self.device, tier)

    @property
    def tiered_tensors(self) -> tuple[TieredTensor, TieredTensor]:
        """What holds parameters: the shard (at stages 1 and 2 all), and float32 masters, unused without them."""
        return self._weights, self._masters

    @property
    def shard(self) -> torch.Tensor:
        """This rank's elements, ``[chunk]`` of the storage dtype, for reading; zeros where nothing was stored."""
        return self._own(self._weights.read())

    @property
    def flat(self) -> torch.Tensor:
        """All elements, ``[padded]``, at the stages that hold them."""
        assert self.stays_whole
        return self._weights.edit()

    def _own(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's part of what the weights holds."""
        return self._own_part(flat) if self.stays_whole else flat

    def put_away(self) -> None:
        """Write what lives on NVMe and has changed, and free its memory; nothing while a step is open."""
        if self._stepped is not None:
            return
        try:
            for transfer in [tiered_tensor.put_away() for tiered_tensor in self.tiered_tensors]:
                transfer.wait()
        finally:
            self.memory_tiers.slots.give(self)

    def discard(self) -> None:
        """Give up all values: the parameters live elsewhere now."""
        self.drop_fetch()
        for tiered_tensor in self.tiered_tensors:
            tiered_tensor.discard()
        self.memory_tiers.slots.give(self)

    # -------------------------------------------------------------- the optimizer's step

    def open_step(self) -> torch.Tensor:
        """What the optimizer updates in place, ``[chunk]``: float32 masters, the shard, or a copy of it
        where the optimizer works. The shard changes at :meth:`close_step`.
        """
        if self._stepped is None:
            self._stepped = self._to_step_on()
        return self._stepped

    def _to_step_on(self) -> torch.Tensor:
        if self.has_master:
            if not self._masters.used:
                return self._masters.edit().copy_(self.shard)
            self._masters_now()
            return self._masters.edit()
        if self.lives_on_host == self.steps_on_host:
            return self._own(self._weights.edit())
        if self.steps_on_host:
            return self.memory_tiers.to_host(self.shard).land()
        return self.memory_tiers.to_device(self.shard, self.device).land()

    def _masters_now(self) -> torch.Tensor:
        """The masters. Each whose parameter was given another value than the master's own, rounded, has that.

        At stages 1 and 2 code writes to parameters where they lie, and nobody is told.
        """
        masters = self._masters.read()
        if self._given or self.stays_whole:
            shard = self.shard.to(masters.device)
            another = masters.to(shard.dtype) != shard
            if another.any():
                self._masters.edit().copy_(torch.where(another, shard, masters))
            self._given = False
        return masters

    def close_step(self, rounded: bool = False) -> None:
        """The shard takes over what was stepped on; ``rounded``: it has already."""
        stepped, self._stepped = self._stepped, None
        apart = self.has_master or self.lives_on_host != self.steps_on_host
        if stepped is not None and apart and not rounded:
            self._own(self._weights.edit()).copy_(stepped)

    @property
    def step_reads(self) -> tuple[TieredTensor, ...]:
        """What :meth:`open_step` reads."""
        if self.has_master and self._masters.used:
            return self.tiered_tensors if self._given else (self._masters,)
        return (self._weights,)

    def room_for_rounded(self) -> torch.Tensor:
        """Host memory ``[chunk]`` for rounded masters, to be filled and given to :meth:`take_rounded`."""
        if self.lives_on_host:
            return self._weights.overwrite()
        return self.memory_tiers.host(self.plan.chunk, self.plan.torch_dtype)

    def take_rounded(self, rounded: torch.Tensor) -> None:
        """The shard becomes ``rounded``."""
        if not self.lives_on_host:
            self._own(self._weights.edit()).copy_(rounded)

    # -------------------------------------------------------------- from NVMe and host to the device

    def start_read(self) -> None:
        """Start reading the shard from NVMe, if it is there and a slot in host memory is free."""
        if self._weights.away and self._fetching is None and self.memory_tiers.slots.take(self):
            self._weights.start_load()

    def start_fetch(self) -> None:
        """Start copying the shard to the device, if it is not there."""
        if self.lives_on_host and self._fetching is None:
            self._fetching = self.memory_tiers.to_device(self._weights.read(), self.device)

    def _here(self) -> torch.Tensor:
        """The shard on the device: where it lives, or as fetched for one gather."""
        if not self.lives_on_host:
            return self.shard
        self.start_fetch()
        fetched, self._fetching = self._fetching, None
        assert fetched is not None
        fetched.wait()
        self.put_away()
        return fetched.tensor

    def drop_fetch(self) -> None:
        """What was fetched ahead is about to be out of date."""
        if self._fetching is not None:
            self._fetching.land()
            self._fetching = None

    def evict(self, reduced: torch.Tensor) -> Moving:
        """Start moving a reduced gradient to where the bucket's optimizer works."""
        return self.memory_tiers.to_host(reduced)

    # -------------------------------------------------------------- one parameter of it

    def store(self, slot: Slot, whole: torch.Tensor) -> None:
        """Keep this rank's part of ``whole``, a tensor of the slot's logical shape."""
        self.drop_fetch()
        self.local(slot, self._own(self._weights.edit())).copy_(self.part_of(slot, whole))
        self._given = True

    def fill(self, slot: Slot, read: Callable[[torch.Tensor, int], None]) -> None:
        """Have ``read(target, start)`` fill this rank's elements, from number ``start`` of the slot on."""
        self.drop_fetch()
        start = max(0, self.plan.chunk_range(self.group.rank).start - slot.offset)
        read(self.local(slot, self._own(self._weights.edit())), start)
        self._given = True
        self.put_away()

    def exact(self, slot: Slot) -> torch.Tensor:
        """This rank's elements ``[n]`` of the slot, a copy: of the float32 master where there is one."""
        self.drop_fetch()
        used = self.has_master and self._masters.used
        flat = self._masters_now() if used else self.shard
        found = self.local(slot, flat).clone()
        self.put_away()
        return found

    def store_exact(self, slot: Slot, part: torch.Tensor) -> None:
        """Replace this rank's elements ``[n]``, and their float32 master where the bucket has one."""
        self.drop_fetch()
        if self.has_master:
            self._put_masters(slot, part)
        self.local(slot, self._own(self._weights.edit())).copy_(part)
        self.put_away()

    def restore_masters(self, slot: Slot, part: torch.Tensor) -> None:
        """Float32 masters ``[n]`` of before; not where they are not, rounded, what the parameter is now."""
        self._put_masters(slot, part)
        self._given = True
        self.put_away()

    def _put_masters(self, slot: Slot, part: torch.Tensor) -> None:
        if not self._masters.used:
            self._masters.edit().copy_(self.shard)
        self.local(slot, self._masters.edit()).copy_(part)
