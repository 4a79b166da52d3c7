"""One bucket at run time: this rank's shard, and the transfers that gather and reduce it."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from zero_runtime.comm.transports import Group, Transfer
from zero_runtime.errors import UnsupportedError
from zero_runtime.ir.placement import Offload
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
from zero_runtime.ir.strides import in_memory_order, lies_as
from zero_runtime.memory import native
from zero_runtime.memory.buffers import flat_buffer
from zero_runtime.notices import Lines
from zero_runtime.offload.memory_tiers import MemoryTiers, Moving
from zero_runtime.offload.tiered_tensor import TieredTensor


class Flight(NamedTuple):
    """A bucket on its way: the tensor it arrives in and the transfer to wait for."""

    tensor: torch.Tensor
    transfer: Transfer

    def land(self) -> torch.Tensor:
        """Wait, then the tensor."""
        self.transfer.wait()
        return self.tensor


_DEFAULT = StatePolicy()
NOTHING: Mapping[Slot, torch.Tensor] = MappingProxyType({})


class Bucket:
    """Owns this rank's part of every parameter in the bucket, on the tiers that its plan names.

    ``serial`` counts the buckets that a process group moves in the order in which they are made, which its
    ranks share. Buckets of no process group (of one rank, or of a preview) are counted by themselves.
    """

    _alone = itertools.count()
    _shared: ClassVar[WeakKeyDictionary[dist.ProcessGroup, Iterator[int]]] = WeakKeyDictionary()

    def __init__(
        self,
        plan: BucketPlan,
        group: Group,
        policy: StatePolicy = _DEFAULT,
        memory_tiers: MemoryTiers | None = None,
    ) -> None:
        self.plan = plan
        self.policy = policy
        self.stage = policy.stage
        self.device = torch.device(plan.device)
        self.group = group
        self.serial = next(self._serials())
        self._transport = group.transport(self.device, self.serial)
        self.compared = False
        """Whether the ranks have compared the values they put in."""
        self.warned: Lines = set()
        """Lines of the user's that were warned about gathering gradients."""
        self.memory_tiers = memory_tiers if memory_tiers is not None else MemoryTiers(Offload())
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

    def _serials(self) -> Iterator[int]:
        if self.group.process_group is None:
            return self._alone
        return self._shared.setdefault(self.group.process_group, itertools.count())

    def _tiered_tensor(self, what: str, numel: int, dtype: torch.dtype, tier: Tier) -> TieredTensor:
        return TieredTensor(self.memory_tiers, self.name_of(what), numel, dtype, self.device, tier)

    def name_of(self, what: str) -> str:
        """How ``what`` of this bucket is called on NVMe, and in messages about it."""
        first, last = self.plan.slots[0].name, self.plan.slots[-1].name
        return (
            f"{what} of bucket {self.serial} ({first if first == last else f'{first} to {last}'})"
        )

    @property
    def home(self) -> "Bucket":
        """The bucket that holds the elements: this one, unless it is a part of another."""
        return self

    def home_slot(self, slot: Slot) -> Slot:
        """The slot's parameter at :attr:`home`."""
        return slot

    def share_of(self, slot: Slot, own: torch.Tensor) -> torch.Tensor:
        """Where the slot's gradient belongs in ``own``, that of the whole parameter at :attr:`home`: a view."""
        return own

    @property
    def tiered_tensors(self) -> tuple[TieredTensor, TieredTensor]:
        """What holds parameters: the shard (at stages 1 and 2 all), and float32 masters, unused without them."""
        return self._weights, self._masters

    @property
    def shard(self) -> torch.Tensor:
        """This rank's elements, ``[chunk]`` of the storage dtype, for reading; zeros where nothing was stored."""
        return self._own(self._weights.read())

    @property
    def stays_whole(self) -> bool:
        """Whether every rank holds all elements between steps: stages 1 and 2."""
        return self.stage is not Stage.PARAMETERS

    @property
    def flat(self) -> torch.Tensor:
        """All elements, ``[padded]``, at the stages that hold them."""
        assert self.stays_whole
        return self._weights.edit()

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
    def gradient_dtype(self) -> torch.dtype:
        """What gradients present themselves as: float16 ones with float32 masters are float32 once their
        loss scale is taken out, and GradScaler takes it out of such only.
        """
        dtype = self.plan.torch_dtype
        return torch.float32 if self.has_master and dtype is torch.float16 else dtype

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
    def stepped_shelves(self) -> tuple[TieredTensor, ...]:
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

    def _own(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's part of what the shelf of weights holds."""
        return self._own_part(flat) if self.stays_whole else flat

    def _own_part(self, padded: torch.Tensor) -> torch.Tensor:
        return padded.narrow(0, self.group.rank * self.plan.chunk, self.plan.chunk)

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

    def start_gather(self, dtype: torch.dtype, into: torch.Tensor | None = None) -> Flight:
        """Start gathering the bucket in ``dtype``; it arrives as ``[padded]``, in ``into`` where several
        ranks are given one of that size.
        """
        shard = self._here()
        if self.group.world_size == 1 and dtype is self.plan.torch_dtype:
            return Flight(shard, self._transport.all_gather(shard, shard))
        gathered = flat_buffer(self.plan.padded, dtype, self.device) if into is None else into
        own = self._own_part(gathered)
        own.copy_(shard)
        return Flight(gathered, self._transport.all_gather(gathered, own))

    def gather_beside(self, slot: Slot, own: torch.Tensor) -> torch.Tensor:
        """Every rank's ``own`` ``[n]``, values that lie as the slot's elements do (state, say). Collective.

        Returns a tensor of the slot's shape and of ``own``'s dtype, on the bucket's device.
        """
        gathered = flat_buffer(self.plan.padded, own.dtype, self.device)
        part = self._own_part(gathered)
        self.local(slot, part).copy_(own)
        self._transport.all_gather(gathered, part).wait()
        return self.whole(slot, gathered).clone()

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

    def start_refresh(self) -> Flight:
        """Start gathering every rank's part into :attr:`flat`, in place."""
        return Flight(self.flat, self._transport.all_gather(self.flat, self.shard))

    def start_reduce(
        self,
        slots: Sequence[Slot],
        gradients: Sequence[torch.Tensor],
        along: Mapping[Slot, torch.Tensor] = NOTHING,
    ) -> Flight:
        """Start averaging whole ``gradients`` of ``slots``; this rank's part arrives as ``[chunk]``.

        At stage 1 all of the average arrives, ``[padded]``. Elements that no gradient covers count
        as zero. What is ``along``, by slot, is added to the slot's gradient.
        """
        shard = self.empty_shard()
        in_place = self.group.world_size == 1 or self.stage is Stage.OPTIMIZER
        if in_place and self.reduce_dtype is self.plan.torch_dtype:
            packed = shard
        else:
            packed = flat_buffer(self.plan.padded, self.reduce_dtype, self.device)
        self._pack(slots, gradients, packed)
        for slot, own in along.items():
            self.whole(slot, packed).add_(own)
        return self._send(packed, shard)

    def reduce(
        self,
        slots: Sequence[Slot],
        gradients: Sequence[torch.Tensor],
        along: Mapping[Slot, torch.Tensor] = NOTHING,
    ) -> torch.Tensor:
        """As :meth:`start_reduce`, waited for, and moved to where the optimizer works."""
        reduced = self.start_reduce(slots, gradients, along).land()
        return self.evict(reduced).land() if self.evicts else reduced

    @property
    def evicts(self) -> bool:
        """Whether reduced gradients leave the device."""
        return self.steps_on_host and self.stage is not Stage.OPTIMIZER

    def _send(self, packed: torch.Tensor, shard: torch.Tensor) -> Flight:
        if self.stage is Stage.OPTIMIZER:
            return Flight(shard, self.group.averaging(packed, into=shard))
        return Flight(shard, self.group.reduction(self._transport, packed, shard))

    @property
    def reduce_dtype(self) -> torch.dtype:
        """What gradients are packed, sent and averaged in."""
        return reduce_dtype(self.plan, self.policy)

    @property
    def reducing_bytes(self) -> int:
        """Memory that one reduction occupies until it is complete."""
        return reducing_bytes(self.plan, self.policy)

    def forget(self) -> None:
        """A graph has ended: drop what it began to put together for this bucket and did not finish."""

    def empty_shard(self) -> torch.Tensor:
        """Uninitialised memory for one reduced gradient of the bucket, as :meth:`start_reduce` gives it."""
        return self._flat(reduced_numel(self.plan, self.stage))

    def _flat(self, numel: int) -> torch.Tensor:
        return flat_buffer(numel, self.plan.torch_dtype, self.device)

    def _pack(
        self, slots: Sequence[Slot], gradients: Sequence[torch.Tensor], packed: torch.Tensor
    ) -> None:
        pairs = zip(slots, gradients, strict=True)
        ordered = sorted(pairs, key=lambda pair: (pair[0].offset, pair[0].numel))
        for slot, gradient in ordered:
            refuse_sparse(slot.name, gradient)
        flat = [(s, g) for s, g in ordered if lies_as(g, s.stride)]
        sources = [in_memory_order(gradient, slot.stride) for slot, gradient in flat]
        native.pack(sources, [slot.offset for slot, _ in flat], packed)
        for slot, gradient in ordered:
            if not lies_as(gradient, slot.stride):  # transposed, say: straight into its place
                self.whole(slot, packed).copy_(gradient)


def refuse_sparse(name: str, gradient: torch.Tensor) -> None:
    """Raise for a gradient that holds some rows only.

    Raises:
        UnsupportedError: the gradient of parameter ``name`` is not strided.
    """
    if gradient.layout is not torch.strided:
        raise UnsupportedError(sparse_advice(name))


def sparse_advice(name: str) -> str:
    """Why the embedding whose weight is ``name`` cannot have sparse gradients, and what to do."""
    return (
        f"embedding {name} asks for sparse gradients, which cannot be partitioned by elements. "
        "Set sparse=False: a partitioned dense gradient costs 1/ranks of its size."
    )
