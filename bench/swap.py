"""`python -m bench.swap`: swap files against a plain loop of large O_DIRECT calls, side by side."""

import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from zero_runtime.ir.aio import AioConfig
from zero_runtime.memory import native
from zero_runtime.offload.swap_file import BackendName, SwapFile, Ticket

MIB = 2**20
BUCKET = 16 * MIB
GOAL = 0.85

PLAIN = "plain loop"
BACKENDS: tuple[BackendName, ...] = ("io_uring", "threads")

#: What is timed, and how often it moves all buckets.
WORK: Mapping[str, int] = {"read": 1, "write": 1, "read and write back": 2}


class Timed(NamedTuple):
    """Seconds of one contender's work, in the order of :data:`WORK`, in one round."""

    contender: str
    seconds: tuple[float, ...]


class Row(NamedTuple):
    """One contender's work over all rounds."""

    contender: str
    work: str
    rate: float
    """Median, in MiB a second."""
    ratios: tuple[float, ...]
    """Of the plain loop's seconds to this one's, by round."""


class Plain:
    """The plain loop: one call for each bucket, one after another, on a file of its own."""

    def __init__(self, path: Path, buckets: int) -> None:
        self._buckets = buckets
        self._buffer = mmap.mmap(-1, BUCKET)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(self._fd, 0, buckets * BUCKET)
        self.write()  # what was never written is not on the disk yet
        self.read()

    def read(self) -> None:
        """All buckets."""
        for bucket in range(self._buckets):
            self._whole(os.preadv(self._fd, [self._buffer], bucket * BUCKET))

    def write(self) -> None:
        """All buckets."""
        for bucket in range(self._buckets):
            self._whole(os.pwrite(self._fd, self._buffer, bucket * BUCKET))

    def read_and_write_back(self) -> None:
        """All buckets, first one way, then the other: one loop that does both would be slower."""
        self.read()
        self.write()

    def close(self) -> None:
        """Leaves the file to whoever removes the folder."""
        os.close(self._fd)

    def _whole(self, moved: int) -> None:
        if moved != BUCKET:
            raise OSError(f"{moved} of {BUCKET} bytes moved in one call")


class Engine:
    """A swap file, used through two buffers as a stream of optimizer states does."""

    def __init__(
        self, folder: Path, buckets: int, backend: BackendName, checksum: bool = True
    ) -> None:
        self._names = [f"bucket{number}" for number in range(buckets)]
        self._buffers = [native.take(BUCKET) for _ in range(2)]
        aio = AioConfig(checksum=checksum)
        self._file = SwapFile(
            folder, buckets * BUCKET, aio, name=backend, native=True, backend=backend
        )
        for name in self._names:
            self._file.allocate(name, BUCKET)
        self.write()
        self.read()

    @property
    def mode(self) -> str:
        """Of the swap file."""
        return self._file.mode

    def read(self) -> None:
        """All buckets, the next one started before the last one is waited for."""
        self._one_way(self._file.read)

    def write(self) -> None:
        """All buckets, likewise."""
        self._one_way(self._file.write)

    def read_and_write_back(self) -> None:
        """All buckets: while one is written, the next one is read into the other buffer."""
        file, buffers, names = self._file, self._buffers, self._names
        reads = [file.read(names[0], buffers[0])]
        writes: list[Ticket] = []
        for number, name in enumerate(names):
            if number + 1 < len(names):
                if writes:
                    writes[-1].wait()
                reads.append(file.read(names[number + 1], buffers[(number + 1) % 2]))
            reads[number].wait()
            writes.append(file.write(name, buffers[number % 2]))
        file.drain()

    def close(self) -> None:
        """Gives up the file."""
        self._file.close()

    def _one_way(self, start: Callable[[str, Tensor], Ticket]) -> None:
        tickets: list[Ticket] = []
        for number, name in enumerate(self._names):
            if number > 1:
                tickets[number - 2].wait()
            tickets.append(start(name, self._buffers[number % 2]))
        self._file.drain()


def measure(
    folder: Path,
    buckets: int,
    rounds: int,
    report: Callable[[str], None],
    checksum: bool = True,
) -> list[Timed]:
    """Time all contenders in turn, round by round; a slow minute of the disk falls on them all."""
    found: list[Timed] = []
    contenders: dict[str, Plain | Engine] = {}
    try:
        contenders[PLAIN] = Plain(folder / "plain", buckets)
        for backend in BACKENDS:
            contenders[backend] = engine = Engine(folder, buckets, backend, checksum)
            report(engine.mode)
        for number in range(rounds):
            report(f"round {number + 1} of {rounds}")
            found += (Timed(name, _timed(each)) for name, each in contenders.items())
    finally:
        for each in contenders.values():
            each.close()
    return found


def summarize(found: Sequence[Timed], buckets: int) -> Iterator[Row]:
    """Rows of all contenders; ratios are taken within a round, so both met the same disk."""
    seconds = {
        name: [timed.seconds for timed in found if timed.contender == name]
        for name in (PLAIN, *BACKENDS)
    }
    for index, (work, times) in enumerate(WORK.items()):
        for name, rounds in seconds.items():
            mine = [each[index] for each in rounds]
            plain = [each[index] for each in seconds[PLAIN]]
            rate = times * buckets * BUCKET / MIB / statistics.median(mine)
            yield Row(name, work, rate, tuple(p / m for p, m in zip(plain, mine, strict=True)))


def render(rows: Sequence[Row], title: str) -> Table:
    """One row for each contender's work."""
    table = Table(title=title, box=box.SIMPLE, pad_edge=False)
    for heading in ("work", "contender", "MiB/s", "÷ plain loop", "min", "max", ""):
        table.add_column(heading, justify="left" if heading in ("work", "contender") else "right")
    for row in rows:
        middle = statistics.median(row.ratios)
        verdict = "" if row.contender == PLAIN else "yes" if middle >= GOAL else f"below {GOAL}"
        figures = [f"{x:.2f}" for x in (middle, min(row.ratios), max(row.ratios))]
        table.add_row(row.work, row.contender, f"{row.rate:,.0f}", *figures, verdict)
    return table


def main(
    folder: Annotated[
        Path | None, typer.Option(help="on the disk in question; that of temporary files if none")
    ] = None,
    nbytes: Annotated[int, typer.Option("--bytes", help="moved one way")] = 512 * MIB,
    rounds: Annotated[int, typer.Option(min=1)] = 7,
    checksum: Annotated[bool, typer.Option(help="of each block, as usual")] = True,
) -> None:
    """Compare swap files with a plain loop of O_DIRECT calls on the same file system."""
    console = Console()
    if not native.AVAILABLE:
        raise typer.BadParameter("the C++ extension is missing; build it with pip install -e .")
    buckets = max(nbytes // BUCKET, 2)
    with tempfile.TemporaryDirectory(dir=folder, prefix="bench-swap-") as scratch:
        try:
            found = measure(Path(scratch), buckets, rounds, console.print, checksum)
        except OSError as error:
            raise typer.BadParameter(f"{scratch} does not serve: {error}") from error
    title = f"{buckets} buckets of {BUCKET // MIB} MiB, {rounds} rounds, in {Path(scratch).parent}"
    console.print(render(list(summarize(found, buckets)), title))


def _timed(contender: Plain | Engine) -> tuple[float, ...]:
    seconds = []
    for act in (contender.read, contender.write, contender.read_and_write_back):
        begin = time.perf_counter()
        act()
        seconds.append(time.perf_counter() - begin)
    return tuple(seconds)


if __name__ == "__main__":
    torch.set_num_threads(1)
    typer.run(main)
