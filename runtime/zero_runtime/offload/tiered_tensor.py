"""One flat tensor of a bucket, kept where its tier says: on the device, in host memory or on NVMe."""

from collections.abc import Iterator, Sequence
from enum import Enum, auto

import torch

from zero_runtime.comm.transports import Done, Several, Transfer
from zero_runtime.ir.plan import Tier
from zero_runtime.offload.memory_tiers import MemoryTiers


class Whereabouts(Enum):
    """A shelf's life."""

    EMPTY = auto()
    """Never used: its values are zeros, and nothing is allocated."""
    COMING = auto()
    """Being read from NVMe."""
    HERE = auto()
    """In the memory of its tier, or from NVMe in host memory."""
    AWAY = auto()
    """On NVMe only."""


class TieredTensor:
    """``[numel]`` values of ``dtype``. Those on NVMe occupy memory only while they are HERE or COMING.

    With ``pieces``, sizes that add up to ``numel``, NVMe holds each under a name of its own, so that it can
    be read alone (:class:`Window`).
    """

    def __init__(
        self,
        memory_tiers: MemoryTiers,
        name: str,
        numel: int,
        dtype: torch.dtype,
        device: torch.device,
        tier: Tier,
        pieces: Sequence[int] = (),
    ) -> None:
        self.name = name
        self.pieces = tuple(pieces) or (numel,)
        self.numel = numel
        self.dtype = dtype
        self.tier = tier
        self._memory_tiers = memory_tiers
        self._device = device if tier is Tier.DEVICE else torch.device("cpu")
        self._state = Whereabouts.EMPTY
        self._tensor: torch.Tensor | None = None
        self._reading: Transfer | None = None
        self._changed = False
        self._stored = False

    @property
    def away(self) -> bool:
        """Whether the values are on NVMe only."""
        return self._state is Whereabouts.AWAY

    @property
    def used(self) -> bool:
        """Whether anything was ever kept here."""
        return self._state is not Whereabouts.EMPTY

    @property
    def held(self) -> torch.Tensor | None:
        """The values as far as they are in memory now."""
        return self._tensor

    def start_load(self) -> None:
        """Start reading the values where they are away; they stay until :meth:`put_away`."""
        if self._state is Whereabouts.AWAY and self.numel:
            self._tensor = self._memory()
            reads = [self._memory_tiers.swap.read(name, part) for name, part in self._parts()]
            self._reading = Several(reads)
            self._state = Whereabouts.COMING

    def read(self) -> torch.Tensor:
        """The values; not to be written to."""
        self.start_load()
        if self._reading is not None:
            reading, self._reading = self._reading, None
            try:
                reading.wait()
            except BaseException:
                self._tensor, self._state = None, Whereabouts.AWAY
                raise
        if self._tensor is None:
            self._tensor = self._memory().zero_()
        self._state = Whereabouts.HERE
        return self._tensor

    def edit(self) -> torch.Tensor:
        """The values, for writing in place until :meth:`put_away`."""
        self._changed = True
        return self.read()

    def overwrite(self) -> torch.Tensor:
        """Memory for all values anew: what they were is not read, and undefined."""
        if self._state is not Whereabouts.HERE:
            self._settle()
            self._tensor, self._state = self._memory(), Whereabouts.HERE
        self._changed = True
        assert self._tensor is not None
        return self._tensor

    def put_away(self) -> Transfer:
        """On NVMe: start writing what was changed, and give the memory back. Elsewhere nothing."""
        if self.tier is not Tier.NVME or self._tensor is None:
            return Done()
        self._settle()
        done: Transfer = Done()
        if self.numel and (self._changed or not self._stored):
            done = self._write()
        self._tensor, self._changed, self._state = None, False, Whereabouts.AWAY
        return done

    def discard(self) -> None:
        """Give up the values, and the memory and the extent that hold them: as if never used."""
        self._settle()
        if self._stored:
            self._memory_tiers.swap.free(self.name)
        self._tensor, self._state = None, Whereabouts.EMPTY
        self._changed = self._stored = False

    def _settle(self) -> None:
        if self._reading is not None:
            reading, self._reading = self._reading, None
            reading.wait()

    def _write(self) -> Transfer:
        parts = list(self._parts())
        if not self._stored:
            for name, part in parts:
                self._memory_tiers.swap.allocate(name, len(part))
            self._stored = True
        return Several([self._memory_tiers.swap.write(name, part) for name, part in parts])

    def name_of_piece(self, number: int) -> str:
        """What NVMe knows a piece by."""
        return f"piece {number} of {self.name}" if len(self.pieces) > 1 else self.name

    def _parts(self) -> Iterator[tuple[str, torch.Tensor]]:
        assert self._tensor is not None
        for number, part in enumerate(self._tensor.split(self.pieces)):
            if len(part):
                yield self.name_of_piece(number), part.view(torch.uint8)

    def _memory(self) -> torch.Tensor:
        if self.tier is Tier.DEVICE:
            return torch.empty(self.numel, dtype=self.dtype, device=self._device)
        return self._memory_tiers.host(self.numel, self.dtype)


class Window(TieredTensor):
    """One piece of another shelf, for reading. From NVMe it is read alone."""

    def __init__(
        self,
        tiered_tensor: TieredTensor,
        number: int,
        memory_tiers: MemoryTiers,
        device: torch.device,
    ) -> None:
        size = tiered_tensor.pieces[number]
        name = tiered_tensor.name_of_piece(number)
        super().__init__(memory_tiers, name, size, tiered_tensor.dtype, device, tiered_tensor.tier)
        self._tiered_tensor = tiered_tensor
        self._start = sum(tiered_tensor.pieces[:number])

    @property
    def away(self) -> bool:
        """Whether the values are on NVMe only."""
        return self._tiered_tensor.away and self._tensor is None

    def start_load(self) -> None:
        """Start reading this piece where it is away; it stays until :meth:`put_away`."""
        if self.away:
            self._state = Whereabouts.AWAY
            super().start_load()

    def read(self) -> torch.Tensor:
        """The values; not to be written to."""
        if self._tensor is None and not self._tiered_tensor.away:
            return self._tiered_tensor.read().narrow(0, self._start, self.numel)
        return super().read()

    def put_away(self) -> Transfer:
        """Give back what memory the piece has of its own; what it was read from keeps the values."""
        self._settle()
        self._tensor, self._state = None, Whereabouts.EMPTY
        return Done()
