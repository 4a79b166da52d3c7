"""Memory for flat buckets: reused, not fresh, on the CPU; torch's caching allocator elsewhere."""

from typing import Any

import torch

from zero_runtime import compat
from zero_runtime.ir.strides import in_memory_order
from zero_runtime.memory import native


def flat_buffer(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An uninitialised flat tensor ``[numel]``; its memory returns to a pool when it is freed."""
    if device.type != "cpu":
        return torch.empty(numel, dtype=dtype, device=device)
    return native.take(numel * dtype.itemsize).view(dtype)


def as_plain(parameter: torch.Tensor) -> torch.Tensor:
    """An alias of a parameter that holds its memory, free of our class; autograd does not see it."""
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        return parameter.as_subclass(torch.Tensor)


def without_storage(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape, stride, dtype and device that holds no memory."""
    empty = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )
    empty.untyped_storage().resize_(0)
    return empty


def aliases(whole: torch.Tensor, results: Any) -> bool:
    """Whether one of ``results`` (a tree) shares memory with ``whole``."""
    memory = compat.storage_of(whole)
    return any(
        isinstance(x, torch.Tensor) and compat.storage_of(x) == memory
        for x in compat.pytree.tree_leaves(results)
    )


def fingerprint(tensor: torch.Tensor) -> int:
    """A digest of 64 bits of the elements' bits and their order, the same on every machine.

    Of each mebibyte in memory order: its words of eight bytes, the i-th times 2i + 1, added up; these are
    the coefficients of a polynomial, whose value at :data:`_FACTOR` is taken. All modulo 2**64. Needs a few
    megabytes, whatever the tensor's size.
    """
    flat = _bytes(tensor)
    weights = torch.arange(1, min(_PIECE, flat.numel() + 7) // 4, 2, device=flat.device)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, flat.numel(), _PIECE):
        words = _words(flat[start : start + _PIECE])
        total.mul_(_FACTOR).add_(_dot(words, weights[: words.numel()]))
    return int(total) % (1 << 64)


def _dot(words: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The sum of products, which not every device has for integers, without a tensor of them where it has."""
    return torch.dot(words, weights) if words.is_cpu else (words * weights).sum()


#: Bytes of a tensor that are digested at once, and the factor between two such pieces (Knuth's MMIX).
_PIECE = 1 << 20
_FACTOR = 6364136223846793005


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    # A tensor with gaps is flat, but not dense, in its memory order.
    return in_memory_order(real.detach(), real.stride()).contiguous().view(torch.uint8)


def _words(piece: torch.Tensor) -> torch.Tensor:
    """Bytes as int64, with zeros after the last."""
    missing = -piece.numel() % 8
    if missing or piece.storage_offset() % 8 or piece.data_ptr() % 8:
        piece = torch.cat([piece, piece.new_zeros(missing)])
    return piece.view(torch.int64)
