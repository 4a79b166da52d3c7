"""Tests of what goes wrong with swap files, and of the file itself, by all implementations."""

import errno
import logging
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from swaps import (
    IMPLEMENTATIONS,
    MIB,
    ONE_AT_A_TIME,
    Make,
    flip,
    held_in,
    noise,
    opener,
    read_back,
    run,
    running,
    skip_without_io_uring,
    time_limit,
    within,
)
from zero_runtime.errors import SwapError, ZeroError
from zero_runtime.ir.aio import AioConfig
from zero_runtime.offload.swap_file import PAGE, Faults, SwapFile


@pytest.fixture(autouse=True)
def _limited() -> Iterator[None]:
    with time_limit():
        yield


@pytest.fixture(params=IMPLEMENTATIONS)
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    return opener(request.param, tmp_path)


# Requests that fail


@pytest.mark.parametrize("write", [True, False])
def test_an_error_names_tensor_path_and_reason(make: Make, write: bool) -> None:
    with make(ONE_AT_A_TIME, faults=Faults(eio_on=2 if write else 5)) as file:
        file.allocate("w", 3 * PAGE)
        tensor = noise(3 * PAGE)
        verb = "write" if write else "read"
        ticket = file.write("w", tensor)
        if not write:
            ticket.wait()
            ticket = file.read("w", tensor)
        pattern = rf"'w': cannot {verb} 12288 bytes at offset 0 of {file.path}: Input/output error"
        for _ in range(2):
            with pytest.raises(SwapError, match=pattern) as caught:
                ticket.wait()
        assert ticket.done()
        assert caught.value.errno == errno.EIO
        assert isinstance(caught.value, ZeroError)
        moved = file.stats().bytes_written + file.stats().bytes_read
        assert moved == (1 if write else 4) * PAGE  # nothing follows the failure
        file.write("w", tensor).wait()


@pytest.mark.parametrize("every", [1, 2, 3, 7])
def test_a_full_disk_fails_the_tensors_that_it_has_no_room_for(make: Make, every: int) -> None:
    """Each third write request fails, say: that of every third tensor of one request."""
    names = [f"layer{i}" for i in range(7)]
    with make(ONE_AT_A_TIME, faults=Faults(enospc_every=every)) as file:
        for name in names:
            file.allocate(name, PAGE)
        tickets = [file.write(name, noise(PAGE, seed)) for seed, name in enumerate(names)]
        for number, (name, ticket) in enumerate(zip(names, tickets, strict=True)):
            if (number + 1) % every:
                ticket.wait()
                assert torch.equal(read_back(file, name, PAGE), noise(PAGE, number))
                continue
            pattern = rf"'{name}': cannot write 4096 bytes .*{file.path}: No space left on device"
            with pytest.raises(SwapError, match=pattern) as caught:
                ticket.wait()
            assert caught.value.errno == errno.ENOSPC
            with pytest.raises(SwapError, match=f"'{name}': cannot read"):
                read_back(file, name, PAGE)


@pytest.mark.parametrize("room", range(7))
def test_a_disk_that_fills_up_at_any_write(make: Make, room: int) -> None:
    """Three tensors of two requests each, and room for so many of these."""
    with make(ONE_AT_A_TIME, faults=Faults(enospc_after=room * PAGE)) as file:
        for name in "abc":
            file.allocate(name, 2 * PAGE)
        for seed, name in enumerate("abc"):
            ticket = file.write(name, noise(2 * PAGE, seed))
            if room >= 2 * (seed + 1):
                ticket.wait()
                continue
            with pytest.raises(SwapError, match=f"'{name}': .*No space left on device"):
                ticket.wait()
        for seed, name in enumerate("abc"[: room // 2]):
            assert torch.equal(read_back(file, name, 2 * PAGE), noise(2 * PAGE, seed))


@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_a_read_that_fails_leaves_all_else_right(make: Make, at: int) -> None:
    with make(ONE_AT_A_TIME, faults=Faults(eio_on=4 + at)) as file:
        for seed, name in enumerate("ab"):
            file.allocate(name, 2 * PAGE)
            file.write(name, noise(2 * PAGE, seed)).wait()
        outs = [torch.zeros(2 * PAGE, dtype=torch.uint8) for _ in "ab"]
        tickets = [file.read(name, out) for name, out in zip("ab", outs, strict=True)]
        # A tensor whose first request failed has no second one.
        bad = 0 if at <= 2 else 1
        with pytest.raises(SwapError, match=f"'{'ab'[bad]}': cannot read .*Input/output error"):
            tickets[bad].wait()
        tickets[1 - bad].wait()
        assert torch.equal(outs[1 - bad], noise(2 * PAGE, 1 - bad))
        for seed, name in enumerate("ab"):
            assert torch.equal(read_back(file, name, 2 * PAGE), noise(2 * PAGE, seed))


def test_a_full_disk_is_reported_up_front(make: Make, tmp_path: Path) -> None:
    with pytest.raises(
        SwapError, match=r"reserve 1048576 bytes .*zero-\w+\.swap: No space"
    ) as caught:
        make(faults=Faults(disk_bytes=MIB - 1))
    assert caught.value.errno == errno.ENOSPC
    assert held_in(tmp_path) == []
    make(faults=Faults(disk_bytes=MIB)).close()


def test_more_than_any_disk_has(make: Make, tmp_path: Path) -> None:
    with pytest.raises(SwapError, match="reserve"):
        make(capacity=1 << 60)
    assert held_in(tmp_path) == []


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize(
    "faults",
    [
        Faults(short_every=1),
        Faults(short_every=3),
        Faults(interrupt_every=2),
        Faults(short_every=2, interrupt_every=3, delay_us=100, reorder=True),
    ],
    ids=["short", "some short", "interrupted", "all"],
)
def test_short_and_interrupted_requests_go_on(make: Make, faults: Faults, direct: bool) -> None:
    config = AioConfig(block_size=8 * PAGE, queue_depth=2)
    with make(config, direct=direct, faults=faults) as file:
        source, out = noise(100_003), torch.zeros(100_003, dtype=torch.uint8)
        file.allocate("x", 100_003)
        file.write("x", source).wait()
        file.read("x", out).wait()
        assert file.stats()[:2] == (100_003, 100_003)
    assert torch.equal(out, source)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("left", [PAGE, 4 * PAGE, 4 * PAGE + 100])
def test_a_file_that_lost_its_end_is_an_error(make: Make, left: int, direct: bool) -> None:
    with make(direct=direct) as file:
        for seed, name in enumerate("abc"):
            file.allocate(name, PAGE if name == "a" else 6 * PAGE - 10)
            file.write(name, noise(file.extent(name).length, seed)).wait()
        os.truncate(within(file.path), left)
        for name in "bc":
            pattern = rf"'{name}': cannot read .* of {file.path}: Input/output error"
            with pytest.raises(SwapError, match=pattern):
                read_back(file, name, 6 * PAGE - 10)
        assert torch.equal(read_back(file, "a", PAGE), noise(PAGE, 0))


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("at", [0, 2 * PAGE - 1, 2 * PAGE, 5 * PAGE + 98])
def test_bytes_that_change_on_the_disk_are_an_error(make: Make, at: int, direct: bool) -> None:
    nbytes = 5 * PAGE + 99
    with make(AioConfig(block_size=2 * PAGE), direct=direct) as file:
        for seed, name in enumerate("abc"):
            file.allocate(name, nbytes)
            file.write(name, noise(nbytes, seed)).wait()
        flip(file.path, file.extent("b").offset + at)
        for _ in range(2):
            pattern = rf"'b': cannot read {nbytes} bytes .* of {file.path}: the data has changed on"
            with pytest.raises(SwapError, match=pattern) as caught:
                read_back(file, "b", nbytes)
            assert caught.value.errno == errno.EBADMSG
        for seed, name in ((0, "a"), (2, "c")):
            assert torch.equal(read_back(file, name, nbytes), noise(nbytes, seed))
        file.write("b", noise(nbytes, 3)).wait()
        assert torch.equal(read_back(file, "b", nbytes), noise(nbytes, 3))


def test_checksums_can_be_left_out(make: Make) -> None:
    with make(AioConfig(checksum=False)) as file:
        file.allocate("x", 10)
        file.write("x", noise(10)).wait()
        flip(file.path, 3)
        assert (read_back(file, "x", 10) != noise(10)).tolist() == [i == 3 for i in range(10)]


def test_a_read_after_a_failed_write_fails(make: Make) -> None:
    with make(faults=Faults(eio_on=1)) as file:
        file.allocate("x", 10)
        write, read = file.write("x", noise(10)), file.read("x", noise(10))
        with pytest.raises(SwapError, match=r"cannot read .*: Input/output error"):
            read.wait()
        with pytest.raises(SwapError, match="cannot write"):
            write.wait()
        file.write("x", noise(10))
        file.read("x", noise(10)).wait()


def test_drain_reports_each_failure_nobody_waited_for_once(make: Make) -> None:
    with make(ONE_AT_A_TIME, faults=Faults(eio_on=2)) as file:
        for name in "ab":
            file.allocate(name, 10)
            file.write(name, noise(10))
        with pytest.raises(SwapError, match="'b'"):
            file.drain()
        file.drain()


# The file


def test_the_space_is_taken_by_a_file_without_a_name_until_it_is_closed(
    make: Make, tmp_path: Path
) -> None:
    file = make(name="rank3")
    assert held_in(tmp_path) == ["rank3"]
    assert not list(tmp_path.iterdir())
    status = os.stat(within(file.path))
    assert (status.st_size, status.st_nlink, status.st_mode & 0o777) == (MIB, 0, 0o600)
    assert status.st_blocks * 512 >= MIB
    file.close()
    file.close()
    assert held_in(tmp_path) == []


def test_closing_waits_for_work_in_flight(make: Make, tmp_path: Path) -> None:
    file = make(ONE_AT_A_TIME, faults=Faults(delay_us=2000))
    source, out = noise(10 * PAGE), torch.zeros(10 * PAGE, dtype=torch.uint8)
    file.allocate("x", 10 * PAGE)
    tickets = [file.write("x", source), file.read("x", out)]
    file.close()
    assert all(ticket.done() for ticket in tickets)
    tickets[1].wait()
    assert torch.equal(out, source)
    assert file.stats()[:2] == (10 * PAGE, 10 * PAGE)
    assert held_in(tmp_path) == []
    for act in (lambda: file.write("x", source), lambda: file.allocate("y", 1)):
        with pytest.raises(SwapError, match=r"zero-\w+\.swap is closed"):
            act()


def test_closing_reports_what_failed(make: Make, tmp_path: Path) -> None:
    file = make(faults=Faults(eio_on=1))
    file.allocate("x", 10)
    ticket = file.write("x", noise(10))
    with pytest.raises(SwapError, match="'x'"):
        file.close()
    assert held_in(tmp_path) == []
    file.close()
    with pytest.raises(SwapError, match="'x'"):
        ticket.wait()


def test_leaving_a_block_hides_no_error(make: Make) -> None:
    def fail() -> None:
        with make(faults=Faults(eio_on=1)) as file:
            file.allocate("x", 10)
            file.write("x", noise(10))
            raise KeyError

    with pytest.raises(KeyError):
        fail()


def test_dropping_a_file_closes_it(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = make(faults=Faults(eio_on=1, delay_us=10_000))
    file.allocate("x", 10)
    file.write("x", noise(10))
    del file
    assert held_in(tmp_path) == []
    assert "was dropped" in caplog.text
    assert "'x': cannot write" in caplog.text


def test_files_of_one_name_and_what_has_such_a_name_already_are_left_alone(
    make: Make, tmp_path: Path
) -> None:
    precious = tmp_path / "precious"
    precious.write_bytes(b"not ours")
    (tmp_path / "zero.swap").symlink_to(precious)
    os.link(precious, tmp_path / "zero-0.swap")
    os.mkfifo(tmp_path / "zero-1.swap")
    names = sorted(os.listdir(tmp_path))
    with make() as first, make() as second:
        for seed, file in enumerate((first, second)):
            file.allocate("x", 3 * PAGE)
            file.write("x", noise(3 * PAGE, seed)).wait()
        for seed, file in enumerate((first, second)):
            assert torch.equal(read_back(file, "x", 3 * PAGE), noise(3 * PAGE, seed))
    assert sorted(os.listdir(tmp_path)) == names
    assert precious.read_bytes() == b"not ours"


@pytest.mark.parametrize("what", ["link", "file", "pipe", "folder"])
def test_a_name_that_somebody_guessed_is_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Guessed right, which is as good as impossible: here the name has nothing random."""
    monkeypatch.setattr(secrets, "token_hex", lambda nbytes: "0" * nbytes)
    place, precious = tmp_path / f"zero-{'0' * 8}.swap", tmp_path / "precious"
    precious.write_bytes(b"not ours")
    make = {"link": lambda p: p.symlink_to(precious), "file": Path.touch, "pipe": os.mkfifo}
    make.get(what, Path.mkdir)(place)
    for _ in range(2):
        with pytest.raises(SwapError, match=r"cannot create swap file .*: File exists"):
            SwapFile(tmp_path, MIB)
    assert place.lstat()
    assert precious.read_bytes() == b"not ours"


@pytest.mark.slow
@pytest.mark.parametrize("direct", [True, False])
def test_a_killed_process_leaves_nothing(
    make: Make, request: pytest.FixtureRequest, tmp_path: Path, direct: bool
) -> None:
    used = request.node.callspec.params["make"]
    options = "native=False" if used == "python" else f"native=True, backend={used!r}"
    script = f"""
import torch
from zero_runtime.swap import AioConfig, SwapFile
file = SwapFile({str(tmp_path)!r}, 1 << 23, direct={direct}, {options})
for i in range(40):
    file.allocate(str(i), 100_000)
print("ready", flush=True)
while True:
    for i in range(40):
        file.write(str(i), torch.full((100_000,), 0xEE, dtype=torch.uint8))
"""
    with running(script):
        time.sleep(0.2)
    assert not list(tmp_path.iterdir())
    with make(direct=direct) as file:
        assert file.stats().capacity == MIB


def test_a_folder_that_is_removed_takes_nothing_from_open_files(make: Make, tmp_path: Path) -> None:
    """The open file keeps its pages without a name; a new file needs the folder."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    with make(folder=folder) as file:
        file.allocate("x", 50_000)
        file.write("x", noise(50_000)).wait()
        shutil.rmtree(folder)
        assert torch.equal(read_back(file, "x", 50_000), noise(50_000))
        file.write("x", noise(50_000, 1)).wait()
        assert torch.equal(read_back(file, "x", 50_000), noise(50_000, 1))
        with pytest.raises(SwapError, match=r"scratch/zero-\w+\.swap: No such file or directory"):
            make(folder=folder)
    assert not folder.exists()


def test_a_missing_folder(make: Make, tmp_path: Path) -> None:
    with pytest.raises(SwapError, match=r"absent/zero-\w+\.swap: No such file or dir") as caught:
        make(folder=tmp_path / "absent")
    assert caught.value.errno == errno.ENOENT


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission(make: Make, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(SwapError, match=r"zero-\w+\.swap: Permission denied"):
            make()
    finally:
        tmp_path.chmod(0o700)


@pytest.mark.parametrize(
    ("direct", "faults", "reason"),
    [
        (False, None, "buffered (as asked for)"),
        (True, Faults(no_direct=True), "buffered (O_DIRECT: Invalid argument)"),
    ],
)
def test_one_line_says_how_data_moves(
    make: Make, direct: bool, faults: Faults | None, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="zero_runtime"):
        with make(direct=direct, faults=faults) as file:
            assert file.mode in {
                f"{how}, {reason}"
                for how in ("io_uring", "threads (as asked for)", "Python threads")
            }
            assert not file.stats().direct
    assert caplog.messages == [f"Swap file {file.path}: {file.mode}"]


def test_the_mode_is_what_the_probe_found(make: Make) -> None:
    with make() as file:
        how = file.mode.split(", ")[1]
        assert how == "O_DIRECT" if file.stats().direct else how.startswith("buffered (")


def test_io_uring_is_the_first_choice_and_can_be_asked_for(tmp_path: Path) -> None:
    pytest.importorskip("zero_runtime._native")
    skip_without_io_uring(tmp_path)
    with SwapFile(tmp_path, MIB, backend="io_uring") as file:
        mode = file.mode
    with SwapFile(tmp_path, MIB, native=True) as file:
        assert file.mode == mode
    with SwapFile(tmp_path, MIB, native=True, backend="threads") as file:
        assert file.mode.startswith("threads (as asked for), ")


def test_a_process_that_ends_leaves_no_file(tmp_path: Path) -> None:
    script = f"""
import os, torch
from zero_runtime.memory import native
from zero_runtime.errors import SwapError
from zero_runtime.offload.swap_file import Faults, SwapFile
slow = Faults(delay_us=20000)
files = [
    SwapFile({str(tmp_path)!r}, 1 << 20, name=str(kind), native=kind, faults=slow)
    for kind in {{native.AVAILABLE, False}}
]
for file in files:
    file.allocate("x", 10)
pid = os.fork()
if pid == 0:
    refused = 0
    for file in files:
        try:
            file.allocate("y", 10)
        except SwapError as error:
            refused += "belongs to process" in str(error)
    raise SystemExit(refused)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == len(files)
for file in files:
    file.write("x", torch.zeros(10, dtype=torch.uint8))
"""
    run(script)
    assert held_in(tmp_path) == []
