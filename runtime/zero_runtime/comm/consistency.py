"""Ranks that are about to run different things are told so, instead of waiting for each other forever.

Before a graph runs (and before eager code gathers a parameter) neighbours on the ring compare a
digest of what each is about to do. Equal neighbours all round make equal ranks.
"""

import hashlib
import itertools
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist

from zero_runtime import compat
from zero_runtime.comm.patience import WAITS
from zero_runtime.errors import DivergenceError

_TAG = 0x5A34
#: How long a rank waits to learn what a neighbour that differs is doing.
_EXPLANATION = timedelta(seconds=10)
#: How long, on backends without cheap messages, a rank waits for its neighbours to reach a new graph.
_FIRST_RUN = timedelta(seconds=50)

Describe = Callable[[], list[str]]


class Agreement(Protocol):
    """Compares what ranks are about to do."""

    def check(
        self, digest: str, describe: Describe, *, new: bool, lasting: Describe | None = None
    ) -> None:
        """Return if the neighbours are about to do the same; ``describe`` lists it step by step.

        ``lasting`` lists those of the lines that are the same whenever a rank comes here; None: all.

        Raises:
            DivergenceError: they are not; names the first step that differs and the ranks.
        """


class NoAgreement:
    """One rank, or a process group that only pretends."""

    def check(
        self, digest: str, describe: Describe, *, new: bool, lasting: Describe | None = None
    ) -> None:
        """Always agreed."""


class MessageAgreement:
    """Eight bytes to each neighbour before every run: for backends whose small messages are cheap."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def check(
        self, digest: str, describe: Describe, *, new: bool, lasting: Describe | None = None
    ) -> None:
        ours = torch.tensor([int(digest, 16)], dtype=torch.int64)
        peers = _neighbours(self._group)
        theirs = {peer: torch.empty_like(ours) for peer in peers}
        works = [
            (p, dist.irecv(theirs[p], group=self._group, group_src=p, tag=_TAG)) for p in peers
        ]
        works += [(p, dist.isend(ours, group=self._group, group_dst=p, tag=_TAG)) for p in peers]
        for peer, work in works:
            if work is not None:
                with WAITS.over(partial(_waiting, self._group, peer, describe)):
                    _wait(work, describe)
        for peer, answer in theirs.items():
            if not torch.equal(answer, ours):
                _explain(self._group, digest, describe(), peer, f"{int(answer):015x}")


class StoreAgreement:
    """Notes in the key-value store at the first run of each graph: for backends without cheap messages.

    A rank that reaches a new graph notes so under the graph's digest, and goes on once its neighbours
    have noted the same. They may have done so long ago: notes stay, so a rank that alone compiles a
    graph anew, for other shapes and to the same steps, passes at once, and several models on one group
    never mistake each other's notes. Nobody passes a graph that a neighbour has not reached.

    A rank that waits also notes where it stands. A neighbour that stands at another graph, one that
    this rank has not reached, waits for this rank while this rank waits for it: neither could ever go
    on. Both see it, and each tells the other what it was about to do. A rank that gives up, for this
    reason or because nobody came in :data:`_FIRST_RUN`, changes its note to say so: who comes later
    must not take it for agreement.

    Limits. Only first runs are compared: ranks that part over graphs that all have reached before are
    stopped by the backend's own timeout. So is a rank in the middle of a known graph whose neighbour
    alone waits at a new one (the neighbour is told after :data:`_FIRST_RUN`), and one whose neighbours
    agree while ranks further round the ring do not. Where a script goes on after an error, a neighbour
    that failed meanwhile may cause one more. Notes last as long as the store: a group made anew in it
    under the same name finds its members agreed on what they agreed on before.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._rank = group.rank()

    def check(
        self, digest: str, describe: Describe, *, new: bool, lasting: Describe | None = None
    ) -> None:
        """As :meth:`Agreement.check`, of the lines that last, where ``new``."""
        if not new:
            return
        outline = (lasting or describe)()
        digest = digest_of(outline)
        notes = _Notes(self._group)
        notes.write(_REACHED, self._rank, digest)
        notes.write(f"{next(_stands)} {digest}", self._rank, _STANDS)
        deadline = time.monotonic() + _FIRST_RUN.total_seconds()
        try:
            for peer in _neighbours(self._group):
                with WAITS.over(partial(_waiting, self._group, peer, lambda: outline)):
                    self._meet(notes, peer, outline, deadline)
        except DivergenceError:
            _tell(digest, outline)
            notes.write(_GAVE_UP, self._rank, digest)
            raise

    def _meet(self, notes: "_Notes", peer: int, outline: list[str], deadline: float) -> None:
        """Return once ``peer`` has reached the graph of this outline."""
        digest, pause = digest_of(outline), 0.001
        while notes.read(peer, digest) != _REACHED:
            stands = self._stuck_at(notes, peer, digest)
            if stands == digest:
                self._refuse("has given up waiting for others there", peer, outline)
            if stands:
                _explain(self._group, digest, outline, peer, stands)
            if time.monotonic() > deadline:
                self._refuse(f"has not, within {_FIRST_RUN.seconds} s", peer, outline)
            time.sleep(pause)
            pause = min(2 * pause, 0.05)

    def _stuck_at(self, notes: "_Notes", peer: int, digest: str) -> str:
        """The digest of the graph that ``peer`` cannot get past; empty where it still may.

        Each stand is taken once, so that one of before an error is not taken for where the peer is now.
        """
        stand = notes.read(peer, _STANDS)
        if not stand or stand == notes.read(self._rank, _TOLD, peer):
            return ""
        theirs = stand.split()[1]
        gave_up = notes.read(peer, theirs) == _GAVE_UP
        if not gave_up and (theirs == digest or notes.read(self._rank, theirs) == _REACHED):
            return ""
        notes.write(stand, self._rank, _TOLD, peer)
        if gave_up:  # that we fail in turn is no news to it
            notes.write(notes.read(self._rank, _STANDS), peer, _TOLD, self._rank)
        return theirs

    def _refuse(self, what: str, peer: int, outline: list[str]) -> NoReturn:
        ours, theirs = _global(self._group, self._rank), _global(self._group, peer)
        raise DivergenceError(
            f"rank {ours} has reached a new graph and rank {theirs} {what}. {_ADVICE}\n"
            f"rank {ours} is about to run: {outline[0]}"
        )


_REACHED, _GAVE_UP, _STANDS, _TOLD = "reached", "gave up", "stands at", "told of"
#: Tells the stands of this process apart.
_stands = itertools.count()


class _Notes:
    """What the members of a group leave in the store for each other, by rank and subject."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._store: Any = compat.default_store()
        self._group = group.group_name

    def read(self, rank: int, *subject: object) -> str:
        """The note; empty where there is none."""
        key = self._key(rank, subject)
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def write(self, note: str, rank: int, *subject: object) -> None:
        self._store.set(self._key(rank, subject), note)

    def _key(self, rank: int, subject: tuple[object, ...]) -> str:
        return "/".join(map(str, ("zero3", self._group, rank, *subject)))


def _explain(
    group: dist.ProcessGroup, ours: str, outline: list[str], peer: int, theirs: str
) -> NoReturn:
    """Ranks that differ tell each other what they were about to do, through the store.

    Notes are kept under the digest of what they say, so an old one is never a wrong one.
    """
    store = compat.default_store()
    _tell(ours, outline)
    known = _arrives(store, _note(theirs), _EXPLANATION)
    other = (
        store.get(_note(theirs)).decode().split("\n") if known else ["something it did not tell"]
    )
    rank, other_rank = dist.get_rank(), _global(group, peer)
    passed = {
        rank: _limit(),
        other_rank: store.get(_limit_of(other_rank)).decode() if known else "",
    }
    said = [_limit_advice(r, limit) for r, limit in passed.items() if limit]
    raise DivergenceError(" ".join([_difference(rank, outline, other_rank, other), *said]))


def _tell(digest: str, outline: list[str]) -> None:
    store = compat.default_store()
    store.set(_limit_of(dist.get_rank()), _limit())
    store.set(_note(digest), "\n".join(outline))


def _limit() -> str:
    return compat.recompile_limit_passed() or ""


def _limit_of(rank: int) -> str:
    return f"zero3/limit/{rank}"


def _limit_advice(rank: int, limit: str) -> str:
    return (
        f"Rank {rank} has passed {limit}: Dynamo compiles no further version of some function there, and "
        "its operations gather one by one where other ranks run a graph. TORCH_LOGS=recompiles shows which, "
        "and why; a higher limit or torch._dynamo.reset() on every rank lets it compile again."
    )


def _global(group: dist.ProcessGroup, rank: int) -> int:
    """The rank by which the user knows a member of the group."""
    return dist.get_global_rank(group, rank)


def _note(digest: str) -> str:
    return f"zero3/outline/{digest}"


class EveryAgreement:
    """All of several: ranks that share shards, and ranks that hold copies."""

    def __init__(self, agreements: Sequence[Agreement]) -> None:
        self._agreements = agreements

    def check(
        self, digest: str, describe: Describe, *, new: bool, lasting: Describe | None = None
    ) -> None:
        """Return if all agree.

        Raises:
            DivergenceError: as :meth:`Agreement.check`.
        """
        for agreement in self._agreements:
            agreement.check(digest, describe, new=new, lasting=lasting)


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
    "depend on a rank's own data (option 'leaf_modules' is for experts: give it to "
    "zero_compile.partition(model, options) before the first forward), and for model.state_dict(), "
    "saving, or values of parameters read on one rank only (they are gathered: call them on every "
    "rank). Where initial values differ, set the same seed or load the same weights on every rank."
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
            f"same. {_ADVICE}{_own_limit()} The backend says: {error}"
        ) from error


def _own_limit() -> str:
    limit = _limit()
    return f" {_limit_advice(dist.get_rank(), limit)}" if limit else ""


def _waiting(group: dist.ProcessGroup, peer: int, describe: Describe) -> str:
    return (
        f"rank {_global(group, peer)} to do the same as rank {dist.get_rank()}, which is about to run "
        f"{describe()[0]}. Is rank {_global(group, peer)} still working, has it left, or does rank "
        f"{dist.get_rank()} do something that rank {_global(group, peer)} does not?"
    )


def _neighbours(group: dist.ProcessGroup) -> list[int]:
    rank, size = group.rank(), group.size()
    return sorted({(rank - 1) % size, (rank + 1) % size})


def _arrives(store: Any, key: str, limit: timedelta) -> bool:
    try:
        store.wait([key], limit)
    except (RuntimeError, dist.DistStoreError):
        return False
    return True
