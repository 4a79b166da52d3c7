"""Which parameters and buckets a session has, and what it knows of them."""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import nn

from zero_runtime import compat
from zero_runtime.comm.transports import Group
from zero_runtime.ir.placement import Offload
from zero_runtime.ir.plan import BucketPlan, Plan, Stage, StatePolicy, TiledPlan
from zero_runtime.notices import Lines
from zero_runtime.offload.memory_tiers import MemoryTiers
from zero_runtime.offload.residences import Residences
from zero_runtime.offload.saved_tensors import SavedStore
from zero_runtime.recorder import Observer, Recorder, Silent
from zero_runtime.sharding.bucket import Bucket
from zero_runtime.sharding.gather_cache import GatherCache
from zero_runtime.sharding.parameter_state import Entry
from zero_runtime.sharding.sharded_gradient import Place, ShardedGradient
from zero_runtime.sharding.tiled_bucket import TiledBucket
from zero_runtime.sharding.update_in_backward import BackwardUpdates

#: Buckets for parameters that no graph has used: (entries, world size) to plans and their entries.
LayOut = Callable[[Sequence[Entry], int], Iterable[tuple[BucketPlan, Sequence[Entry]]]]


class GatheredBytes(NamedTuple):
    """Bytes of gathered parameters: the most held at once, and the most any plan allows."""

    peak: int
    planned: int


class Construction(Protocol):
    """What partitions a model while it is built, as far as its session asks."""

    def finish(self, names: Mapping[str, nn.Parameter]) -> None:
        """The model is built, and known by these names."""

    def movable(self, entry: Entry) -> bool:
        """Whether the entry may get a place in another bucket."""

    def moving(self) -> Sequence[Entry]:
        """Entries that have a destination."""

    def move(self) -> None:
        """Bring those there. Collective."""

    def unseen(self) -> Sequence[Bucket]:
        """Buckets of its own whose values the ranks have not compared."""


class Partitioned(nn.Parameter):
    """Tells partitioned parameters from others; the class of each carries its session."""

    session: ClassVar["SessionRegistry"]


class SessionRegistry:
    """Entries, buckets and plans of one compiled model, on one group."""

    def __init__(
        self, group: Group, lay_out: LayOut, policy: StatePolicy, offload: Offload
    ) -> None:
        self.group = group
        self.policy = policy
        self.offload = offload
        self.memory_tiers = MemoryTiers(offload)
        self.saved = SavedStore(self.memory_tiers)
        """What forwards have sent off the device for their backwards."""
        self.all_memory_tiers = [self.memory_tiers]
        """Its own, and those of sessions that it has absorbed."""
        self._residences = Residences(offload)
        self.updates = BackwardUpdates(offload.in_backward)
        """Buckets that are updated inside backward."""
        self.stage = policy.stage
        self._lay_out = lay_out
        self.entries: list[Entry] = []
        self.buckets: list[Bucket] = []
        self.plans: list[Plan] = []
        self.gathered_peak = 0
        self.abandoned: list[object] = []
        self.warned: Lines = set()
        self.synchronise = True
        """Whether backward reduces gradients; off inside ``no_sync``."""
        self.leaves: weakref.WeakKeyDictionary[nn.Module, object] = weakref.WeakKeyDictionary()
        """Modules that are gathered as a whole, and what does it."""
        self.observer: Observer = Silent()
        """Told of every step of every graph."""
        self.gather_cache = GatherCache()
        """Buckets gathered, or on their way, between two graphs."""
        self.opening: Sequence[tuple[Bucket, torch.dtype]] = ()
        """The first gathers of the forward that ran last."""
        self.steps = 0
        """Optimizer steps done."""
        self.construction: Construction
        """What partitions the model while it is built."""
        self._class: type[Partitioned]
        self.unsharded: dict[Entry, list[Any]] = {}
        """Entries whose parameters are held whole, and by which blocks, outermost first."""
        self._by_parameter: compat.WeakIdKeyDictionary = compat.WeakIdKeyDictionary()

    def attach(self, kind: type[Partitioned], construction: Construction) -> None:
        """Say what partitioned parameters are to eager code, once, before there are any."""
        self._class, self.construction = kind, construction

    def claim(self, name: str, parameter: nn.Parameter) -> Entry:
        """The parameter's entry; a new one at its first mention."""
        entry: Entry | None = self._by_parameter.get(parameter)
        if entry is None:
            entry = self._by_parameter[parameter] = Entry(name, parameter)
            self.entries.append(entry)
        return entry

    def entry(self, parameter: nn.Parameter) -> Entry:
        """The entry :meth:`claim` made.

        Raises:
            KeyError: the parameter is not of this session.
        """
        found: Entry = self._by_parameter[parameter]
        return found

    def owns(self, parameter: nn.Parameter) -> bool:
        """Whether the parameter is of this session."""
        return parameter in self._by_parameter

    def bucket(self, plan: BucketPlan) -> Bucket:
        """A bucket for ``plan``, which says where its state lives once this returns."""
        trainable = any(slot.trainable for slot in plan.slots)
        placed = replace(plan, residence=self._residences.of(plan.chunk, trainable))
        bucket = (
            TiledBucket(placed, self.group, self.policy, self.memory_tiers)
            if isinstance(placed, TiledPlan)
            else Bucket(placed, self.group, self.policy, self.memory_tiers)
        )
        bucket.warned = self.warned
        return bucket

    def adopt(self, bucket: Bucket, entries: Sequence[Entry]) -> None:
        """Give ``entries`` the bucket's slots, in order. Nothing moves until :meth:`partition`.

        Those that are placed already must be :meth:`PartitionedConstruction.movable`.
        """
        self.buckets.append(bucket)
        for entry, slot in zip(entries, bucket.plan.slots, strict=True):
            if entry.placed:
                entry.destination = Place(bucket, slot)
            else:
                entry.place = Place(bucket, slot)

    def adopt_entries(self, entries: Sequence[Entry]) -> None:
        """Entries of another session become this one's."""
        for entry in entries:
            parameter = entry.parameter
            if parameter is not None:
                parameter.__class__ = self._class
                self._by_parameter[parameter] = entry
                self.entries.append(entry)

    def place(self, entries: Sequence[Entry]) -> None:
        """Give entries that no bucket holds yet, or only one of before the model was built, common buckets."""
        rest = [e for e in entries if not e.placed or self.construction.movable(e)]
        for plan, members in self._lay_out(rest, self.group.world_size):
            self.adopt(self.bucket(plan), members)

    def record(self) -> None:
        """Keep the timeline of the last step from now on. Idempotent."""
        if not isinstance(self.observer, Recorder):
            self.observer = Recorder(self.group.world_size)

    def initial_values(self, buckets: Sequence[Bucket]) -> list[str]:
        """What the buckets' parameters were when they were partitioned, a line each, for comparison."""
        homes = {bucket.home for bucket in buckets}
        return [
            f"a graph with {e.name} of initial bits {e.initial_bits:x}"
            for e in self.entries
            if e.placed and e.place.bucket in homes
        ]

    def agree(self, what: str) -> None:
        """Compare with the other ranks that ``what`` is what comes next.

        Raises:
            DivergenceError: they are about to do something else.
        """
        self.group.agree(what)

    def state(self, buckets: Sequence[Bucket]) -> list[str]:
        """What ranks must have in common beside the plan, a line each: steps done, buckets at hand."""
        lines = [f"after {self.steps} optimizer steps"] if self.steps else []
        held = [f"{b.serial} in {dtype}" for b, dtype in self.gather_cache if b in buckets]
        return [*lines, f"with buckets {', '.join(held)} at hand"] if held else lines

    def anywhere(self, here: Sequence[bool], what: str) -> list[bool]:
        """Which of ``here`` are true on any rank. Collective."""
        device = next((e.place.bucket.device for e in self.entries if e.placed), None)
        flags = torch.tensor(here, dtype=torch.int32, device=device)
        return [
            bool(x) for x in self.group.any(flags, f"which parameters of {what} have gradients")
        ]

    def gathered_bytes(self) -> GatheredBytes:
        """What was held at once, against what the plans allow."""
        planned = max((plan.peak_gathered_bytes for plan in self.plans), default=0)
        return GatheredBytes(self.gathered_peak, planned)

    def reduced_gradient(self, place: Place, reduced: torch.Tensor) -> torch.Tensor:
        """A parameter's gradient out of its reduced bucket, in the form the stage keeps."""
        bucket, slot = place
        if self.stage is Stage.OPTIMIZER:
            return bucket.whole(slot, reduced).to(bucket.gradient_dtype)
        return ShardedGradient(bucket.local(slot, reduced), place, bucket.gradient_dtype)
