"""Tests of zero_runtime.swap: the C++ extension and threads of Python must behave alike."""

import errno
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from zero_runtime import native
from zero_runtime.errors import OptionError, SwapError, ZeroError
from zero_runtime.swap import MAX_THREADS, PAGE, AioConfig, Faults, SwapFile

MIB = 1 << 20
ONE_AT_A_TIME = AioConfig(block_size=PAGE, queue_depth=1)
SMALL_BLOCKS = AioConfig(block_size=2 * PAGE, queue_depth=4)

Make = Callable[..., SwapFile]


@pytest.fixture(params=["native", "python"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    """Opens swap files of 1 MiB in an empty folder, with each implementation in turn."""
    if request.param == "native":
        pytest.importorskip("zero_runtime._native")

    def open_file(
        config: AioConfig | None = None,
        *,
        folder: Path = tmp_path,
        capacity: int = MIB,
        **options: Any,
    ) -> SwapFile:
        return SwapFile(folder, capacity, config, native=request.param == "native", **options)

    return open_file


def noise(nbytes: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), generator=generator, dtype=torch.uint8)


def placed(nbytes: int, shift: int) -> torch.Tensor:
    """Return an empty tensor whose address is `shift` bytes past a page."""
    memory = torch.zeros(nbytes + 2 * PAGE, dtype=torch.uint8)
    return memory[-memory.data_ptr() % PAGE + shift :][:nbytes]


def settled(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + 10
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    return condition()


# Round trips


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("shift", [0, 1, 64])
def test_what_is_read_is_what_was_written(make: Make, shift: int, direct: bool) -> None:
    with make(SMALL_BLOCKS, direct=direct) as file:
        for nbytes in (0, 1, 4095, 4096, 4097, 8192, 3 * 8192, 100_003):
            source, out = placed(nbytes, shift), placed(nbytes + 1, shift)
            source.copy_(noise(nbytes))
            out.fill_(7)
            file.allocate(f"{nbytes}", nbytes)
            file.write(f"{nbytes}", source).wait()
            file.read(f"{nbytes}", out[:nbytes]).wait()
            assert torch.equal(out[:nbytes], source)
            assert out[nbytes] == 7


@pytest.mark.parametrize("nbytes", [1, 4097, 10_000])
def test_a_write_leaves_the_neighbours_alone(make: Make, nbytes: int) -> None:
    with make(SMALL_BLOCKS) as file:
        for name, length in (("below", PAGE), ("x", nbytes), ("above", PAGE)):
            file.allocate(name, length)
        for name in ("below", "above"):
            file.write(name, noise(PAGE))
        file.drain()
        file.write("x", noise(nbytes, 1)).wait()
        for name in ("below", "above"):
            out = torch.zeros(PAGE, dtype=torch.uint8)
            file.read(name, out).wait()
            assert torch.equal(out, noise(PAGE))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
def test_any_dtype_moves(make: Make, dtype: torch.dtype) -> None:
    source = noise(8008).view(dtype).requires_grad_(dtype.is_floating_point)
    out = torch.zeros(source.shape, dtype=dtype)
    with make() as file:
        file.allocate("x", 8008)
        file.write("x", source).wait()
        file.read("x", out).wait()
    assert torch.equal(out.view(torch.uint8), source.detach().view(torch.uint8))


def test_a_tensor_may_be_shorter_than_its_extent(make: Make) -> None:
    with make() as file:
        file.allocate("x", 5000)
        file.write("x", noise(5000)).wait()
        out = torch.zeros(100, dtype=torch.uint8)
        file.read("x", out).wait()
    assert torch.equal(out, noise(5000)[:100])


def test_many_tensors_move_at_once(make: Make) -> None:
    sizes = [(i * 7919) % 30_011 + 1 for i in range(50)]
    sources = [noise(n, i) for i, n in enumerate(sizes)]
    outs = [torch.zeros_like(source) for source in sources]
    with make(SMALL_BLOCKS, capacity=4 * MIB, slots=1) as file:
        for i, n in enumerate(sizes):
            file.allocate(str(i), n)

        def move(first: int) -> None:
            for i in range(first, len(sizes), 3):
                file.write(str(i), sources[i])
                file.read(str(i), outs[i])

        threads = [threading.Thread(target=move, args=(first,)) for first in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        file.drain()
        stats = file.stats()
    assert all(map(torch.equal, outs, sources))
    assert stats.bytes_read == stats.bytes_written == sum(sizes)


def test_double_buffering(make: Make) -> None:
    """The next layer is read while one is updated and the one before is written."""
    layers, nbytes = 6, 20_000
    with make(SMALL_BLOCKS, faults=Faults(delay_us=500, reorder=True)) as file:
        for i in range(layers):
            file.allocate(f"layer{i}", nbytes)
            file.write(f"layer{i}", torch.full((nbytes,), i, dtype=torch.uint8)).wait()
        buffers = [torch.empty(nbytes, dtype=torch.uint8) for _ in range(2)]
        written = [file.read("layer0", buffers[0]), None]
        written[0].wait()
        for i in range(layers):
            if i + 1 < layers:
                if (before := written[(i + 1) % 2]) is not None:
                    before.wait()
                following = file.read(f"layer{i + 1}", buffers[(i + 1) % 2])
            buffers[i % 2].add_(100)
            written[i % 2] = file.write(f"layer{i}", buffers[i % 2])
            following.wait()
        file.drain()
        for i in range(layers):
            file.read(f"layer{i}", buffers[0]).wait()
            assert bool((buffers[0] == 100 + i).all())


def test_operations_on_one_name_keep_their_order(make: Make) -> None:
    faults = Faults(delay_us=1000, reorder=True)
    outs = [torch.zeros(3 * PAGE, dtype=torch.uint8) for _ in range(8)]
    with make(AioConfig(block_size=PAGE), faults=faults) as file:
        file.allocate("x", 3 * PAGE)
        for i, out in enumerate(outs):
            file.write("x", torch.full((3 * PAGE,), i, dtype=torch.uint8))
            file.read("x", out)
    for i, out in enumerate(outs):
        assert bool((out == i).all())


def test_completions_come_in_another_order(make: Make) -> None:
    faults = Faults(delay_us=150_000, reorder=True)
    with make(AioConfig(queue_depth=4), faults=faults) as file:
        tickets = []
        for i in range(4):
            file.allocate(str(i), 10)
            tickets.append(file.write(str(i), noise(10)))
            time.sleep(0.03)  # until a thread has taken it
        tickets[3].wait()
        assert not tickets[0].done()
        tickets[0].wait()
        assert all(ticket.done() for ticket in tickets)


def test_a_ticket_says_when_it_is_done(make: Make) -> None:
    with make(faults=Faults(delay_us=300_000)) as file:
        file.allocate("x", 10)
        ticket = file.write("x", noise(10))
        assert ticket.name == "x"
        assert not ticket.done()
        assert settled(ticket.done)
        ticket.wait()
        ticket.wait()


def test_others_run_while_one_waits(make: Make) -> None:
    with make(faults=Faults(delay_us=400_000)) as file:
        file.allocate("x", 10)
        waiting = threading.Thread(target=file.write("x", noise(10)).wait)
        waiting.start()
        assert waiting.is_alive()
        waiting.join()


# Tensors in flight


def test_tensors_live_until_their_operation_is_complete(make: Make) -> None:
    with make(faults=Faults(delay_us=50_000)) as file:
        file.allocate("x", 100_000)
        file.write("x", noise(100_000))  # nobody else holds it
        noise(100_000, 1)
        out = torch.zeros(100_000, dtype=torch.uint8)
        file.read("x", out).wait()
    assert torch.equal(out, noise(100_000))


def test_tensors_need_not_be_waited_for_to_be_let_go(make: Make) -> None:
    live = native.stats().live
    with make(faults=Faults(delay_us=50_000)) as file:
        file.allocate("x", 5000)
        ticket = file.write("x", native.take(5000))
        assert native.stats().live == live + 5000
        assert settled(ticket.done)
        assert native.stats().live == live


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(2, 2), torch.zeros(8)[::2], torch.zeros(4, device="meta")],
    ids=["shape", "stride", "device"],
)
def test_only_flat_tensors_move(make: Make, tensor: torch.Tensor) -> None:
    with make() as file:
        file.allocate("x", 100)
        with pytest.raises(SwapError, match=r"'x' .* must be flat, contiguous and on the CPU"):
            file.write("x", tensor)
        with pytest.raises(SwapError, match="'x'"):
            file.read("x", tensor)


# Extents


def test_extents_are_whole_pages_and_stay_where_they_are(make: Make) -> None:
    with make() as file:
        extents = [file.allocate(str(n), n) for n in (1, 0, 4096, 4097, 10)]
        assert [extent.length for extent in extents] == [1, 0, 4096, 4097, 10]
        assert [extent.offset for extent in extents] == [p * PAGE for p in (0, 1, 2, 3, 5)]
        assert file.extent("4097") == extents[3]
        assert file.stats().allocated == 6 * PAGE
        assert file.stats().capacity == MIB


def test_freed_extents_are_used_again(make: Make) -> None:
    with make(capacity=4 * PAGE - 100) as file:
        for name in "abcd":
            file.allocate(name, PAGE)
        with pytest.raises(SwapError, match=r"'e' of 1 bytes .* stretch has 0") as caught:
            file.allocate("e", 1)
        assert caught.value.errno == errno.ENOSPC
        file.free("b")
        file.free("d")
        with pytest.raises(SwapError, match=r"'e' of 4097 bytes .* of 16384 .* has 4096"):
            file.allocate("e", PAGE + 1)
        file.free("c")  # between two free ones
        assert file.allocate("e", 3 * PAGE).offset == PAGE
        file.write("e", noise(3 * PAGE)).wait()
        file.free("a")
        file.free("e")
        assert file.stats().allocated == 0
        assert file.allocate("whole", 4 * PAGE).offset == 0


def test_freeing_waits_for_operations(make: Make) -> None:
    with make(faults=Faults(delay_us=50_000)) as file:
        file.allocate("x", 10)
        ticket = file.write("x", noise(10))
        file.free("x")
        assert ticket.done()


def test_names_and_sizes_are_checked(make: Make) -> None:
    with make() as file:
        file.allocate("x", 10)
        with pytest.raises(SwapError, match=r"'x' has an extent in .*zero\.swap already"):
            file.allocate("x", 10)
        with pytest.raises(OptionError, match="'y' cannot have -1 bytes"):
            file.allocate("y", -1)
        with pytest.raises(SwapError, match=r"'x' of 11 bytes .* its extent of 10"):
            file.write("x", noise(11))
        for act in (file.extent, file.free, lambda name: file.read(name, noise(1))):
            with pytest.raises(SwapError, match=r"'y' has no extent in .*zero\.swap") as caught:
                act("y")
            assert caught.value.errno == errno.ENOENT


# Faults


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


def test_a_disk_that_fills_up(make: Make) -> None:
    with make(ONE_AT_A_TIME, faults=Faults(enospc_after=2 * PAGE)) as file:
        for name in "abc":
            file.allocate(name, PAGE)
        tickets = [file.write(name, noise(PAGE)) for name in "abc"]
        tickets[0].wait()
        tickets[1].wait()
        with pytest.raises(SwapError, match=r"'c': .*No space left on device") as caught:
            tickets[2].wait()
        assert caught.value.errno == errno.ENOSPC


def test_a_full_disk_is_reported_up_front(make: Make, tmp_path: Path) -> None:
    with pytest.raises(SwapError, match=r"reserve 1048576 bytes .*zero.swap: No space") as caught:
        make(faults=Faults(disk_bytes=MIB - 1))
    assert caught.value.errno == errno.ENOSPC
    assert not list(tmp_path.iterdir())
    make(faults=Faults(disk_bytes=MIB)).close()


def test_more_than_any_disk_has(make: Make, tmp_path: Path) -> None:
    with pytest.raises(SwapError, match="reserve"):
        make(capacity=1 << 60)
    assert not list(tmp_path.iterdir())


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


def test_a_file_that_lost_its_end_is_an_error(make: Make) -> None:
    with make() as file:
        file.allocate("x", 10 * PAGE)
        os.truncate(file.path, PAGE)
        with pytest.raises(SwapError, match="'x': cannot read"):
            file.read("x", noise(10 * PAGE)).wait()


def test_a_read_after_a_failed_write_fails(make: Make) -> None:
    with make(faults=Faults(eio_on=1)) as file:
        file.allocate("x", 10)
        write, read = file.write("x", noise(10)), file.read("x", noise(10))
        with pytest.raises(SwapError, match="cannot read"):
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


def test_the_file_is_there_until_it_is_closed(make: Make, tmp_path: Path) -> None:
    file = make(name="rank3")
    assert file.path == str(tmp_path / "rank3.swap")
    assert os.stat(file.path).st_size == MIB
    assert os.stat(file.path).st_blocks * 512 >= MIB
    file.close()
    file.close()
    assert not list(tmp_path.iterdir())


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
    assert not list(tmp_path.iterdir())
    for act in (lambda: file.write("x", source), lambda: file.allocate("y", 1)):
        with pytest.raises(SwapError, match=r"zero\.swap is closed"):
            act()


def test_closing_reports_what_failed(make: Make, tmp_path: Path) -> None:
    file = make(faults=Faults(eio_on=1))
    file.allocate("x", 10)
    ticket = file.write("x", noise(10))
    with pytest.raises(SwapError, match="'x'"):
        file.close()
    assert not list(tmp_path.iterdir())
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
    assert not list(tmp_path.iterdir())
    assert "was dropped" in caplog.text
    assert "'x': cannot write" in caplog.text


def test_a_file_in_use_is_refused_and_a_leftover_taken_over(make: Make, tmp_path: Path) -> None:
    (tmp_path / "zero.swap").write_bytes(b"left behind")
    with make() as file:
        with pytest.raises(SwapError, match=r"zero\.swap is in use") as caught:
            make()
        assert caught.value.errno == errno.EWOULDBLOCK
        assert os.path.exists(file.path)
        make(name="other").close()
    make().close()


def test_a_missing_folder(make: Make, tmp_path: Path) -> None:
    with pytest.raises(SwapError, match=r"absent/zero\.swap: No such file or dir") as caught:
        make(folder=tmp_path / "absent")
    assert caught.value.errno == errno.ENOENT


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission(make: Make, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(SwapError, match=r"zero\.swap: Permission denied"):
            make()
    finally:
        tmp_path.chmod(0o700)


@pytest.mark.parametrize(
    ("direct", "faults", "reason"),
    [
        (False, None, "buffered, as asked for"),
        (True, Faults(no_direct=True), "buffered, O_DIRECT is refused: Invalid argument"),
    ],
)
def test_one_line_says_how_data_moves(
    make: Make, direct: bool, faults: Faults | None, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="zero_runtime"):
        with make(direct=direct, faults=faults) as file:
            assert file.mode == reason
            assert not file.stats().direct
    assert caplog.messages == [f"Swap file {file.path}: {reason}"]


def test_the_mode_is_what_the_probe_found(make: Make) -> None:
    with make() as file:
        assert file.mode.startswith("O_DIRECT, " if file.stats().direct else "buffered, ")


def test_a_process_that_ends_leaves_no_file(tmp_path: Path) -> None:
    script = f"""
import os, torch
from zero_runtime import native
from zero_runtime.errors import SwapError
from zero_runtime.swap import Faults, SwapFile
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
    assert os.path.exists(file.path)
    file.write("x", torch.zeros(10, dtype=torch.uint8))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.iterdir())


# Configuration


def test_the_section_is_deepspeeds() -> None:
    section = {
        "block_size": 1 << 16,
        "queue_depth": 32,
        "thread_count": 4,
        "single_submit": True,
        "overlap_events": False,
    }
    assert AioConfig.from_mapping(section) == AioConfig(1 << 16, 32, 4, True, False)
    assert AioConfig.from_mapping({}) == AioConfig(1 << 20, 8, 1, False, True)
    assert AioConfig().in_flight == 8
    assert AioConfig.from_mapping(section).in_flight == MAX_THREADS


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"block_sise": 1, "depth": 2}, "unknown key 'block_sise', 'depth'; known are block_size"),
        ({"block_size": 1000}, "block_size must be a multiple of 4096, got 1000"),
        ({"block_size": 0}, "block_size must be from 1"),
        ({"block_size": 4096.0}, "block_size must be of type int, got 4096.0"),
        ({"queue_depth": True}, "queue_depth must be of type int, got True"),
        ({"thread_count": 65}, "thread_count must be from 1 to 64, got 65"),
        ({"single_submit": 1}, "single_submit must be of type bool, got 1"),
    ],
)
def test_wrong_sections_are_refused(section: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        AioConfig.from_mapping(section)


@pytest.mark.parametrize(
    "arguments", [{"capacity": 0}, {"slots": 0}, {"name": "a/b"}, {"name": ""}]
)
def test_wrong_arguments_are_refused(make: Make, arguments: dict[str, object]) -> None:
    with pytest.raises(OptionError):
        make(**arguments)
