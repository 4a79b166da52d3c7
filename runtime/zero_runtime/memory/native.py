"""Buffers that are reused, and copies between many tensors and one flat buffer.

Everything here works on CPU tensors through the C++ extension where it is installed, and through
plain PyTorch otherwise: on other devices, for other dtypes, and where the extension is missing.
Results are the same either way, bit for bit, except that a NaN may change its payload.

The environment variable ``ZERO_RUNTIME_NO_NATIVE=1``, read on import, leaves the extension out.
"""

import bisect
import collections
import ctypes
import importlib
import logging
import os
import threading
import weakref
from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

import torch
from torch import Tensor

__all__ = [
    "AVAILABLE",
    "ArenaStats",
    "pack",
    "reset_peak",
    "stats",
    "sum_chunks",
    "take",
    "trim",
    "unpack",
]

_NATIVE_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})
_PAGE = 4096
_CACHE_LINE = 64
_LARGE = 1 << 20

_MISSING = (
    "The C++ extension of zero_runtime cannot be loaded (%s). Everything works without it, but "
    "packing and summing are slower. To build it, install a C++17 compiler and run "
    "'pip install --no-build-isolation .' in the source tree."
)


class ArenaStats(NamedTuple):
    """What the arena holds; sizes are in bytes."""

    live: int
    """Requested by the tensors that are alive."""
    peak: int
    """Largest ``live`` since the last :func:`reset_peak`."""
    held: int
    """Obtained from the operating system and not given back: in use, or free for reuse."""
    os_allocations: int
    """Requests to the operating system since the process started."""
    takes: int
    """Tensors handed out since the process started."""


class Backend(Protocol):
    """An implementation of this module's functions."""

    def take(self, nbytes: int) -> Tensor: ...
    def stats(self) -> ArenaStats: ...
    def reset_peak(self) -> None: ...
    def trim(self) -> None: ...
    def pack(self, sources: Sequence[Tensor], offsets: Sequence[int], out: Tensor) -> None: ...
    def unpack(self, source: Tensor, offsets: Sequence[int], outs: Sequence[Tensor]) -> None: ...
    def sum_chunks(self, chunks: Tensor, scale: float, out: Tensor) -> None: ...


#: Bytes that free blocks may add to the most that were in use, where a quarter of those is less.
_SLACK = 8 << 20


class TorchBackend:
    """The functions in plain PyTorch, for every device and dtype."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[Tensor] = []  # by size
        # Blocks whose tensor died. Finalizers may run anywhere, inside the lock too, so they
        # only append here.
        self._returned: collections.deque[tuple[Tensor, int]] = collections.deque()
        self._live = self._peak = self._held = self._os_allocations = self._takes = 0
        self._in_use = self._most_in_use = 0  # whole blocks, the most since the last trim

    def take(self, nbytes: int) -> Tensor:
        if nbytes < 0:
            raise RuntimeError(f"arena_take: nbytes must not be negative, got {nbytes}")
        with self._lock:
            self._collect()
            block = self._take_block(nbytes)
            self._in_use += block.numel()
            self._most_in_use = max(self._most_in_use, self._in_use)
            self._live += nbytes
            self._peak = max(self._peak, self._live)
            self._takes += 1
        return self._hand_out(block, nbytes)

    def stats(self) -> ArenaStats:
        with self._lock:
            self._collect()
            return ArenaStats(self._live, self._peak, self._held, self._os_allocations, self._takes)

    def reset_peak(self) -> None:
        with self._lock:
            self._collect()
            self._peak = self._live

    def trim(self) -> None:
        with self._lock:
            self._collect()
            self._release(self._held)
            self._most_in_use = self._in_use

    def pack(self, sources: Sequence[Tensor], offsets: Sequence[int], out: Tensor) -> None:
        _check_flat("pack: out", out)
        _check_places("pack: source", sources, offsets, out.numel())
        done = 0
        for source, offset in zip(sources, offsets, strict=True):
            out[done:offset].zero_()
            done = offset + source.numel()
            out[offset:done].view(source.shape).copy_(source)
        out[done:].zero_()

    def unpack(self, source: Tensor, offsets: Sequence[int], outs: Sequence[Tensor]) -> None:
        _check_flat("unpack: source", source)
        _check_places("unpack: out", outs, offsets, source.numel())
        for out, offset in zip(outs, offsets, strict=True):
            out.copy_(source[offset : offset + out.numel()].view(out.shape))

    def sum_chunks(self, chunks: Tensor, scale: float, out: Tensor) -> None:
        _check_flat("sum_chunks: chunks", chunks)
        _check_flat("sum_chunks: out", out)
        _check_chunks(chunks.numel(), out.numel())
        if out.numel() == 0:
            return
        rows = chunks.view(-1, out.numel())
        total = rows[0].to(torch.promote_types(chunks.dtype, torch.float32), copy=True)
        for row in rows[1:]:
            total.add_(row)
        out.copy_(total.mul_(scale))

    def _collect(self) -> None:
        while self._returned:
            block, nbytes = self._returned.popleft()
            bisect.insort(self._free, block, key=Tensor.numel)
            self._live -= nbytes
            self._in_use -= block.numel()

    def _take_block(self, nbytes: int) -> Tensor:
        wanted = _capacity(nbytes)
        fit = bisect.bisect_left(self._free, wanted, key=Tensor.numel)
        if fit < len(self._free) and self._free[fit].numel() <= wanted + wanted // 4:
            return self._free.pop(fit)
        most = max(self._most_in_use, self._in_use + wanted)
        self._release(self._held + wanted - most - max(most // 4, _SLACK))
        block = _new_block(wanted, nbytes)
        self._held += wanted
        self._os_allocations += 1
        return block

    def _release(self, at_least: int) -> None:
        """Drop free blocks of `at_least` bytes together, or all; as few of them as possible."""
        released = 0
        while released < at_least and self._free:
            covering = bisect.bisect_left(self._free, at_least - released, key=Tensor.numel)
            released += self._free.pop(min(covering, len(self._free) - 1)).numel()
        self._held -= released

    def _hand_out(self, block: Tensor, nbytes: int) -> Tensor:
        # The tensor's storage keeps `owner` alive, and nothing else does: where `owner` dies, the
        # last reference to the storage is gone.
        owner = (ctypes.c_uint8 * max(nbytes, 1)).from_address(block.data_ptr())
        finalizer = weakref.finalize(owner, self._returned.append, (block, nbytes))
        finalizer.atexit = False
        tensor = torch.frombuffer(owner, dtype=torch.uint8)
        return tensor if nbytes else tensor[:0]


class NativeBackend:
    """The functions in C++; calls that it does not cover go to plain PyTorch.

    Raises ImportError where the extension is missing or does not load.
    """

    def __init__(self) -> None:
        importlib.import_module("zero_runtime._native")
        ops = torch.ops.zero_native
        self._take = ops.arena_take.default
        self._stats = ops.arena_stats.default
        self._reset_peak = ops.arena_reset_peak.default
        self._trim = ops.arena_trim.default
        self._pack = ops.pack.default
        self._unpack = ops.unpack.default
        self._sum_chunks = ops.sum_chunks.default
        self._torch = TorchBackend()

    def take(self, nbytes: int) -> Tensor:
        tensor: Tensor = self._take(nbytes)
        return tensor

    def stats(self) -> ArenaStats:
        return ArenaStats(*self._stats())

    def reset_peak(self) -> None:
        self._reset_peak()

    def trim(self) -> None:
        self._trim()

    def pack(self, sources: Sequence[Tensor], offsets: Sequence[int], out: Tensor) -> None:
        if all(map(_is_native, sources)) and _is_native(out) and out.is_contiguous():
            self._pack([source.contiguous() for source in sources], list(offsets), out)
        else:
            self._torch.pack(sources, offsets, out)

    def unpack(self, source: Tensor, offsets: Sequence[int], outs: Sequence[Tensor]) -> None:
        written = all(_is_native(out) and out.is_contiguous() for out in outs)
        if written and _is_native(source):
            self._unpack(source.contiguous(), list(offsets), list(outs))
        else:
            self._torch.unpack(source, offsets, outs)

    def sum_chunks(self, chunks: Tensor, scale: float, out: Tensor) -> None:
        if _is_native(chunks) and _is_native(out) and out.is_contiguous():
            self._sum_chunks(chunks.contiguous(), scale, out)
        else:
            self._torch.sum_chunks(chunks, scale, out)


def take(nbytes: int) -> Tensor:
    """Return an uninitialised CPU tensor whose memory is reused once its storage is dead.

    The result is uint8 of shape ``[nbytes]``, aligned to 64 bytes, from 1 MiB on to 4096. Any
    thread may call this, and any thread may drop the tensor. Raises RuntimeError where `nbytes`
    is negative or memory runs out.
    """
    return _BACKEND.take(nbytes)


def stats() -> ArenaStats:
    """Return what the memory behind :func:`take` amounts to, for the whole process."""
    return _BACKEND.stats()


def reset_peak() -> None:
    """Start a new measurement of :attr:`ArenaStats.peak`, at what is live now."""
    _BACKEND.reset_peak()


def trim() -> None:
    """Give all memory that no tensor uses back to the operating system."""
    _BACKEND.trim()


def pack(sources: Sequence[Tensor], offsets: Sequence[int], out: Tensor) -> None:
    """Copy each source, flattened and cast, into `out` at its offset, and zero all the rest.

    `out` has shape ``[n]``; sources have any shape and stride, and do not share memory with `out`.
    Offsets count elements of `out`, ascend, and leave room for the sources before them. No
    gradients flow. Raises RuntimeError where `out` is not 1-D or a source does not fit, and names
    the source.
    """
    with torch.no_grad():
        _BACKEND.pack(sources, offsets, out)


def unpack(source: Tensor, offsets: Sequence[int], outs: Sequence[Tensor]) -> None:
    """Fill each of `outs`, of any shape and dtype, from its offset in `source` of shape ``[n]``.

    The inverse of :func:`pack`, under the same conditions and with the same errors.
    """
    with torch.no_grad():
        _BACKEND.unpack(source, offsets, outs)


def sum_chunks(chunks: Tensor, scale: float, out: Tensor) -> None:
    """Set `out` to `scale` times the sum of the chunks, added up in ascending order.

    `chunks` has shape ``[world * chunk]`` and `out`, of any dtype, shape ``[chunk]``. Sums and
    scales in float32, float64 and complex chunks in their own precision, then rounds once. No
    gradients flow. Raises RuntimeError where the shapes do not match.
    """
    with torch.no_grad():
        _BACKEND.sum_chunks(chunks, scale, out)


def _is_native(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.dtype in _NATIVE_DTYPES


def _capacity(nbytes: int) -> int:
    """Return the block size for a request: powers of two up to a page, then whole pages."""
    if nbytes > _PAGE // 2:
        return -(-nbytes // _PAGE) * _PAGE
    return max(_CACHE_LINE, 1 << max(nbytes - 1, 0).bit_length())


def _new_block(capacity: int, nbytes: int) -> Tensor:
    alignment = _PAGE if capacity >= _LARGE else _CACHE_LINE
    try:
        memory = torch.empty(capacity + alignment, dtype=torch.uint8)
    except RuntimeError as error:
        raise RuntimeError(f"arena_take: out of memory, cannot get {nbytes} bytes") from error
    return memory[-memory.data_ptr() % alignment :][:capacity]


def _check_flat(name: str, tensor: Tensor) -> None:
    if tensor.dim() != 1:
        raise RuntimeError(f"{name} has {tensor.dim()} dimensions, expected 1")


def _check_places(part: str, tensors: Sequence[Tensor], offsets: Sequence[int], size: int) -> None:
    if len(tensors) != len(offsets):
        raise RuntimeError(f"{part}s: {len(tensors)} tensors but {len(offsets)} offsets")
    begin = 0
    for index, (tensor, offset) in enumerate(zip(tensors, offsets, strict=True)):
        _check_place(f"{part} {index} at offset {offset}", tensor.numel(), offset, begin, size)
        begin = offset + tensor.numel()


def _check_place(name: str, count: int, offset: int, begin: int, size: int) -> None:
    if offset < begin:
        raise RuntimeError(f"{name} overlaps what ends at offset {begin}, offsets must ascend")
    if offset + count > size:
        raise RuntimeError(f"{name} with {count} elements does not fit into {size} elements")


def _check_chunks(elements: int, chunk: int) -> None:
    whole = elements == 0 if chunk == 0 else elements > 0 and elements % chunk == 0
    if not whole:
        raise RuntimeError(f"sum_chunks: {elements} elements are not one or more chunks of {chunk}")


def _choose_backend() -> Backend:
    if os.environ.get("ZERO_RUNTIME_NO_NATIVE") == "1":
        return TorchBackend()
    try:
        return NativeBackend()
    except ImportError as error:
        logging.getLogger("zero_runtime").warning(_MISSING, error)
        return TorchBackend()


_BACKEND: Final[Backend] = _choose_backend()

AVAILABLE: Final[bool] = isinstance(_BACKEND, NativeBackend)
"""Whether the C++ extension is in use."""
