"""A program: what a rank issues in which order, as data that a simulator plays and a checker proves.

One host thread issues operations in list order. Each channel is serial, first in first out. An
operation starts when its channel is free, when every operation in ``after`` has ended, and (off the
compute channel) not before the compute operations issued earlier have ended. A compute operation that
must wait for a transfer names it in ``after``: that is what a wait is.
"""

from dataclasses import dataclass

from zero_runtime.ir.plan import Channel
from zero_runtime.ir.timeline import Category


@dataclass(frozen=True)
class Buffer:
    """Device memory that an operation takes: ``bytes`` of ``category``, by a name unique in the program."""

    name: str
    bytes: int
    category: Category


@dataclass(frozen=True)
class Op:
    """One operation.

    ``takes`` is allocated when the operation is issued (compute: when it starts); ``frees`` returns
    when it ends. ``reads`` and ``writes`` name buffers. ``bucket``, ``bytes`` moved and ``node`` are
    what a reader is shown.
    """

    name: str
    channel: Channel
    seconds: float
    phase: str
    after: tuple[str, ...] = ()
    takes: tuple[Buffer, ...] = ()
    frees: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    bucket: int | None = None
    bytes: int = 0
    node: str = ""


@dataclass(frozen=True)
class Program:
    """Operations in issue order; ``resident`` is memory held throughout, in bytes by category."""

    name: str
    world_size: int
    ops: tuple[Op, ...]
    resident: tuple[tuple[Category, int], ...] = ()
    budget: int | None = None
