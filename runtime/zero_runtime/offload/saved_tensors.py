"""Saved tensors off the device: what autograd holds in their place, and the transfers there and back.

On the host that is the copy itself, which so lives exactly as long as autograd wants the tensor. On
NVMe it is a *handle*, a few bytes that name an extent of the swap files; the extent is free again
once the last tensor that shares the handle's memory is gone. Either may be brought back many times.
"""

import collections
import itertools
import weakref
from typing import NamedTuple

import torch

from zero_runtime import compat
from zero_runtime.comm.transports import Transfer
from zero_runtime.errors import PlanError, UnsupportedError
from zero_runtime.ir.ops import HANDLE_BYTES
from zero_runtime.ir.plan import Plan, Saved, Tier
from zero_runtime.offload.memory_tiers import MemoryTiers, Moving

_PACKED = (
    "torch.autograd.graph.saved_tensors_hooks, or torch.utils.checkpoint around a compiled module, "
    "would pack handles of tensors on NVMe, which do not survive without their memory: use "
    "offload_activations with device 'cpu', or call the model outside of it"
)


class _Memory(bytearray):
    """A handle's memory. It dies with the last tensor on it, of which a weak reference tells."""


class Leaving(NamedTuple):
    """A saved tensor on its way: ``away`` stands for it, ``address`` is where it lay on the device."""

    away: torch.Tensor
    moving: Moving
    address: int


class Recalled(NamedTuple):
    """Host memory into which a tensor is read from NVMe."""

    tensor: torch.Tensor
    reading: Transfer


class SavedStore:
    """One session's saved tensors off the device."""

    def __init__(self, memory_tiers: MemoryTiers) -> None:
        self._memory_tiers = memory_tiers
        self._numbers = itertools.count()
        self._stored: set[int] = set()
        # A handle may die anywhere, on any thread, inside the swap's locks too: its extent is given
        # back by whoever comes next.
        self._dead: collections.deque[int] = collections.deque()

    def send(self, flat: torch.Tensor, tier: Tier, address: int) -> Leaving:
        """Start copying a flat tensor off the device."""
        self._give_back()
        moving = self._memory_tiers.to_host(flat)
        away = self._handle() if tier is Tier.NVME else moving.tensor
        return Leaving(away, moving, address)

    def settle(self, leaving: Leaving) -> None:
        """Have the device wait for the copy, after which it may use the tensor's memory for other things.

        What goes to NVMe is then complete on the host, and being written.

        Raises:
            SwapError: NVMe has no room.
        """
        if leaving.away is leaving.moving.tensor:
            leaving.moving.wait()
            return
        copy, number = leaving.moving.land().view(torch.uint8), _number(leaving.away)
        self._memory_tiers.swap.allocate(_name(number), copy.numel())
        self._stored.add(number)
        self._memory_tiers.swap.write(_name(number), copy)  # whoever reads it learns of a failure

    def recall(self, handle: torch.Tensor, saved: Saved) -> Recalled:
        """Start reading a tensor from NVMe to the host."""
        self._give_back()
        staging = self._memory_tiers.host(saved.numel, saved.torch_dtype)
        return Recalled(
            staging, self._memory_tiers.swap.read(_name(_number(handle)), staging.view(torch.uint8))
        )

    def bring(self, copy: torch.Tensor, device: torch.device) -> Moving:
        """Start copying a flat tensor from the host to fresh memory of the device."""
        return self._memory_tiers.to_device(copy, device)

    def _handle(self) -> torch.Tensor:
        number = next(self._numbers)
        memory = _Memory(number.to_bytes(HANDLE_BYTES, "little"))
        weakref.finalize(memory, self._dead.append, number).atexit = False
        return torch.frombuffer(memory, dtype=torch.uint8)

    def _give_back(self) -> None:
        while self._dead:
            number = self._dead.popleft()
            if number in self._stored:
                self._stored.remove(number)
                self._memory_tiers.swap.free(_name(number))


class SavedTensorMoves:
    """The saved tensors that one run of a graph moves, by their number in its plan."""

    def __init__(self, store: SavedStore, plan: Plan) -> None:
        self._store = store
        self._plan = plan
        self._leaving: dict[int, Leaving] = {}
        self._left: list[Leaving] = []
        self._recalled: dict[int, Recalled] = {}
        self._coming: dict[int, Moving] = {}

    def start_offload(self, number: int, flat: torch.Tensor, address: int) -> torch.Tensor:
        """Start copying a flat tensor off the device; what autograd is to hold instead."""
        leaving = self._store.send(flat, self._plan.saved[number].tier, address)
        self._leaving[number] = leaving
        return leaving.away

    def finish_offload(self, number: int, address: int) -> None:
        """Once the copy is complete: the tensor's memory on the device is no longer needed.

        Raises:
            PlanError: nothing has set out, or from other memory.
        """
        leaving = self._leaving.get(number)
        if leaving is None:
            raise PlanError(f"{self._plan.name}: {self._say(number)} was never sent off the device")
        if leaving.address != address:
            raise PlanError(
                f"{self._plan.name}: the compiled code sends a copy of {self._say(number)} off the "
                "device, and would free another one. Turn 'offload_activations' off; please report it."
            )
        self._store.settle(leaving)
        self._left.append(self._leaving.pop(number))

    def start_recall(self, number: int, handle: torch.Tensor) -> None:
        """Start reading from NVMe to the host."""
        self._recalled[number] = self._store.recall(handle, self._plan.saved[number])

    def start_reload(self, number: int, away: torch.Tensor, device: torch.device) -> None:
        """Start copying to the device: ``away`` itself, or what it is a handle of, once that is read.

        Raises:
            PlanError: it is on NVMe, and nobody has recalled it.
            SwapError: it could not be read, or had not been written.
        """
        if self._plan.saved[number].tier is Tier.NVME:
            recalled = self._recalled.pop(number, None)
            if recalled is None:
                raise PlanError(
                    f"{self._plan.name}: {self._say(number)} was not recalled from NVMe"
                )
            recalled.reading.wait()
            away = recalled.tensor
        self._coming[number] = self._store.bring(away, device)

    def finish_reload(self, number: int) -> torch.Tensor:
        """The tensor, flat, in memory of its own, once it is there.

        Raises:
            PlanError: it has not set out.
        """
        moving = self._coming.pop(number, None)
        if moving is None:
            raise PlanError(f"{self._plan.name}: {self._say(number)} was awaited before it set out")
        moving.wait()
        return moving.tensor

    def finish(self) -> None:
        """After the graph.

        Raises:
            PlanError: something is under way.
            UnsupportedError: the user's code packs saved tensors, and would get handles.
        """
        late = [*self._leaving, *self._recalled, *self._coming]
        if late:
            raise PlanError(f"{self._plan.name}: {self._say(late[0])} was never waited for")
        if self._left and compat.packs_saved_tensors():
            if any(saved.tier is Tier.NVME for saved in self._plan.saved):
                raise UnsupportedError(_PACKED)
            for leaving in self._left:  # the user's code is about to read the copies on the host
                leaving.moving.land()
        self._left.clear()

    def abandon(self) -> list[object]:
        """After a failure: what is in flight, whose memory must stay."""
        flying = [*self._leaving.values(), *self._recalled.values(), *self._coming.values()]
        for under_way in (self._leaving, self._recalled, self._coming):
            under_way.clear()
        self._left.clear()
        return list(flying)

    def _say(self, number: int) -> str:
        return f"saved tensor {number} ({self._plan.saved[number].name})"


def _number(handle: torch.Tensor) -> int:
    return int.from_bytes(bytes(handle.tolist()), "little")


def _name(number: int) -> str:
    return f"saved {number}"
