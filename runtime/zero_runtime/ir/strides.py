"""The order in which the elements of a tensor lie in memory."""

import torch


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
