"""What a session keeps off the device: its host memory, its swap files, and the transfers to both."""

import itertools
import os
from collections.abc import Hashable

import torch
import torch.distributed as dist

from zero_runtime.comm.transports import Transfer
from zero_runtime.errors import OptionError
from zero_runtime.ir.aio import PAGE
from zero_runtime.ir.placement import Offload
from zero_runtime.memory.buffers import flat_buffer
from zero_runtime.offload.host_copies import Copy, Pool, Transfers, transfers_for
from zero_runtime.offload.striped_swap import StripedSwap


class Slots:
    """A fixed number of places in host memory for shards on their way from NVMe."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._taken: set[Hashable] = set()

    def take(self, owner: Hashable) -> bool:
        """Whether ``owner`` has a place now."""
        if owner not in self._taken and len(self._taken) < self._count:
            self._taken.add(owner)
        return owner in self._taken

    def give(self, owner: Hashable) -> None:
        """The place is free again, if there was one."""
        self._taken.discard(owner)


class MemoryTiers:
    """Host memory, NVMe and transfers of one session on one rank. Nothing is opened before its first use."""

    _serials = itertools.count()

    def __init__(self, offload: Offload) -> None:
        self.offload = offload
        self.slots = Slots(offload.slots)
        self._serial = next(self._serials)
        self._pool = Pool(offload.pinned)
        self._swap: StripedSwap | None = None
        self._transfers: dict[torch.device, Transfers] = {}

    @property
    def swap(self) -> StripedSwap:
        """The swap files; opened here.

        Raises:
            SwapError: a folder is missing, full or not writable.
        """
        if self._swap is None:
            if not self.offload.folders:
                raise OptionError("state goes to NVMe, but no nvme_path says where")
            capacity = self.offload.nvme_bytes + self.offload.nvme_bytes // 8 + 64 * PAGE
            self._swap = StripedSwap(
                self.offload.folders, capacity, self.offload.aio, name=self._name()
            )
        return self._swap

    @property
    def swapped_bytes(self) -> int:
        """What swap files hold now."""
        return 0 if self._swap is None else self._swap.stats().allocated

    def host(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised host memory ``[numel]``, pinned where a GPU can use that."""
        return self._pool.take(numel, dtype)

    def to_device(self, host: torch.Tensor, device: torch.device) -> "Moving":
        """Start copying a flat host tensor to fresh memory on ``device``."""
        there = flat_buffer(host.numel(), host.dtype, device)
        return Moving(there, self._transfers_of(device).to_device(host, there))

    def to_host(self, tensor: torch.Tensor, into: torch.Tensor | None = None) -> "Moving":
        """Start copying a flat tensor on a device to host memory: fresh, or ``into`` of its size."""
        there = self.host(tensor.numel(), tensor.dtype) if into is None else into
        return Moving(there, self._transfers_of(tensor.device).to_host(tensor, there))

    def _transfers_of(self, device: torch.device) -> Transfers:
        if device not in self._transfers:
            self._transfers[device] = transfers_for(device)
        return self._transfers[device]

    def _name(self) -> str:
        rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
        return f"zero{self._serial}-rank{rank}"


class Moving(Transfer):
    """A tensor on its way to or from the device."""

    def __init__(self, tensor: torch.Tensor, copy: Copy) -> None:
        self.tensor = tensor
        self._copy = copy

    def wait(self) -> None:
        """The device may use the tensor after this; on the CPU the host as well."""
        self._copy.wait()

    def land(self) -> torch.Tensor:
        """Have the host wait, then the tensor."""
        self._copy.wait_on_host()
        return self.tensor
