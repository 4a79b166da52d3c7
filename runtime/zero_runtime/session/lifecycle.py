"""A session in its steps: what is open, what is held, and what comes back after it."""

from collections.abc import Iterable

from torch import nn

from zero_runtime.comm.transports import Group
from zero_runtime.errors import SwapError, ZeroError
from zero_runtime.ir.placement import Offload
from zero_runtime.ir.plan import Stage, StatePolicy
from zero_runtime.memory.buffers import as_plain
from zero_runtime.session.registry import LayOut, Partitioned
from zero_runtime.session.whole_values import WholeValues
from zero_runtime.sharding.bucket import Flight


class Session(WholeValues):
    """Everything one compiled model keeps between steps: entries, buckets, plans, on one group."""

    def __init__(
        self, group: Group, lay_out: LayOut, policy: StatePolicy, offload: Offload
    ) -> None:
        super().__init__(group, lay_out, policy, offload)
        self._stepping = False
        self._refreshing: list[Flight] = []

    def begin_step(self, parameters: Iterable[nn.Parameter]) -> None:
        """Turn parameters into their flat shards for ``optimizer.step()``."""
        self._freeze()
        for parameter in parameters:
            self.entry(parameter).begin_step()

    def step_aside(self, parameter: nn.Parameter) -> None:
        """Take a parameter out of the stock ``step()``: its gradient waits for an update of our own."""
        self._freeze()
        self.entry(parameter).step_aside()

    def _freeze(self) -> None:
        """Values are about to change: nothing gathered or fetched stays. Once a step, not once a parameter."""
        if self._stepping:
            return
        self.unpin(at_once=True)
        for entry in self.unsharded:
            raise ZeroError(
                f"optimizer.step() inside a block that holds {entry.name} whole: leave the block of "
                "GatheredParameters first"
            )
        self.finish_refresh()
        self.gather_cache.drop()
        if self.offload.active:
            for bucket in self.buckets:
                bucket.drop_fetch()
        self._stepping = True

    def unpin(self, *, at_once: bool = False) -> None:
        """Free parameters that stayed whole for an autograd graph older than their partition, ``at_once`` (a
        step changes them, after which a backward of that graph is autograd's own error) or if it is done.
        """
        for entry in self._pinned:
            if entry.ahead and entry.parameter is not None:  # written to, by every rank
                self.put(entry, as_plain(entry.parameter).detach())
                entry.mark()
        done = [entry for entry in self._pinned if entry.unpin(at_once=at_once)]
        for entry in done:
            self._pinned.remove(entry)
            if entry not in self.unsharded:
                entry.reshard()

    def refuse_ahead(self) -> None:
        """Raise if a graph would not see a change that was made to a parameter that is held whole.

        Raises:
            ZeroError: names the parameter.
        """
        for entry in self.unsharded:
            if entry.ahead:
                raise ZeroError(
                    f"{entry.name} was changed inside a block that holds it whole, and a compiled graph "
                    "would not see that: leave the block of GatheredParameters first"
                )

    def end_step(self) -> None:
        """Bring back every parameter that is still a shard.

        Raises:
            SwapError: something could not be read or written; all else is brought back.
        """
        if not self._stepping:
            return
        self.gathered_views.outdate({entry for entry in self.entries if entry.changing})
        for entry in self.entries:
            entry.end_step(self._class)
        self._stepping, failures = False, []
        for bucket in self.buckets:
            for act in (bucket.close_step, bucket.put_away):
                try:
                    act()
                except SwapError as error:
                    failures.append(error)
        if failures:
            raise failures[0]

    def start_refresh(self) -> None:
        """After a step: start the gathers that come first now.

        At stages 1 and 2 those of all that was updated, at stage 3 those that open the next forward.
        """
        self.steps += 1
        self.updates.reset()
        if self.stage is Stage.PARAMETERS:
            self._open_next_forward()
        else:
            self._refreshing = [bucket.start_refresh() for bucket in self.buckets]

    def _open_next_forward(self) -> None:
        for bucket, dtype in self.opening:
            if bucket.lives_on_host:  # on its way at least: a gather would have to wait for it here
                bucket.start_read()
            elif (bucket, dtype) not in self.gather_cache:
                self.gather_cache.put(bucket, dtype, bucket.start_gather(dtype))

    def finish_refresh(self) -> None:
        """Before parameters are read again."""
        self.updates.finish()
        for flight in self._refreshing:
            flight.land()
        self._refreshing.clear()


def session_of(parameter: object) -> Session | None:
    """The session that owns a partitioned parameter; None for any other object."""
    session = type(parameter).session if isinstance(parameter, Partitioned) else None
    assert session is None or isinstance(session, Session)
    return session
