"""What happened when, on which channel, and what memory was held: predicted or measured, one format."""

from dataclasses import dataclass
from enum import StrEnum

from pydantic import TypeAdapter

from zero_runtime.ir.plan import Channel


class Category(StrEnum):
    """What a byte of device memory holds."""

    SHARDS = "shards"
    OPTIMIZER = "optimizer"
    ACTIVATIONS = "activations"
    GATHERED = "gathered"
    REDUCING = "reducing"
    GRADIENTS = "gradients"
    STAGING = "staging"


class Source(StrEnum):
    """Where a timeline comes from."""

    PREDICTED = "predicted"
    MEASURED = "measured"


@dataclass(frozen=True)
class Event:
    """One operation on one channel, from ``start`` to ``end`` in seconds since the step began.

    ``stall`` is how long the channel stood idle right before it, because something it needs had not
    arrived. ``bucket`` is None for compute. ``node`` is the graph node it stands for or in front of.
    """

    name: str
    channel: Channel
    start: float
    end: float
    phase: str
    bucket: int | None = None
    bytes: int = 0
    stall: float = 0.0
    node: str = ""


@dataclass(frozen=True)
class Sample:
    """Bytes held from ``time`` (seconds) until the next sample, by category."""

    time: float
    held: dict[Category, int]

    @property
    def total(self) -> int:
        """All categories together."""
        return sum(self.held.values())


@dataclass(frozen=True)
class Timeline:
    """A training step (or one graph of it). ``budget`` is the memory limit in bytes, None for none."""

    name: str
    source: Source
    world_size: int
    events: tuple[Event, ...]
    memory: tuple[Sample, ...]
    budget: int | None = None

    @property
    def seconds(self) -> float:
        """From the first start to the last end."""
        if not self.events:
            return 0.0
        return max(e.end for e in self.events) - min(e.start for e in self.events)

    @property
    def exposed(self) -> float:
        """Seconds in which compute waited for something."""
        return sum(e.stall for e in self.events if e.channel is Channel.COMPUTE)

    @property
    def peak(self) -> int:
        """The most bytes held at once."""
        return max((s.total for s in self.memory), default=0)

    def to_json(self, indent: int | None = None) -> str:
        """The timeline as JSON text."""
        return _ADAPTER.dump_json(self, indent=indent).decode()

    @staticmethod
    def from_json(text: str) -> "Timeline":
        """The inverse of :meth:`to_json`.

        Raises:
            pydantic.ValidationError: ``text`` is not a timeline; the message names the field.
        """
        return _ADAPTER.validate_json(text)


_ADAPTER = TypeAdapter(Timeline)
