"""Gathered copies that eager code may still write to: what is written is put back into the shards.

``p[0]`` and ``p.detach()`` of a partitioned parameter are views of a copy gathered for that one
operation. A later write through such a view shows in the copy's version counter, which all its views
share; every rank then keeps its part of what was written.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from zero_runtime import compat
from zero_runtime.entry import Entry


class _Loan(NamedTuple):
    entry: Entry
    whole: torch.Tensor
    version: int


class Lent:
    """The copies that are out. ``store(entry, whole)`` puts one back."""

    def __init__(self, store: Callable[[Entry, torch.Tensor], None]) -> None:
        self._store = store
        self._loans: list[_Loan] = []

    def lend(self, entry: Entry, whole: torch.Tensor) -> None:
        """Watch ``whole``, of which the caller hands out a view."""
        if not whole.is_inference():  # those count no versions
            self._loans.append(_Loan(entry, whole, whole._version))

    def settle(self) -> None:
        """Put back what was written since, and forget the copies of which no view is left."""
        if self._loans:
            self._loans = list(self._kept())

    def _kept(self) -> Iterator[_Loan]:
        for entry, whole, version in self._loans:
            if whole._version != version:
                self._store(entry, whole.detach())
            if compat.shares_storage(whole):
                yield _Loan(entry, whole, whole._version)


def aliases(whole: torch.Tensor, results: Any) -> bool:
    """Whether one of ``results`` (a tree) shares memory with ``whole``."""
    memory = compat.storage_of(whole)
    return any(
        isinstance(x, torch.Tensor) and compat.storage_of(x) == memory
        for x in compat.pytree.tree_leaves(results)
    )
