"""When a session's parameters are partitioned: after the first graphs, the first backward, or before a step."""

from collections.abc import Callable, Iterable, Sequence

import torch

from zero_runtime.comm.consistency import digest_of
from zero_runtime.comm.transports import Group
from zero_runtime.ir.placement import Offload
from zero_runtime.ir.plan import StatePolicy
from zero_runtime.session.registry import LayOut, SessionRegistry
from zero_runtime.sharding.bucket import Bucket
from zero_runtime.sharding.parameter_state import Entry, ParameterState
from zero_runtime.sharding.put_off import LateReductions


class Partitioning(SessionRegistry):
    """Partitions what graphs have placed, and in time all other parameters of the model."""

    def __init__(
        self, group: Group, lay_out: LayOut, policy: StatePolicy, offload: Offload
    ) -> None:
        super().__init__(group, lay_out, policy, offload)
        self.late = LateReductions(self)
        """Gradients that ``no_sync`` puts off."""
        self._pinned: list[Entry] = []
        self._hook: Callable[[Entry, torch.Tensor | None], torch.Tensor | None]
        """What a gradient passes on its way to a parameter."""

    @torch.no_grad()
    def partition(self) -> None:
        """Keep this rank's part of every placed parameter and free the rest.

        Collective where parameters were partitioned one by one while the model was built: they move.
        """
        self.construction.move()
        members: dict[Bucket, list[Entry]] = {}
        for entry in self.entries:
            if entry.placed:
                members.setdefault(entry.place.bucket, []).append(entry)
        for bucket, entries in members.items():
            for entry in entries:
                entry.shard(self._class)
                entry.watch(self._hook)
                if entry.pinned and entry not in self._pinned:
                    self._pinned.append(entry)
            bucket.put_away()

    def free_storage(self, entry: Entry) -> torch.Tensor:
        """Free a placed parameter's memory. Returns its value, which nothing else holds then."""
        whole = entry.free_storage(self._class)
        entry.watch(self._hook)
        return whole

    def guard(self, entries: Iterable[Entry]) -> None:
        """Watch over parameters outside the graph: eager code that trains them has them averaged."""
        for entry in entries:
            entry.guard(self._class)
            entry.watch(self._hook)

    def settle(self) -> None:
        """Before a step: reduce what was put off, partition what no graph has used."""
        self.construction.finish({})
        self.late.reduce()
        rest = [e for e in self.entries if e.state is ParameterState.GUARDED and not e.placed]
        self._partition_rest(rest)

    def _partition_trained(self) -> None:
        """After a backward: what eager code trains has gradients of the graphs' kind from the first step on."""
        guarded = [e for e in self.entries if e.state is ParameterState.GUARDED and not e.placed]
        self._partition_rest(guarded)

    def _partition_rest(self, rest: Sequence[Entry]) -> None:
        """Give parameters that no graph has used buckets, and compare the values. Collective."""
        self.place(rest)
        if rest or self.construction.moving():
            self.partition()
        fresh = list(dict.fromkeys(e.place.bucket for e in rest))
        fresh += [bucket for bucket in self.construction.unseen() if bucket not in fresh]
        if fresh:
            values = self.initial_values(fresh)
            for bucket in fresh:
                bucket.compared = True
            self.group.agreement.check(digest_of(values), lambda: values, new=False)
