"""Tests of zero_runtime.memory.native: the C++ extension and plain PyTorch must behave alike."""

import itertools
import logging
import threading

import pytest
import torch

from zero_runtime.memory import native
from zero_runtime.memory.native import Backend, NativeBackend, TorchBackend

MIB = 1 << 20
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
PAIRS = list(itertools.product(DTYPES, DTYPES))


@pytest.fixture(params=["native", "torch"])
def backend(request: pytest.FixtureRequest) -> Backend:
    """Each implementation in turn, with an arena that holds no free memory."""
    if request.param == "torch":
        return TorchBackend()
    try:
        chosen = NativeBackend()
    except ImportError as error:
        pytest.skip(f"no C++ extension: {error}")
    chosen.trim()
    chosen.reset_peak()
    return chosen


def numbers(count: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return values of all magnitudes that float32 has, infinities and zeros, but no NaN."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**31), 2**31, (count,), generator=generator).to(torch.int32)
    wild = bits.view(torch.float32).nan_to_num(nan=-0.0, posinf=torch.inf, neginf=-torch.inf)
    tame = torch.randn(count, generator=generator)
    mixed = torch.where(torch.arange(count) % 2 == 0, wild, tame)
    # The extra bits make a cast from float64 round twice.
    return (mixed.double() * (1 + 2.0**-27)).to(dtype)


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype
    assert torch.equal(actual.view(torch.uint8), expected.view(torch.uint8))


# Arena


@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 65, 4096, 5000, MIB - 1, MIB, 3 * MIB + 7])
def test_take_gives_usable_aligned_memory(backend: Backend, nbytes: int) -> None:
    tensor = backend.take(nbytes)
    assert tensor.dtype == torch.uint8
    assert tensor.shape == (nbytes,)
    assert tensor.device.type == "cpu"
    if nbytes:
        assert tensor.data_ptr() % (4096 if nbytes >= MIB else 64) == 0
    tensor.fill_(7)
    assert bool((tensor == 7).all())


def test_live_tensors_never_share_memory(backend: Backend) -> None:
    tensors = [backend.take(1000).fill_(index) for index in range(50)]
    assert all(bool((tensor == index).all()) for index, tensor in enumerate(tensors))


def test_memory_returns_with_the_last_reference_to_the_storage(backend: Backend) -> None:
    before = backend.stats().live
    tensor = backend.take(2 * MIB)
    view = tensor.view(torch.float32)[10:]
    address = tensor.data_ptr()
    del tensor
    assert backend.stats().live == before + 2 * MIB
    del view
    assert backend.stats().live == before
    assert backend.take(2 * MIB).data_ptr() == address


def test_nothing_bytes_are_counted_as_a_take(backend: Backend) -> None:
    before = backend.stats()
    for _ in range(3):
        backend.take(0)
    after = backend.stats()
    assert (after.live, after.takes - before.takes) == (before.live, 3)
    assert after.os_allocations - before.os_allocations <= 1


def test_steady_state_asks_the_os_for_nothing(backend: Backend) -> None:
    sizes = [100, 5000, 2 * MIB, 2 * MIB, 3 * MIB + 1]
    step = [backend.take(size) for size in sizes]
    before = backend.stats()
    for _ in range(5):
        step.clear()
        step.extend(backend.take(size) for size in sizes)
    after = backend.stats()
    assert after.os_allocations == before.os_allocations
    assert after.held == before.held
    assert after.takes == before.takes + 25


def test_a_block_up_to_a_quarter_larger_fits(backend: Backend) -> None:
    backend.take(5 * MIB)
    before = backend.stats()
    backend.take(4 * MIB)
    assert backend.stats().os_allocations == before.os_allocations
    backend.take(4 * MIB - 4096)
    assert backend.stats().os_allocations == before.os_allocations + 1


def test_the_best_fit_is_taken(backend: Backend) -> None:
    blocks = {size: backend.take(size * MIB) for size in (10, 9, 8)}
    address = blocks[9].data_ptr()
    blocks.clear()
    tensor = backend.take(9 * MIB - 5)
    assert tensor.data_ptr() == address


def test_a_misfit_gives_back_what_is_held_beyond_the_most_in_use_and_its_slack(
    backend: Backend,
) -> None:
    backend.trim()
    base = backend.stats().held
    blocks = [backend.take(size * MIB) for size in (20, 40, 80)]
    blocks.clear()
    tensor = backend.take(30 * MIB)  # no fit, within 140 MiB and a quarter
    assert backend.stats().held == base + (20 + 40 + 80 + 30) * MIB
    larger = backend.take(
        90 * MIB
    )  # 85 MiB too many: the largest goes, then the one that covers the rest
    assert backend.stats().held == base + (40 + 30 + 90) * MIB
    del tensor, larger


def test_small_blocks_of_other_sizes_stay_within_eight_mebibytes(backend: Backend) -> None:
    backend.trim()
    base = backend.stats().held
    blocks = [backend.take(size * MIB) for size in (2, 4)]
    blocks.clear()
    kept = [backend.take(3 * MIB), backend.take(3 * MIB)]
    assert backend.stats().held == base + (2 + 4 + 3 + 3) * MIB
    kept.append(backend.take(9 * MIB))  # 15 MiB in use, and 8 more: nothing goes
    assert backend.stats().held == base + (2 + 4 + 3 + 3 + 9) * MIB
    kept.append(backend.take(9 * MIB))  # 24 MiB in use now
    assert backend.stats().held == base + (2 + 4 + 3 + 3 + 9 + 9) * MIB
    del kept


def test_held_memory_stays_below_the_peak_and_its_slack(backend: Backend) -> None:
    backend.reset_peak()
    base = backend.stats()
    for size in range(1, 40):
        tensors = [backend.take(size * MIB // 2 + 13) for _ in range(2)]
        tensors.clear()
    after = backend.stats()
    assert after.held - base.held <= 1.25 * (after.peak - base.live) + 2 * 4096


def test_peak_counts_from_the_last_reset(backend: Backend) -> None:
    base = backend.stats().live
    backend.take(MIB)
    assert backend.stats().peak == base + MIB
    backend.reset_peak()
    assert backend.stats().peak == base
    kept = backend.take(1000)
    assert backend.stats().peak == base + kept.numel()


def test_trim_keeps_only_live_blocks(backend: Backend) -> None:
    base = backend.stats().held
    kept = backend.take(MIB)
    backend.take(4 * MIB)
    backend.take(100)
    backend.trim()
    assert backend.stats().held == base + kept.numel()


@pytest.mark.parametrize(
    ("nbytes", "message"), [(-1, "negative, got -1"), (1 << 60, f"out of memory.* {1 << 60} bytes")]
)
def test_impossible_sizes_are_named(backend: Backend, nbytes: int, message: str) -> None:
    before = backend.stats()
    with pytest.raises(RuntimeError, match=message):
        backend.take(nbytes)
    assert backend.stats().live == before.live


def test_threads_share_the_arena(backend: Backend) -> None:
    before = backend.stats()
    mixed_up: list[int] = []

    def work(mark: int) -> None:
        for turn in range(200):
            tensor = backend.take(64 + 997 * (turn % 7)).fill_(mark)
            if not bool((tensor == mark).all()):
                mixed_up.append(mark)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    after = backend.stats()
    assert not mixed_up
    assert (after.live, after.takes) == (before.live, before.takes + 800)


# Packing


@pytest.mark.parametrize(("source_dtype", "out_dtype"), PAIRS)
def test_pack_casts_like_torch(
    backend: Backend, source_dtype: torch.dtype, out_dtype: torch.dtype
) -> None:
    source = numbers(70_001, source_dtype)
    out = torch.empty(source.numel() + 3, dtype=out_dtype).fill_(5)
    backend.pack([source], [3], out)
    assert_same_bits(out[3:], source.to(out_dtype))
    assert_same_bits(out[:3], torch.zeros(3, dtype=out_dtype))


@pytest.mark.parametrize(("source_dtype", "out_dtype"), PAIRS)
def test_casts_keep_nan(
    backend: Backend, source_dtype: torch.dtype, out_dtype: torch.dtype
) -> None:
    source = torch.full((100,), torch.nan, dtype=source_dtype)
    out = torch.zeros(100, dtype=out_dtype)
    backend.pack([source, -source[:0]], [0, 100], out)
    assert bool(out.isnan().all())


def test_half_values_all_convert_exactly(backend: Backend) -> None:
    bits = torch.arange(-(1 << 15), 1 << 15).to(torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        source = bits.view(dtype)
        source = source[~source.isnan()]
        out = torch.empty(source.numel())
        backend.pack([source], [0], out)
        assert_same_bits(out, source.float())


def test_rounding_is_to_nearest_even(backend: Backend) -> None:
    source = torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-8 + 2.0**-20, 3.4e38])
    out = torch.empty(4, dtype=torch.bfloat16)
    backend.pack([source], [0], out)
    assert out.tolist() == [1.0, 1 + 4 * 2.0**-8, 1 + 2 * 2.0**-8, torch.inf]


def test_pack_fills_gaps_and_tail_with_zeros(backend: Backend) -> None:
    sources = [torch.ones(2, 3), torch.tensor(2.0), torch.empty(0), torch.full((4,), 3.0).half()]
    out = torch.full((20,), 9.0)
    backend.pack(sources, [1, 7, 9, 9], out)
    assert out.tolist() == [0] + [1] * 6 + [2, 0] + [3] * 4 + [0] * 7


def test_pack_of_nothing_zeroes_out(backend: Backend) -> None:
    out = torch.ones(200_000)
    backend.pack([], [], out)
    assert not out.any()
    backend.pack([], [], out[:0])


def test_pack_of_many_tensors_larger_than_a_task(backend: Backend) -> None:
    sources = [numbers(30_000 + 7 * index, torch.float32, index) for index in range(12)]
    offsets = [index * 31_000 for index in range(12)]
    out, expected = torch.ones(400_000), torch.zeros(400_000)
    for source, offset in zip(sources, offsets, strict=True):
        expected[offset : offset + source.numel()] = source
    backend.pack(sources, offsets, out)
    assert_same_bits(out, expected)
    copies = [torch.empty_like(source) for source in sources]
    backend.unpack(out, offsets, copies)
    for copy, source in zip(copies, sources, strict=True):
        assert_same_bits(copy, source)


def test_tensors_need_not_be_contiguous(backend: Backend) -> None:
    source = torch.arange(6.0).view(2, 3).t()
    flat = torch.empty(12)[::2]
    backend.pack([source], (0,), flat)
    assert flat.tolist() == [0, 3, 1, 4, 2, 5]
    out = torch.zeros(2, 3).t()
    backend.unpack(flat, range(1), (out,))
    assert torch.equal(out, source)


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, torch.bool])
def test_other_dtypes_are_packed_too(backend: Backend, dtype: torch.dtype) -> None:
    source = torch.tensor([0, 1, 1]).to(dtype)
    out = torch.empty(4, dtype=dtype)
    backend.pack([source], [1], out)
    assert torch.equal(out[1:], source)
    back = torch.empty_like(source)
    backend.unpack(out, [1], [back])
    assert torch.equal(back, source)


@pytest.mark.parametrize(("source_dtype", "out_dtype"), PAIRS)
def test_unpack_is_the_inverse_of_pack(
    backend: Backend, source_dtype: torch.dtype, out_dtype: torch.dtype
) -> None:
    flat = numbers(1000, source_dtype)
    outs = [torch.empty(10, 20, dtype=out_dtype), torch.empty((), dtype=out_dtype)]
    backend.unpack(flat, [5, 999], outs)
    assert_same_bits(outs[0], flat[5:205].view(10, 20).to(out_dtype))
    assert_same_bits(outs[1].view(1), flat[999:].to(out_dtype))


@pytest.mark.parametrize(
    ("counts", "offsets", "message"),
    [
        ([2, 3], [0], "2 tensors but 1 offsets"),
        ([4, 2], [0, 3], "1 at offset 3 overlaps what ends at offset 4"),
        ([2, 2], [6, 1], "1 at offset 1 overlaps what ends at offset 8"),
        ([2], [-1], "0 at offset -1 overlaps what ends at offset 0"),
        ([2, 3], [0, 8], "1 at offset 8 with 3 elements does not fit into 10 elements"),
        ([0], [11], "0 at offset 11 with 0 elements does not fit into 10 elements"),
    ],
)
def test_misplaced_tensors_are_named(
    backend: Backend, counts: list[int], offsets: list[int], message: str
) -> None:
    flat, parts = torch.full((10,), 4.0), [torch.zeros(count) for count in counts]
    with pytest.raises(RuntimeError, match="pack: source.*" + message):
        backend.pack(parts, offsets, flat)
    with pytest.raises(RuntimeError, match="unpack: out.*" + message):
        backend.unpack(flat, offsets, parts)
    assert bool((flat == 4).all())


def test_flat_buffers_have_one_dimension(backend: Backend) -> None:
    square, flat = torch.zeros(2, 2), torch.zeros(4)
    with pytest.raises(RuntimeError, match="pack: out has 2 dimensions"):
        backend.pack([flat], [0], square)
    with pytest.raises(RuntimeError, match="unpack: source has 2 dimensions"):
        backend.unpack(square, [0], [flat])
    with pytest.raises(RuntimeError, match="sum_chunks: chunks has 2 dimensions"):
        backend.sum_chunks(square, 1.0, flat)


# Sums


@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize(("chunks_dtype", "out_dtype"), PAIRS)
def test_sums_in_order_and_rounds_once(
    backend: Backend, chunks_dtype: torch.dtype, out_dtype: torch.dtype, world: int
) -> None:
    chunk = 2500
    chunks = torch.randn(world * chunk, generator=torch.Generator().manual_seed(world))
    chunks = chunks.to(chunks_dtype)
    accumulator = torch.float64 if chunks_dtype == torch.float64 else torch.float32
    expected = torch.zeros(chunk, dtype=accumulator)
    for row in chunks.view(world, chunk):
        expected += row
    out = torch.empty(chunk, dtype=out_dtype)
    backend.sum_chunks(chunks, 1 / 3, out)
    assert_same_bits(out, (expected * (1 / 3)).to(out_dtype))


def test_large_sums_are_split_among_threads(backend: Backend) -> None:
    chunks = torch.arange(900_000, dtype=torch.float32)
    out = torch.empty(300_000, dtype=torch.float64)
    backend.sum_chunks(chunks, 0.5, out)
    assert torch.equal(out, chunks.view(3, -1).double().sum(0) * 0.5)


def test_sums_accept_other_dtypes_and_strides(backend: Backend) -> None:
    out = torch.empty(4)[::2]
    backend.sum_chunks(torch.arange(8)[::2], 0.5, out)
    assert out.tolist() == [2.0, 4.0]


@pytest.mark.parametrize(("elements", "chunk"), [(10, 4), (0, 4), (4, 0), (3, 4)])
def test_sums_need_whole_chunks(backend: Backend, elements: int, chunk: int) -> None:
    with pytest.raises(RuntimeError, match=f"{elements} elements are not one or more .* {chunk}$"):
        backend.sum_chunks(torch.zeros(elements), 1.0, torch.zeros(chunk))


def test_sum_of_nothing(backend: Backend) -> None:
    backend.sum_chunks(torch.zeros(0), 1.0, torch.zeros(0))


# The operators themselves refuse what the Python functions route around


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (torch.zeros(4, 2).t(), "pack: source 0 is not contiguous"),
        (torch.zeros(4, dtype=torch.int32), "pack: source 0 has dtype Int, expected float32"),
    ],
)
def test_operators_check_their_arguments(source: torch.Tensor, message: str) -> None:
    pytest.importorskip("zero_runtime._native")
    with pytest.raises(RuntimeError, match=message):
        torch.ops.zero_native.pack([source], [0], torch.zeros(8))


# Module functions


def test_functions_use_one_backend_without_gradients() -> None:
    source = torch.ones(3, requires_grad=True)
    out, back = torch.empty(4), torch.empty(3)
    native.pack([source], [1], out)
    native.unpack(out, [1], [back])
    native.sum_chunks(torch.cat([source, source]), 2.0, back)
    assert not out.requires_grad
    assert not back.requires_grad
    assert back.tolist() == [4.0] * 3
    native.trim()
    native.reset_peak()
    takes = native.stats().takes
    assert native.take(5).shape == (5,)
    assert native.stats().takes == takes + 1


def test_other_devices_take_the_plain_path(backend: Backend) -> None:
    out = torch.empty(4, device="meta")
    backend.pack([torch.ones(2, device="meta")], [1], out)
    backend.unpack(out, [0], [torch.empty(2, device="meta")])
    backend.sum_chunks(out, 1.0, torch.empty(2, device="meta"))


def test_a_missing_extension_is_announced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(name: str) -> None:
        raise ImportError(f"no {name}")

    monkeypatch.delenv("ZERO_RUNTIME_NO_NATIVE", raising=False)
    monkeypatch.setattr("importlib.import_module", fail)
    with caplog.at_level(logging.WARNING, logger="zero_runtime"):
        chosen = native._choose_backend()
    assert isinstance(chosen, TorchBackend)
    assert [record.name for record in caplog.records] == ["zero_runtime"]
    assert "no zero_runtime._native" in caplog.text
    assert "pip install" in caplog.text


def test_the_environment_turns_the_extension_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ZERO_RUNTIME_NO_NATIVE", "1")
    assert isinstance(native._choose_backend(), TorchBackend)
    assert not caplog.records
