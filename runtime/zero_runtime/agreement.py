"""Ranks that are about to run different things are told so, instead of waiting for each other forever.

Before a graph runs (and before eager code gathers a parameter) neighbours on the ring compare a
digest of what each is about to do. Equal neighbours all round make equal ranks.
"""

import hashlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist

from zero_runtime import compat
from zero_runtime.errors import DivergenceError

_TAG = 0x5A34
#: How long a rank waits to learn what a neighbour that differs is doing.
_EXPLANATION = timedelta(seconds=10)
#: How long, on backends without cheap messages, a rank waits for its neighbours to reach a new graph.
_FIRST_RUN = timedelta(seconds=50)

Describe = Callable[[], list[str]]


class Agreement(Protocol):
    """Compares what ranks are about to do."""

    def check(self, digest: str, describe: Describe, *, new: bool) -> None:
        """Return if the neighbours are about to do the same; ``describe`` lists it step by step.

        Raises:
            DivergenceError: they are not; names the first step that differs and the ranks.
        """


class NoAgreement:
    """One rank, or a process group that only pretends."""

    def check(self, digest: str, describe: Describe, *, new: bool) -> None:
        """Always agreed."""


class MessageAgreement:
    """Eight bytes to each neighbour before every run: for backends whose small messages are cheap."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def check(self, digest: str, describe: Describe, *, new: bool) -> None:
        ours = torch.tensor([int(digest, 16)], dtype=torch.int64)
        peers = _neighbours(self._group)
        theirs = {peer: torch.empty_like(ours) for peer in peers}
        works = [dist.irecv(theirs[p], group=self._group, group_src=p, tag=_TAG) for p in peers]
        works += [dist.isend(ours, group=self._group, group_dst=p, tag=_TAG) for p in peers]
        for work in works:
            if work is not None:
                _wait(work, describe)
        for peer, answer in theirs.items():
            if not torch.equal(answer, ours):
                _explain(self._group, digest, describe(), peer, f"{int(answer):015x}")


class StoreAgreement:
    """One note in the key-value store at the first run of each graph: for backends without cheap messages."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._runs = 0

    def check(self, digest: str, describe: Describe, *, new: bool) -> None:
        if not new:
            return
        self._runs += 1
        store, rank = compat.default_store(), self._group.rank()
        store.set(_key(self._group, rank, self._runs), digest)
        for peer in _neighbours(self._group):
            key = _key(self._group, peer, self._runs)
            if not _arrives(store, key, _FIRST_RUN):
                raise DivergenceError(
                    f"rank {rank} has reached a new graph and rank {peer} has not, within "
                    f"{_FIRST_RUN.seconds} s. {_ADVICE}\nrank {rank} is about to run: {describe()[0]}"
                )
            answer = store.get(key).decode()
            if answer != digest:
                _explain(self._group, digest, describe(), peer, answer)


def _explain(
    group: dist.ProcessGroup, ours: str, outline: list[str], peer: int, theirs: str
) -> NoReturn:
    """Ranks that differ tell each other what they were about to do, through the store.

    Notes are kept under the digest of what they say, so an old one is never a wrong one.
    """
    store = compat.default_store()
    store.set(_note(ours), "\n".join(outline))
    known = _arrives(store, _note(theirs), _EXPLANATION)
    other = (
        store.get(_note(theirs)).decode().split("\n") if known else ["something it did not tell"]
    )
    raise DivergenceError(_difference(dist.get_rank(), outline, _global(group, peer), other))


def _global(group: dist.ProcessGroup, rank: int) -> int:
    """The rank by which the user knows a member of the group."""
    return dist.get_global_rank(group, rank)


def _note(digest: str) -> str:
    return f"zero3/outline/{digest}"


class EveryAgreement:
    """All of several: ranks that share shards, and ranks that hold copies."""

    def __init__(self, agreements: Sequence[Agreement]) -> None:
        self._agreements = agreements

    def check(self, digest: str, describe: Describe, *, new: bool) -> None:
        """Return if all agree.

        Raises:
            DivergenceError: as :meth:`Agreement.check`.
        """
        for agreement in self._agreements:
            agreement.check(digest, describe, new=new)


def agreement_for(groups: Sequence[dist.ProcessGroup]) -> Agreement:
    """What each group's backend can do cheaply."""
    return EveryAgreement([_agreement(group) for group in groups])


def _agreement(group: dist.ProcessGroup) -> Agreement:
    if group.size() == 1:
        return NoAgreement()
    backends = {compat.backend_name(group, device) for device in compat.devices_of(group)}
    if "fake" in backends:
        return NoAgreement()
    return MessageAgreement(group) if "gloo" in backends else StoreAgreement(group)


def digest_of(lines: list[str]) -> str:
    """Fifteen hexadecimal digits (they fit a signed 64-bit integer) that differ where the lines do."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:15]


_ADVICE = (
    "Ranks must do the same in the same order: look for branches, loop lengths or expert choices that "
    "depend on a rank's own data, and for model.state_dict(), saving, or values of parameters read on "
    "one rank only (they are gathered: call them on every rank). Where initial values differ, set the "
    "same seed or load the same weights on every rank."
)


def _difference(rank: int, ours: list[str], peer: int, theirs: list[str]) -> str:
    step = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
    if step is None:
        step = min(len(ours), len(theirs))
    mine, other = (lines[step] if step < len(lines) else "nothing" for lines in (ours, theirs))
    return (
        f"ranks {rank} and {peer} differ at step {step}: rank {rank} is about to run {mine}; "
        f"rank {peer}: {other}. {_ADVICE}"
    )


def _wait(work: dist.Work, describe: Describe) -> None:
    try:
        work.wait()
    except RuntimeError as error:
        raise DivergenceError(
            f"rank {dist.get_rank()} was about to run {describe()[0]}, and a neighbour did not come to do the "
            f"same. {_ADVICE} The backend says: {error}"
        ) from error


def _neighbours(group: dist.ProcessGroup) -> list[int]:
    rank, size = group.rank(), group.size()
    return sorted({(rank - 1) % size, (rank + 1) % size})


def _key(group: dist.ProcessGroup, rank: int, what: object) -> str:
    return f"zero3/{group.group_name}/{rank}/{what}"


def _arrives(store: Any, key: str, limit: timedelta) -> bool:
    try:
        store.wait([key], limit)
    except (RuntimeError, dist.DistStoreError):
        return False
    return True
