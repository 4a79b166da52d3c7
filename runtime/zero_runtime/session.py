"""The session: owns one compiled model's shards and knows which parameter lies where."""

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from zero_runtime import compat
from zero_runtime.agreement import digest_of
from zero_runtime.bucket import Bucket, Flight, refuse_sparse
from zero_runtime.building import Building
from zero_runtime.carried import Carried
from zero_runtime.collectives import Group
from zero_runtime.depot import Depot
from zero_runtime.entry import Entry, ParameterState
from zero_runtime.errors import SwapError, UnsupportedError, ZeroError
from zero_runtime.gradient import Place, ShardedGradient
from zero_runtime.hooks import ModuleHook
from zero_runtime.lent import Lent
from zero_runtime.offload import Offload, Residences
from zero_runtime.parameter import ShardedParameter, as_plain, class_for
from zero_runtime.plan import BucketPlan, Plan, Policy, Stage, TiledPlan
from zero_runtime.recorder import Observer, Recorder, Silent
from zero_runtime.saved import SavedStore
from zero_runtime.tiles import TiledBucket
from zero_runtime.updates import Updates

_STAYS = Offload()

#: Buckets for parameters that no graph has used: (entries, world size) to plans and their entries.
LayOut = Callable[[Sequence[Entry], int], Iterable[tuple[BucketPlan, Sequence[Entry]]]]


class GatheredBytes(NamedTuple):
    """Bytes of gathered parameters: the most held at once, and the most any plan allows."""

    peak: int
    planned: int


class Session:
    """Everything one compiled model keeps between steps: entries, buckets, plans, on one group."""

    def __init__(
        self, group: Group, lay_out: LayOut, policy: Policy, offload: Offload = _STAYS
    ) -> None:
        self.group = group
        self.policy = policy
        self.offload = offload
        self.depot = Depot(offload)
        self.saved = SavedStore(self.depot)
        """What forwards have sent off the device for their backwards."""
        self.depots = [self.depot]
        """Its own, and those of sessions that it has absorbed."""
        self._residences = Residences(offload)
        self.updates = Updates(offload.in_backward)
        """Buckets that are updated inside backward."""
        self.stage = policy.stage
        self._lay_out = lay_out
        self.entries: list[Entry] = []
        self.buckets: list[Bucket] = []
        self.plans: list[Plan] = []
        self.gathered_peak = 0
        self.abandoned: list[object] = []
        self.warned: set[tuple[str, int]] = set()
        self.synchronise = True
        """Whether backward reduces gradients; off inside ``no_sync``."""
        self.leaves: weakref.WeakKeyDictionary[nn.Module, object] = weakref.WeakKeyDictionary()
        """Modules that are gathered as a whole, and what does it."""
        self.observer: Observer = Silent()
        """Told of every step of every graph."""
        self.carried = Carried()
        """Buckets gathered, or on their way, between two graphs."""
        self.opening: Sequence[tuple[Bucket, torch.dtype]] = ()
        """The first gathers of the forward that ran last."""
        self.steps = 0
        """Optimizer steps done."""
        self.lent = Lent(self._store)
        """Copies handed to eager code, which may write to them."""
        self._rescued: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._stepping = False
        self._refreshing: list[Flight] = []
        self.building = Building(self)
        """What partitions the model while it is built."""
        self.holdings: dict[Entry, list[Any]] = {}
        """Entries whose parameters are held whole, and by which blocks, outermost first."""
        self._by_parameter: compat.WeakIdKeyDictionary = compat.WeakIdKeyDictionary()
        self._class = class_for(self)

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
        if isinstance(placed, TiledPlan):
            return TiledBucket(placed, self.group, self.policy, self.depot)
        return Bucket(placed, self.group, self.policy, self.depot)

    def adopt(self, bucket: Bucket, entries: Sequence[Entry]) -> None:
        """Give ``entries`` the bucket's slots, in order. Nothing moves until :meth:`partition`.

        Those that are placed already must be :meth:`Building.movable`.
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
        self.building.move()
        members: dict[Bucket, list[Entry]] = {}
        for entry in self.entries:
            if entry.placed:
                members.setdefault(entry.place.bucket, []).append(entry)
        for bucket, entries in members.items():
            for entry in entries:
                entry.shard(self._class)
            bucket.put_away()

    def hollow(self, entry: Entry) -> torch.Tensor:
        """Free a placed parameter's memory. Returns its value, which nothing else holds then."""
        return entry.hollow(self._class)

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

    def rescue(self, root: nn.Module) -> None:
        """Have ``root.state_dict()`` see parameters also after a step that failed. Idempotent."""
        given = compat.compiled_module(root)
        root = root if given is None else given
        if root not in self._rescued:
            self._rescued.add(root)
            root.register_state_dict_pre_hook(ModuleHook(lambda *_: self.end_step()))

    def settle(self) -> None:
        """Before a step: reduce what was put off, partition what no graph has used."""
        self.building.finish({})
        for bucket in self.buckets:
            if bucket.waiting:
                self._reduce_waiting(bucket)
        rest = [e for e in self.entries if e.state is ParameterState.GUARDED and not e.placed]
        self.place(rest)
        if rest or self.building.moving():
            self.partition()
        fresh = list(dict.fromkeys(e.place.bucket for e in rest))
        fresh += [bucket for bucket in self.building.unseen() if bucket not in fresh]
        if fresh:
            values = self.initial_values(fresh)
            for bucket in fresh:
                bucket.compared = True
            self.group.agreement.check(digest_of(values), lambda: values, new=False)

    def _reduce_waiting(self, bucket: Bucket) -> None:
        waiting = set(bucket.waiting)
        self.agree(f"a reduction that no_sync put off, bucket {bucket.serial}")
        shard = bucket.reduce([], [])
        for entry in self.entries:
            parameter = entry.parameter
            if parameter is None or not entry.placed or entry.place.bucket is not bucket:
                continue
            if entry.place.slot in waiting:
                gradient = self.reduced_gradient(entry.place, shard)
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

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
        for entry in self.holdings:
            raise ZeroError(
                f"optimizer.step() inside a block that holds {entry.name} whole: leave the block of "
                "GatheredParameters first"
            )
        self.finish_refresh()
        self.carried.drop()
        if self.offload.active:
            for bucket in self.buckets:
                bucket.drop_fetch()
        self._stepping = True

    def refuse_ahead(self) -> None:
        """Raise if a graph would not see a change that was made to a parameter that is held whole.

        Raises:
            ZeroError: names the parameter.
        """
        for entry in self.holdings:
            if entry.ahead:
                raise ZeroError(
                    f"{entry.name} was changed inside a block that holds it whole, and a compiled graph "
                    "would not see that: leave the block of GatheredParameters first"
                )

    def end_step(self) -> None:
        """Bring back every parameter that is still a shard (also after an exception inside ``step()``).

        Raises:
            SwapError: something could not be read or written; all else is brought back.
        """
        if not self._stepping:
            return
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
            elif (bucket, dtype) not in self.carried:
                self.carried.put(bucket, dtype, bucket.start_gather(dtype))

    def state(self, buckets: Sequence[Bucket]) -> list[str]:
        """What ranks must have in common beside the plan, a line each: steps done, buckets at hand."""
        lines = [f"after {self.steps} optimizer steps"] if self.steps else []
        held = [f"{b.serial} in {dtype}" for b, dtype in self.carried if b in buckets]
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
        at_hand = self.lent.at_hand(entry)
        if at_hand is not None:
            return at_hand.detach().clone()
        self.lent.settle()
        if entry.whole:
            return as_plain(parameter).detach().clone()
        bucket, slot = entry.place
        self.agree(f"a gather of {slot.name} for code that is not compiled, bucket {bucket.serial}")
        return bucket.taken_out(slot, bucket.start_gather(bucket.plan.torch_dtype).land())

    def put(self, entry: Entry, whole: torch.Tensor) -> None:
        """Replace a placed parameter's value in its bucket, whatever the user's object holds."""
        self.lent.forget(entry)
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
        self.carried.drop()
        bucket.store(slot, whole)
        bucket.put_away()
        if not bucket.compared:
            entry.note_value(whole)

    def average(self, entry: Entry, gradient: torch.Tensor) -> torch.Tensor | None:
        """The mean of whole gradients over the ranks; partitioned if the parameter is. Collective.

        None where reductions are put off: the gradient waits in its bucket.

        Raises:
            UnsupportedError: the gradient is sparse.
        """
        refuse_sparse(entry.name, gradient)
        self._refuse_late(entry)
        if not entry.placed or self.stage is Stage.OPTIMIZER:
            self.agree(f"an average of the gradient of {entry.name} outside the compiled graphs")
            return self.group.average(gradient.clone())
        bucket, slot = entry.place
        if not self.synchronise:
            bucket.keep_whole([slot], [gradient])
            return None
        self.agree(f"a reduction of {slot.name} outside the graphs, bucket {bucket.serial}")
        return self.reduced_gradient(entry.place, bucket.reduce([slot], [gradient]))

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

    def average_buckets(
        self, entries: Sequence[Entry], gradients: Sequence[torch.Tensor], what: str
    ) -> list[torch.Tensor | None]:
        """As :meth:`average`, for many entries at once: one reduction a bucket."""
        members: dict[Bucket, list[int]] = {}
        for number, entry in enumerate(entries):
            self._refuse_late(entry)
            members.setdefault(entry.place.bucket, []).append(number)
        averaged: list[torch.Tensor | None] = [None] * len(entries)
        if self.synchronise:
            self.agree(f"a reduction of {what}, buckets {[b.serial for b in members]}")
        for bucket, numbers in members.items():
            slots = [entries[n].place.slot for n in numbers]
            whole = [gradients[n] for n in numbers]
            if not self.synchronise:
                bucket.keep_whole(slots, whole)
                continue
            reduced = bucket.reduce(slots, whole)
            for number in numbers:
                averaged[number] = self.reduced_gradient(entries[number].place, reduced)
        return averaged

    def reduced_gradient(self, place: Place, reduced: torch.Tensor) -> torch.Tensor:
        """A parameter's gradient out of its reduced bucket, in the form the stage keeps."""
        bucket, slot = place
        if self.stage is Stage.OPTIMIZER:
            return bucket.whole(slot, reduced).to(bucket.gradient_dtype)
        return ShardedGradient(bucket.local(slot, reduced), place, bucket.gradient_dtype)

    def place(self, entries: Sequence[Entry]) -> None:
        """Give entries that no bucket holds yet, or only one of before the model was built, common buckets."""
        rest = [e for e in entries if not e.placed or self.building.movable(e)]
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
        self.group.agreement.check(digest_of([what]), lambda: [what], new=False)

    def gathered_bytes(self) -> GatheredBytes:
        """What was held at once, against what the plans allow."""
        planned = max((plan.peak_gathered_bytes for plan in self.plans), default=0)
        return GatheredBytes(self.gathered_peak, planned)


def session_of(parameter: object) -> Session | None:
    """The session that owns a partitioned parameter; None for any other object."""
    return type(parameter).session if isinstance(parameter, ShardedParameter) else None
