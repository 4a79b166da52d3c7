"""One bucket at run time: this rank's shard, and the transfers that gather and reduce it."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
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
)
from zero_runtime.ir.strides import in_memory_order, lies_as
from zero_runtime.memory import native
from zero_runtime.memory.buffers import flat_buffer
from zero_runtime.notices import Lines
from zero_runtime.offload.memory_tiers import MemoryTiers
from zero_runtime.sharding.sharded_storage import ShardedStorage


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


class Bucket(ShardedStorage):
    """This rank's part of every parameter in the bucket, and the collectives that gather and reduce them.

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
        serial = next(self._serials(group))
        tiers = memory_tiers if memory_tiers is not None else MemoryTiers(Offload())
        super().__init__(plan, group, policy, tiers, serial)
        self._transport = group.transport(self.device, serial)
        self.compared = False
        """Whether the ranks have compared the values they put in."""
        self.warned: Lines = set()
        """Lines of the user's that were warned about gathering gradients."""

    @classmethod
    def _serials(cls, group: Group) -> Iterator[int]:
        if group.process_group is None:
            return cls._alone
        return cls._shared.setdefault(group.process_group, itertools.count())

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

    def _send(self, packed: torch.Tensor, shard: torch.Tensor) -> Flight:
        if self.stage is Stage.OPTIMIZER:
            return Flight(shard, self.group.averaging(packed, into=shard))
        return Flight(shard, self.group.reduction(self._transport, packed, shard))

    def forget(self) -> None:
        """A graph has ended: drop what it began to put together for this bucket and did not finish."""

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
