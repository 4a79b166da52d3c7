"""Memory for flat buckets: reused, not fresh, on the CPU; torch's caching allocator elsewhere."""

import torch

from zero_runtime import native


def flat_buffer(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An uninitialised flat tensor ``[numel]``; its memory returns to a pool when it is freed."""
    if device.type != "cpu":
        return torch.empty(numel, dtype=dtype, device=device)
    return native.take(numel * dtype.itemsize).view(dtype)


def lies_as(tensor: torch.Tensor, stride: tuple[int, ...]) -> bool:
    """Whether ``tensor`` lies in memory, without gaps, in the order of a tensor of ``stride``."""
    return tensor.permute(_by_stride(stride)).is_contiguous()


def in_memory_order(tensor: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """``tensor`` flattened in the order in which a tensor of ``stride`` lies in memory.

    A view where ``tensor`` itself has that stride, else a copy.
    """
    return tensor.permute(_by_stride(stride)).reshape(-1)


def _by_stride(stride: tuple[int, ...]) -> list[int]:
    return sorted(range(len(stride)), key=lambda d: -stride[d])


def dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """The stride of a copy without gaps: the tensor's own where it has none, else row-major."""
    meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return torch.empty_like(meta).stride()


def husk(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape, stride, dtype and device that holds no memory."""
    empty = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )
    empty.untyped_storage().resize_(0)
    return empty


def sum_of_bits(tensor: torch.Tensor) -> int:
    """The elements' bit patterns added up: exact, whatever the order and the machine."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(tensor.element_size(), torch.int64)
    flat = tensor.contiguous().reshape(-1)
    return int(flat.view(bits).sum(dtype=torch.int64)) if flat.numel() else 0
