"""Several folders as one swap file that grows: each tensor lies in parts, one in each folder.

A :class:`StripedSwap` does what a :class:`zero_runtime.offload.swap_file.SwapFile` does, with the bandwidth of
several disks, and without the caller having to know how many bytes there will be.
"""

import errno
import itertools
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

import torch
from torch import Tensor

from zero_runtime.errors import OptionError, SwapError
from zero_runtime.ir.aio import AioConfig
from zero_runtime.offload.swap_file import (
    PAGE,
    BackendName,
    Extent,
    Faults,
    SwapFile,
    SwapStats,
    Ticket,
    flat_on_cpu,
)

__all__ = ["Stripe", "StripedSwap", "StripedTicket"]

_GROWTH: Final = 4


class Stripe(NamedTuple):
    """The stretch ``[begin, end)`` of a tensor's bytes, and the file that holds it."""

    file: SwapFile
    begin: int
    """A multiple of :data:`zero_runtime.ir.aio.PAGE`."""
    end: int


class StripedTicket:
    """One write or read that was started in every folder; it keeps the files alive."""

    def __init__(self, name: str, tickets: Sequence[Ticket]) -> None:
        self.name = name
        """Of the tensor."""
        self._tickets = tickets

    def done(self) -> bool:
        """Return whether all parts are complete, successful or not, without waiting."""
        return all(ticket.done() for ticket in self._tickets)

    def wait(self) -> None:
        """Return once all parts are complete; see :meth:`zero_runtime.offload.swap_file.Ticket.wait`.

        Raises SwapError, each time, for the first part that failed.
        """
        _all_of(ticket.wait for ticket in self._tickets)


class _Lane:
    """The files of one folder: the first one, and those that were needed later."""

    def __init__(
        self, folder: str, capacity: int, make: Callable[..., SwapFile], name: str
    ) -> None:
        self._folder = folder
        self._make = make
        self._name = name
        self._capacity = capacity
        self.files = [make(folder, capacity, name=name)]

    def allocate(self, name: str, nbytes: int) -> tuple[SwapFile, Extent]:
        """Set `nbytes` aside in the first file with room, or in a new one. Raises SwapError."""
        for file in self.files:
            try:
                return file, file.allocate(name, nbytes)
            except SwapError as error:
                if error.errno != errno.ENOSPC:
                    raise
        self.files.append(self._grow(name, nbytes))
        return self.files[-1], self.files[-1].allocate(name, nbytes)

    def _grow(self, name: str, nbytes: int) -> SwapFile:
        needed = max(nbytes, 1)
        wanted = max(needed, self._capacity // _GROWTH)
        make = partial(self._make, self._folder, name=f"{self._name}+{len(self.files)}")
        try:
            try:
                return make(wanted)
            except SwapError as error:
                if error.errno != errno.ENOSPC or wanted == needed:
                    raise
            return make(needed)  # a disk that is nearly full may still hold this one
        except SwapError as error:
            reason = f"tensor '{name}' of {nbytes} bytes needs more space: {error.strerror}"
            raise SwapError(error.errno or errno.EIO, reason) from error


class StripedSwap:
    """Swap files in several folders that hold flat CPU tensors by name, as one.

    Each tensor is cut at multiples of 4096 bytes into as many parts as there are folders, part i in
    folder i; one of fewer pages than folders lies in the first ones. Where a folder's files have no
    space left, `allocate` opens a further one there, of a quarter of the first one's capacity or
    what the tensor needs. All else is as with :class:`zero_runtime.offload.swap_file.SwapFile`: the order of
    operations on one name, use by several threads, closing and forking.
    """

    def __init__(
        self,
        folders: Sequence[str | os.PathLike[str]],
        capacity: int,
        config: AioConfig | None = None,
        *,
        name: str,
        slots: int = 4,
        direct: bool = True,
        native: bool | None = None,
        backend: BackendName | None = None,
        faults: Faults | None = None,
    ) -> None:
        """Reserve `capacity` bytes, evenly over `folders`, which must exist.

        Messages call the first file of each folder `name`, further ones ``name+1`` and so on.
        `config`, `slots` and the arguments after it hold for each file; see
        :class:`zero_runtime.offload.swap_file.SwapFile`.

        Raises SwapError where a folder is missing or not writable, or the space is not there;
        OptionError where an argument is out of range or a folder is named twice. Then no file is
        left.
        """
        make = partial(
            SwapFile,
            config=config,
            slots=slots,
            direct=direct,
            native=native,
            backend=backend,
            faults=faults,
        )
        places = _checked(folders)
        share = -(-_pages(capacity) // len(places)) * PAGE
        self._lock = threading.Lock()
        self._tensors: dict[str, tuple[Extent, tuple[Stripe, ...]]] = {}
        self._lanes: list[_Lane] = []
        try:
            for folder in places:
                self._lanes.append(_Lane(folder, share, make, name))
        except BaseException:
            self.close()
            raise

    @property
    def path(self) -> str:
        """Of the first file in each folder, separated by commas."""
        return ", ".join(lane.files[0].path for lane in self._lanes)

    @property
    def mode(self) -> str:
        """How data moves and why, in each folder; see :attr:`zero_runtime.offload.swap_file.SwapFile.mode`."""
        modes = [lane.files[0].mode for lane in self._lanes]
        if len(set(modes)) > 1:
            return "; ".join(f"{lane.files[0].path}: {lane.files[0].mode}" for lane in self._lanes)
        return modes[0] if len(modes) == 1 else f"{len(modes)} folders, each {modes[0]}"

    def allocate(self, name: str, nbytes: int) -> Extent:
        """Set `nbytes`, each part rounded up to whole pages, aside for the tensor `name`.

        Returns the extent of the tensor, with the offset of its first part in the file that holds
        it. Raises SwapError where the name is taken, a further file would be needed and cannot be
        made, or all is closed; then nothing is set aside. OptionError where `nbytes` is negative.
        """
        if nbytes < 0:
            raise OptionError(f"swap: tensor '{name}' cannot have {nbytes} bytes")
        with self._lock:
            if name in self._tensors:
                raise SwapError(
                    errno.EEXIST, f"tensor '{name}' has an extent in {self.path} already"
                )
            first, parts = self._set_aside(name, nbytes)
            extent = Extent(first.offset, nbytes)
            self._tensors[name] = extent, parts
            return extent

    def free(self, name: str) -> None:
        """Wait for the operations on `name`, then let others have its pages; files stay.

        Raises SwapError where there is no such tensor or all is closed.
        """
        for part in self.parts(name):
            part.file.free(name)
        with self._lock:
            self._tensors.pop(name, None)

    def extent(self, name: str) -> Extent:
        """Return what `allocate` returned; raises SwapError where `name` has no extent."""
        return self._lookup(name)[0]

    def parts(self, name: str) -> tuple[Stripe, ...]:
        """Return where the bytes of `name` lie; raises SwapError where it has no extent."""
        return self._lookup(name)[1]

    def write(self, name: str, source: Tensor) -> StripedTicket:
        """Start writing a flat, contiguous CPU tensor, of at most the extent's length, to `name`.

        `source` is kept alive, and must not change until the ticket was waited for. Raises
        SwapError where the tensor does not fit, has another form, or all is closed.
        """
        pieces = self._pieces(name, source)
        return StripedTicket(name, [file.write(name, piece) for file, piece in pieces])

    def read(self, name: str, out: Tensor) -> StripedTicket:
        """Start filling `out` with what was last written to `name`, and has its size.

        The same as :meth:`write` otherwise; SwapError also where something of another size, or
        nothing, was written.
        """
        pieces = self._pieces(name, out)
        return StripedTicket(name, [file.read(name, piece) for file, piece in pieces])

    def drain(self) -> None:
        """Wait for all operations; raise a failure that nobody waited for, once.

        Raises SwapError.
        """
        _all_of(file.drain for file in self._files())

    def stats(self) -> SwapStats:
        """Return the sums over all files; `direct` says whether all of them pass the cache by."""
        each = [file.stats() for file in self._files()]
        read, written, allocated, capacity, direct = zip(*each, strict=True)
        return SwapStats(sum(read), sum(written), sum(allocated), sum(capacity), all(direct))

    def close(self) -> None:
        """Wait for all operations and give up the files; does nothing the second time.

        Raises SwapError, after that, for a failure that nobody waited for.
        """
        _all_of(file.close for file in self._files())

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

    def _files(self) -> list[SwapFile]:
        with self._lock:
            return [file for lane in self._lanes for file in lane.files]

    def _lookup(self, name: str) -> tuple[Extent, tuple[Stripe, ...]]:
        with self._lock:
            if name not in self._tensors:
                raise SwapError(errno.ENOENT, f"tensor '{name}' has no extent in {self.path}")
            return self._tensors[name]

    def _set_aside(self, name: str, nbytes: int) -> tuple[Extent, tuple[Stripe, ...]]:
        parts: list[Stripe] = []
        extents: list[Extent] = []
        try:
            for lane, (begin, end) in zip(
                self._lanes, _cuts(nbytes, len(self._lanes)), strict=True
            ):
                if parts and begin == end:
                    break
                file, extent = lane.allocate(name, end - begin)
                parts.append(Stripe(file, begin, end))
                extents.append(extent)
        except BaseException:
            for part in parts:
                part.file.free(name)
            raise
        return extents[0], tuple(parts)

    def _pieces(self, name: str, tensor: Tensor) -> list[tuple[SwapFile, Tensor]]:
        extent, parts = self._lookup(name)
        if len(parts) == 1:
            return [(parts[0].file, tensor)]
        flat = flat_on_cpu(name, tensor, self.path).view(torch.uint8)
        if flat.numel() > extent.length:
            raise SwapError(
                errno.EINVAL,
                f"tensor '{name}' of {flat.numel()} bytes does not fit into its extent of "
                f"{extent.length} in {self.path}",
            )
        return [(part.file, flat[part.begin : part.end]) for part in parts]


def _checked(folders: Any) -> list[str]:
    """Return the folders' paths, or say which one is wrong."""
    if isinstance(folders, str | os.PathLike) or not folders:
        raise OptionError(f"swap: folders must be a list of at least one folder, got {folders!r}")
    places = [os.path.abspath(folder) for folder in folders]
    seen: set[str] = set()
    for place in places:
        if not os.path.isdir(place):
            code = errno.ENOTDIR if os.path.exists(place) else errno.ENOENT
            raise SwapError(
                code,
                f"swap folder {place}: {os.strerror(code)}; make the folder, on a local disk, or "
                "name another one",
            )
        if os.path.realpath(place) in seen:
            raise OptionError(f"swap: folder {place} is named twice; each must be another one")
        seen.add(os.path.realpath(place))
    return places


def _pages(nbytes: int) -> int:
    return -(-nbytes // PAGE)


def _cuts(nbytes: int, count: int) -> list[tuple[int, int]]:
    """Return `count` adjacent stretches of whole pages, the earlier ones one page longer."""
    each, longer = divmod(_pages(nbytes), count)
    begins = [min((i * each + min(i, longer)) * PAGE, nbytes) for i in range(count + 1)]
    return list(itertools.pairwise(begins))


def _all_of(acts: Iterable[Callable[[], None]]) -> None:
    """Call them all, then raise the first SwapError that one of them raised."""
    first: SwapError | None = None
    for act in acts:
        try:
            act()
        except SwapError as error:
            first = first or error
    if first is not None:
        raise first
