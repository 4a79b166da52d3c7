"""Partitioning a model while it is built: each parameter by itself, and whole again while code writes to it.

Every rank runs the same initialisation on whole tensors, with the same random stream, and keeps its part
of the result; one whole parameter is in memory at a time. The first graph then gives the parameters the
buckets that it wants.
"""

import gc
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from zero_runtime.ir.plan import Slot
from zero_runtime.memory import native
from zero_runtime.session import Session
from zero_runtime.sharding.bucket import Bucket
from zero_runtime.sharding.parameter_state import Entry, ParameterState
from zero_runtime.sharding.sharded_gradient import Place


class PartitionedConstruction:
    """One session's model under construction: from :meth:`begin` to :meth:`finish`."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._provisional: set[Bucket] = set()
        self.active = False
        """Whether no graph of the model is known yet, and code may do what it likes with parameters."""
        self.taking = False
        """Whether copies of parameters are partitioned too."""

    def begin(self) -> None:
        """The model is about to be built."""
        self.active = True

    def finish(self, names: Mapping[str, nn.Parameter]) -> None:
        """The model is built, and known by these names."""
        self._session.gathered_views.settle(thorough=True)
        if self.active:
            self.active = False
            self.tidy()
        self.rename(names)

    # -------------------------------------------------------------- parameters come and change

    @torch.no_grad()
    def take(self, name: str, parameter: nn.Parameter, *, blank: bool = False) -> Entry:
        """Partition an ordinary parameter, in a bucket of its own. Not collective.

        Its value may be written to for as long as no other parameter is used, and is stored then; a
        ``blank`` one has none, and is zero until something is stored.
        """
        session = self._session
        entry = session.claim(name, parameter)
        session.place([entry])
        self._provisional.add(entry.place.bucket)
        whole = session.free_storage(entry)
        if not blank:
            session.gathered_views.keep(entry, whole, changed=True)
        return entry

    def working_copy(self, parameter: nn.Parameter) -> torch.Tensor:
        """The parameter's value, to be read and written in place. Collective unless it is at hand."""
        gathered_views, entry = self._session.gathered_views, self._session.entry(parameter)
        at_hand = gathered_views.at_hand(entry)
        if at_hand is not None:
            return at_hand
        gathered_views.settle()
        native.trim()  # parameters of one size follow those of another: buffers would pile up
        return gathered_views.keep(entry, self._session.gather_whole(parameter), changed=False)

    def edit(
        self, parameter: nn.Parameter, change: Callable[[torch.Tensor], Any], *, anew: bool
    ) -> None:
        """Apply ``change`` to the parameter's value, in place.

        Collective unless the value is at hand, or ``anew``: then ``change`` reads nothing of it.
        """
        gathered_views, entry = self._session.gathered_views, self._session.entry(parameter)
        at_hand = gathered_views.at_hand(entry)
        if anew and at_hand is None:
            slot, bucket = entry.place.slot, entry.place.bucket
            whole = torch.empty_strided(
                slot.shape, slot.stride, dtype=bucket.plan.torch_dtype, device=bucket.device
            )
            change(whole)
            gathered_views.keep(entry, whole, changed=True)
        else:
            change(self.working_copy(parameter))
        if anew:
            entry.begin_values()

    @torch.no_grad()
    def fill(self, entry: Entry, read: Callable[[torch.Tensor, int], None], digest: int) -> None:
        """Replace the value: ``read(target, start)`` fills a flat tensor with this rank's elements, the first
        of which is number ``start`` in memory order. ``digest`` is of all of them, the same on every rank.
        """
        bucket, slot = entry.place
        self._session.gathered_views.outdate([entry])
        bucket.fill(slot, read)
        entry.begin_values()
        entry.note_digest(digest)

    def is_blank(self, entry: Entry) -> bool:
        """Whether the parameter has no value yet."""
        return self._session.gathered_views.at_hand(entry) is None and not entry.noted

    def replace(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        """The parameter becomes ``value``, of another shape, dtype or device."""
        entry = self._session.entry(parameter)
        self._session.gathered_views.forget(entry)
        self.drop(entry.place.bucket)
        entry.restore(value)
        entry.begin_values()
        self.take(entry.name, parameter)

    # -------------------------------------------------------------- what becomes of the buckets

    def drop(self, bucket: Bucket) -> None:
        """The bucket holds nothing any more."""
        self._provisional.discard(bucket)
        self._session.buckets.remove(bucket)
        bucket.discard()

    def tidy(self) -> None:
        """Let go of parameters that are in no model any more: replaced by tied ones, say."""
        gc.collect()
        gone = [e for e in self._session.entries if e.parameter is None and self._alone(e)]
        for entry in gone:
            self._session.gathered_views.forget(entry)
            self.drop(entry.place.bucket)
            self._session.entries.remove(entry)

    def rename(self, names: Mapping[str, nn.Parameter]) -> None:
        """Parameters get the names that the finished model has for them."""
        session = self._session
        for name, parameter in names.items():
            entry = session.entry(parameter) if session.owns(parameter) else None
            if entry is not None and entry.name != name and self.movable(entry):
                entry.name = name
                self._relabel(entry.place.bucket, replace(entry.place.slot, name=name), entry)

    def _relabel(self, bucket: Bucket, slot: Slot, entry: Entry) -> None:
        bucket.plan = replace(bucket.plan, slots=(slot,))
        entry.place = Place(bucket, slot)

    def movable(self, entry: Entry) -> bool:
        """Whether a graph may give the entry a place in another bucket: nothing else refers to this one."""
        if entry.state is not ParameterState.SHARDED or not self._alone(entry):
            return False
        bucket, parameter = entry.place.bucket, entry.parameter
        idle = not bucket.tiered_tensors[1].used and entry.destination is None
        return idle and parameter is not None and parameter.grad is None and not self._session.steps

    def unseen(self) -> list[Bucket]:
        """Provisional buckets whose values the ranks have not compared, because no graph uses them."""
        return [b for b in self._session.buckets if b in self._provisional and not b.compared]

    def moving(self) -> list[Entry]:
        """Entries that have a destination."""
        return [e for e in self._session.entries if e.destination is not None]

    def move(self) -> None:
        """Bring every entry that has a destination there, one at a time. Collective."""
        moving = self.moving()
        for entry in moving:
            self._move(entry)
        for bucket in dict.fromkeys(entry.place.bucket for entry in moving):
            bucket.put_away()

    def _move(self, entry: Entry) -> None:
        parameter = entry.parameter
        if parameter is None:
            entry.destination = None
            return
        assert entry.destination is not None
        whole = self._session.gather_whole(parameter)
        entry.destination.bucket.store(entry.destination.slot, whole)
        self.drop(entry.place.bucket)
        entry.arrive()

    def _alone(self, entry: Entry) -> bool:
        return entry.placed and entry.place.bucket in self._provisional

    def absorb(self, other: Session) -> None:
        """Take over all that another session holds whose model is being built too."""
        session = self._session
        other.gathered_views.settle()
        self._provisional |= construction_of(other)._provisional
        session.buckets += other.buckets
        session.adopt_entries(other.entries)
        other.buckets, other.entries = [], []
        session.all_memory_tiers += other.all_memory_tiers


def construction_of(session: Session) -> PartitionedConstruction:
    """What partitions the session's model while it is built."""
    assert isinstance(session.construction, PartitionedConstruction)
    return session.construction
