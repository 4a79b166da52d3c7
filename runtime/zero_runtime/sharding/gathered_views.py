"""Gathered copies that eager code may still write to: what is written is put back into the shards.

``p[0]``, ``p.detach()`` and ``p.data`` of a partitioned parameter are views of a copy gathered for that one
operation. Whether something was written through such a view is seen when the session is used next, by the
copy's version counter, which its views share, and by a digest of its elements: numpy counts no versions.
Every rank then keeps its part of what was written. A copy of a value that has changed since, by a step
say, is out of date: a write to that is an error.

While a model is being built the copy that was used last stays, as the parameter's value, until another
parameter is used: initialisation takes several operations a parameter. Which copy stays follows from
the order of operations alone, so ranks agree on what need not be gathered.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import NamedTuple

import torch

from zero_runtime import compat
from zero_runtime.errors import ZeroError
from zero_runtime.memory.buffers import fingerprint
from zero_runtime.sharding.parameter_state import Entry


class _Content(NamedTuple):
    """What a copy held, and how often it had been written to as far as torch counts."""

    version: int
    digest: int


@dataclass(eq=False)
class _Loan:
    """``known`` is what the shards have of the copy; None: something else. ``late``: they have changed since."""

    entry: Entry
    whole: torch.Tensor
    known: _Content | None
    late: bool = False

    def written(self, thorough: bool) -> bool:
        """Whether it holds something else; ``thorough``: also if no version counter shows it."""
        known = self.known
        if known is None or version_of(self.whole) != known.version:
            return True
        return thorough and fingerprint(self.whole) != known.digest


class GatheredViews:
    """The copies that are out. ``store(entry, whole)`` puts one back."""

    def __init__(self, store: Callable[[Entry, torch.Tensor], None]) -> None:
        self._store = store
        self._loans: list[_Loan] = []
        self._last: _Loan | None = None

    def lend(self, entry: Entry, whole: torch.Tensor) -> None:
        """Watch ``whole``, of which the caller hands out a view."""
        self._loans.append(_Loan(entry, whole, _content(whole)))

    def at_hand(self, entry: Entry) -> torch.Tensor | None:
        """The copy that was kept, if it is this entry's."""
        return self._last.whole if self._last is not None and self._last.entry is entry else None

    def keep(self, entry: Entry, whole: torch.Tensor, *, changed: bool) -> torch.Tensor:
        """``whole`` is the entry's value until another is kept. ``changed``: the shards differ from it.

        Returns what to work on: the copy that somebody still holds, brought up to date, if there is one.
        """
        self.settle()
        loan = _Loan(entry, whole, None)
        for out in self._loans:
            if out.entry is entry and _alike(out.whole, whole):
                out.whole.data.copy_(whole)  # autograd may have saved it: to it nothing changes
                loan = out
        self._loans = [out for out in self._loans if out is not loan]
        loan.known, loan.late = None if changed else _content(loan.whole), False
        self._last = loan
        return loan.whole

    def settle(self, but: Collection[Entry] = (), *, thorough: bool = False) -> None:
        """Put back what was written since, and forget the copies of which no view is left.

        A copy kept for one of the entries ``but`` stays. ``thorough``: digest copies that are out of date
        too, which somebody may hold for good.

        Raises:
            ZeroError: something was written to a copy whose parameter has changed since.
        """
        if self._last is not None and self._last.entry not in but:
            self._loans.append(self._last)
            self._last = None
        loans, self._loans = self._loans, []
        spoilt = [x.entry.name for x in loans if not self._put_back(x, loans, thorough)]
        self._loans = [loan for loan in loans if compat.shares_storage(loan.whole)]
        if spoilt:
            raise ZeroError(
                f"a view or .data of {', '.join(spoilt)} was written to after the parameter had changed "
                "otherwise (by a step, by load_state_dict(), through another view): the view shows the "
                "value of before. Take it anew before each write, or write inside a block of "
                "zero_compile.GatheredParameters."
            )

    def forget(self, entry: Entry) -> None:
        """The entry has memory of its own anew, or is gone: copies of before are nobody's concern."""
        if self._last is not None and self._last.entry is entry:
            self._last = None
        self._loans = [loan for loan in self._loans if loan.entry is not entry]

    def outdate(self, entries: Collection[Entry]) -> None:
        """The entries' values have changed, otherwise than through copies: those are of the old ones."""
        if self._last is not None and self._last.entry in entries:
            self._loans.append(self._last)
            self._last = None
        for loan in self._loans:
            if loan.entry in entries and not loan.late:
                loan.known, loan.late = _content(loan.whole), True

    def _put_back(self, loan: _Loan, loans: list[_Loan], thorough: bool) -> bool:
        """Store what was written, if that can be: other copies of the entry are out of date then."""
        if not loan.written(thorough or not loan.late):
            return True
        if not loan.late:
            self._store(loan.entry, loan.whole.detach())
            for other in loans:
                other.late |= other.entry is loan.entry and other is not loan
        loan.known = _content(loan.whole)
        return not loan.late


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)


def _content(whole: torch.Tensor) -> _Content:
    return _Content(version_of(whole), fingerprint(whole))


def version_of(whole: torch.Tensor) -> int:
    """How often the tensor was written to; one made in inference mode does not count."""
    return 0 if whole.is_inference() else whole._version
