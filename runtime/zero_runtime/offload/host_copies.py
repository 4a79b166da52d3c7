"""Host memory for what a device does not hold, and copies between the two while others compute.

A :class:`Pool` hands out host memory of exact size, pinned where a GPU is there. :class:`Transfers`
start copies, one lane for each direction, and each :class:`Copy` is waited for where its result is
needed: by the device's current stream, or by the host. A GPU's copies run on streams of their own,
through the CUDA extension where it is installed and through PyTorch's streams otherwise; those of
the CPU run on threads. The bits that arrive are the same in every case.

The environment variable ``ZERO_RUNTIME_NO_NATIVE=1``, read on first use, leaves the extension out.
"""

import collections
import contextlib
import functools
import importlib
import logging
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from enum import Enum
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from zero_runtime.errors import UnsupportedError, ZeroError
from zero_runtime.memory import native

__all__ = [
    "Copy",
    "ExtensionStats",
    "Pool",
    "Transfers",
    "cuda_extension",
    "extension_stats",
    "transfers_for",
    "trim",
]

_MISSING = (
    "The CUDA extension of zero_runtime cannot be loaded (%s). Copies between host and GPU go "
    "through PyTorch's streams, which is as fast, but pinned memory is rounded up to powers of two. "
    "To build it, install CUDA's toolkit of version %s and run 'pip install --no-build-isolation .' "
    "in the source tree."
)


class Copy(Protocol):
    """One copy that was started, which keeps its tensors alive until it is complete.

    Both ways to wait raise ZeroError, each time, where the copy has failed. A GPU's failure is known
    to the host only when the copy is over: :meth:`wait` may return before.
    """

    def wait(self) -> None:
        """Return once the current stream of the device may use both tensors.

        On a GPU the stream waits, not the host; on the CPU the calling thread waits.
        """

    def wait_on_host(self) -> None:
        """Return once the copy is complete: the host may use both tensors."""

    def done(self) -> bool:
        """Return whether the copy is complete, successful or not, without waiting."""


class Transfers(Protocol):
    """Starts copies between the host and one device.

    Copies of one direction run in the order in which they were started. Each begins after the work
    that the device's current stream has been given by then, so the source need not be computed and
    the destination need not be free yet on that stream. What the host itself reads and writes is
    not in that order: see :meth:`Copy.wait_on_host`.

    The two tensors have the same shape and dtype, are contiguous and hold memory; ZeroError is
    raised otherwise. No gradients flow.
    """

    def to_device(self, host: Tensor, device: Tensor) -> Copy:
        """Start copying ``host``, on the CPU, to ``device``."""

    def to_host(self, device: Tensor, host: Tensor) -> Copy:
        """Start copying ``device`` to ``host``, on the CPU."""


class Pool:
    """Host memory of exact size. What its tensors leave behind is used again."""

    def __init__(self, pinned: bool) -> None:
        """``pinned`` memory is copied from and to a GPU at full speed and without the host's help."""
        self.pinned = pinned and torch.cuda.is_available()
        """Whether memory is pinned: as asked for, where there is a GPU."""

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """An uninitialised CPU tensor ``[numel]``, aligned to 64 bytes or more.

        Raises ZeroError where memory runs out or ``numel`` is negative.
        """
        if numel < 0:
            raise ZeroError(f"host memory of {numel} elements was asked for, expected 0 or more")
        nbytes = numel * dtype.itemsize
        with _explaining(f"take {nbytes} bytes of {'pinned' if self.pinned else 'host'} memory"):
            if not self.pinned:
                return native.take(nbytes).view(dtype)
            if not cuda_extension():
                return torch.empty(numel, dtype=dtype, pin_memory=True)
            taken: Tensor = torch.ops.zero_cuda.pinned_take.default(
                nbytes, torch.cuda.current_device()
            )
            return taken.view(dtype)


def transfers_for(device: torch.device) -> Transfers:
    """What copies between the host and ``device``; a caller keeps one for each device.

    Raises UnsupportedError for a device that is neither the CPU nor a CUDA GPU.
    """
    if device.type == "cpu":
        return _ThreadTransfers(device)
    if device.type != "cuda":
        raise UnsupportedError(
            f"copies between host and {device} are not supported, only those of cpu and cuda"
        )
    if device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return _ExtensionTransfers(device) if cuda_extension() else _StreamTransfers(device)


@functools.cache
def cuda_extension() -> bool:
    """Whether the CUDA extension is in use."""
    if torch.version.cuda is None or os.environ.get("ZERO_RUNTIME_NO_NATIVE") == "1":
        return False
    try:
        importlib.import_module("zero_runtime._cuda")
    except ImportError as error:
        logging.getLogger("zero_runtime").warning(_MISSING, error, torch.version.cuda)
        return False
    return True


class ExtensionStats(NamedTuple):
    """What the CUDA extension holds, in the whole process."""

    pinned_live: int
    """Bytes of pinned memory that tensors take up."""
    pinned_held: int
    """Bytes of pinned memory that are in use or free to be used again."""
    in_flight: int
    """Copies that were not found complete yet."""
    events: int
    """CUDA events that were made."""


def extension_stats() -> ExtensionStats:
    """What the CUDA extension holds; all 0 without it."""
    if not cuda_extension():
        return ExtensionStats(0, 0, 0, 0)
    return ExtensionStats(*torch.ops.zero_cuda.stats.default())


def trim() -> None:
    """Give host memory that no tensor uses back to the operating system. A GPU finishes its work."""
    native.trim()
    if cuda_extension():
        torch.ops.zero_cuda.pinned_trim.default()


class _Direction(Enum):
    TO_DEVICE = "to device"
    TO_HOST = "to host"


class _Move(NamedTuple):
    """Two tensors that have been checked, without their autograd history."""

    host: Tensor
    device: Tensor
    direction: _Direction

    @property
    def source(self) -> Tensor:
        return self.host if self.direction is _Direction.TO_DEVICE else self.device

    @property
    def destination(self) -> Tensor:
        return self.device if self.direction is _Direction.TO_DEVICE else self.host

    def __str__(self) -> str:
        ends = ["host", str(self.device.device)]
        source, destination = ends if self.direction is _Direction.TO_DEVICE else reversed(ends)
        shape, dtype = list(self.host.shape), self.host.dtype
        return f"copy {self.host.nbytes} bytes, {shape} of {dtype}, from {source} to {destination}"


class _Checking(ABC):
    """Both directions of :class:`Transfers` as one method, with tensors that fit each other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def to_device(self, host: Tensor, device: Tensor) -> Copy:
        return self._start(self._checked(host, device, _Direction.TO_DEVICE))

    def to_host(self, device: Tensor, host: Tensor) -> Copy:
        return self._start(self._checked(host, device, _Direction.TO_HOST))

    @abstractmethod
    def _start(self, move: _Move) -> Copy: ...

    def _checked(self, host: Tensor, device: Tensor, direction: _Direction) -> _Move:
        cpu = torch.device("cpu")
        for name, tensor, place in (("host", host, cpu), ("device", device, self._device)):
            if tensor.device != place:
                raise ZeroError(
                    f"cannot copy: the {name}'s tensor is on {tensor.device}, not {place}"
                )
        move = _Move(host.detach(), device.detach(), direction)
        if host.shape != device.shape or host.dtype != device.dtype:
            raise ZeroError(
                f"cannot copy: the host's tensor is {list(host.shape)} of {host.dtype}, "
                f"the device's {list(device.shape)} of {device.dtype}; they must be equal"
            )
        for name, tensor in (("host", host), ("device", device)):
            if not tensor.is_contiguous():
                raise ZeroError(f"cannot {move}: the {name}'s tensor is not contiguous")
            if not _holds_memory(tensor):
                raise ZeroError(f"cannot {move}: the {name}'s tensor holds no memory")
        return move


def _holds_memory(tensor: Tensor) -> bool:
    end = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
    return tensor.numel() == 0 or tensor.untyped_storage().nbytes() >= end


@contextlib.contextmanager
def _explaining(what: str) -> Iterator[None]:
    """Raise what fails as ZeroError that says what could not be done."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        raise ZeroError(f"cannot {what}: {error}") from error


# ------------------------------------------------------------------------------ the CPU


class _ThreadTransfers(_Checking):
    """Copies within host memory, on a thread for each direction.

    The threads start with the first copy, and end when this object and its copies are gone.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._lanes = {
            direction: ThreadPoolExecutor(1, f"zero copies {direction.value}")
            for direction in _Direction
        }

    def _start(self, move: _Move) -> Copy:
        return _ThreadCopy(self._lanes[move.direction].submit(_copy, move), str(move))


def _copy(move: _Move) -> None:
    # Only there may tensors made in inference mode be written to, and all others may as well.
    with torch.inference_mode():
        move.destination.copy_(move.source)


class _ThreadCopy:
    """A copy on another thread, which holds the tensors until it has run."""

    def __init__(self, future: Future[None], what: str) -> None:
        self._future = future
        self._what = what

    def wait(self) -> None:
        with _explaining(self._what):
            self._future.result()

    def wait_on_host(self) -> None:
        self.wait()

    def done(self) -> bool:
        return self._future.done()


# ------------------------------------------------------------------------------ PyTorch's streams


class _StreamTransfers(_Checking):
    """Copies on two streams of PyTorch's, for a GPU without the extension.

    The caching allocator is not told which streams use a tensor, which would delay the reuse of its
    memory: what is in flight is held here instead, and let go when the next copy starts.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._streams = {direction: torch.cuda.Stream(device) for direction in _Direction}
        self._lock = threading.Lock()
        self._in_flight: dict[_Direction, collections.deque[_StreamCopy]] = {
            direction: collections.deque() for direction in _Direction
        }
        weakref.finalize(self, _wait_for_all, list(self._in_flight.values())).atexit = False

    def _start(self, move: _Move) -> Copy:
        in_flight = self._in_flight[move.direction]
        with self._lock, _explaining(str(move)):
            while in_flight and in_flight[0].done():
                in_flight.popleft()
            copy = _StreamCopy(move, self._streams[move.direction])
            in_flight.append(copy)
        return copy


class _StreamCopy:
    """A copy on ``stream``, which is complete when the event has passed."""

    def __init__(self, move: _Move, stream: torch.cuda.Stream) -> None:
        self._what = str(move)
        self._started_on = torch.cuda.current_stream(move.device.device)
        self._tensors: tuple[Tensor, ...] = (move.host, move.device)
        stream.wait_stream(self._started_on)
        with torch.cuda.stream(stream), torch.inference_mode():
            move.destination.copy_(move.source, non_blocking=True)
        self._event = stream.record_event()

    def wait(self) -> None:
        with _explaining(self._what):
            current = torch.cuda.current_stream(self._started_on.device)
            current.wait_event(self._event)
        if current == self._started_on:
            # What this stream is given the device's memory for next runs after the copy. The host
            # is in no such order: its memory stays.
            self._tensors = self._tensors[:1]

    def wait_on_host(self) -> None:
        with _explaining(self._what):
            self._event.synchronize()
        self._tensors = ()

    def done(self) -> bool:
        try:
            complete = bool(self._event.query())
        except RuntimeError:  # is told to whoever waits
            complete = True
        if complete:
            self._tensors = ()
        return complete


def _wait_for_all(lanes: list[collections.deque[_StreamCopy]]) -> None:
    for lane in lanes:
        for copy in lane:
            copy.wait_on_host()


# ------------------------------------------------------------------------------ the extension


class _ExtensionTransfers(_Checking):
    """Copies by the operators of ``csrc/cuda``, which hold the tensors."""

    def _start(self, move: _Move) -> Copy:
        ops: Any = torch.ops.zero_cuda
        with _explaining(str(move)):
            if move.direction is _Direction.TO_DEVICE:
                ticket = ops.copy_to_device.default(move.host, move.device, 0)
            else:
                ticket = ops.copy_to_host.default(move.device, move.host, 0)
        return _TicketCopy(ticket, str(move))


class _TicketCopy:
    """A copy known by its ticket, which is given back with this object."""

    def __init__(self, ticket: int, what: str) -> None:
        self._ops: Any = torch.ops.zero_cuda
        self._ticket = ticket
        self._what = what
        weakref.finalize(self, self._ops.release.default, ticket).atexit = False

    def wait(self) -> None:
        with _explaining(self._what):
            self._ops.wait_on_stream.default(self._ticket)

    def wait_on_host(self) -> None:
        with _explaining(self._what):
            self._ops.wait_on_host.default(self._ticket)

    def done(self) -> bool:
        return bool(self._ops.done.default(self._ticket))
