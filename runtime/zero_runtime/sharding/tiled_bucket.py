"""A parameter that is too large to be moved whole: its bucket holds it, and graphs move its tiles.

Each :class:`Tile` is a bucket to the graphs: gathered, reduced, fetched and counted alone. It keeps
nothing itself: its shard is a part of the tiled bucket's, and so is its reduced gradient, so the
optimizer, norms and offloading see one parameter with one shard (Rajbhandari et al., ZeRO-Infinity,
2021, section 5.1.3, without a change to the model).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from zero_runtime.comm.transports import Group, Several, Transfer
from zero_runtime.ir.plan import BucketPlan, Slot, StatePolicy, Tier, TiledPlan, bounds_of
from zero_runtime.memory.buffers import flat_buffer
from zero_runtime.offload.memory_tiers import MemoryTiers, Moving
from zero_runtime.offload.tiered_tensor import TieredTensor, Window
from zero_runtime.sharding.bucket import NOTHING, Bucket, Flight

_DEFAULT = StatePolicy()


class Arriving(NamedTuple):
    """A reduced gradient ``[chunk]`` on its way to host memory, tile by tile."""

    tensor: torch.Tensor
    tiles: Sequence["Moving | _Added"]

    def land(self) -> torch.Tensor:
        """Have the host wait, then the tensor."""
        for tile in self.tiles:
            tile.land()
        return self.tensor


class _Added:
    """A second gradient of a tile on its way to the host, where it is added to the first. Once."""

    def __init__(self, first: "Moving | _Added", second: Moving) -> None:
        self.tensor: torch.Tensor = first.tensor
        self._first = first
        self._second: Moving | None = second

    def land(self) -> torch.Tensor:
        """Have the host wait for both and add them, then the sum."""
        self._first.land()
        if self._second is not None:
            self.tensor.add_(self._second.land())
            self._second = None
        return self.tensor


class _Adding(NamedTuple):
    """A second gradient of a tile that is under reduction, to be added to the first."""

    flight: Flight
    total: torch.Tensor

    def wait(self) -> None:
        self.total.add_(self.flight.land())


class Tile(Bucket):
    """One tile of a tiled bucket."""

    def __init__(self, whole: "TiledBucket", plan: BucketPlan, number: int) -> None:
        self._whole = whole
        self._number = number
        super().__init__(plan, whole.group, whole.policy, whole.memory_tiers)

    def _tiered_tensor(self, what: str, numel: int, dtype: torch.dtype, tier: Tier) -> TieredTensor:
        if what == "weights":
            return Window(
                self._whole.tiered_tensors[0], self._number, self.memory_tiers, self.device
            )
        return super()._tiered_tensor(what, numel, dtype, tier)

    @property
    def home(self) -> "TiledBucket":
        """The tiled bucket."""
        return self._whole

    def drop_fetch(self) -> None:
        """What was read or fetched ahead is about to be out of date."""
        super().drop_fetch()
        self.put_away()

    def empty_shard(self) -> torch.Tensor:
        """Memory for one reduced gradient: of the whole bucket's, unless another is there already."""
        if self.evicts or self._whole.reduced(self):
            return super().empty_shard()
        return self._whole.room_for(self)

    def home_slot(self, slot: Slot) -> Slot:
        """The one slot of the tiled bucket."""
        return self._whole.plan.slots[0]

    def share_of(self, slot: Slot, own: torch.Tensor) -> torch.Tensor:
        """The tile's rows or columns of ``own``, a gradient of the whole parameter."""
        plan = self._whole.plan
        return own.narrow(plan.dim, sum(plan.sizes[: self._number]), plan.sizes[self._number])

    def start_reduce(
        self,
        slots: Sequence[Slot],
        gradients: Sequence[torch.Tensor],
        along: Mapping[Slot, torch.Tensor] = NOTHING,
    ) -> Flight:
        """As of any bucket. A gradient after the first, since :meth:`TiledBucket.collect`, is added to it."""
        again = self._whole.reduced(self)
        flight = super().start_reduce(slots, gradients, along)
        if self.evicts:
            return flight
        total = self._whole.take(self)
        return Flight(total, _Adding(flight, total)) if again else flight

    def evict(self, reduced: torch.Tensor) -> Moving:
        """Start moving a reduced gradient to the whole bucket's, where the optimizer works."""
        return self._whole.evict_tile(self, reduced)


class TiledBucket(Bucket):
    """Holds one parameter, of which graphs move :attr:`tiles`. Gathered whole it lies tile after tile."""

    plan: TiledPlan

    def __init__(
        self,
        plan: TiledPlan,
        group: Group,
        policy: StatePolicy = _DEFAULT,
        memory_tiers: MemoryTiers | None = None,
    ) -> None:
        self.plan = plan
        super().__init__(plan, group, policy, memory_tiers)
        self.tiles = tuple(Tile(self, tile, n) for n, tile in enumerate(plan.tiles))
        bounds = bounds_of(tile.chunk for tile in plan.tiles)
        self._bounds = dict(zip(self.tiles, bounds, strict=True))
        self._gradient: torch.Tensor | None = None
        self._reduced: set[Tile] = set()
        self._evicting: dict[Tile, Moving | _Added] = {}

    def _tiered_tensor(self, what: str, numel: int, dtype: torch.dtype, tier: Tier) -> TieredTensor:
        pieces = [tile.chunk for tile in self.plan.tiles]
        return TieredTensor(
            self.memory_tiers, self.name_of(what), numel, dtype, self.device, tier, pieces
        )

    def drop_fetch(self) -> None:
        """What was fetched ahead, of the whole or of tiles, is about to be out of date."""
        super().drop_fetch()
        for tile in self.tiles:
            tile.drop_fetch()

    # -------------------------------------------------------------- the parameter

    def part_of(self, slot: Slot, whole: torch.Tensor) -> torch.Tensor:
        """This rank's elements of ``whole``, flat: those of each tile one after another."""
        return torch.cat([t.part_of(t.plan.slots[0], part) for t, part in self._cut(whole)])

    def whole(self, slot: Slot, gathered: torch.Tensor) -> torch.Tensor:
        """The parameter out of ``gathered`` ``[padded]``: a view where tiles are rows, else a copy."""
        if self.plan.dim == 0:
            return super().whole(slot, gathered)
        parts = (tile.whole(tile.plan.slots[0], part) for tile, part in self._split(gathered))
        return torch.cat(list(parts), self.plan.dim)

    def spread(self, slot: Slot, local: torch.Tensor) -> torch.Tensor:
        """``local`` at its place in zeros, as a gather arrives."""
        return torch.cat([t.spread(t.plan.slots[0], part) for t, part in self._owned(local)])

    def gather_beside(self, slot: Slot, own: torch.Tensor) -> torch.Tensor:
        """As of any bucket, one tile after another."""
        parts = [t.gather_beside(t.plan.slots[0], part) for t, part in self._owned(own)]
        return torch.cat(parts, self.plan.dim)

    def _owned(self, local: torch.Tensor) -> Iterator[tuple[Tile, torch.Tensor]]:
        """This rank's elements of each tile, of ``local``, its elements of all."""
        owned = [len(t.plan.owned(t.plan.slots[0], self.group.rank)) for t in self.tiles]
        return zip(self.tiles, local.split(owned), strict=True)

    def _cut(self, whole: torch.Tensor) -> Iterator[tuple[Tile, torch.Tensor]]:
        return zip(self.tiles, whole.split(self.plan.sizes, self.plan.dim), strict=True)

    def _split(self, padded: torch.Tensor) -> Iterator[tuple[Tile, torch.Tensor]]:
        sizes = [tile.plan.padded for tile in self.tiles]
        return zip(self.tiles, padded.split(sizes), strict=True)

    def start_gather(self, dtype: torch.dtype, into: torch.Tensor | None = None) -> Flight:
        """Start gathering every tile in ``dtype``; they arrive one after another as ``[padded]``."""
        if self.group.world_size == 1:
            return super().start_gather(dtype, into)
        whole = flat_buffer(self.plan.padded, dtype, self.device) if into is None else into
        transfers: list[Transfer] = [
            tile.start_gather(dtype, part).transfer for tile, part in self._split(whole)
        ]
        return Flight(whole, Several(transfers))

    # -------------------------------------------------------------- its gradient

    def reduce(
        self,
        slots: Sequence[Slot],
        gradients: Sequence[torch.Tensor],
        along: Mapping[Slot, torch.Tensor] = NOTHING,
    ) -> torch.Tensor:
        """Average a whole gradient one tile after another; this rank's ``[chunk]``."""
        for tile in self.tiles:
            slot = tile.plan.slots[0]
            parts = [tile.share_of(slot, g) for g in gradients]
            shares = [tile.share_of(slot, own) for own in along.values()]
            with_it = dict(zip((slot,), shares, strict=False))
            reduced = tile.start_reduce((slot,), parts, with_it).land()
            if self.evicts:
                tile.evict(reduced)
        return self.collect().land()

    def collect(self) -> Flight | Arriving:
        """The gradient ``[chunk]`` of which every tile was reduced; further reductions make a new one."""
        gradient, evicting = self._whole_gradient(), list(self._evicting.values())
        self.forget()
        return Arriving(gradient, evicting) if self.evicts else Flight(gradient, Several(()))

    def forget(self) -> None:
        """Drop a gradient of which not every tile has come."""
        self._gradient = None
        self._evicting = {}
        self._reduced.clear()

    def reduced(self, tile: Tile) -> bool:
        """Whether a reduction of the tile has started since :meth:`collect`."""
        return tile in self._reduced

    def room_for(self, tile: Tile) -> torch.Tensor:
        """The tile's part of the gradient."""
        start, stop = self._bounds[tile]
        return self._whole_gradient()[start:stop]

    def take(self, tile: Tile) -> torch.Tensor:
        """As :meth:`room_for`, from where on the part holds a gradient."""
        self._reduced.add(tile)
        return self.room_for(tile)

    def evict_tile(self, tile: Tile, reduced: torch.Tensor) -> Moving:
        """Start moving the tile's gradient to the host; a later one is added there."""
        earlier = self._evicting.get(tile)
        if earlier is None:
            moving = self.memory_tiers.to_host(reduced, into=self.room_for(tile))
            self._evicting[tile] = moving
            return moving
        moving = self.memory_tiers.to_host(reduced)
        self._evicting[tile] = _Added(earlier, moving)
        return moving

    def _whole_gradient(self) -> torch.Tensor:
        if self._gradient is None:
            if self.evicts:
                self._gradient = self.memory_tiers.host(self.plan.chunk, self.plan.torch_dtype)
            else:
                self._gradient = self._flat(self.plan.chunk)
        return self._gradient
