"""A swap file in plain Python, for where the C++ extension is missing.

Does what ``csrc/swap.h`` does, in the same order and with the same errors, with threads around
os.pread and os.pwrite.
"""

import collections
import ctypes
import errno
import fcntl
import mmap
import os
import threading
import time
import zlib
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from zero_runtime.errors import SwapError
from zero_runtime.ir.aio import PAGE
from zero_runtime.offload.scratch import Scratch

__all__ = ["Faults", "ThreadedSwap"]

"""What O_DIRECT asks of addresses, file offsets and counts, in bytes."""

_MAX_STUCK = 16

_CHANGED = errno.EBADMSG
"""Of a read that finds other bytes than were written; file systems with checksums say so too."""


@dataclass(frozen=True)
class Faults:
    """What is to go wrong with a swap file, for tests; by default nothing.

    Requests to the file, reads and writes together, are counted from 1.
    """

    disk_bytes: int = -1
    """A file of more than this many bytes cannot be reserved (ENOSPC); -1: any can."""
    enospc_after: int = -1
    """Bytes, in whole pages, that can be written before ENOSPC; -1: any number."""
    eio_on: int = 0
    """The one request that fails with EIO; 0: none."""
    short_every: int = 0
    """Every so many requests move about half of their bytes; 0: none."""
    interrupt_every: int = 0
    """Every so many requests fail with EINTR, from 2 on; 0: none."""
    delay_us: int = 0
    """Microseconds that each request takes longer."""
    reorder: bool = False
    """The first of four requests takes four such delays, the last takes one."""
    no_direct: bool = False
    """O_DIRECT is refused."""
    enospc_every: int = 0
    """Every so many writes, counted alone, fail with ENOSPC; 0: none."""


class _Io:
    """The system calls, with faults."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._lock = threading.Lock()
        self._calls = self._writes = self._taken = 0

    def read(self, fd: int, data: memoryview, offset: int) -> int:
        return os.preadv(fd, [data[: self._begin(len(data), offset)]], offset)

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        count = self._take_room(self._begin(len(data), offset))
        return os.pwrite(fd, data[:count], offset)

    def allocate(self, fd: int, nbytes: int) -> None:
        if 0 <= self._faults.disk_bytes < nbytes:
            raise _os_error(errno.ENOSPC)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, nbytes)
        else:
            os.ftruncate(fd, nbytes)

    def _begin(self, count: int, offset: int) -> int:
        """Return how many bytes of a request may move, after its delay; raise its error."""
        faults = self._faults
        with self._lock:
            self._calls += 1
            call = self._calls
        if faults.delay_us:
            delays = 4 - (call - 1) % 4 if faults.reorder else 1
            time.sleep(delays * faults.delay_us * 1e-6)
        if call == faults.eio_on:
            raise _os_error(errno.EIO)
        if _hits(call, faults.interrupt_every):
            raise _os_error(errno.EINTR)
        if not _hits(call, faults.short_every):
            return count
        aligned = count % PAGE == 0 and offset % PAGE == 0
        return (count // 2 // PAGE * PAGE if aligned else count // 2) or count

    def _take_room(self, count: int) -> int:
        faults = self._faults
        with self._lock:
            self._writes += 1
            if _hits(self._writes, faults.enospc_every):
                raise _os_error(errno.ENOSPC)
            if faults.enospc_after < 0:
                return count
            room = faults.enospc_after - self._taken
            allowed = count if count <= room else room // PAGE * PAGE
            self._taken += allowed
        if not allowed:
            raise _os_error(errno.ENOSPC)
        return allowed


@dataclass(eq=False)
class _Operation:
    ticket: int
    write: bool
    name: str
    extent: "_Extent"
    tensor: Tensor | None
    data: memoryview
    address: int
    next: int = 0
    running: int = 0
    code: int = 0
    waited_for: bool = False
    complete: bool = False


@dataclass(eq=False)
class _Extent:
    offset: int
    length: int
    queue: collections.deque[_Operation] = field(default_factory=collections.deque)
    broken: int = 0
    written: int = -1
    sums: dict[int, int] = field(default_factory=dict)
    """Of each block as it was last written, by its first byte's number."""

    @property
    def reserved(self) -> int:
        return _whole_pages(max(self.length, 1))


class _Slots:
    """Aligned buffers of one size, lent to one request at a time."""

    def __init__(self, slots: int, nbytes: int) -> None:
        memory = memoryview(mmap.mmap(-1, slots * nbytes))
        self._free = [memory[i * nbytes : (i + 1) * nbytes] for i in range(slots)]
        self._freed = threading.Condition()

    def take(self) -> memoryview:
        with self._freed:
            self._freed.wait_for(lambda: self._free)
            return self._free.pop()

    def give(self, slot: memoryview) -> None:
        with self._freed:
            self._free.append(slot)
            self._freed.notify()


class ThreadedSwap:
    """One scratch file and its threads; see :class:`zero_runtime.offload.swap_file.SwapFile`."""

    def __init__(
        self,
        scratch: Scratch,
        capacity: int,
        block_size: int,
        threads: int,
        checksum: bool,
        slots: int,
        direct: bool,
        faults: Faults,
    ) -> None:
        self._path = scratch.path
        self._capacity = _whole_pages(capacity)
        self._block_size = block_size
        self._checksum = checksum
        self._io = _Io(faults)
        self._lock = threading.RLock()
        self._work = threading.Condition(self._lock)
        self._completion = threading.Condition(self._lock)
        self._extents: dict[str, _Extent] = {}
        self._free: list[tuple[int, int]] = [(0, self._capacity)]
        self._ready: collections.deque[_Operation] = collections.deque()
        self._operations: dict[int, _Operation] = {}
        self._tickets = self._unfinished = self._read = self._written = self._allocated = 0
        self._closing = self._closed = self._direct = False
        self._fd = os.dup(scratch.descriptor)
        try:
            self._reserve()
            self.mode = f"Python threads, {self._probe_direct(direct, faults)}"
        except BaseException:
            os.close(self._fd)
            raise
        self._slots = _Slots(slots, block_size)
        # Daemons: the interpreter would otherwise wait for them before it lets anyone close.
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def allocate(self, name: str, nbytes: int) -> tuple[int, int]:
        """Set `nbytes` aside for `name`; return offset and length. Raises SwapError."""
        with self._lock:
            self._check_open()
            if name in self._extents:
                raise SwapError(
                    errno.EEXIST, f"tensor '{name}' has an extent in {self._path} already"
                )
            extent = _Extent(0, nbytes)
            for index, (offset, length) in enumerate(self._free):
                if length >= extent.reserved:
                    rest = (offset + extent.reserved, length - extent.reserved)
                    self._free[index : index + 1] = [rest] if rest[1] else []
                    self._allocated += extent.reserved
                    extent.offset = offset
                    self._extents[name] = extent
                    return offset, nbytes
            largest = max((length for _, length in self._free), default=0)
            raise SwapError(
                errno.ENOSPC,
                f"tensor '{name}' of {nbytes} bytes does not fit into {self._path} of "
                f"{self._capacity} bytes: the largest free stretch has {largest}",
            )

    def free(self, name: str) -> None:
        """Wait for the operations on `name`, then forget it. Raises SwapError."""
        with self._lock:
            self._check_open()
            self._lookup(name)
            self._completion.wait_for(
                lambda: name not in self._extents or not self._extents[name].queue
            )
            extent = self._lookup(name)
            del self._extents[name]
            self._allocated -= extent.reserved
            begin, end = extent.offset, extent.offset + extent.reserved
            at = bisect_left(self._free, (begin, 0))
            if at < len(self._free) and self._free[at][0] == end:
                end += self._free.pop(at)[1]
            if at and sum(self._free[at - 1]) == begin:
                at -= 1
                begin = self._free.pop(at)[0]
            self._free.insert(at, (begin, end - begin))

    def find(self, name: str) -> tuple[int, int]:
        """Return offset and length of `name`, in bytes. Raises SwapError."""
        with self._lock:
            extent = self._lookup(name)
            return extent.offset, extent.length

    def write(self, name: str, tensor: Tensor) -> int:
        """Start a write and return its ticket. Raises SwapError."""
        return self._start(name, tensor, True)

    def read(self, name: str, tensor: Tensor) -> int:
        """Start a read and return its ticket. Raises SwapError."""
        return self._start(name, tensor, False)

    def done(self, ticket: int) -> bool:
        """Return whether the operation is complete."""
        with self._lock:
            operation = self._operations.get(ticket)
            return operation is None or operation.complete

    def wait(self, ticket: int) -> None:
        """Wait for one operation. Raises SwapError where it failed."""
        with self._lock:
            operation = self._operations.get(ticket)
            if operation is None:
                return
            operation.waited_for = True
            self._completion.wait_for(lambda: operation.complete)
            if operation.code:
                raise self._failure(operation)

    def drain(self) -> None:
        """Wait for all operations. Raises SwapError where one failed that nobody waited for."""
        with self._lock:
            self._completion.wait_for(lambda: self._unfinished == 0)
            failed = [o for o in self._operations.values() if not o.waited_for]
            for operation in failed:
                operation.waited_for = True
            if failed:
                raise self._failure(failed[0])

    def close(self) -> None:
        """Wait for all operations, end the threads and give up the file."""
        with self._lock:
            if self._closing:
                self._completion.wait_for(lambda: self._closed)
                return
            self._closing = True
            self._work.notify_all()
        for thread in self._threads:
            thread.join()
        with self._lock:
            _code_of(partial(os.ftruncate, self._fd, 0))  # a forked child may still have it
            os.close(self._fd)
            self._closed = True
            self._completion.notify_all()

    def release(self) -> None:
        """Close, as there is nothing else to give back."""
        self.close()

    def stats(self) -> tuple[int, int, int, int, bool]:
        """Return the fields of :class:`zero_runtime.offload.swap_file.SwapStats`."""
        with self._lock:
            return self._read, self._written, self._allocated, self._capacity, self._direct

    def _start(self, name: str, tensor: Tensor, write: bool) -> int:
        nbytes = tensor.numel() * tensor.element_size()
        address = tensor.data_ptr()
        data = memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
        with self._lock:
            self._check_open()
            extent = self._lookup(name)
            if nbytes > extent.length:
                raise SwapError(
                    errno.EINVAL,
                    f"tensor '{name}' of {nbytes} bytes does not fit into its extent of "
                    f"{extent.length} in {self._path}",
                )
            self._tickets += 1
            ticket = self._tickets
            if nbytes == 0:
                return ticket
            if write:
                extent.written = nbytes
            elif nbytes != extent.written:
                was = "none" if extent.written < 0 else extent.written
                raise SwapError(
                    errno.EINVAL,
                    f"tensor '{name}': cannot read {nbytes} bytes of {self._path}, where {was} were "
                    "written",
                )
            operation = _Operation(ticket, write, name, extent, tensor, data, address)
            self._operations[ticket] = operation
            self._unfinished += 1
            extent.queue.append(operation)
            if len(extent.queue) == 1:
                self._ready.append(operation)
                self._work.notify_all()
            return ticket

    def _lookup(self, name: str) -> _Extent:
        if name not in self._extents:
            raise SwapError(errno.ENOENT, f"tensor '{name}' has no extent in {self._path}")
        return self._extents[name]

    def _check_open(self) -> None:
        if self._closing:
            raise SwapError(errno.EBADF, f"swap file {self._path} is closed")

    # ------------------------------------------------------------------------------ threads

    def _run(self) -> None:
        with self._lock:
            while True:
                self._work.wait_for(
                    lambda: self._ready or (self._closing and self._unfinished == 0)
                )
                if not self._ready:
                    return
                operation = self._ready[0]
                begin = operation.next
                end = min(begin + self._block_size, len(operation.data))
                operation.next = end
                operation.running += 1
                if end == len(operation.data):
                    self._ready.popleft()
                self._lock.release()
                try:
                    code = _code_of(partial(self._move, operation, begin, end))
                finally:
                    self._lock.acquire()
                operation.running -= 1
                if code:
                    operation.code = operation.code or code
                elif operation.write:
                    self._written += end - begin
                else:
                    self._read += end - begin
                self._finish(operation)
                del operation

    def _finish(self, operation: _Operation) -> None:
        if operation.code and operation.next < len(operation.data):
            operation.next = len(operation.data)
            self._ready.remove(operation)
        if operation.running or operation.next < len(operation.data):
            return
        extent = operation.extent
        if operation.write:
            extent.broken = operation.code
        else:
            operation.code = extent.broken or operation.code
        extent.queue.popleft()
        if extent.queue:
            self._ready.append(extent.queue[0])
        operation.tensor = None
        operation.complete = True
        if not operation.code:
            del self._operations[operation.ticket]
        self._unfinished -= 1
        self._work.notify_all()
        self._completion.notify_all()

    def _move(self, operation: _Operation, begin: int, end: int) -> None:
        data = operation.data[begin:end]
        self._carry(operation, begin, data)
        if self._checksum:
            found = zlib.crc32(data)
            if operation.write:
                operation.extent.sums[begin] = found
            elif operation.extent.sums.get(begin) != found:
                raise _os_error(_CHANGED)

    def _carry(self, operation: _Operation, begin: int, data: memoryview) -> None:
        offset = operation.extent.offset + begin
        aligned = (operation.address + begin) % PAGE == 0 and len(data) % PAGE == 0
        if aligned or not self._direct:
            self._transfer(operation.write, data, offset)
            return
        slot = self._slots.take()
        try:
            padded = slot[: _whole_pages(len(data))]
            if operation.write:
                padded[: len(data)] = data
                padded[len(data) :] = bytes(len(padded) - len(data))
            self._transfer(operation.write, padded, offset)
            if not operation.write:
                data[:] = padded[: len(data)]
        finally:
            self._slots.give(slot)

    def _transfer(self, write: bool, data: memoryview, offset: int) -> None:
        move = self._io.write if write else self._io.read
        done = stuck = 0
        while done < len(data):
            try:
                moved = move(self._fd, data[done:], offset + done)
            except InterruptedError:
                continue
            if moved == 0:
                raise _os_error(errno.EIO)
            if self._direct and done + moved < len(data):
                moved = moved // PAGE * PAGE
            stuck += moved == 0
            if stuck == _MAX_STUCK:
                raise _os_error(errno.EIO)
            done += moved

    def _failure(self, operation: _Operation) -> SwapError:
        verb = "write" if operation.write else "read"
        return SwapError(
            operation.code,
            f"tensor '{operation.name}': cannot {verb} {len(operation.data)} bytes at offset "
            f"{operation.extent.offset} of {self._path}: {_reason_of(operation.code)}",
        )

    # ------------------------------------------------------------------------------ the file

    def _reserve(self) -> None:
        code = _code_of(partial(self._io.allocate, self._fd, self._capacity))
        if code:
            raise SwapError(
                code,
                f"cannot reserve {self._capacity} bytes for swap file {self._path}: "
                f"{os.strerror(code)}",
            )

    def _probe_direct(self, direct: bool, faults: Faults) -> str:
        """Have requests pass the page cache by, where a page passes through; return the mode."""
        if not direct:
            return "buffered (as asked for)"
        if not hasattr(os, "O_DIRECT"):
            return "buffered (there is no O_DIRECT)"
        if _is_tmpfs(self._fd):
            return "buffered (tmpfs is memory)"
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        code = errno.EINVAL if faults.no_direct else _code_of(partial(self._try_direct, flags))
        if code:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags)
            return f"buffered (O_DIRECT: {os.strerror(code)})"
        self._direct = True
        return "O_DIRECT"

    def _try_direct(self, flags: int) -> None:
        fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        sent, received = mmap.mmap(-1, PAGE), mmap.mmap(-1, PAGE)
        sent[:] = b"\xa5" * PAGE
        os.pwrite(self._fd, sent, 0)
        os.preadv(self._fd, [received], 0)
        if sent[:] != received[:]:
            raise _os_error(errno.EIO)


def _code_of(act: Callable[[], object]) -> int:
    """Return 0, or the errno with which `act` failed."""
    try:
        act()
    except OSError as error:
        return error.errno or errno.EIO
    return 0


def _is_tmpfs(fd: int) -> bool:
    """Return whether a file lies in memory already: O_DIRECT would only mean another copy."""
    try:
        with open("/proc/self/mountinfo") as table:
            mounts = [line.split() for line in table]
    except OSError:
        return False
    device = os.fstat(fd).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    return any(m[2] == wanted and m[m.index("-") + 1] == "tmpfs" for m in mounts)


def _reason_of(code: int) -> str:
    if code == _CHANGED:
        return "the data has changed on the disk: its checksum is another one"
    return os.strerror(code)


def _os_error(code: int) -> OSError:
    return OSError(code, os.strerror(code))


def _hits(call: int, every: int) -> bool:
    return every > 0 and call % every == 0


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE
