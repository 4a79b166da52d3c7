"""The session: owns one compiled model's shards and knows which parameter lies where."""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import nn

from zero_runtime import compat
from zero_runtime.comm.consistency import digest_of
from zero_runtime.comm.transports import Group
from zero_runtime.errors import SwapError, UnsupportedError, ZeroError
from zero_runtime.ir.placement import Offload
from zero_runtime.ir.plan import BucketPlan, Plan, Stage, StatePolicy, TiledPlan
from zero_runtime.memory.buffers import as_plain
from zero_runtime.notices import Lines
from zero_runtime.offload.memory_tiers import MemoryTiers
from zero_runtime.offload.residences import Residences
from zero_runtime.offload.saved_tensors import SavedStore
from zero_runtime.recorder import Observer, Recorder, Silent
from zero_runtime.sharding.bucket import Bucket, Flight, refuse_sparse
from zero_runtime.sharding.gather_cache import GatherCache
from zero_runtime.sharding.gathered_views import GatheredViews
from zero_runtime.sharding.parameter_state import Entry, ParameterState
from zero_runtime.sharding.put_off import LateReductions, PutOffGradient, whole_like
from zero_runtime.sharding.sharded_gradient import Place, ShardedGradient, SpentGradient
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

    session: ClassVar["Session"]


class Session:
    """Everything one compiled model keeps between steps: entries, buckets, plans, on one group."""

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
        self.late = LateReductions(self)
        """Gradients that ``no_sync`` puts off."""
        self._pinned: list[Entry] = []
        self._averaged: dict[Entry | Place, tuple[int, int]] = {}
        """Plain gradients that were averaged here, until they arrive at their parameters."""
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
        self.gathered_views = GatheredViews(self._store)
        """Copies handed to eager code, which may write to them."""
        self._stepping = False
        self._refreshing: list[Flight] = []
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

    def record(self) -> None:
        """Keep the timeline of the last step from now on. Idempotent."""
        if not isinstance(self.observer, Recorder):
            self.observer = Recorder(self.group.world_size)

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

    @torch.no_grad()
    def partition(self) -> None:
        """Keep this rank's part of every placed parameter and free the rest.

        Collective where parameters were partitioned one by one while the model was built: they move.
        """
        self.construction.move()
        members: dict[Bucket, list[Entry]] = {}
        for entry in self.entries:
            if entry.placed:
                members.setdefault(entry.place.bucket, []).append(entry)
        for bucket, entries in members.items():
            for entry in entries:
                entry.shard(self._class)
                entry.watch(_arrives)
                if entry.pinned and entry not in self._pinned:
                    self._pinned.append(entry)
            bucket.put_away()

    def free_storage(self, entry: Entry) -> torch.Tensor:
        """Free a placed parameter's memory. Returns its value, which nothing else holds then."""
        whole = entry.free_storage(self._class)
        entry.watch(_arrives)
        return whole

    def adopt_entries(self, entries: Sequence[Entry]) -> None:
        """Entries of another session become this one's."""
        for entry in entries:
            parameter = entry.parameter
            if parameter is not None:
                parameter.__class__ = self._class
                self._by_parameter[parameter] = entry
                self.entries.append(entry)

    def guard(self, entries: Iterable[Entry]) -> None:
        """Watch over parameters outside the graph: eager code that trains them has them averaged."""
        for entry in entries:
            entry.guard(self._class)
            entry.watch(_arrives)

    def settle(self) -> None:
        """Before a step: reduce what was put off, partition what no graph has used."""
        self.construction.finish({})
        self.late.reduce()
        rest = [e for e in self.entries if e.state is ParameterState.GUARDED and not e.placed]
        self._partition_rest(rest)

    def _partition_trained(self) -> None:
        """After a backward: what eager code trains has gradients of the graphs' kind from the first step on."""
        guarded = [e for e in self.entries if e.state is ParameterState.GUARDED and not e.placed]
        self._partition_rest(guarded)

    def _partition_rest(self, rest: Sequence[Entry]) -> None:
        """Give parameters that no graph has used buckets, and compare the values. Collective."""
        self.place(rest)
        if rest or self.construction.moving():
            self.partition()
        fresh = list(dict.fromkeys(e.place.bucket for e in rest))
        fresh += [bucket for bucket in self.construction.unseen() if bucket not in fresh]
        if fresh:
            values = self.initial_values(fresh)
            for bucket in fresh:
                bucket.compared = True
            self.group.agreement.check(digest_of(values), lambda: values, new=False)

    # -------------------------------------------------------------- the optimizer's step

    def begin_step(self, parameters: Iterable[nn.Parameter]) -> None:
        """Turn parameters into their flat shards for ``optimizer.step()``."""
        self._freeze()
        for parameter in parameters:
            self.entry(parameter).begin_step()

    def step_aside(self, parameter: nn.Parameter) -> None:
        """Take a parameter out of the stock ``step()``: its gradient waits for an update of our own."""
        self._freeze()
        self.entry(parameter).step_aside()

    def _freeze(self) -> None:
        """Values are about to change: nothing gathered or fetched stays. Once a step, not once a parameter."""
        if self._stepping:
            return
        self.unpin(at_once=True)
        for entry in self.unsharded:
            raise ZeroError(
                f"optimizer.step() inside a block that holds {entry.name} whole: leave the block of "
                "GatheredParameters first"
            )
        self.finish_refresh()
        self.gather_cache.drop()
        if self.offload.active:
            for bucket in self.buckets:
                bucket.drop_fetch()
        self._stepping = True

    def unpin(self, *, at_once: bool = False) -> None:
        """Free parameters that stayed whole for an autograd graph older than their partition, ``at_once`` (a
        step changes them, after which a backward of that graph is autograd's own error) or if it is done.
        """
        for entry in self._pinned:
            if entry.ahead and entry.parameter is not None:  # written to, by every rank
                self.put(entry, as_plain(entry.parameter).detach())
                entry.mark()
        done = [entry for entry in self._pinned if entry.unpin(at_once=at_once)]
        for entry in done:
            self._pinned.remove(entry)
            if entry not in self.unsharded:
                entry.reshard()

    def refuse_ahead(self) -> None:
        """Raise if a graph would not see a change that was made to a parameter that is held whole.

        Raises:
            ZeroError: names the parameter.
        """
        for entry in self.unsharded:
            if entry.ahead:
                raise ZeroError(
                    f"{entry.name} was changed inside a block that holds it whole, and a compiled graph "
                    "would not see that: leave the block of GatheredParameters first"
                )

    def end_step(self) -> None:
        """Bring back every parameter that is still a shard.

        Raises:
            SwapError: something could not be read or written; all else is brought back.
        """
        if not self._stepping:
            return
        self.gathered_views.outdate({entry for entry in self.entries if entry.changing})
        for entry in self.entries:
            entry.end_step(self._class)
        self._stepping, failures = False, []
        for bucket in self.buckets:
            for act in (bucket.close_step, bucket.put_away):
                try:
                    act()
                except SwapError as error:
                    failures.append(error)
        if failures:
            raise failures[0]

    def start_refresh(self) -> None:
        """After a step: start the gathers that come first now.

        At stages 1 and 2 those of all that was updated, at stage 3 those that open the next forward.
        """
        self.steps += 1
        self.updates.reset()
        if self.stage is Stage.PARAMETERS:
            self._open_next_forward()
        else:
            self._refreshing = [bucket.start_refresh() for bucket in self.buckets]

    def _open_next_forward(self) -> None:
        for bucket, dtype in self.opening:
            if bucket.lives_on_host:  # on its way at least: a gather would have to wait for it here
                bucket.start_read()
            elif (bucket, dtype) not in self.gather_cache:
                self.gather_cache.put(bucket, dtype, bucket.start_gather(dtype))

    def state(self, buckets: Sequence[Bucket]) -> list[str]:
        """What ranks must have in common beside the plan, a line each: steps done, buckets at hand."""
        lines = [f"after {self.steps} optimizer steps"] if self.steps else []
        held = [f"{b.serial} in {dtype}" for b, dtype in self.gather_cache if b in buckets]
        return [*lines, f"with buckets {', '.join(held)} at hand"] if held else lines

    def finish_refresh(self) -> None:
        """Before parameters are read again."""
        self.updates.finish()
        for flight in self._refreshing:
            flight.land()
        self._refreshing.clear()

    # -------------------------------------------------------------- whole parameters, one at a time

    @torch.no_grad()
    def gather_whole(self, parameter: nn.Parameter) -> torch.Tensor:
        """The parameter's value, a plain tensor of the logical shape. Collective once partitioned."""
        entry = self.entry(parameter)
        at_hand = self.gathered_views.at_hand(entry)
        if at_hand is not None:
            return at_hand.detach().clone()
        self.gathered_views.settle()
        if entry.whole:
            return as_plain(parameter).detach().clone()
        bucket, slot = entry.place
        self.agree(f"a gather of {slot.name} for code that is not compiled, bucket {bucket.serial}")
        return bucket.taken_out(slot, bucket.start_gather(bucket.plan.torch_dtype).land())

    def put(self, entry: Entry, whole: torch.Tensor) -> None:
        """Replace a placed parameter's value in its bucket, whatever the user's object holds."""
        self.gathered_views.outdate([entry])
        self._store(entry, whole)

    def store_whole(self, parameter: nn.Parameter, whole: torch.Tensor) -> None:
        """Replace the parameter's value by ``whole``, of which each rank keeps its part. Not collective."""
        if self.entry(parameter).whole:
            as_plain(parameter).detach().copy_(whole)
            return
        self.put(self.entry(parameter), whole)

    @torch.no_grad()
    def _store(self, entry: Entry, whole: torch.Tensor) -> None:
        bucket, slot = entry.place
        self.gather_cache.drop()
        bucket.store(slot, whole)
        bucket.put_away()
        if not bucket.compared:
            entry.note_value(whole)

    def average(self, entry: Entry, gradient: torch.Tensor) -> torch.Tensor:
        """The mean of whole gradients over the ranks; partitioned if the parameter is. Collective.

        Not collective where reductions are put off.

        Raises:
            UnsupportedError: the gradient is sparse.
        """
        refuse_sparse(entry.name, gradient)
        self._refuse_late(entry)
        if entry.placed and not self.synchronise:
            return self.late.keep(entry.place, whole_like(entry.place).copy_(gradient))
        self.late.reduce_after_backward()
        if not entry.placed or self.stage is Stage.OPTIMIZER:
            if not entry.placed:
                compat.after_backward(self._partition_trained)
            what = f"an average of the gradient of {entry.name} outside the compiled graphs"
            averaged = self.group.average(gradient.clone(), what)
            self._averaged[entry.place if entry.placed else entry] = _identity(averaged)
            return averaged
        bucket, slot = entry.place
        self.agree(f"a reduction of {slot.name} outside the graphs, bucket {bucket.serial}")
        return self.reduced_gradient(entry.place, bucket.reduce([slot], [gradient]))

    def returned_gradient(self, place: Place, reduced: torch.Tensor) -> torch.Tensor:
        """As :meth:`reduced_gradient`, for autograd, which brings it to :meth:`arriving`."""
        gradient = self.reduced_gradient(place, reduced)
        if self.stage is Stage.OPTIMIZER:
            self._averaged[place] = _identity(gradient)
        return gradient

    def arriving(self, entry: Entry, gradient: torch.Tensor) -> torch.Tensor | None:
        """The mean of a plain gradient that autograd is about to accumulate; None if it is that already.

        Collective, unless it is one that was averaged here: what came another way is each rank's own, and
        the mean of a sum of both is right too.
        """
        known = self._averaged.pop(entry.place if entry.placed else entry, None)
        return None if known == _identity(gradient) else self.average(entry, gradient)

    def _refuse_late(self, entry: Entry) -> None:
        if entry.placed and self.updates.has(entry.place.bucket):
            raise UnsupportedError(
                f"{entry.name} was updated inside backward, and code outside the compiled graphs has a "
                "further gradient for it: turn the option 'update_in_backward' off."
            )

    @torch.no_grad()
    def gather_buckets(self, buckets: Sequence[Bucket], what: str) -> list[torch.Tensor]:
        """Whole buckets, ``[padded]`` each, for ``what``. Collective."""
        self.agree(f"a gather of {what}, buckets {[b.serial for b in buckets]}")
        flights = [bucket.start_gather(bucket.plan.torch_dtype) for bucket in buckets]
        return [flight.land() for flight in flights]

    def anywhere(self, here: Sequence[bool], what: str) -> list[bool]:
        """Which of ``here`` are true on any rank. Collective."""
        device = next((e.place.bucket.device for e in self.entries if e.placed), None)
        flags = torch.tensor(here, dtype=torch.int32, device=device)
        return [
            bool(x) for x in self.group.any(flags, f"which parameters of {what} have gradients")
        ]

    def average_buckets(
        self, entries: Sequence[Entry], gradients: Sequence[torch.Tensor], what: str
    ) -> list[torch.Tensor]:
        """As :meth:`average`, for many entries at once: one reduction a bucket."""
        members: dict[Bucket, list[int]] = {}
        for number, entry in enumerate(entries):
            self._refuse_late(entry)
            members.setdefault(entry.place.bucket, []).append(number)
        if not self.synchronise:
            pairs = zip((e.place for e in entries), gradients, strict=True)
            return [self.late.keep(place, whole_like(place).copy_(g)) for place, g in pairs]
        averaged: list[Any] = [None] * len(entries)
        self.agree(f"a reduction of {what}, buckets {[b.serial for b in members]}")
        along = self.late.take_along(e.place for e in entries)
        for bucket, numbers in members.items():
            slots = [entries[n].place.slot for n in numbers]
            with_it = {slot: along[slot] for slot in slots if slot in along}
            reduced = bucket.reduce(slots, [gradients[n] for n in numbers], with_it)
            for number in numbers:
                averaged[number] = self.returned_gradient(entries[number].place, reduced)
        self.late.reduce_after_backward()
        return averaged

    def reduced_gradient(self, place: Place, reduced: torch.Tensor) -> torch.Tensor:
        """A parameter's gradient out of its reduced bucket, in the form the stage keeps."""
        bucket, slot = place
        if self.stage is Stage.OPTIMIZER:
            return bucket.whole(slot, reduced).to(bucket.gradient_dtype)
        return ShardedGradient(bucket.local(slot, reduced), place, bucket.gradient_dtype)

    def place(self, entries: Sequence[Entry]) -> None:
        """Give entries that no bucket holds yet, or only one of before the model was built, common buckets."""
        rest = [e for e in entries if not e.placed or self.construction.movable(e)]
        for plan, members in self._lay_out(rest, self.group.world_size):
            self.adopt(self.bucket(plan), members)

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

    def gathered_bytes(self) -> GatheredBytes:
        """What was held at once, against what the plans allow."""
        planned = max((plan.peak_gathered_bytes for plan in self.plans), default=0)
        return GatheredBytes(self.gathered_peak, planned)


def _arrives(entry: Entry, gradient: torch.Tensor | None) -> torch.Tensor | None:
    """A hook: the gradient of a parameter in the form its stage keeps. Collective where it is this rank's
    own, because it came another way than through our operators.
    """
    session = session_of(entry.parameter)
    if session is None or gradient is None:
        return None
    if isinstance(gradient, PutOffGradient):
        session.late.make_room(entry)
    if isinstance(gradient, ShardedGradient | SpentGradient | PutOffGradient):
        return None
    return session.arriving(entry, gradient)


def _identity(gradient: torch.Tensor) -> tuple[int, int]:
    """Tells a gradient from any other, and from what it is after something was added to it."""
    return gradient.data_ptr(), gradient._version


def session_of(parameter: object) -> Session | None:
    """The session that owns a partitioned parameter; None for any other object."""
    return type(parameter).session if isinstance(parameter, Partitioned) else None
