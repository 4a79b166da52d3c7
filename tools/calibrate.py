"""Measure this machine and write its hardware profile: ``python -m zero_compile.tools.calibrate --output my.json``.

Each figure is the best of many repetitions, as one rank sees it: with its share of the cores, while
the other ranks are idle. A profile that is measured says what was reached, so nothing is deducted.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import typer
from rich.console import Console
from rich.table import Table

from zero_compile.analysis.hardware import Hardware, Link, Peaks, Sustained, save
from zero_runtime.errors import GroupError, OptionError

MEASURED = Sustained(matmul=1.0, memory=1.0, links=1.0)
Rank = subprocess.Popen[str]

PAGE, BLOCK = 4096, 1 << 23  # bytes: the smallest and the largest access to a file
COLLECTIVE_TIMEOUT = 120.0  # seconds, most of which starting processes may take on a busy machine


class Effort(NamedTuple):
    """How large the work is, and how long each figure may take."""

    matmul: int  # rows and columns
    copy_bytes: int
    collective_bytes: int
    file_bytes: int
    budget: float  # seconds a figure


def effort(quick: bool, cuda: bool) -> Effort:
    """The work that shows this kind of device at its best, or a first idea of it."""
    if cuda:
        return Effort(8192, 1 << 30, 1 << 28, 1 << (26 if quick else 30), 0.3 if quick else 2.0)
    if quick:
        return Effort(512, 1 << 27, 1 << 24, 1 << 25, 0.25)
    return Effort(1536, 1 << 29, 1 << 26, 1 << 29, 2.0)


# ------------------------------------------------------------------------------ timing


def best_seconds(
    function: Callable[[], object], budget: float, after: Callable[[], object] | None = None
) -> float:
    """The least time of one call, over repetitions for ``budget`` seconds; ``after`` is part of it."""
    function()
    best, deadline = float("inf"), time.perf_counter() + budget
    while True:
        start = time.perf_counter()
        function()
        if after is not None:
            after()
        end = time.perf_counter()
        best = min(best, end - start)
        if end > deadline:
            return best


def synchronize(device: torch.device) -> None:
    """Until the device has done what it was asked."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# ------------------------------------------------------------------------------ the device


def matmul_rate(dtype: torch.dtype, device: torch.device, work: Effort) -> float:
    """FLOP/s of a square matmul, 2 n^3 operations."""
    a, b = (torch.ones(work.matmul, work.matmul, dtype=dtype, device=device) for _ in range(2))
    taken = best_seconds(lambda: torch.mm(a, b), work.budget, lambda: synchronize(device))
    return 2.0 * work.matmul**3 / taken


def memory_rate(device: torch.device, work: Effort) -> float:
    """Bytes/s of a copy within the device: each byte is read once and written once."""
    source = torch.ones(work.copy_bytes, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    taken = best_seconds(lambda: target.copy_(source), work.budget, lambda: synchronize(device))
    return 2.0 * work.copy_bytes / taken


def launch_seconds(device: torch.device, work: Effort, calls: int = 200) -> float:
    """Seconds a kernel on next to nothing."""
    x = torch.zeros(1, device=device)

    def many() -> None:
        for _ in range(calls):
            x.add_(1.0)

    return best_seconds(many, work.budget, lambda: synchronize(device)) / calls


def host_links(device: torch.device, work: Effort, memory: float) -> tuple[Link, Link]:
    """Host to device, device to host. Where the device is the host, a copy at ``memory`` bytes/s."""
    if device.type != "cuda":
        link = Link(bandwidth=memory / 2, latency=launch_seconds(device, work))
        return link, link
    host = torch.zeros(work.copy_bytes, dtype=torch.uint8, pin_memory=True)
    there = torch.zeros_like(host, device=device)
    return _copy_link(there, host, device, work), _copy_link(host, there, device, work)


def _copy_link(
    target: torch.Tensor, source: torch.Tensor, device: torch.device, work: Effort
) -> Link:
    small, large = (
        best_seconds(
            lambda n=n: target[:n].copy_(source[:n], non_blocking=True),  # type: ignore[misc]
            work.budget,
            lambda: synchronize(device),
        )
        for n in (64, work.copy_bytes)
    )
    return link_of(small, large, work.copy_bytes)


def link_of(small: float, large: float, nbytes: float) -> Link:
    """Latency and bandwidth of a link from the seconds of a tiny message and of one of ``nbytes``."""
    return Link(bandwidth=nbytes / max(large - small, 1e-9), latency=small)


# ------------------------------------------------------------------------------ two ranks


def intra_node_link(device: torch.device, work: Effort) -> Link:
    """The link between two ranks, from all-gathers of a tiny and of a large buffer.

    Raises:
        GroupError: the two ranks did not end in time, or one of them failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        arguments = [
            str(Path(folder) / "store"),
            str(work.collective_bytes),
            str(torch.get_num_threads()),
            device.type,
        ]
        ranks: list[Rank] = []
        try:
            for rank in range(2):
                ranks.append(start_rank(rank, arguments))  # noqa: PERF401  # each is ended below
            printed = [output_of(process) for process in ranks]
            small, large = json.loads(printed[0])
        finally:
            for process in ranks:
                process.kill()
                process.communicate()
    # A ring of two takes one step, which moves half of what is gathered.
    return link_of(small, large, work.collective_bytes / 2)


def start_rank(rank: int, arguments: list[str]) -> Rank:
    """A process of its own, on the loopback interface."""
    return subprocess.Popen(
        [sys.executable, "-m", f"{__package__}.calibrate_ranks", str(rank), *arguments],
        cwd=Path(__file__).resolve().parent.parent if __package__ == "tools" else None,
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def output_of(rank: Rank) -> str:
    """What a rank printed, once it has ended.

    Raises:
        GroupError: it failed (its last line is named) or did not end in time.
    """
    try:
        output, errors = rank.communicate(timeout=COLLECTIVE_TIMEOUT)
    except subprocess.TimeoutExpired:
        message = f"two ranks on 127.0.0.1 did not answer in {COLLECTIVE_TIMEOUT:.0f} s"
        raise GroupError(message) from None
    if rank.returncode:
        last = (errors.strip().splitlines() or ["no output"])[-1]
        raise GroupError(f"two ranks on 127.0.0.1 failed: {last}")
    return output


# ------------------------------------------------------------------------------ the drive


def drive_links(folder: Path, work: Effort) -> tuple[Link, Link]:
    """Reading and writing a file in ``folder``, past the page cache as far as the system allows.

    Raises:
        OptionError: no file can be written there.
    """
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            descriptor = file.fileno()
            write = _write_link(descriptor, work)
            return _read_link(descriptor, work), write
    except OSError as error:
        raise OptionError(f"cannot measure a drive in {folder}: {error.strerror}") from None


def _write_link(descriptor: int, work: Effort) -> Link:
    def write(data: bytes) -> None:
        os.lseek(descriptor, 0, os.SEEK_SET)
        for start in range(0, work.file_bytes if len(data) > PAGE else PAGE, len(data)):
            os.pwrite(descriptor, data, start)
        os.fsync(descriptor)

    large = best_seconds(lambda: write(bytes(BLOCK)), work.budget)
    small = best_seconds(lambda: write(bytes(PAGE)), work.budget)
    return link_of(min(small, large / 2), large, work.file_bytes)


def _read_link(descriptor: int, work: Effort) -> Link:
    def read(nbytes: int, block: int) -> None:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        for start in range(0, nbytes, block):
            os.pread(descriptor, block, start)

    large = best_seconds(lambda: read(work.file_bytes, BLOCK), work.budget)
    small = best_seconds(lambda: read(PAGE, PAGE), work.budget)
    return link_of(min(small, large / 2), large, work.file_bytes)


# ------------------------------------------------------------------------------ the profile


def measure(name: str, folder: Path, quick: bool, report: Callable[[str], None]) -> Hardware:
    """This machine as a profile; ``report`` hears what is being measured.

    Raises:
        GroupError: two ranks could not talk to each other.
        OptionError: ``folder`` cannot be written to.
    """
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    ranks = torch.cuda.device_count() if cuda else min(2, os.cpu_count() or 1)
    threads, before = max(1, (os.cpu_count() or 1) // ranks), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return _measured(name, folder, effort(quick, cuda), device, ranks, report)
    finally:
        torch.set_num_threads(before)


def _measured(
    name: str,
    folder: Path,
    work: Effort,
    device: torch.device,
    ranks: int,
    report: Callable[[str], None],
) -> Hardware:
    report("matmul")
    dtypes = ("float32", "bfloat16", "float16")
    rates = {dtype: matmul_rate(getattr(torch, dtype), device, work) for dtype in dtypes}
    report("memory and launches")
    memory = memory_rate(device, work)
    to_device, to_host = host_links(device, work, memory)
    report(f"all-gathers between {min(2, ranks)} ranks")
    cuda = device.type == "cuda"
    alone = cuda and ranks == 1  # no second device to talk to
    peer = to_host if alone else intra_node_link(device, work)
    report(f"the drive behind {folder}")
    nvme_read, nvme_write = drive_links(folder, work)
    host = host_memory_bytes()
    return Hardware(
        name=name,
        source=source_text(device, alone),
        peaks=Peaks(**rates),
        sustained=MEASURED,
        memory_bandwidth=memory,
        memory_bytes=torch.cuda.mem_get_info(device)[1] if cuda else host // ranks,
        launch_seconds=launch_seconds(device, work),
        ranks_per_node=ranks,
        intra_node=peer,
        inter_node=peer,
        host_to_device=to_device,
        device_to_host=to_host,
        host_memory_bytes=host,
        nvme_read=nvme_read,
        nvme_write=nvme_write,
    )


def host_memory_bytes() -> int:
    """The machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def source_text(device: torch.device, alone: bool) -> str:
    """What was measured on, and what was not measured."""
    cuda = device.type == "cuda"
    what = torch.cuda.get_device_name(device) if cuda else f"{os.cpu_count()} CPU cores"
    text = f"measured by tools/calibrate.py on {what}, torch {torch.__version__}"
    text += f", {torch.get_num_threads()} threads a rank" if not cuda else ""
    if cuda and torch.get_float32_matmul_precision() == "highest":
        text += "; float32 without TF32"
    text += "; links between ranks not measured (one GPU): as to the host" if alone else ""
    return text + "; inter_node not measured: as intra_node."


def profile_table(hardware: Hardware) -> Table:
    """One row a figure."""
    table = Table(title=f"hardware profile {hardware.name}")
    table.add_column("figure")
    table.add_column("value", justify="right")
    for dtype, rate in hardware.peaks.model_dump().items():
        table.add_row(f"matmul {dtype}", f"{rate / 1e9:,.1f} GFLOP/s")
    table.add_row("memory", f"{hardware.memory_bandwidth / 1e9:,.2f} GB/s")
    table.add_row("memory size", f"{hardware.memory_bytes / 1e9:,.1f} GB")
    table.add_row("kernel launch", f"{hardware.launch_seconds * 1e6:,.2f} µs")
    table.add_row("ranks a node", str(hardware.ranks_per_node))
    for name in ("intra_node", "host_to_device", "device_to_host", "nvme_read", "nvme_write"):
        link: Link = getattr(hardware, name)
        shown = f"{link.bandwidth / 1e9:,.2f} GB/s, {link.latency * 1e6:,.1f} µs"
        table.add_row(name.replace("_", " "), shown)
    return table


def check_paths(output: Path, folder: Path) -> None:
    """Before anything is measured.

    Raises:
        typer.BadParameter: the profile could not be written, or there is no such folder.
    """
    parent = output.absolute().parent
    if output.is_dir():
        raise typer.BadParameter(
            f"{output} is a folder, not a file to write", param_hint="--output"
        )
    if not parent.is_dir():
        raise typer.BadParameter(f"folder {parent} does not exist", param_hint="--output")
    if not os.access(output if output.exists() else parent, os.W_OK):
        raise typer.BadParameter(f"{output} cannot be written", param_hint="--output")
    if not folder.is_dir():
        raise typer.BadParameter(f"folder {folder} does not exist", param_hint="--folder")


def main(
    output: Annotated[Path, typer.Option(help="write the profile here, as JSON")],
    name: Annotated[str, typer.Option(help="name in the profile; default: this host's")] = "",
    folder: Annotated[
        Path | None, typer.Option(help="a folder on the drive to measure; default: temporary files")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="a first idea, in seconds")] = False,
) -> None:
    """Measure this machine and write a hardware profile that plans can be made for."""
    drive = folder or Path(tempfile.gettempdir())
    check_paths(output, drive)
    console = Console()
    try:
        with console.status("starting") as status:
            hardware = measure(name or socket.gethostname() or "local", drive, quick, status.update)
        save(hardware, output)
    except (GroupError, OptionError) as error:
        console.print(f"calibrate failed: {error}", style="red", markup=False)
        raise typer.Exit(1) from None
    console.print(profile_table(hardware))
    console.print(f"{hardware.source}\nwritten to {output}", markup=False)


if __name__ == "__main__":
    typer.run(main)
