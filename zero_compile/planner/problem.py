"""What the scheduler is asked: compute in a fixed order, buckets with their uses, and a memory limit.

Positions count compute nodes: position ``k`` is the moment before node ``k``; position ``n`` (one past
the last node) is the end. Everything here is integers of bytes and floats of seconds.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Gather:
    """One all-gather: must have arrived before node ``first``; its memory is free after node ``last``.

    It may not start before position ``earliest``, which is at most ``first``.
    """

    bucket: int
    seconds: float
    bytes: int
    first: int
    last: int
    earliest: int = 0


@dataclass(frozen=True)
class Reduce:
    """One reduce-scatter of gradients that are complete after node ``ready``.

    ``bytes`` is what it holds from its start to its wait, ``moved`` what it sums up over the ranks.
    It is waited for at position ``latest`` at the latest.
    """

    bucket: int
    seconds: float
    bytes: int
    ready: int
    moved: int = 0
    latest: int | None = None


@dataclass(frozen=True)
class Problem:
    """``compute[k]`` seconds and ``live[k]`` bytes (activations, and gradients not yet reduced) of node k.

    ``gathers`` are ordered by first use, ``reductions`` by readiness. ``limit`` bytes hold for live,
    gathered and reducing memory together, at every node; None: no limit. ``names`` of nodes, where
    given, are for messages.
    """

    compute: tuple[float, ...]
    live: tuple[int, ...]
    gathers: tuple[Gather, ...]
    reductions: tuple[Reduce, ...] = ()
    limit: int | None = None
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Schedule:
    """The answer, aligned with the problem's gathers and reductions.

    ``gather_starts[i]`` is the position at which gather ``i`` starts; ``reduce_waits[j]`` that at which
    reduction ``j`` is waited for (its start is right after its last gradient).
    """

    gather_starts: tuple[int, ...]
    reduce_waits: tuple[int, ...]
