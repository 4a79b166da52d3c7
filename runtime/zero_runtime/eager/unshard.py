"""Parameters held whole for a while, so that code can change them as if nothing was partitioned."""

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import nn

from zero_runtime.comm.transports import Group, current_group
from zero_runtime.errors import ZeroError
from zero_runtime.memory.buffers import as_plain, fingerprint
from zero_runtime.session import Session, session_of
from zero_runtime.sharding.bucket import Bucket
from zero_runtime.sharding.parameter_state import Entry, ParameterState


class Unsharded:
    """Holds ``parameters`` whole from :meth:`open` to :meth:`close`, both collective, or :meth:`abandon`.

    What the rank ``source`` (of the default group) changes is kept on every rank; None: nothing may
    change. Parameters that are not partitioned are as they are.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], source: int | None) -> None:
        self.source = source
        self._parameters = list(dict.fromkeys(parameters))
        self._held: dict[Entry, int] = {}
        """What each value was when it was last stored."""

    def open(self) -> None:
        """Gather the parameters, one bucket at a time.

        Raises:
            GroupError: the rank ``source`` does not share one of them.
        """
        owned = [(session, p) for p in self._parameters if (session := session_of(p)) is not None]
        for session in dict.fromkeys(session for session, _ in owned):
            if self.source is not None:
                session.group.refuse_stranger(self.source, owned[0][1].device)
            session.finish_refresh()
            session.gathered_views.settle()
        entries = {session.entry(p): session for session, p in owned}
        _gather({e: s for e, s in entries.items() if not e.whole})
        for entry, session in entries.items():
            if entry.state is ParameterState.HELD:
                session.unsharded.setdefault(entry, []).append(self)
                self._held[entry] = fingerprint(_value(entry))

    def close(self) -> None:
        """Store what was changed, and free the memory of what no other block holds.

        Raises:
            ZeroError: there is no ``source``, and something was changed; it is as before then.
        """
        try:
            lost = self._settle()
        finally:
            self.abandon()
        if lost:
            raise ZeroError(
                f"{', '.join(lost)} changed while held whole, on this rank or another, and no modifier_rank says "
                "whose change counts: every rank has its own copy. Give GatheredParameters a modifier_rank; the "
                "change is undone."
            )

    def abandon(self) -> None:
        """Free the memory of what no other block holds; what was changed since it was stored is lost."""
        for session, entry in list(_sessions(self._parameters)):
            unsharded = session.unsharded.get(entry, [])
            if self in unsharded:
                unsharded.remove(self)
            if not unsharded and entry in session.unsharded:
                del session.unsharded[entry]
                entry.reshard()
        self._held.clear()

    def _settle(self) -> list[str]:
        """Store what was changed. Names of what must not have been, on any rank."""
        lost = set()
        for parameter in self._parameters:
            session = session_of(parameter)
            entry = session.entry(parameter) if session is not None else None
            if session is None or entry is None or entry not in self._held:
                self._share(parameter, session)
            elif self._keep(session, entry):
                lost.add(entry)
        return self._on_any_rank(lost) if self.source is None else []

    def _on_any_rank(self, lost: Collection[Entry]) -> list[str]:
        """The names of what some rank has lost: all must be told. Collective."""
        held: dict[Session, list[Entry]] = {}
        for session, entry in _sessions(self._parameters):
            if entry in self._held:
                held.setdefault(session, []).append(entry)
        names = []
        for session, entries in held.items():
            flags = torch.tensor(
                [int(e in lost) for e in entries], device=_value(entries[0]).device
            )
            found = session.group.any(flags, "the end of a block of GatheredParameters").tolist()
            names += [e.name for e, flag in zip(entries, found, strict=True) if flag]
        return names

    def _share(self, parameter: nn.Parameter, session: Session | None) -> None:
        """A parameter that every rank has whole: the source's value counts."""
        if self.source is None:
            return
        group = current_group() if session is None else session.group
        value = _from(group, self.source, as_plain(parameter).detach(), "a parameter")
        with torch.no_grad():
            as_plain(parameter).detach().copy_(value)
        if session is not None and session.entry(parameter).placed:
            session.put(session.entry(parameter), value)

    def _keep(self, session: Session, entry: Entry) -> bool:
        """Store a held parameter's value. Whether a change would be lost instead."""
        value = _value(entry)
        if self.source is not None:
            value.copy_(_from(session.group, self.source, value, entry.name))
        digest = fingerprint(value)
        if digest == self._held[entry]:
            return False
        if self.source is None:
            others = (block for block in session.unsharded[entry] if block is not self)
            return not any(block.source is not None for block in others)
        entry.begin_values()
        session.put(entry, value)
        entry.mark()
        for block in session.unsharded[entry]:
            block._held[entry] = digest
        return False


def _sessions(parameters: Sequence[nn.Parameter]) -> Iterator[tuple[Session, Entry]]:
    for parameter in parameters:
        session = session_of(parameter)
        if session is not None:
            yield session, session.entry(parameter)


def _gather(entries: dict[Entry, Session]) -> None:
    members: dict[Bucket, list[Entry]] = {}
    for entry in entries:
        members.setdefault(entry.place.bucket, []).append(entry)
    for bucket, of_bucket in members.items():
        session = entries[of_bucket[0]]
        what = f"{of_bucket[0].name}, to be held whole"
        (gathered,) = session.gather_buckets([bucket], what)
        for entry in of_bucket:
            entry.hold(bucket.whole(entry.place.slot, gathered).clone())


def _value(entry: Entry) -> torch.Tensor:
    """The memory of a parameter that is held, or whole anyway."""
    assert entry.parameter is not None
    return as_plain(entry.parameter).detach()


def _from(group: Group, source: int, value: torch.Tensor, name: str) -> torch.Tensor:
    with torch.no_grad():
        return group.broadcast(value.contiguous(), source, f"{name}, held whole,")
