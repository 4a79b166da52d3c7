"""Tests of zero_runtime.offload.host_copies: host memory, and copies between host and device."""

import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from zero_runtime.errors import UnsupportedError, ZeroError
from zero_runtime.memory import native
from zero_runtime.memory.buffers import flat_buffer, without_storage
from zero_runtime.offload.host_copies import (
    Pool,
    Transfers,
    _StreamTransfers,
    _ThreadTransfers,
    cuda_extension,
    extension_stats,
    transfers_for,
    trim,
)

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool]
LARGE = 1 << 24  # elements: a copy takes milliseconds

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
needs_extension = pytest.mark.skipif(not cuda_extension(), reason="needs the CUDA extension")
WAYS = [
    "cpu",
    pytest.param("streams", marks=needs_gpu),
    pytest.param("extension", marks=[needs_gpu, needs_extension]),
]


@pytest.fixture(params=WAYS)
def transfers(request: pytest.FixtureRequest) -> Transfers:
    """Each way to copy in turn."""
    if request.param == "streams":
        return _StreamTransfers(torch.device("cuda", 0))
    return transfers_for(torch.device("cpu" if request.param == "cpu" else "cuda"))


@pytest.fixture
def device(transfers: Transfers) -> torch.device:
    return CPU if isinstance(transfers, _ThreadTransfers) else torch.device("cuda", 0)


def noise(
    numel: int, dtype: torch.dtype = torch.float32, device: torch.device = CPU
) -> torch.Tensor:
    """Every bit pattern may occur, those of NaN with a payload too."""
    generator = torch.Generator().manual_seed(numel)
    bits = torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return (bits.bool() if dtype is torch.bool else bits.view(dtype)).to(device)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.cpu().view(torch.uint8), other.cpu().view(torch.uint8))


def filled(tensor: torch.Tensor, value: float) -> bool:
    """Whether each element is ``value``; apart from asserts, which would print the whole tensor."""
    return bool((tensor.cpu() == value).all())


def held(device: torch.device) -> int:
    """Bytes that tensors on the host and on the device take up."""
    gc.collect()
    on_gpu = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    return native.stats().live + on_gpu


def settled(condition: Callable[[], bool], seconds: float = 10) -> bool:
    """Whether the condition comes true before time is up."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.001)
    return condition()


# ------------------------------------------------------------------------------ host memory


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_host_memory_has_exactly_the_size_asked_for(pinned: bool, dtype: torch.dtype) -> None:
    pool = Pool(pinned)
    taken = pool.take(1000_003, dtype)
    assert taken.shape == (1000_003,)
    assert taken.dtype is dtype
    assert taken.device == CPU
    assert taken.data_ptr() % 64 == 0
    assert taken.is_pinned() == pool.pinned == (pinned and torch.cuda.is_available())
    if not pinned or cuda_extension():
        assert taken.untyped_storage().nbytes() == 1000_003 * dtype.itemsize


def test_host_memory_is_used_again() -> None:
    pool = Pool(pinned=True)
    address = pool.take(3_000_001, torch.float32).data_ptr()
    before = native.stats().os_allocations
    assert pool.take(3_000_001, torch.float32).data_ptr() == address
    assert native.stats().os_allocations == before


def test_host_memory_in_use_is_not_handed_out_again() -> None:
    pool = Pool(pinned=True)
    taken = [pool.take(1000, torch.float32).fill_(number) for number in range(5)]
    assert all(filled(tensor, number) for number, tensor in enumerate(taken))


def test_an_empty_tensor_takes_no_special_care(transfers: Transfers, device: torch.device) -> None:
    copy = transfers.to_device(Pool(True).take(0, torch.float32), torch.empty(0, device=device))
    copy.wait()
    copy.wait_on_host()
    assert copy.done()


def test_memory_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ZeroError, match=r"cannot take 4611686018427387904 bytes of \w+ memory: "):
        Pool(True).take(1 << 60, torch.float32)
    with pytest.raises(ZeroError, match="-1 elements"):
        Pool(True).take(-1, torch.float32)


# ------------------------------------------------------------------------------ values and order


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_arrives_is_the_same_bits(
    transfers: Transfers, device: torch.device, dtype: torch.dtype, pinned: bool
) -> None:
    pool = Pool(pinned)
    source, back = pool.take(100_003, dtype), pool.take(100_003, dtype)
    source.copy_(noise(100_003, dtype))
    there = torch.empty(100_003, dtype=dtype, device=device)
    transfers.to_device(source, there).wait()
    copy = transfers.to_host(there, back)
    copy.wait_on_host()
    assert copy.done()
    assert same_bits(back, noise(100_003, dtype))


def test_shapes_and_parts_of_buffers_move(transfers: Transfers, device: torch.device) -> None:
    host, there = torch.arange(24.0).view(2, 3, 4), torch.zeros(5, 3, 4, device=device)
    transfers.to_device(host, there[2:4]).wait()
    assert torch.equal(there[2:4].cpu(), host)
    assert not there.cpu()[[0, 1, 4]].any()


def test_copies_of_one_direction_run_in_order(transfers: Transfers, device: torch.device) -> None:
    """The large one would end last if they ran side by side, and its values would remain."""
    there = torch.empty(LARGE, device=device)
    copies = [transfers.to_device(torch.full((LARGE,), 1.0), there)]
    copies += [transfers.to_device(torch.full((8,), float(n)), there[:8]) for n in range(2, 50)]
    copies[-1].wait_on_host()
    assert all(copy.done() for copy in copies)
    assert there[:9].tolist() == [49.0] * 8 + [1.0]


def test_a_copy_sees_what_was_computed_before_it_started(
    transfers: Transfers, device: torch.device
) -> None:
    there = torch.zeros(LARGE, device=device)
    for _ in range(50):
        there += 1
    back = Pool(True).take(LARGE, torch.float32)
    transfers.to_host(there, back).wait_on_host()
    assert filled(back, 50)


def test_a_round_trip_needs_no_wait_on_the_host(transfers: Transfers, device: torch.device) -> None:
    pool = Pool(True)
    middle = pool.take(LARGE, torch.float32)
    source, there = torch.rand(LARGE, device=device), torch.zeros(LARGE, device=device)
    transfers.to_host(source, middle).wait()
    transfers.to_device(middle, there).wait()
    assert torch.equal(source + 1, there + 1)


def test_many_threads_may_start_copies(transfers: Transfers, device: torch.device) -> None:
    def move(number: int) -> bool:
        there, back = torch.empty(1000, device=device), torch.empty(1000)
        transfers.to_device(torch.full((1000,), float(number)), there).wait()
        transfers.to_host(there, back).wait_on_host()
        return filled(back, number)

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(move, range(200)))


# ------------------------------------------------------------------------------ life


def test_tensors_that_nobody_else_holds_live_until_the_copy_is_complete(
    transfers: Transfers, device: torch.device
) -> None:
    pool = Pool(True)
    there = [torch.empty(LARGE, device=device) for _ in range(3)]
    copies = [
        transfers.to_device(pool.take(LARGE, torch.float32).fill_(n), tensor)
        for n, tensor in enumerate(there)
    ]
    overwritten = [pool.take(LARGE, torch.float32).fill_(-1) for _ in range(3)]
    for copy in copies:
        copy.wait()
    assert all(filled(tensor, n) for n, tensor in enumerate(there))
    assert len(overwritten) == 3


def test_a_copy_that_is_dropped_still_arrives(transfers: Transfers, device: torch.device) -> None:
    there = torch.zeros(LARGE, device=device)
    transfers.to_device(torch.ones(LARGE), there)
    last = torch.zeros(1, device=device)
    transfers.to_device(torch.ones(1), last).wait_on_host()
    assert filled(there, 1)


def test_tensors_are_let_go_when_the_copy_is_complete(
    transfers: Transfers, device: torch.device
) -> None:
    before = held(device)
    host, there = flat_buffer(1000, torch.float32, CPU), flat_buffer(1000, torch.float32, device)
    copy = transfers.to_device(host, there)
    del host, there
    copy.wait_on_host()
    assert copy.done()
    assert settled(lambda: held(device) == before), "the copy still holds them"


def test_threads_end_with_the_object_that_started_them() -> None:
    def count() -> int:
        return sum(thread.name.startswith("zero copies") for thread in threading.enumerate())

    before = count()
    transfers = transfers_for(CPU)
    assert count() == before
    there = torch.zeros(LARGE)
    copy = transfers.to_device(torch.ones(LARGE), there)
    transfers.to_host(torch.ones(1), torch.ones(1)).wait()
    assert count() == before + 2
    del transfers
    copy.wait()
    assert filled(there, 1)
    assert settled(lambda: count() == before)


def test_a_process_that_ends_waits_for_its_copies() -> None:
    script = f"""
import torch
from zero_runtime.offload.host_copies import transfers_for
transfers = transfers_for(torch.device("cpu"))
for _ in range(5):
    transfers.to_device(torch.ones({LARGE}), torch.ones({LARGE}))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


# ------------------------------------------------------------------------------ errors


def test_an_error_surfaces_each_time_the_copy_is_waited_for() -> None:
    transfers = transfers_for(CPU)
    memory = torch.arange(16.0)
    copy = transfers.to_device(memory[:8], memory[4:12])
    expected = r"cannot copy 32 bytes, \[8\] of torch.float32, from host to cpu: .* single memory"
    for wait in (copy.wait, copy.wait, copy.wait_on_host):
        with pytest.raises(ZeroError, match=expected):
            wait()
    assert copy.done()
    after = torch.zeros(1)
    transfers.to_device(torch.ones(1), after).wait()
    assert after == 1, "the next copy suffers from the failure"


@pytest.mark.parametrize(
    ("host", "there", "message"),
    [
        ((8,), (4, 2), r"\[8\] of torch.float32, the device's \[4, 2\] of torch.float32"),
        (torch.ones(8).bfloat16(), (8,), "bfloat16, the device's .8. of torch.float32"),
        (torch.ones(8)[::2], (4,), "from host to .*: the host's tensor is not contiguous"),
        (torch.ones(8, device="meta"), (8,), "the host's tensor is on meta, not cpu"),
        (without_storage(torch.ones(8)), (8,), "the host's tensor holds no memory"),
    ],
    ids=["shape", "dtype", "stride", "device", "husk"],
)
def test_tensors_that_do_not_fit_are_refused_at_once(
    transfers: Transfers,
    device: torch.device,
    host: torch.Tensor | tuple[int, ...],
    there: tuple[int, ...],
    message: str,
) -> None:
    on_host = host if isinstance(host, torch.Tensor) else torch.ones(host)
    on_device = torch.zeros(there, device=device)
    with pytest.raises(ZeroError, match=message):
        transfers.to_device(on_host, on_device)
    with pytest.raises(ZeroError, match=message.replace("from host to .*:", "to host:")):
        transfers.to_host(on_device, on_host)
    assert not on_device.cpu().any()


def test_the_other_devices_tensors_are_refused(transfers: Transfers, device: torch.device) -> None:
    with pytest.raises(ZeroError, match=f"the device's tensor is on meta, not {device}"):
        transfers.to_device(torch.ones(8), torch.ones(8, device="meta"))


def test_other_kinds_of_device_are_refused() -> None:
    with pytest.raises(
        UnsupportedError, match="host and meta are not supported, only those of cpu"
    ):
        transfers_for(torch.device("meta"))


@pytest.mark.parametrize("made_in_inference_mode", [False, True])
def test_parameters_and_inference_tensors_may_be_written(
    transfers: Transfers, device: torch.device, made_in_inference_mode: bool
) -> None:
    with torch.inference_mode(made_in_inference_mode):
        there = torch.nn.Parameter(torch.zeros(8, device=device))
    transfers.to_device(torch.ones(8), there).wait()
    assert there.tolist() == [1.0] * 8
    assert there.requires_grad is True
    assert there.grad_fn is None


# ------------------------------------------------------------------------------ GPUs only


@pytest.fixture
def gpu(transfers: Transfers, device: torch.device) -> torch.device:
    if device.type != "cuda":
        pytest.skip("about streams")
    torch.cuda.synchronize()
    return device


def keep_busy() -> None:
    """Give the current stream about half a second of work."""
    torch.cuda._sleep(1 << 30)


@needs_gpu
def test_only_the_stream_waits(transfers: Transfers, gpu: torch.device) -> None:
    there, back = torch.ones(LARGE, device=gpu), Pool(True).take(LARGE, torch.float32)
    keep_busy()
    there += 1
    copy = transfers.to_host(there, back)
    copy.wait()
    assert not copy.done(), "the host waited"
    there += 1
    copy.wait_on_host()
    assert copy.done()
    assert filled(back, 2)


@needs_gpu
def test_a_destination_is_not_written_before_it_is_free(
    transfers: Transfers, gpu: torch.device
) -> None:
    """The memory's last user, still to run, would write over the copy."""
    first = torch.empty(LARGE, device=gpu)
    host = Pool(True).take(LARGE, torch.float32).fill_(7)
    torch.cuda.synchronize()
    keep_busy()
    first.fill_(1)
    address = first.data_ptr()
    del first
    second = torch.empty(LARGE, device=gpu)
    assert second.data_ptr() == address
    transfers.to_device(host, second).wait()
    assert filled(second, 7)


@needs_gpu
def test_the_devices_memory_is_free_for_the_stream_that_waited(
    transfers: Transfers, gpu: torch.device
) -> None:
    before = torch.cuda.memory_allocated()
    there, back = torch.ones(LARGE, device=gpu), Pool(True).take(LARGE, torch.float32)
    keep_busy()
    copy = transfers.to_host(there, back)
    del there
    assert torch.cuda.memory_allocated() > before, "the copy reads memory that is free"
    copy.wait()
    assert torch.cuda.memory_allocated() == before
    torch.zeros(LARGE, device=gpu)  # takes the same memory
    copy.wait_on_host()
    assert filled(back, 1)


@needs_gpu
def test_another_stream_may_wait(transfers: Transfers, gpu: torch.device) -> None:
    there, host = torch.zeros(LARGE, device=gpu), Pool(True).take(LARGE, torch.float32).fill_(3)
    keep_busy()
    copy = transfers.to_device(host, there)
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        copy.wait()
        total = there.sum()
    other.synchronize()
    assert total.item() == 3.0 * LARGE


@needs_gpu
def test_both_directions_run_at_once(transfers: Transfers, gpu: torch.device) -> None:
    """A copy to the device is over while the stream that a copy to the host waits for is busy."""
    host, back = (Pool(True).take(1000, torch.float32).fill_(n) for n in (1, 2))
    up, down = torch.zeros(1000, device=gpu), torch.full((1000,), 4.0, device=gpu)
    torch.cuda.synchronize()
    to_device = transfers.to_device(host, up)
    keep_busy()
    to_host = transfers.to_host(down, back)
    to_device.wait_on_host()
    assert not to_host.done()
    to_host.wait_on_host()
    assert filled(back, 4)


@needs_extension
def test_events_and_tickets_are_recycled() -> None:
    device = torch.device("cuda", 0)
    transfers, there = transfers_for(device), torch.zeros(8, device=device)
    host = Pool(True).take(8, torch.float32).fill_(1)

    def move() -> None:
        for _ in range(100):
            copy = transfers.to_device(host, there)
            copy.wait_on_host()

    move()
    before = extension_stats()
    move()
    after = extension_stats()
    assert after.events == before.events
    assert after.in_flight == 0


@needs_extension
def test_pinned_memory_is_given_back_when_asked_to() -> None:
    taken = Pool(True).take(5_000_003, torch.float32)
    assert extension_stats().pinned_live >= taken.nbytes
    del taken
    assert extension_stats().pinned_held > extension_stats().pinned_live
    trim()
    assert extension_stats().pinned_held == extension_stats().pinned_live
