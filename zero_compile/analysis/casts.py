"""Casts in a graph."""

import torch
from torch.fx import Node


def narrow_dtype(gather: Node) -> torch.dtype | None:
    """The one narrower dtype in which all users want the parameter; None if there is no such dtype."""
    wanted = {cast_dtype(user) for user in gather.users}
    dtype = wanted.pop() if len(wanted) == 1 else None
    stored: torch.dtype = gather.meta["val"].dtype
    if dtype is None or not dtype.is_floating_point or not stored.is_floating_point:
        return None
    return dtype if dtype.itemsize < stored.itemsize else None


def cast_dtype(node: Node) -> torch.dtype | None:
    """The target dtype of a node that is a cast and nothing else."""
    if node.target is torch.ops.prims.convert_element_type.default:
        return node.args[1]  # type: ignore[return-value]
    if node.target is torch.ops.aten._to_copy.default and set(node.kwargs) == {"dtype"}:
        return node.kwargs["dtype"]  # type: ignore[return-value]
    return None
