"""What the scheduler is asked: compute in a fixed order, buckets with their uses, and a memory limit.

Positions count compute nodes: position ``k`` is the moment before node ``k``; position ``n`` (one past
the last node) is the end. Everything here is integers of bytes and floats of seconds.
"""

from dataclasses import dataclass
from functools import cached_property

#: Host memory for shards that are read from NVMe, in buckets, where nothing else is said.
STAGING_SLOTS = 5


@dataclass(frozen=True)
class Gather:
    """One all-gather: must have arrived before node ``first``; its memory is free after node ``last``.

    It may not start before position ``earliest``, which is at most ``first``. Where this rank's shard
    lies on the host, ``fetch`` seconds bring it into ``shard`` bytes of the device, which are free once
    the gather has started; where it lies on NVMe, ``read`` seconds bring it to the host before that.
    """

    bucket: int
    seconds: float
    bytes: int
    first: int
    last: int
    earliest: int = 0
    fetch: float = 0.0
    read: float = 0.0
    shard: int = 0
    in_place: bool = False
    """Whether the fetched shard is the whole bucket: its memory becomes the gathered memory."""


@dataclass(frozen=True)
class Reduce:
    """One reduce-scatter of gradients that are complete after node ``ready``.

    ``bytes`` is what it holds from its start to its wait, ``moved`` what it sums up over the ranks.
    It is waited for at position ``latest`` at the latest. Where the optimizer works on the host, the
    reduced ``shard``, one of ``bytes``, then goes there in ``evict`` seconds.
    """

    bucket: int
    seconds: float
    bytes: int
    ready: int
    moved: int = 0
    latest: int | None = None
    evict: float = 0.0
    shard: int = 0


@dataclass(frozen=True)
class Problem:
    """``compute[k]`` seconds and ``live[k]`` bytes (activations, and gradients not yet reduced) of node k.

    ``gathers`` are ordered by first use, ``reductions`` by readiness. ``limit`` bytes hold for live,
    gathered and reducing memory together, at every node; None: no limit. ``names`` of nodes, where
    given, are for messages. ``slots`` shards that are read from NVMe have room on the host: each takes
    a slot from the start of its read to that of its gather.
    """

    compute: tuple[float, ...]
    live: tuple[int, ...]
    gathers: tuple[Gather, ...]
    reductions: tuple[Reduce, ...] = ()
    limit: int | None = None
    names: tuple[str, ...] = ()
    slots: int = STAGING_SLOTS

    @cached_property
    def fetched(self) -> tuple[int, ...]:
        """Gathers whose shard lies off the device, by index."""
        return tuple(i for i, gather in enumerate(self.gathers) if gather.fetch)

    @cached_property
    def read(self) -> tuple[int, ...]:
        """Gathers whose shard lies on NVMe, by index."""
        return tuple(i for i, gather in enumerate(self.gathers) if gather.read)


@dataclass(frozen=True)
class Schedule:
    """The answer, aligned with the problem's gathers and reductions.

    ``gather_starts[i]`` is the position at which gather ``i`` starts; ``reduce_waits[j]`` that at which
    reduction ``j`` is waited for (its start is right after its last gradient). ``fetch_starts[i]`` and
    ``read_starts[i]`` are where the shard of gather ``i`` sets out, for those that lie off the device;
    empty: each where its gather starts.
    """

    gather_starts: tuple[int, ...]
    reduce_waits: tuple[int, ...]
    fetch_starts: tuple[int, ...] = ()
    read_starts: tuple[int, ...] = ()

    def fetch_start(self, i: int) -> int:
        """The position at which the shard of gather ``i`` sets out from the host."""
        return self.fetch_starts[i] if self.fetch_starts else self.gather_starts[i]

    def read_start(self, i: int) -> int:
        """The position at which the shard of gather ``i`` sets out from NVMe."""
        return self.read_starts[i] if self.read_starts else self.gather_starts[i]
