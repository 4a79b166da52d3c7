"""Whole parameters and whole gradients, for code that is not compiled."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from zero_runtime import compat
from zero_runtime.comm.transports import Group
from zero_runtime.errors import UnsupportedError
from zero_runtime.ir.placement import Offload
from zero_runtime.ir.plan import Stage, StatePolicy
from zero_runtime.memory.buffers import as_plain
from zero_runtime.session.partitioning import Partitioning
from zero_runtime.session.registry import LayOut
from zero_runtime.sharding.bucket import Bucket, refuse_sparse
from zero_runtime.sharding.gathered_views import GatheredViews
from zero_runtime.sharding.parameter_state import Entry
from zero_runtime.sharding.put_off import PutOffGradient, whole_like
from zero_runtime.sharding.sharded_gradient import Place, ShardedGradient, SpentGradient


class WholeValues(Partitioning):
    """Gathers and stores whole parameters, and averages whole gradients, one at a time or many."""

    def __init__(
        self, group: Group, lay_out: LayOut, policy: StatePolicy, offload: Offload
    ) -> None:
        super().__init__(group, lay_out, policy, offload)
        self.gathered_views = GatheredViews(self._store)
        """Copies handed to eager code, which may write to them."""
        self._averaged: dict[Entry | Place, tuple[int, int]] = {}
        """Plain gradients that were averaged here, until they arrive at their parameters."""
        self._hook = _arrives

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


def _arrives(entry: Entry, gradient: torch.Tensor | None) -> torch.Tensor | None:
    """A hook: the gradient of a parameter in the form its stage keeps. Collective where it is this rank's
    own, because it came another way than through our operators.
    """
    session = getattr(type(entry.parameter), "session", None)
    if not isinstance(session, WholeValues) or gradient is None:
        return None
    if isinstance(gradient, PutOffGradient):
        session.late.make_room(entry)
    if isinstance(gradient, ShardedGradient | SpentGradient | PutOffGradient):
        return None
    return session.arriving(entry, gradient)


def _identity(gradient: torch.Tensor) -> tuple[int, int]:
    """Tells a gradient from any other, and from what it is after something was added to it."""
    return gradient.data_ptr(), gradient._version
