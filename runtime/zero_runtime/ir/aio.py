"""How swap files are read and written: DeepSpeed's section ``aio``."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, Self

from zero_runtime.errors import OptionError

#: Bytes to whose multiples files are read and written past the page cache.
PAGE = 4096

MAX_THREADS: Final = 64
"""Most requests that threads of a swap file have in flight."""


MAX_DEPTH: Final = 1024
"""Most requests that an io_uring of a swap file has in flight."""


_LARGEST: Mapping[str, int] = {
    "block_size": 1 << 30,
    "queue_depth": 1 << 16,
    "thread_count": MAX_THREADS,
}


@dataclass(frozen=True)
class AioConfig:
    """How a swap file moves data: DeepSpeed's ``aio`` section, with its defaults, and one key more.

    Raises OptionError, naming the key, where a value has a wrong type or is out of range.
    """

    block_size: int = 1 << 20
    """Bytes of one request; larger tensors are split. A multiple of 4096, at most 1 GiB."""
    queue_depth: int = 8
    """Requests in flight for each of `thread_count`."""
    thread_count: int = 1
    """``thread_count * queue_depth`` requests are in flight: by so many threads, at most
    :data:`MAX_THREADS`, or in one io_uring, at most :data:`MAX_DEPTH`."""
    single_submit: bool = False
    """With io_uring, submit each request by a system call of its own instead of all that are ready
    by one. Threads make a call for each request anyway."""
    overlap_events: bool = True
    """With io_uring, start a request as soon as another one is complete; otherwise wait for all in
    flight, then start as many again. Threads always overlap."""
    checksum: bool = True
    """Ours: a checksum of each block, made when it is written and compared when it is read."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if type(value) is not each.type:
                name = getattr(each.type, "__name__", each.type)
                raise OptionError(f"aio: {each.name} must be of type {name}, got {value!r}")
            largest = _LARGEST.get(each.name)
            if largest is not None and not 1 <= value <= largest:
                raise OptionError(f"aio: {each.name} must be from 1 to {largest}, got {value}")
        if self.block_size % PAGE:
            raise OptionError(
                f"aio: block_size must be a multiple of {PAGE}, got {self.block_size}"
            )

    @classmethod
    def from_mapping(cls, section: Mapping[str, Any]) -> Self:
        """Return the configuration of an ``aio`` section; missing keys have their defaults.

        ``intra_op_parallelism`` is DeepSpeed's newer name of ``thread_count``. ``use_gds`` is taken and has
        no effect: what is read passes through host memory.

        Raises OptionError where a key is unknown, naming it, or a value is wrong.
        """
        section = dict(section)
        if type(gds := section.pop("use_gds", False)) is not bool:
            raise OptionError(f"aio: use_gds must be of type bool, got {gds!r}")
        if "intra_op_parallelism" in section:
            section["thread_count"] = section.pop("intra_op_parallelism")
        known = [each.name for each in fields(cls)]
        unknown = sorted(str(key) for key in section if key not in known)
        if unknown:
            raise OptionError(
                f"aio: unknown key {', '.join(map(repr, unknown))}; known are {', '.join(known)}"
            )
        return cls(**section)

    @property
    def in_flight(self) -> int:
        """Most requests in flight by threads."""
        return min(self.thread_count * self.queue_depth, MAX_THREADS)

    @property
    def ring_depth(self) -> int:
        """Most requests in flight in an io_uring."""
        return min(self.thread_count * self.queue_depth, MAX_DEPTH)
