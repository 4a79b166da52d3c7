"""Tensors by name in a scratch file on a local disk, moved there and back while others compute.

A :class:`SwapFile` is one preallocated file. Each tensor has an extent of it; writes and reads are
started, and waited for later. Requests pass the page cache by (O_DIRECT) where the file system lets
them. The work is done by the C++ extension, with io_uring where the kernel permits it and with
threads elsewhere, or by threads of Python where the extension is missing.
"""

import errno
import importlib
import logging
import os
import re
import weakref
from collections.abc import Callable, Mapping
from dataclasses import astuple
from types import TracebackType
from typing import Any, Final, Literal, NamedTuple, Protocol, Self, TypeVar

import torch
from torch import Tensor

from zero_runtime.errors import OptionError, SwapError
from zero_runtime.ir.aio import MAX_DEPTH, MAX_THREADS, PAGE, AioConfig
from zero_runtime.memory import native as _native
from zero_runtime.offload.python_swap import Faults, ThreadedSwap
from zero_runtime.offload.scratch import Scratch, open_scratch

__all__ = [
    "MAX_DEPTH",
    "MAX_THREADS",
    "PAGE",
    "AioConfig",
    "BackendName",
    "Extent",
    "Faults",
    "SwapFile",
    "SwapStats",
    "Ticket",
]


BackendName = Literal["io_uring", "threads"]
"""What moves the data of the C++ extension."""

_BACKENDS: Mapping[BackendName | None, int] = {None: 0, "io_uring": 1, "threads": 2}


_T = TypeVar("_T")


class Extent(NamedTuple):
    """Where a tensor lies in the file, in bytes."""

    offset: int
    """A multiple of :data:`PAGE`."""
    length: int
    """As asked for; the file sets whole pages aside."""


class SwapStats(NamedTuple):
    """What a swap file holds and has moved; sizes are in bytes."""

    bytes_read: int
    """Of tensors, without padding, by requests that succeeded."""
    bytes_written: int
    """Likewise."""
    allocated: int
    """Set aside for extents."""
    capacity: int
    """Of the file."""
    direct: bool
    """Whether requests pass the page cache by."""


class _Backend(Protocol):
    @property
    def mode(self) -> str: ...
    def allocate(self, name: str, nbytes: int) -> tuple[int, int]: ...
    def free(self, name: str) -> None: ...
    def find(self, name: str) -> tuple[int, int]: ...
    def write(self, name: str, tensor: Tensor) -> int: ...
    def read(self, name: str, tensor: Tensor) -> int: ...
    def done(self, ticket: int) -> bool: ...
    def wait(self, ticket: int) -> None: ...
    def drain(self) -> None: ...
    def close(self) -> None: ...
    def release(self) -> None: ...
    def stats(self) -> tuple[int, int, int, int, bool]: ...


class _NativeSwap:
    """The operators of the C++ extension; raises ImportError where it is missing."""

    def __init__(
        self,
        scratch: Scratch,
        capacity: int,
        config: AioConfig,
        slots: int,
        direct: bool,
        backend: BackendName | None,
        faults: Faults,
    ) -> None:
        importlib.import_module("zero_runtime._native")
        self._ops: Any = torch.ops.zero_native
        self._file: int = _reporting(
            self._ops.swap_open.default,
            scratch.path,
            scratch.descriptor,
            capacity,
            config.block_size,
            config.in_flight,
            config.ring_depth,
            slots,
            direct,
            config.checksum,
            _BACKENDS[backend],
            config.single_submit,
            config.overlap_events,
            [int(fault) for fault in astuple(faults)] if faults != Faults() else [],
        )
        self._write, self._read = self._ops.swap_write.default, self._ops.swap_read.default
        self._done, self._wait = self._ops.swap_done.default, self._ops.swap_wait.default
        self.mode: str = _reporting(self._ops.swap_mode.default, self._file)

    def allocate(self, name: str, nbytes: int) -> tuple[int, int]:
        offset, length = _reporting(self._ops.swap_allocate.default, self._file, name, nbytes)
        return offset, length

    def free(self, name: str) -> None:
        _reporting(self._ops.swap_free.default, self._file, name)

    def find(self, name: str) -> tuple[int, int]:
        offset, length = _reporting(self._ops.swap_find.default, self._file, name)
        return offset, length

    def write(self, name: str, tensor: Tensor) -> int:
        ticket: int = _reporting(self._write, self._file, name, tensor)
        return ticket

    def read(self, name: str, tensor: Tensor) -> int:
        ticket: int = _reporting(self._read, self._file, name, tensor)
        return ticket

    def done(self, ticket: int) -> bool:
        done: bool = _reporting(self._done, self._file, ticket)
        return done

    def wait(self, ticket: int) -> None:
        _reporting(self._wait, self._file, ticket)

    def drain(self) -> None:
        _reporting(self._ops.swap_drain.default, self._file)

    def close(self) -> None:
        _reporting(self._ops.swap_close.default, self._file)

    def release(self) -> None:
        _reporting(self._ops.swap_release.default, self._file)

    def stats(self) -> tuple[int, int, int, int, bool]:
        read, written, allocated, capacity, direct = _reporting(
            self._ops.swap_stats.default, self._file
        )
        return read, written, allocated, capacity, bool(direct)


class Ticket:
    """One write or read that was started; it keeps its swap file alive."""

    def __init__(self, file: "SwapFile", number: int, name: str) -> None:
        self._file = file
        self._number = number
        self.name = name
        """Of the tensor."""

    def done(self) -> bool:
        """Return whether the operation is complete, successful or not, without waiting."""
        return self._file._live().done(self._number)

    def wait(self) -> None:
        """Return once the operation is complete, also after the file was closed.

        Then the tensor of a read holds its data, and the tensor of a write may change. Raises
        SwapError, each time, where the operation failed; what a read's tensor holds is undefined
        then.
        """
        self._file._live().wait(self._number)


class SwapFile:
    """A preallocated scratch file, without a name of its own, that holds flat CPU tensors by name.

    Operations on one name run in the order in which they were started, so a read sees the write
    before it; those on different names run in any order. A read takes as many bytes as were written
    last, and fails where that write failed, or where the file holds other bytes by now.
    Any thread may call any method. Closing, also at the end of a ``with`` block, when the object is
    dropped and when the interpreter ends, waits for everything and gives the space back. A process
    that is killed leaves nothing behind. Where the folder is removed meanwhile, the open file works
    on, and a new one needs the folder again.

    A forked child may not use its parent's file, and leaves it alone.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        capacity: int,
        config: AioConfig | None = None,
        *,
        name: str = "zero",
        slots: int = 4,
        direct: bool = True,
        native: bool | None = None,
        backend: BackendName | None = None,
        faults: Faults | None = None,
    ) -> None:
        """Reserve `capacity` bytes in `folder`, which must exist.

        `name` stands in messages and need not be unique. With O_DIRECT, tensors that are not aligned
        to 4096 bytes, and ends that are not, pass through `slots` buffers of ``block_size`` bytes,
        which are resident from the start where io_uring has them registered.
        `direct=False` goes without O_DIRECT; `native` chooses the C++ extension (True, raises
        ImportError where it is missing) or Python (False) instead of whichever there is.
        `backend` chooses what the extension does: ``"io_uring"`` or ``"threads"`` instead of
        io_uring where a page passes through it, threads elsewhere. `faults` is for tests.

        Raises SwapError where the folder is missing or not writable, the space is not there, or
        `backend` does not work; OptionError where an argument is out of range.
        """
        if capacity < 1 or slots < 1:
            raise OptionError(f"swap: capacity {capacity} and slots {slots} must be at least 1")
        if not name or os.sep in name or "\0" in name:
            raise OptionError(f"swap: name {name!r} is no file name")
        if backend not in _BACKENDS or (backend == "io_uring" and native is False):
            raise OptionError(f"swap: backend {backend!r} does not exist with native={native}")
        scratch = open_scratch(folder, name)
        self.path: Final = scratch.path
        """What the file was called for a moment: messages, and tools that list open files, say it."""
        try:
            self._backend = _make_backend(
                _native.AVAILABLE or backend == "io_uring" if native is None else native,
                scratch,
                capacity,
                config if config is not None else AioConfig(),
                slots,
                direct,
                backend,
                faults if faults is not None else Faults(),
            )
        finally:
            os.close(scratch.descriptor)
        self._pid = os.getpid()
        self._closed = False
        self._finalizer = weakref.finalize(self, _abandon, self._backend, self.path, self._pid)
        logging.getLogger("zero_runtime").info("Swap file %s: %s", self.path, self.mode)

    @property
    def mode(self) -> str:
        """How data moves and why, as in ``"io_uring, O_DIRECT, registered buffers"``.

        First ``io_uring``, ``threads`` or ``Python threads``; then ``O_DIRECT`` or ``buffered``;
        then, with io_uring and O_DIRECT, whether the buffers for data that is not aligned are
        registered with the kernel. Where something else was tried first, the reason why that
        failed stands in brackets.
        """
        return self._backend.mode

    def allocate(self, name: str, nbytes: int) -> Extent:
        """Set an extent of `nbytes`, rounded up to whole pages, aside for the tensor `name`.

        Raises SwapError where the name has one, no free stretch is long enough, or the file is
        closed; OptionError where `nbytes` is negative.
        """
        if nbytes < 0:
            raise OptionError(f"swap: tensor '{name}' cannot have {nbytes} bytes")
        return Extent(*self._live().allocate(name, nbytes))

    def free(self, name: str) -> None:
        """Wait for the operations on the extent of `name`, then let others have its pages.

        Raises SwapError where there is none or the file is closed; the failures of the operations
        are raised where those are waited for.
        """
        self._live().free(name)

    def extent(self, name: str) -> Extent:
        """Return where the tensor `name` lies; raises SwapError where it has no extent."""
        return Extent(*self._live().find(name))

    def write(self, name: str, source: Tensor) -> Ticket:
        """Start writing a flat, contiguous CPU tensor, of at most the extent's length, to `name`.

        `source` is kept alive, and must not change until the ticket was waited for. Raises
        SwapError where the tensor does not fit, has another form, or the file is closed.
        """
        flat = flat_on_cpu(name, source, self.path)
        return Ticket(self, self._live().write(name, flat), name)

    def read(self, name: str, out: Tensor) -> Ticket:
        """Start filling `out` with what was last written to `name`, and has its size.

        The same as :meth:`write` otherwise; SwapError also where something of another size, or
        nothing, was written.
        """
        flat = flat_on_cpu(name, out, self.path)
        return Ticket(self, self._live().read(name, flat), name)

    def drain(self) -> None:
        """Wait for all operations; raise the first failure that nobody waited for, once.

        Raises SwapError.
        """
        self._live().drain()

    def stats(self) -> SwapStats:
        """Return what the file holds and has moved since it was opened, also after closing."""
        return SwapStats(*self._live().stats())

    def close(self) -> None:
        """Wait for all operations and give up the file; does nothing the second time.

        Raises SwapError, after that, for the first failure that nobody waited for.
        """
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self._backend.close()
        self._backend.drain()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except SwapError:
            if error is None:
                raise

    def _live(self) -> _Backend:
        if os.getpid() != self._pid:
            raise SwapError(errno.EBADF, f"swap file {self.path} belongs to process {self._pid}")
        return self._backend


def _make_backend(
    native: bool,
    scratch: Scratch,
    capacity: int,
    config: AioConfig,
    slots: int,
    direct: bool,
    backend: BackendName | None,
    faults: Faults,
) -> _Backend:
    if native:
        return _NativeSwap(scratch, capacity, config, slots, direct, backend, faults)
    return ThreadedSwap(
        scratch,
        capacity,
        config.block_size,
        config.in_flight,
        config.checksum,
        slots,
        direct,
        faults,
    )


def flat_on_cpu(name: str, tensor: Tensor, path: str) -> Tensor:
    """Return `tensor` without autograd; raises SwapError unless it is flat and on the CPU."""
    if tensor.device.type == "cpu" and tensor.dim() == 1 and tensor.is_contiguous():
        return tensor.detach()
    raise SwapError(
        errno.EINVAL,
        f"tensor '{name}' of shape {list(tensor.shape)} on {tensor.device} cannot move to or from "
        f"{path}: it must be flat, contiguous and on the CPU",
    )


def _reporting(operator: Callable[..., _T], *arguments: Any) -> _T:
    """Call an operator of the extension and raise its failures as SwapError."""
    try:
        return operator(*arguments)
    except RuntimeError as error:
        found = re.match(r"\[(\d+)\] (.*)", str(error), re.DOTALL)
        if found is None:
            raise SwapError(errno.EIO, str(error)) from error
        code, message = int(found[1]), found[2]
    raise SwapError(code, message)


def _abandon(backend: _Backend, path: str, owner: int) -> None:
    """Close what nobody closed, in the process that opened it."""
    if os.getpid() != owner:
        return
    backend.close()
    try:
        backend.drain()
    except SwapError as error:
        logging.getLogger("zero_runtime").warning("Swap file %s was dropped: %s", path, error)
    backend.release()
