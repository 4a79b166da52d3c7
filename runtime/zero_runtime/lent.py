"""Gathered copies that eager code may still write to: what is written is put back into the shards.

``p[0]`` and ``p.detach()`` of a partitioned parameter are views of a copy gathered for that one
operation. A later write through such a view shows in the copy's version counter, which all its views
share; every rank then keeps its part of what was written.

While a model is being built the copy that was used last stays, as the parameter's value, until another
parameter is used: initialisation takes several operations a parameter. Which copy stays follows from
the order of operations alone, so ranks agree on what need not be gathered.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import torch

from zero_runtime import compat
from zero_runtime.entry import Entry

_CHANGED = -1


@dataclass(eq=False)
class _Loan:
    """``version`` is the copy's when it was last put back; ``open``: writes may bypass that count."""

    entry: Entry
    whole: torch.Tensor
    version: int
    open: bool = False

    @property
    def written(self) -> bool:
        counts = not self.open and not self.whole.is_inference()
        return not counts or _version(self.whole) != self.version


class Lent:
    """The copies that are out. ``store(entry, whole)`` puts one back."""

    def __init__(self, store: Callable[[Entry, torch.Tensor], None]) -> None:
        self._store = store
        self._loans: list[_Loan] = []
        self._last: _Loan | None = None

    def lend(self, entry: Entry, whole: torch.Tensor) -> None:
        """Watch ``whole``, of which the caller hands out a view."""
        if not whole.is_inference():  # those count no versions
            self._loans.append(_Loan(entry, whole, whole._version))

    def at_hand(self, entry: Entry) -> torch.Tensor | None:
        """The copy that was kept, if it is this entry's."""
        return self._last.whole if self._last is not None and self._last.entry is entry else None

    def keep(self, entry: Entry, whole: torch.Tensor, *, changed: bool) -> torch.Tensor:
        """``whole`` is the entry's value until another is kept. ``changed``: the shards differ from it.

        Returns what to work on: the copy that somebody still holds, brought up to date, if there is one.
        """
        self.settle()
        loan = _Loan(entry, whole, 0)
        for out in self._loans:
            if out.entry is entry and out.whole.shape == whole.shape:
                out.whole.data.copy_(whole)  # autograd may have saved it: to it nothing changes
                loan = out
        self._loans = [out for out in self._loans if out is not loan]
        loan.version = _CHANGED if changed else _version(loan.whole)
        self._last = loan
        return loan.whole

    def open(self, entry: Entry) -> None:
        """The kept copy goes to code whose writes its version counter may not show."""
        assert self._last is not None
        assert self._last.entry is entry
        self._last.open = True

    def settle(self, but: Collection[Entry] = ()) -> None:
        """Put back what was written since, and forget the copies of which no view is left.

        A copy kept for one of the entries ``but`` stays.
        """
        if self._last is not None and self._last.entry not in but:
            self._loans.append(self._last)
            self._last = None
        if self._loans:
            self._loans = list(self._kept())

    def forget(self, entry: Entry) -> None:
        """The entry's value is replaced: copies of the old one are nobody's concern."""
        if self._last is not None and self._last.entry is entry:
            self._last = None
        self._loans = [loan for loan in self._loans if loan.entry is not entry]

    def close(self) -> None:
        """Put everything back; from now on only the version counters of copies that are out count."""
        self.settle()
        self._loans = [loan for loan in self._loans if not loan.whole.is_inference()]
        for loan in self._loans:
            loan.open = False

    def _kept(self) -> Iterator[_Loan]:
        for loan in self._loans:
            if loan.written:
                self._store(loan.entry, loan.whole.detach())
                loan.version = _version(loan.whole)
            if compat.shares_storage(loan.whole):
                yield loan


def _version(whole: torch.Tensor) -> int:
    """How often the tensor was written to; one made in inference mode does not count."""
    return 0 if whole.is_inference() else whole._version
