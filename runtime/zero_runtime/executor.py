"""Runs one compiled graph by its plan: starts, waits and releases in the planned order, counted in bytes."""

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch._ops import OpOverload

from zero_runtime.comm.consistency import digest_of
from zero_runtime.comm.transports import Done
from zero_runtime.errors import PlanError
from zero_runtime.ir import ops
from zero_runtime.ir.plan import OF_SAVED, Phase, Plan, Slot, StepKind
from zero_runtime.ir.strides import in_memory_order
from zero_runtime.memory.buffers import without_storage
from zero_runtime.offload.memory_tiers import Moving
from zero_runtime.offload.saved_tensors import SavedTensorMoves
from zero_runtime.session import Session
from zero_runtime.sharding.bucket import Bucket, Flight, refuse_sparse
from zero_runtime.sharding.put_off import whole_like
from zero_runtime.sharding.sharded_gradient import Place, SpentGradient
from zero_runtime.sharding.tiled_bucket import Arriving, TiledBucket

#: The executor whose graph runs in this context. Dynamic scope keeps session names out of the
#: graphs, so that equal graphs share compiled code.
_current: ContextVar["Executor"] = ContextVar("zero_executor")


def current() -> "Executor":
    """The executor of the running graph.

    Raises:
        PlanError: called outside a graph compiled by a zero backend.
    """
    try:
        return _current.get()
    except LookupError:
        raise PlanError(
            "a zero3 operator ran outside a graph that a zero backend compiled"
        ) from None


class Executor:
    """A compiled graph as AOTAutograd calls it: a list of arguments in, a list of outputs out.

    ``buckets`` are the plan's, in its order. ``gradients`` says which outputs of a backward graph
    are reduced buckets, and for which parameter: those leave as :class:`ShardedGradient`.
    """

    def __init__(
        self,
        session: Session,
        plan: Plan,
        buckets: Sequence[Bucket],
        compiled: Any,
        gradients: Mapping[int, Place],
    ) -> None:
        self._boxed_call = True  # in the instance's dict: torch copies that to its wrappers
        self.session = session
        self.plan = plan
        self._buckets = tuple(buckets)
        self._compiled = compiled
        self._gradients = gradients
        self._expected = [(s.kind, s.bucket) for s in plan.steps if s.kind not in _WAITS]
        self._cursor = 0
        self._flights: dict[tuple[StepKind, int], Flight] = {}
        self._dtypes: dict[int, torch.dtype] = {}
        self._gathered = 0
        self._reduced: dict[int, list[Slot]] = {}
        self._own: dict[Slot, torch.Tensor] = {}
        """Whole gradients that are not reduced now, by the slots of their parameters."""
        self._along: dict[Slot, torch.Tensor] = {}
        """Such gradients of earlier backwards, which reductions of this one take along: each slot once."""
        self._taken: set[Slot] = set()
        self._evicting: list[Moving | Arriving] = []
        self._crossing = SavedTensorMoves(session.saved, plan)
        self._outline = [*plan.outline(), f"the end, over {', '.join(map(_name, self._buckets))}"]
        self._digest = digest_of(self._outline)
        self._opening = [(self._buckets[b], dtype) for b, dtype in plan.opening()]
        self._new = True

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        self.session.finish_refresh()
        self.session.gathered_views.settle()
        self.session.unpin()
        self.session.refuse_ahead()
        self._agree()
        self._cursor, self._gathered = 0, 0
        if self.plan.phase is Phase.FORWARD:
            self.session.opening = self._opening
            self.session.updates.expect(list(dict.fromkeys(b.home for b in self._buckets)))
        if self._gradients and self.session.synchronise:
            self._along = self.session.late.take_along(self._gradients.values())
            self.session.late.reduce_after_backward()
        token = _current.set(self)
        self.session.observer.begin(self.plan)
        try:
            outputs = self._compiled(args)
            self._finish()
            self.session.observer.end()
        finally:
            _current.reset(token)
            self._abandon()
        return self._with_gradients(outputs) if self._gradients else outputs

    def _agree(self) -> None:
        """Ranks compare what they run, and at a bucket's first use the values they have partitioned.

        Two comparisons: a rank that alone compiles a graph anew, for other shapes, has no values left
        to compare, and must find the graph as the others knew it.
        """
        outline, digest = self._outline, self._digest
        agreement = self.session.group.agreement
        state = self.session.state(self._buckets)
        if state:
            outline = [*outline, *state]
            digest = digest_of(outline)
        agreement.check(digest, lambda: outline, new=self._new, lasting=lambda: self._outline)
        self._new = False
        fresh = [bucket for bucket in self._buckets if not bucket.compared]
        if fresh:
            values = self.session.initial_values(fresh)
            agreement.check(digest_of(values), lambda: values, new=True)
        for bucket in fresh:
            bucket.compared = True

    # -------------------------------------------------------------- the steps

    def start_gather(self, bucket: int, dtype: torch.dtype) -> None:
        """Start filling a buffer with the bucket, in ``dtype``."""
        self._advance(StepKind.ALL_GATHER_START, bucket)
        gather_cache = self.session.gather_cache.take(self._buckets[bucket], dtype)
        flight = gather_cache or self._buckets[bucket].start_gather(dtype)
        self._flights[StepKind.ALL_GATHER_START, bucket] = flight
        self._dtypes[bucket] = dtype
        held = self._buckets[bucket].plan.gathered_bytes(dtype)
        if flight.transfer is not _KEPT:
            self.session.observer.started(StepKind.ALL_GATHER_START, bucket, held)
        self._gathered += held
        self.session.gathered_peak = max(self.session.gathered_peak, self._gathered)

    def finish_gather(self, bucket: int) -> torch.Tensor:
        """The gathered bucket, flat, once it has arrived."""
        gathered = self._land(StepKind.ALL_GATHER_WAIT, bucket)
        if bucket in self.plan.kept:
            self._carry(bucket, Flight(gathered, _KEPT))
        return gathered

    def _carry(self, bucket: int, flight: Flight) -> None:
        self.session.gather_cache.put(self._buckets[bucket], self._dtypes[bucket], flight)

    def release(self, bucket: int, dtype: torch.dtype) -> None:
        """Count the bucket's buffer as free; its memory returns when the graph drops it, which is next."""
        self._advance(StepKind.RELEASE, bucket)
        if bucket not in self.plan.kept:
            self._gathered -= self._buckets[bucket].plan.gathered_bytes(dtype)
            self.session.observer.released(bucket)

    def start_reduce(
        self, bucket: int, slots: Sequence[int], gradients: Sequence[torch.Tensor]
    ) -> None:
        """Start averaging whole gradients of some of the bucket's slots."""
        self._advance(StepKind.REDUCE_SCATTER_START, bucket)
        places = [self._buckets[bucket].plan.slots[i] for i in slots]
        self._reduced[bucket] = places
        step = (StepKind.REDUCE_SCATTER_START, bucket)
        if not self.session.synchronise:
            self._keep(self._buckets[bucket], places, gradients)
            self._flights[step] = Flight(self._buckets[bucket].empty_shard(), Done())
            return
        along = self._take_along(self._buckets[bucket], places)
        self._flights[step] = self._buckets[bucket].start_reduce(places, gradients, along)
        self.session.observer.started(*step, self._buckets[bucket].reducing_bytes)

    def _keep(
        self, bucket: Bucket, slots: Sequence[Slot], gradients: Sequence[torch.Tensor]
    ) -> None:
        """Add whole gradients to those of their parameters. Copies: the graph goes on using the memory."""
        for slot, gradient in zip(slots, gradients, strict=True):
            refuse_sparse(slot.name, gradient)
            home = bucket.home_slot(slot)
            if home not in self._own:
                self._own[home] = whole_like(Place(bucket.home, home)).zero_()
            bucket.share_of(slot, self._own[home]).add_(gradient)

    def _take_along(self, bucket: Bucket, slots: Sequence[Slot]) -> dict[Slot, torch.Tensor]:
        """What was put off for these slots, each once, though a graph may reduce a tile twice."""
        found = {}
        for slot in slots:
            home = bucket.home_slot(slot)
            if home in self._along and slot not in self._taken:
                found[slot] = bucket.share_of(slot, self._along[home])
                self._taken.add(slot)
        return found

    def finish_reduce(self, bucket: int) -> torch.Tensor:
        """This rank's part of the averaged bucket, flat, once it is complete."""
        return self._land(StepKind.REDUCE_SCATTER_WAIT, bucket)

    def start_read(self, bucket: int) -> None:
        """Start reading this rank's shard of the bucket from NVMe to the host."""
        self._advance(StepKind.READ_START, bucket)
        self._buckets[bucket].start_read()

    def start_fetch(self, bucket: int) -> None:
        """Start moving this rank's shard of the bucket from the host to the device."""
        self._advance(StepKind.FETCH_START, bucket)
        self._buckets[bucket].start_fetch()

    def evict(self, bucket: int, reduced: torch.Tensor) -> torch.Tensor:
        """Move a reduced gradient of the bucket to the host; it is there when the graph has run."""
        self._advance(StepKind.EVICT, bucket)
        if not self.session.synchronise:  # nothing was reduced: no_sync keeps gradients whole
            return self.session.memory_tiers.host(reduced.numel(), reduced.dtype)
        moving = self._buckets[bucket].evict(reduced)
        if self._buckets[bucket].home is not self._buckets[bucket]:
            # nobody reads a tile's: :meth:`assemble` has the values
            return torch.empty_like(moving.tensor)
        if self.session.updates.take(self._buckets[bucket], self._reduced[bucket], moving):
            return without_storage(moving.tensor)
        self._evicting.append(moving)
        return moving.tensor

    def assemble(self, tiles: Sequence[int]) -> torch.Tensor:
        """The gradient whose tiles are these buckets, all of which have been reduced, or evicted."""
        whole = self._buckets[tiles[0]].home
        assert isinstance(whole, TiledBucket)
        gradient = whole.collect()
        if isinstance(gradient, Flight) or not self.session.synchronise:
            return gradient.tensor  # under no_sync nothing was reduced, and nothing is on its way
        if self.session.updates.take(whole, whole.plan.slots, gradient):
            return without_storage(gradient.tensor)
        self._evicting.append(gradient)
        return gradient.tensor

    # -------------------------------------------------------------- saved tensors

    def start_offload(
        self, number: int, saved: torch.Tensor, stride: tuple[int, ...]
    ) -> torch.Tensor:
        """Start moving a saved tensor off the device; what autograd is to hold in its place.

        The copy lies in the memory order of ``stride``, which is what backward expects.
        """
        self._advance(StepKind.OFFLOAD_START, number)
        flat = in_memory_order(saved, stride)
        away = self._crossing.start_offload(number, flat, saved.data_ptr())
        self.session.observer.started(StepKind.OFFLOAD_START, number, 0)
        return away

    def finish_offload(self, number: int, saved: torch.Tensor) -> None:
        """The saved tensor's memory is no longer needed; it returns when the graph drops it, which is next."""
        self._advance(StepKind.OFFLOAD_WAIT, number)
        self.session.observer.waits()
        self._crossing.finish_offload(number, saved.data_ptr())
        self.session.observer.arrived(StepKind.OFFLOAD_START, number)

    def start_recall(self, number: int, away: torch.Tensor) -> None:
        """Start reading a saved tensor from NVMe to the host."""
        self._advance(StepKind.RECALL_START, number)
        self._crossing.start_recall(number, away)

    def start_reload(self, number: int, away: torch.Tensor, device: torch.device) -> None:
        """Start moving a saved tensor from the host to the device."""
        self._advance(StepKind.RELOAD_START, number)
        self._crossing.start_reload(number, away, device)
        self.session.observer.started(StepKind.RELOAD_START, number, 0)

    def finish_reload(self, number: int) -> torch.Tensor:
        """The saved tensor, flat, once it has arrived."""
        self.session.observer.waits()
        saved = self._crossing.finish_reload(number)
        self.session.observer.arrived(StepKind.RELOAD_START, number)
        return saved

    # -------------------------------------------------------------- order

    def _advance(self, kind: StepKind, bucket: int) -> None:
        if (kind, bucket) in self._flights:
            raise PlanError(f"{self.plan.name}: {_say((kind, bucket))} ran while it is under way")
        planned = self._expected[self._cursor] if self._cursor < len(self._expected) else None
        if planned != (kind, bucket):
            raise PlanError(
                f"{self.plan.name}: step {self._cursor} was planned as {_say(planned)} and ran as "
                f"{_say((kind, bucket))}. The compiled code left the planned order; please report it."
            )
        self._cursor += 1

    def _land(self, kind: StepKind, bucket: int) -> torch.Tensor:
        """Two waits between the same starts may change places; a wait before its start may not."""
        flight = self._flights.pop((_WAITS[kind], bucket), None)
        if flight is None:
            raise PlanError(f"{self.plan.name}: {_say((kind, bucket))} ran before its start")
        self.session.observer.waits()
        landed = flight.land()
        if flight.transfer is not _KEPT:
            self.session.observer.arrived(_WAITS[kind], bucket)
        return landed

    def _finish(self) -> None:
        for moving in self._evicting:
            moving.land()
        self._evicting.clear()
        self._crossing.finish()
        for bucket in self.plan.early:
            flight = self._flights.pop((StepKind.ALL_GATHER_START, bucket), None)
            if flight is not None:
                self._carry(bucket, flight)
        if self._flights:
            late = ", ".join(_say(step) for step in self._flights)
            raise PlanError(f"{self.plan.name}: {late} was never waited for")
        if self._cursor != len(self._expected):
            raise PlanError(
                f"{self.plan.name}: {self._cursor} of {len(self._expected)} planned steps ran; next "
                f"would have been {_say(self._expected[self._cursor])}."
            )

    def _abandon(self) -> None:
        """After a failure, keep what is in flight alive: its memory may still be written to."""
        self.session.abandoned.extend(self._flights.values())
        self.session.abandoned.extend(self._crossing.abandon())
        for bucket in self._buckets:
            bucket.home.forget()
        self._flights.clear()
        self._evicting.clear()
        self._along.clear()
        self._taken.clear()

    def _with_gradients(self, outputs: Sequence[Any]) -> list[Any]:
        result = list(outputs)
        for position, place in self._gradients.items():
            result[position] = self._gradient(place, result[position])
        self._own.clear()
        return result

    def _gradient(self, place: Place, reduced: torch.Tensor) -> torch.Tensor:
        if not self.session.synchronise:
            return self.session.late.keep(place, self._own[place.slot])
        if self.session.updates.has(place.bucket):
            return SpentGradient(place)
        return self.session.returned_gradient(place, reduced)


#: Each wait that may change places with others, and the start it waits for.
_WAITS = {
    StepKind.ALL_GATHER_WAIT: StepKind.ALL_GATHER_START,
    StepKind.REDUCE_SCATTER_WAIT: StepKind.REDUCE_SCATTER_START,
    StepKind.RELOAD_WAIT: StepKind.RELOAD_START,
}


#: The transfer of a bucket that the graph before has kept.
_KEPT = Done()


def _name(bucket: Bucket) -> str:
    first, last = bucket.plan.slots[0].name, bucket.plan.slots[-1].name
    return f"bucket {bucket.serial} ({first if first == last else f'{first} to {last}'})"


def _say(step: tuple[StepKind, int] | None) -> str:
    if step is None:
        return "the end"
    kind, number = step
    return f"{kind} of {'saved tensor' if kind in OF_SAVED else 'bucket'} {number}"


# ------------------------------------------------------------------------------ what the operators do


def _start_gather(_: Any, bucket: int, dtype: torch.dtype) -> torch.Tensor:
    current().start_gather(bucket, dtype)
    return ops.ticket()


def _start_reduce(
    gradients: Sequence[torch.Tensor], _: Any, bucket: int, slots: Sequence[int]
) -> torch.Tensor:
    current().start_reduce(bucket, slots, gradients)
    return ops.ticket()


#: By operator: its operands in the order of its schema.
_KERNELS: Mapping[OpOverload, Callable[..., Any]] = {
    ops.token: ops.ticket,
    ops.all_gather_start: _start_gather,
    ops.all_gather_wait: lambda _t, _c, bucket, *_: current().finish_gather(bucket),
    ops.release: lambda _g, _c, bucket, dtype: current().release(bucket, dtype),
    ops.read_start: lambda _, bucket: current().start_read(bucket),
    ops.fetch_start: lambda _, bucket: current().start_fetch(bucket),
    ops.evict: lambda reduced, _, bucket: current().evict(bucket, reduced),
    ops.keep: lambda gathered: gathered.clone(memory_format=torch.preserve_format),
    ops.offload_start: lambda saved, _, number, stride, _n: current().start_offload(
        number, saved, tuple(stride)
    ),
    ops.offload_wait: lambda saved, _, number: current().finish_offload(number, saved),
    ops.recall_start: lambda away, _, number: current().start_recall(number, away),
    ops.reload_start: lambda away, _, number, device: current().start_reload(number, away, device),
    ops.reload_wait: lambda _, number, *_o: current().finish_reload(number),
    ops.reduce_scatter_start: _start_reduce,
    ops.reduce_scatter_wait: lambda _t, _c, bucket, *_: current().finish_reduce(bucket),
    ops.assemble: lambda _p, _c, buckets, *_: current().assemble(buckets),
}
for _operator, _kernel in _KERNELS.items():
    ops.implement(_operator, _kernel)
