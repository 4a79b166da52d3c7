"""The plan: what is gathered, reduced and released, in which order, as frozen JSON-able data.

The compiler writes plans, the runtime executes them, tools show them. Nothing here depends on
a rank: every rank of a group holds the same plan.
"""

import hashlib
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from functools import cached_property

import torch
from pydantic import TypeAdapter

#: Parameters begin at multiples of this many elements, so that each is aligned to a cache line
#: (and to what vector units and tensor cores want) in every gather dtype of two bytes or more.
ALIGNMENT = 32


class Stage(IntEnum):
    """What is partitioned (Rajbhandari et al., ZeRO, 2020): each stage includes those before it."""

    OPTIMIZER = 1
    GRADIENTS = 2
    PARAMETERS = 3


class Tier(StrEnum):
    """Where state lives between its uses."""

    DEVICE = "device"
    HOST = "cpu"
    NVME = "nvme"


@dataclass(frozen=True)
class Residence:
    """Where one bucket's state lives: its parameter shards, and its optimizer state.

    Reduced gradients go where the optimizer works: to the host unless its state is on the device.
    """

    parameters: Tier = Tier.DEVICE
    optimizer: Tier = Tier.DEVICE


@dataclass(frozen=True)
class StatePolicy:
    """How a session keeps its state.

    ``master_weights``: the optimizer steps on float32 copies of 16-bit shards (Micikevicius et al.,
    Mixed Precision Training, 2018). ``reduce_dtype``: what gradients are averaged in; None: theirs.
    """

    stage: Stage = Stage.PARAMETERS
    master_weights: bool = False
    reduce_dtype: str | None = None


class Phase(StrEnum):
    """Which of a model's graphs a plan belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"
    INFERENCE = "inference"


class Channel(StrEnum):
    """What a step occupies: steps of one channel run one after another, channels run side by side."""

    COMPUTE = "compute"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    HOST_TO_DEVICE = "host_to_device"
    DEVICE_TO_HOST = "device_to_host"
    NVME_READ = "nvme_read"
    NVME_WRITE = "nvme_write"


class StepKind(StrEnum):
    """The nodes a reader meets in a dumped graph."""

    ALL_GATHER_START = "all_gather_start"
    ALL_GATHER_WAIT = "all_gather_wait"
    RELEASE = "release"
    REDUCE_SCATTER_START = "reduce_scatter_start"
    REDUCE_SCATTER_WAIT = "reduce_scatter_wait"
    READ_START = "read_start"
    FETCH_START = "fetch_start"
    EVICT = "evict"
    OFFLOAD_START = "offload_start"
    OFFLOAD_WAIT = "offload_wait"
    RECALL_START = "recall_start"
    RELOAD_START = "reload_start"
    RELOAD_WAIT = "reload_wait"


#: Steps that move a saved tensor, and not a bucket.
OF_SAVED = frozenset(
    {
        StepKind.OFFLOAD_START,
        StepKind.OFFLOAD_WAIT,
        StepKind.RECALL_START,
        StepKind.RELOAD_START,
        StepKind.RELOAD_WAIT,
    }
)


@dataclass(frozen=True)
class Range:
    """Elements ``start`` (included) to ``stop`` (excluded) of a flat bucket."""

    start: int
    stop: int

    def __len__(self) -> int:
        return max(0, self.stop - self.start)


@dataclass(frozen=True)
class Slot:
    """One parameter's place in its bucket. Offsets and sizes are elements, never bytes."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    trainable: bool
    offset: int
    numel: int

    @property
    def span(self) -> Range:
        """The slot's elements in the bucket."""
        return Range(self.offset, self.offset + self.numel)


@dataclass(frozen=True)
class BucketPlan:
    """Parameters moved by one collective, laid end to end; each rank owns ``chunk`` contiguous elements.

    ``dtype`` is the storage dtype of the shards; a gather may move a narrower one.
    """

    dtype: str
    device: str
    world_size: int
    chunk: int
    slots: tuple[Slot, ...]
    residence: Residence = Residence()

    @property
    def padded(self) -> int:
        """Elements of the whole bucket, padding included: ``chunk * world_size``."""
        return self.chunk * self.world_size

    @property
    def torch_dtype(self) -> torch.dtype:
        """The storage dtype as torch knows it."""
        return dtype_of(self.dtype)

    def chunk_range(self, rank: int) -> Range:
        """The elements ``rank`` owns."""
        return Range(rank * self.chunk, (rank + 1) * self.chunk)

    def owned(self, slot: Slot, rank: int) -> Range:
        """The part of ``slot`` that ``rank`` owns, relative to the rank's chunk; may be empty."""
        chunk = self.chunk_range(rank)
        start = min(max(slot.span.start, chunk.start), chunk.stop)
        stop = min(max(slot.span.stop, chunk.start), chunk.stop)
        return Range(start - chunk.start, max(start, stop) - chunk.start)

    def gathered_bytes(self, dtype: torch.dtype) -> int:
        """Memory one gather of this bucket occupies.

        One rank alone gathers nothing: it reads its own shard, unless that lies elsewhere or a cast
        needs room.
        """
        here = self.residence.parameters is Tier.DEVICE
        if self.world_size == 1 and dtype is self.torch_dtype and here:
            return 0
        return self.padded * dtype.itemsize


@dataclass(frozen=True)
class TiledPlan(BucketPlan):
    """A bucket of one parameter ``[rows, columns]`` that is never moved whole: graphs move its tiles.

    Tiles are of ``sizes`` along ``dim``, 0 or 1; in graphs' plans each is a bucket of its own. A rank owns
    ``tile.chunk`` elements of every tile: its chunk is those one after another, and the last alone has
    padding, so what it owns of the parameter is still one run of its chunk.
    """

    dim: int = 0
    sizes: tuple[int, ...] = ()

    @cached_property
    def tiles(self) -> tuple[BucketPlan, ...]:
        """The tiles as buckets, in order."""
        (slot,) = self.slots
        pieces = (tile_slot(slot, self.dim, *bounds) for bounds in bounds_of(self.sizes))
        return tuple(
            BucketPlan(
                self.dtype,
                self.device,
                self.world_size,
                chunk_for(piece.numel, self.world_size),
                (piece,),
                self.residence,
            )
            for piece in pieces
        )

    def owned(self, slot: Slot, rank: int) -> Range:
        """What ``rank`` owns of every tile, relative to its chunk."""
        return Range(0, sum(len(tile.owned(tile.slots[0], rank)) for tile in self.tiles))


def bounds_of(sizes: Iterable[int]) -> list[tuple[int, int]]:
    """Where tiles of ``sizes`` begin (included) and end (excluded) along their dimension."""
    return list(itertools.pairwise(itertools.accumulate(sizes, initial=0)))


def tile_slot(slot: Slot, dim: int, start: int, stop: int) -> Slot:
    """Rows (``dim`` 0) or columns ``start`` to ``stop`` of a matrix, as a parameter of its own."""
    rows, columns = slot.shape
    rows, columns = (stop - start, columns) if dim == 0 else (rows, stop - start)
    where = f"{start}:{stop}" if dim == 0 else f":, {start}:{stop}"
    name = f"{slot.name}[{where}]"
    return Slot(name, (rows, columns), (columns, 1), slot.trainable, 0, rows * columns)


def chunk_for(numel: int, world_size: int) -> int:
    """Elements one of ``world_size`` ranks owns of ``numel``: aligned, and equal on all of them."""
    return -(-numel // (world_size * ALIGNMENT)) * ALIGNMENT


@dataclass(frozen=True)
class Saved:
    """What forward computes, backward reads, and ``tier`` holds in between: ``numel`` elements of ``dtype``."""

    name: str
    numel: int
    dtype: str
    tier: Tier = Tier.HOST

    @property
    def bytes(self) -> int:
        """What moves, and what the device does without meanwhile."""
        return self.numel * self.torch_dtype.itemsize

    @property
    def torch_dtype(self) -> torch.dtype:
        """``dtype`` as torch knows it."""
        return dtype_of(self.dtype)


@dataclass(frozen=True)
class Step:
    """One scheduled operation on ``Plan.buckets[bucket]``, or for a saved tensor on ``Plan.saved[bucket]``.

    The last three fields are bytes held while the step runs: gathered parameters; gradients under
    reduction; whole gradients that wait for it together with the shards it has produced.
    """

    position: int
    kind: StepKind
    bucket: int
    dtype: str
    bytes: int
    channel: Channel
    before: str
    gathered_bytes: int
    reducing_bytes: int
    gradient_bytes: int

    @property
    def held_bytes(self) -> int:
        """All three together."""
        return self.gathered_bytes + self.reducing_bytes + self.gradient_bytes


@dataclass(frozen=True)
class Plan:
    """Everything one compiled graph does with partitioned state, in execution order.

    ``buckets`` are those the graph uses, in order of first use.
    """

    name: str
    phase: Phase
    world_size: int
    policy: str
    buckets: tuple[BucketPlan, ...]
    steps: tuple[Step, ...]
    kept: tuple[int, ...] = ()
    """Buckets whose gathered memory stays for the graph that follows."""
    early: tuple[int, ...] = ()
    """Buckets whose gather starts here, for the graph that follows."""
    saved: tuple[Saved, ...] = ()
    """What a forward sends off the device and its backward brings back, in the order of leaving."""

    @property
    def peak_gathered_bytes(self) -> int:
        """The most bytes of gathered parameters held at once."""
        return max((step.gathered_bytes for step in self.steps), default=0)

    @property
    def peak_reducing_bytes(self) -> int:
        """The most bytes of gradients under reduction held at once."""
        return max((step.reducing_bytes for step in self.steps), default=0)

    @property
    def peak_bytes(self) -> int:
        """The most bytes held at once: gathered, under reduction, and gradients."""
        return max((step.held_bytes for step in self.steps), default=0)

    def opening(self) -> list[tuple[int, torch.dtype]]:
        """Gathers (bucket, dtype) that start before anything is waited for: they may start before the graph."""
        first = itertools.takewhile(lambda s: s.kind in _STARTS, self.steps)
        gathers = [step for step in first if step.kind is StepKind.ALL_GATHER_START]
        return [(step.bucket, dtype_of(step.dtype)) for step in gathers]

    def outline(self) -> list[str]:
        """The collectives of each channel in order, a line each: equal on ranks that may run together.

        How those of one channel mix with those of the other is left out: it may follow from sizes of
        activations, which may differ between ranks.
        """
        lines = [f"a {self.phase} graph"]
        for step in sorted(self.steps, key=lambda step: step.channel):
            if step.kind in (StepKind.ALL_GATHER_START, StepKind.REDUCE_SCATTER_START):
                slots = self.buckets[step.bucket].slots
                names = slots[0].name if len(slots) == 1 else f"{slots[0].name} to {slots[-1].name}"
                what = f"bucket {step.bucket} ({names}), {step.bytes} bytes of {step.dtype}"
                lines.append(f"{step.kind} of {what}")
        return lines

    def fingerprint(self) -> str:
        """A digest of :meth:`outline`, sixteen hexadecimal digits."""
        return hashlib.sha256("\n".join(self.outline()).encode()).hexdigest()[:16]

    def to_json(self, indent: int | None = 2) -> str:
        """The plan as JSON text."""
        return _ADAPTER.dump_json(self, indent=indent).decode()

    @staticmethod
    def from_json(text: str) -> "Plan":
        """The inverse of :meth:`to_json`.

        Raises:
            pydantic.ValidationError: ``text`` is not a plan; the message names the field.
        """
        return _ADAPTER.validate_json(text)


#: Steps that bring parameters and wait for nothing.
_STARTS = (StepKind.ALL_GATHER_START, StepKind.FETCH_START, StepKind.READ_START)

_ADAPTER = TypeAdapter(Plan)


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.float32`` as ``"float32"``."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The inverse of :func:`dtype_name`.

    Raises:
        ValueError: torch has no such dtype.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a torch dtype")
    return dtype


def reduce_dtype(plan: BucketPlan, policy: StatePolicy) -> torch.dtype:
    """What the bucket's gradients are packed, sent and averaged in."""
    name, stored = policy.reduce_dtype, plan.torch_dtype
    return dtype_of(name) if name and stored.is_floating_point else stored


def reducing_bytes(plan: BucketPlan, policy: StatePolicy) -> int:
    """Memory that one reduction of the bucket occupies at most, beside its result.

    What is sent, and room to receive the others' parts. At stage 1, and where one rank is alone, gradients
    are averaged in place, unless a cast needs room.
    """
    dtype = reduce_dtype(plan, policy)
    in_place = policy.stage is Stage.OPTIMIZER or plan.world_size == 1
    copies = int(dtype is not plan.torch_dtype) if in_place else 2
    return copies * plan.padded * dtype.itemsize


def reduced_numel(plan: BucketPlan, stage: Stage) -> int:
    """Elements of a reduced gradient of the bucket on one rank."""
    return plan.padded if stage is Stage.OPTIMIZER else plan.chunk
