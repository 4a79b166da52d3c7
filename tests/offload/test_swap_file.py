"""Tests of zero_runtime.offload.swap_file: io_uring, threads in C++ and threads of Python must behave alike."""

import errno
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from swaps import (
    IMPLEMENTATIONS,
    MIB,
    Make,
    noise,
    opener,
    settled,
    skip_without_io_uring,
    time_limit,
)
from zero_runtime.errors import OptionError, SwapError
from zero_runtime.ir.aio import MAX_DEPTH, MAX_THREADS, AioConfig
from zero_runtime.memory import native
from zero_runtime.offload.swap_file import PAGE, Faults, SwapFile

SMALL_BLOCKS = AioConfig(block_size=2 * PAGE, queue_depth=4)


@pytest.fixture(autouse=True)
def _limited() -> Iterator[None]:
    with time_limit():
        yield


@pytest.fixture(params=IMPLEMENTATIONS)
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    return opener(request.param, tmp_path)


def placed(nbytes: int, shift: int) -> torch.Tensor:
    """Return an empty tensor whose address is `shift` bytes past a page."""
    memory = torch.zeros(nbytes + 2 * PAGE, dtype=torch.uint8)
    return memory[-memory.data_ptr() % PAGE + shift :][:nbytes]


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


def test_a_tensor_may_be_shorter_than_its_extent_and_is_read_as_written(make: Make) -> None:
    out = torch.zeros(100, dtype=torch.uint8)
    with make() as file:
        file.allocate("x", 5000)
        with pytest.raises(
            SwapError, match=r"'x': cannot read 100 bytes .*, where none were writt"
        ):
            file.read("x", out)
        file.write("x", noise(5000)).wait()
        with pytest.raises(
            SwapError, match=r"'x': cannot read 100 bytes .*, where 5000 were writt"
        ):
            file.read("x", out)
        file.write("x", noise(100, 1))
        file.read("x", out).wait()
    assert torch.equal(out, noise(100, 1))


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
        with pytest.raises(SwapError, match=r"'x' has an extent in .*zero-\w+\.swap already"):
            file.allocate("x", 10)
        with pytest.raises(OptionError, match="'y' cannot have -1 bytes"):
            file.allocate("y", -1)
        with pytest.raises(SwapError, match=r"'x' of 11 bytes .* its extent of 10"):
            file.write("x", noise(11))
        for act in (file.extent, file.free, lambda name: file.read(name, noise(1))):
            with pytest.raises(SwapError, match=r"'y' has no extent in .*zero-\w+\.swap") as caught:
                act("y")
            assert caught.value.errno == errno.ENOENT


# Configuration


@pytest.mark.parametrize(
    "aio",
    [
        AioConfig(block_size=PAGE, queue_depth=5, single_submit=True),
        AioConfig(block_size=PAGE, queue_depth=5, overlap_events=False),
        AioConfig(block_size=PAGE, queue_depth=1 << 16, thread_count=64),
    ],
    ids=["single", "batches", "deep"],
)
def test_any_configuration_moves_data(make: Make, aio: AioConfig) -> None:
    outs = [torch.zeros(20_000, dtype=torch.uint8) for _ in range(20)]
    with make(aio) as file:
        for i, out in enumerate(outs):
            file.allocate(str(i), 20_000)
            file.write(str(i), noise(20_000, i))
            file.read(str(i), out)
    assert all(torch.equal(out, noise(20_000, i)) for i, out in enumerate(outs))


@pytest.mark.parametrize("overlap", [True, False])
def test_a_request_waits_for_a_batch_where_that_is_asked_for(tmp_path: Path, overlap: bool) -> None:
    """Of four requests, three at a time, the first takes four delays and the last one takes one."""
    pytest.importorskip("zero_runtime._native")
    skip_without_io_uring(tmp_path)
    slow = Faults(delay_us=150_000, reorder=True)
    config = AioConfig(queue_depth=3, overlap_events=overlap)
    with SwapFile(tmp_path, MIB, config, backend="io_uring", faults=slow) as file:
        tickets = []
        for i in range(4):
            file.allocate(str(i), PAGE)
            tickets.append(file.write(str(i), noise(PAGE)))
            time.sleep(0.01)  # until it is taken
        tickets[3].wait()
        assert tickets[0].done() is not overlap


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
    assert AioConfig.from_mapping(section).ring_depth == 128
    assert AioConfig(queue_depth=1 << 16).ring_depth == MAX_DEPTH


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
