"""The digest by which ranks compare values and code finds out whether a tensor was changed."""

import struct

import pytest
import torch

from zero_runtime.memory.buffers import fingerprint

_PIECE = 1 << 20


def _by_definition(data: bytes) -> int:
    data += b"\0" * (-len(data) % 8)
    value = 0
    for start in range(0, len(data), _PIECE):
        piece = data[start : start + _PIECE]
        words = struct.unpack(f"<{len(piece) // 8}q", piece)
        value = value * 6364136223846793005 + sum(w * (2 * i + 1) for i, w in enumerate(words))
    return value % (1 << 64)


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, _PIECE, _PIECE + 5, 2 * _PIECE + 3])
def test_it_is_the_sum_that_its_docstring_says(count: int) -> None:
    values = torch.randint(-128, 128, (count,), dtype=torch.int8)
    expected = _by_definition(values.numpy().tobytes())
    assert fingerprint(values) == expected
    shifted = torch.cat([torch.zeros(3, dtype=torch.int8), values])[3:]  # not at a multiple of 8
    assert fingerprint(shifted) == expected


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.int32, torch.bool],
)
def test_order_and_every_bit_count(dtype: torch.dtype) -> None:
    values = torch.arange(24).view(4, 6).fmod(5).to(dtype)
    found = fingerprint(values)
    assert found == fingerprint(values.clone())
    assert found != fingerprint(values.flip(0))
    changed = values.clone()
    changed[3, 5] = 1 - changed[3, 5] if dtype is not torch.bool else ~changed[3, 5]
    assert found != fingerprint(changed)
    assert fingerprint(values.t()) == found  # it lies in memory as before


def test_gaps_between_elements_count_for_nothing() -> None:
    spread = torch.randn(6, 12)[:, ::2]
    assert fingerprint(spread) == fingerprint(spread.clone())
    line = torch.randn(12)[::2]
    assert fingerprint(line) == fingerprint(line.clone())
