"""Tests of zero_runtime.offload.striped_swap: several folders as one swap file that grows."""

import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from swaps import MIB, ONE_AT_A_TIME, flip, held_in, noise, read_back, time_limit, within
from zero_runtime.errors import OptionError, SwapError
from zero_runtime.ir.aio import AioConfig
from zero_runtime.offload.striped_swap import StripedSwap, _Lane
from zero_runtime.offload.swap_file import PAGE, Faults, SwapFile

Make = Callable[..., StripedSwap]


@pytest.fixture(autouse=True)
def _limited() -> Iterator[None]:
    with time_limit():
        yield


@pytest.fixture(params=["native", "python"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    """Opens striped files over so many folders, with each implementation in turn."""
    if request.param == "native":
        pytest.importorskip("zero_runtime._native")

    def open_all(count: int, capacity: int = MIB, **options: Any) -> StripedSwap:
        return StripedSwap(
            folders_in(tmp_path, count),
            capacity,
            name="rank0",
            native=request.param == "native",
            **options,
        )

    return open_all


def folders_in(folder: Path, count: int) -> list[Path]:
    places = [folder / f"disk{i}" for i in range(count)]
    for place in places:
        place.mkdir(exist_ok=True)
    return places


def cuts(swap: StripedSwap, name: str) -> list[tuple[int, int]]:
    return [(part.begin, part.end) for part in swap.parts(name)]


# Round trips


@pytest.mark.parametrize("count", [1, 2, 3])
def test_what_is_read_is_what_was_written(make: Make, count: int) -> None:
    with make(count) as swap:
        for nbytes in (0, 1, 4095, 4096, 4097, 3 * 4096, 100_003):
            extent = swap.allocate(f"{nbytes}", nbytes)
            assert extent.length == nbytes
            assert swap.extent(f"{nbytes}") == extent
            swap.write(f"{nbytes}", noise(nbytes)).wait()
            assert torch.equal(read_back(swap, f"{nbytes}", nbytes), noise(nbytes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.bool])
def test_any_dtype_moves(make: Make, dtype: torch.dtype) -> None:
    source = (noise(8 * PAGE) % 2).view(dtype)
    out = torch.zeros_like(source)
    with make(2) as swap:
        swap.allocate("x", 8 * PAGE)
        swap.write("x", source.requires_grad_(dtype.is_floating_point)).wait()
        swap.read("x", out).wait()
    assert torch.equal(out.view(torch.uint8), source.detach().view(torch.uint8))


def test_a_tensor_may_be_shorter_than_its_extent(make: Make) -> None:
    with make(3) as swap:
        swap.allocate("x", 9 * PAGE)
        for nbytes in (100, 3 * PAGE, 5 * PAGE + 1):
            swap.write("x", noise(nbytes))
            assert torch.equal(read_back(swap, "x", nbytes), noise(nbytes))


def test_parts_are_pages_and_each_lies_in_its_folder(make: Make, tmp_path: Path) -> None:
    with make(3) as swap:
        swap.allocate("even", 6 * PAGE)
        swap.allocate("odd", 4 * PAGE + 1)
        swap.allocate("small", 10)
        assert cuts(swap, "even") == [(0, 2 * PAGE), (2 * PAGE, 4 * PAGE), (4 * PAGE, 6 * PAGE)]
        assert cuts(swap, "odd") == [(0, 2 * PAGE), (2 * PAGE, 4 * PAGE), (4 * PAGE, 4 * PAGE + 1)]
        assert cuts(swap, "small") == [(0, 10)]
        swap.write("odd", noise(4 * PAGE + 1)).wait()
        for i, part in enumerate(swap.parts("odd")):
            assert part.file.path.startswith(f"{tmp_path}/disk{i}/rank0-")
            held = read_back(part.file, "odd", part.end - part.begin)
            assert torch.equal(held, noise(4 * PAGE + 1)[part.begin : part.end])


def test_one_folder_is_one_swap_file(make: Make, tmp_path: Path) -> None:
    with make(1) as swap:
        extents = [swap.allocate(name, PAGE + 1) for name in "abc"]
        with SwapFile(tmp_path / "disk0", MIB, name="other") as file:
            assert extents == [file.allocate(name, PAGE + 1) for name in "abc"]
        assert swap.path.startswith(f"{tmp_path}/disk0/rank0-")
        assert swap.stats().capacity == MIB


def test_operations_on_one_name_keep_their_order(make: Make) -> None:
    outs = [torch.zeros(4 * PAGE, dtype=torch.uint8) for _ in range(6)]
    faults = Faults(delay_us=500, reorder=True)
    with make(2, config=AioConfig(block_size=PAGE), faults=faults) as swap:
        swap.allocate("x", 4 * PAGE)
        for i, out in enumerate(outs):
            swap.write("x", torch.full((4 * PAGE,), i, dtype=torch.uint8))
            swap.read("x", out)
    for i, out in enumerate(outs):
        assert bool((out == i).all())


def test_several_threads_move_tensors_while_it_grows(make: Make) -> None:
    sizes = [(i * 7919) % 60_011 + 1 for i in range(30)]
    outs = [torch.zeros(nbytes, dtype=torch.uint8) for nbytes in sizes]
    with make(2, capacity=64 * 1024, slots=1) as swap:

        def move(first: int) -> None:
            for i in range(first, len(sizes), 3):
                swap.allocate(str(i), sizes[i])
                swap.write(str(i), noise(sizes[i], i))
                swap.read(str(i), outs[i])

        threads = [threading.Thread(target=move, args=(first,)) for first in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        swap.drain()
        stats = swap.stats()
    assert all(torch.equal(out, noise(len(out), i)) for i, out in enumerate(outs))
    assert stats.bytes_read == stats.bytes_written == sum(sizes)
    assert stats.capacity >= stats.allocated > 64 * 1024


def test_a_ticket_is_done_when_all_parts_are(make: Make) -> None:
    with make(2, config=ONE_AT_A_TIME, faults=Faults(delay_us=50_000)) as swap:
        swap.allocate("x", 3 * PAGE)  # two pages in the first folder, one in the second
        ticket = swap.write("x", noise(3 * PAGE))
        assert ticket.name == "x"
        second = swap.parts("x")[1].file
        second.drain()
        assert not ticket.done()
        ticket.wait()
        assert ticket.done()


# Growth


def test_it_grows_by_a_quarter_where_space_runs_out(make: Make, tmp_path: Path) -> None:
    with make(2, capacity=32 * PAGE) as swap:
        for i in range(4):
            swap.allocate(str(i), 8 * PAGE)
        assert swap.stats().capacity == swap.stats().allocated == 32 * PAGE
        swap.allocate("more", 2 * PAGE)
        assert swap.stats().capacity == 40 * PAGE
        swap.allocate("again", 6 * PAGE)
        assert swap.stats().capacity == swap.stats().allocated == 40 * PAGE
        first, second = (f"disk{i}/rank0" for i in range(2))
        assert held_in(tmp_path) == [
            *(f"{first}{end}" for end in ("", "+1")),
            *(f"{second}{end}" for end in ("", "+1")),
        ]
        names = ["0", "1", "2", "3", "more", "again"]
        for seed, name in enumerate(names):
            swap.write(name, noise(swap.extent(name).length, seed))
        for seed, name in enumerate(names):
            nbytes = swap.extent(name).length
            assert torch.equal(read_back(swap, name, nbytes), noise(nbytes, seed))
    assert held_in(tmp_path) == []


def test_it_grows_by_what_a_large_tensor_needs(make: Make) -> None:
    with make(1, capacity=4 * PAGE) as swap:
        swap.allocate("x", 100 * PAGE)
        assert swap.stats().capacity == 104 * PAGE
        swap.write("x", noise(100 * PAGE)).wait()
        assert torch.equal(read_back(swap, "x", 100 * PAGE), noise(100 * PAGE))


def test_freed_space_is_used_before_it_grows(make: Make) -> None:
    with make(2, capacity=8 * PAGE) as swap:
        swap.allocate("a", 8 * PAGE)
        swap.allocate("b", 2 * PAGE)
        capacity = swap.stats().capacity
        swap.free("a")
        swap.allocate("c", 8 * PAGE)
        assert swap.stats().capacity == capacity
        with pytest.raises(SwapError, match=r"'a' has no extent in .*disk0.*disk1"):
            swap.extent("a")


def test_a_nearly_full_disk_holds_what_is_needed(make: Make) -> None:
    with make(1, capacity=16 * PAGE, faults=Faults(disk_bytes=16 * PAGE)) as swap:
        swap.allocate("a", 16 * PAGE)
        swap.allocate("b", 16 * PAGE)
        assert swap.stats().capacity == 32 * PAGE


def test_growing_takes_less_where_a_quarter_does_not_fit(tmp_path: Path) -> None:
    asked: list[int] = []

    def make(folder: str, capacity: int, *, name: str) -> SwapFile:
        asked.append(capacity)
        limit = 64 if len(asked) == 1 else 8  # pages: the first file leaves little on the disk
        return SwapFile(folder, capacity, name=name, faults=Faults(disk_bytes=limit * PAGE))

    lane = _Lane(str(tmp_path), 64 * PAGE, make, "x")
    assert lane.allocate("a", 64 * PAGE)[0] is lane.files[0]
    assert lane.allocate("b", 3 * PAGE)[0] is lane.files[1]
    assert asked == [64 * PAGE, 16 * PAGE, 3 * PAGE]
    with pytest.raises(SwapError, match="'c' of 36864 bytes needs more space"):
        lane.allocate("c", 9 * PAGE)
    for file in lane.files:
        file.close()


def test_a_disk_without_space_for_more_is_an_error(make: Make, tmp_path: Path) -> None:
    with make(2, capacity=8 * PAGE, faults=Faults(disk_bytes=4 * PAGE)) as swap:
        swap.allocate("a", 8 * PAGE)
        allocated = swap.stats().allocated
        pattern = r"'b' of 20480 bytes needs more space: cannot reserve 20480 .*disk0.*No space"
        with pytest.raises(SwapError, match=pattern) as caught:
            swap.allocate("b", 10 * PAGE)
        assert caught.value.errno == errno.ENOSPC
        assert swap.stats().allocated == allocated
        swap.allocate("b", 8 * PAGE)


def test_what_one_folder_cannot_hold_is_set_aside_in_none(make: Make, tmp_path: Path) -> None:
    with make(2, capacity=8 * PAGE) as swap:
        swap.allocate("a", 8 * PAGE)
        before = swap.stats().allocated
        (tmp_path / "disk1").rename(tmp_path / "elsewhere")
        with pytest.raises(SwapError, match=r"'b' .*disk1/rank0\+1-\w+\.swap"):
            swap.allocate("b", 4 * PAGE)
        assert swap.stats().allocated == before
        (tmp_path / "elsewhere").rename(tmp_path / "disk1")
        swap.allocate("b", 4 * PAGE)


# Errors


def test_an_error_of_any_part_names_tensor_path_and_reason(make: Make, tmp_path: Path) -> None:
    with make(2) as swap:
        for name in "xy":
            swap.allocate(name, 4 * PAGE)
            swap.write(name, noise(4 * PAGE)).wait()
        os.truncate(within(swap.parts("x")[1].file.path), 3 * PAGE)
        ticket = swap.read("y", noise(4 * PAGE))
        for _ in range(2):
            with pytest.raises(
                SwapError, match=r"'y': cannot read .*disk1/rank0-\w+\.swap"
            ) as caught:
                ticket.wait()
        assert caught.value.errno == errno.EIO
        assert ticket.done()
        assert torch.equal(read_back(swap, "x", 4 * PAGE), noise(4 * PAGE))


def test_bytes_that_change_in_one_folder_are_an_error_that_names_it(make: Make) -> None:
    with make(2) as swap:
        swap.allocate("x", 4 * PAGE)
        swap.write("x", noise(4 * PAGE)).wait()
        flip(swap.parts("x")[1].file.path, PAGE)
        with pytest.raises(
            SwapError, match=r"'x': cannot read .*/disk1/rank0-\w+\.swap: the data has"
        ):
            read_back(swap, "x", 4 * PAGE)


def test_a_failure_in_one_folder_is_waited_for_in_all(make: Make) -> None:
    with make(2, config=ONE_AT_A_TIME, faults=Faults(eio_on=1, delay_us=20_000)) as swap:
        swap.allocate("x", 6 * PAGE)
        with pytest.raises(SwapError, match="'x': cannot write"):
            swap.write("x", noise(6 * PAGE)).wait()
        swap.write("x", noise(6 * PAGE)).wait()
        assert torch.equal(read_back(swap, "x", 6 * PAGE), noise(6 * PAGE))


def test_draining_and_closing_report_what_nobody_waited_for(make: Make, tmp_path: Path) -> None:
    swap = make(2, faults=Faults(eio_on=1))
    swap.allocate("x", 2 * PAGE)
    swap.write("x", noise(2 * PAGE))
    with pytest.raises(SwapError, match="'x': cannot write"):
        swap.drain()
    swap.drain()
    swap.close()
    swap.close()
    other = make(2, faults=Faults(eio_on=1))
    other.allocate("x", 2 * PAGE)
    other.write("x", noise(2 * PAGE))
    with pytest.raises(SwapError, match="'x': cannot write"):
        other.close()
    assert held_in(tmp_path) == []
    with pytest.raises(SwapError, match=r"rank0-\w+\.swap is closed"):
        other.write("x", noise(1))


def test_names_sizes_and_forms_are_checked(make: Make) -> None:
    with make(2) as swap:
        swap.allocate("x", 10_000)
        with pytest.raises(SwapError, match=r"'x' has an extent in .*disk0.*disk1.* already"):
            swap.allocate("x", 10)
        with pytest.raises(OptionError, match="'y' cannot have -1 bytes"):
            swap.allocate("y", -1)
        with pytest.raises(SwapError, match=r"'x' of 10001 bytes .* its extent of 10000"):
            swap.write("x", noise(10_001))
        with pytest.raises(SwapError, match=r"'x' .* must be flat, contiguous and on the CPU"):
            swap.read("x", torch.zeros(2, 2))
        for act in (swap.extent, swap.free, lambda name: swap.read(name, noise(1))):
            with pytest.raises(
                SwapError, match=r"'y' has no extent in .*rank0-\w+\.swap"
            ) as caught:
                act("y")
            assert caught.value.errno == errno.ENOENT


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    places = [*folders_in(tmp_path, 1), tmp_path / "absent"]
    pattern = r"swap folder .*/absent: No such file or directory; make the folder"
    with pytest.raises(SwapError, match=pattern) as caught:
        StripedSwap(places, MIB, name="x")
    assert caught.value.errno == errno.ENOENT
    assert held_in(tmp_path) == []


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(SwapError, match=r"swap folder .*/file: Not a directory") as caught:
        StripedSwap([tmp_path / "file"], MIB, name="x")
    assert caught.value.errno == errno.ENOTDIR


@pytest.mark.parametrize(
    ("choose", "message"),
    [
        (lambda at: [], "at least one folder"),
        (lambda at: str(at), "folders must be a list"),
        (lambda at: [at, at / "." / "link"], "is named twice"),
    ],
)
def test_wrong_folders_are_refused(
    tmp_path: Path, choose: Callable[[Path], Sequence[Path]], message: str
) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(OptionError, match=message):
        StripedSwap(choose(tmp_path), MIB, name="x")


def test_two_runs_share_folders(make: Make, tmp_path: Path) -> None:
    with make(2) as first, make(2) as second:
        for seed, swap in enumerate((first, second)):
            swap.allocate("x", 3 * PAGE)
            swap.write("x", noise(3 * PAGE, seed)).wait()
        for seed, swap in enumerate((first, second)):
            assert torch.equal(read_back(swap, "x", 3 * PAGE), noise(3 * PAGE, seed))
    assert held_in(tmp_path) == []


def test_files_that_were_opened_go_where_a_later_one_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = folders_in(tmp_path, 2)
    real = os.open

    def refuse(path: str, *arguments: Any) -> int:
        if str(path).startswith(str(folders[1])):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return real(path, *arguments)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(SwapError, match=r"disk1.*Permission denied"):
        StripedSwap(folders, MIB, name="rank0")
    assert held_in(tmp_path) == []


def test_the_mode_is_that_of_the_files(make: Make) -> None:
    with make(1, direct=False) as swap:
        swap.allocate("x", 1)
        assert swap.mode == swap.parts("x")[0].file.mode
        assert not swap.stats().direct
    with make(2, direct=False) as swap:
        swap.allocate("x", 2 * PAGE)
        assert swap.mode == f"2 folders, each {swap.parts('x')[0].file.mode}"


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="there is no other file system")
def test_the_mode_tells_folders_that_differ_apart(tmp_path: Path) -> None:
    with StripedSwap([tmp_path, "/dev/shm"], MIB, name=f"test{os.getpid()}") as swap:
        swap.allocate("x", 2 * PAGE)
        modes = [(part.file.path, part.file.mode) for part in swap.parts("x")]
        if modes[0][1] == modes[1][1]:
            pytest.skip("both file systems move data alike")
        assert swap.mode == "; ".join(f"{path}: {mode}" for path, mode in modes)
