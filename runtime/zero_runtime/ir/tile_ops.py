"""What graphs compute with one tile of a parameter where elementwise work would not do.

Inductor fuses elementwise work, lookups included, over several tiles, and would need all of them in
memory at once. These operators run where they stand, on one tile each.

``lookup`` and ``lookup_backward`` are an embedding over rows ``first`` to ``first + len(tile)`` of its table.
``logits`` and ``logits_backward`` are the cross-entropy of logits ``x @ weight`` of which one tile of the
columns exists at a time: the sum of exponentials is kept with its maximum (Milakov, Gimelshein, Online
normalizer calculation for softmax, 2018).
"""

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("zero3", "FRAGMENT")
_LIBRARY.define(
    "lookup(Tensor? before, Tensor tile, Tensor indices, int first, int total) -> Tensor"
)
_LIBRARY.define(
    "lookup_backward(Tensor gradient, Tensor indices, Tensor? mask, int first, int rows) -> Tensor"
)
_LIBRARY.define(
    "logits(Tensor? before, Tensor x, Tensor weight, Tensor targets, int first, ScalarType dtype) "
    "-> Tensor"
)
_LIBRARY.define(
    "logits_backward(Tensor x, Tensor weight, Tensor targets, Tensor lse, Tensor scale, int first, "
    "ScalarType dtype) -> Tensor"
)

lookup = torch.ops.zero3.lookup.default
lookup_backward = torch.ops.zero3.lookup_backward.default
logits = torch.ops.zero3.logits.default
logits_backward = torch.ops.zero3.logits_backward.default

#: Operators that compute, unlike those of the schedule.
COMPUTING = (lookup, lookup_backward, logits, logits_backward)


def _lookup(
    before: torch.Tensor | None, tile: torch.Tensor, indices: torch.Tensor, first: int, total: int
) -> torch.Tensor:
    """Rows of the table ``[total, n]`` at ``indices``, as far as they are in ``tile``; else ``before``."""
    if before is None:
        legal = ((indices >= 0) & (indices < total)).all()
        torch.ops.aten._assert_async.msg(legal, f"an index is out of range of {total} embeddings")
    local, inside = _inside(indices, first, len(tile))
    found = tile[local]
    if before is None:
        return found.mul_(inside.unsqueeze(-1))
    return torch.where(inside.unsqueeze(-1), found, before)


def _lookup_backward(
    gradient: torch.Tensor,
    indices: torch.Tensor,
    mask: torch.Tensor | None,
    first: int,
    rows: int,
) -> torch.Tensor:
    """The gradient ``[rows, n]`` of a tile; ``mask`` (of the indices, or ending in 1) picks what counts."""
    local, inside = _inside(indices, first, rows)
    if mask is not None:
        inside = inside & mask.expand(*indices.shape, 1).squeeze(-1)
    local = torch.where(inside, local, rows).reshape(-1)  # the row behind the last is dropped
    columns = gradient.shape[-1]
    summed = gradient.new_zeros(rows + 1, columns)
    return summed.index_add_(0, local, gradient.reshape(-1, columns))[:rows]


def _inside(indices: torch.Tensor, first: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices relative to the tile, and which of them are in it; the others are 0."""
    inside = (indices >= first) & (indices < first + rows)
    return torch.where(inside, indices - first, 0), inside


def _logits(
    before: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    first: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """``[3, n]`` of the logits so far: their maximum, the sum of ``exp(logit - maximum)``, the target's.

    ``x`` ``[n, k]``, ``weight`` ``[k, columns]``, ``targets`` ``[n]`` among all columns.
    """
    tile = (x @ weight).to(dtype)
    local, inside = _inside(targets, first, tile.shape[1])
    picked = torch.where(inside, tile.gather(1, local.unsqueeze(1)).squeeze(1), 0)
    most = tile.amax(1)
    if before is not None:
        most = torch.maximum(most, before[0])
        picked = picked + before[2]
    total = tile.sub_(most.unsqueeze(1)).exp_().sum(1)
    if before is not None:
        total = total + before[1] * (before[0] - most).exp()
    return torch.stack([most, total, picked])


def _logits_backward(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    lse: torch.Tensor,
    scale: torch.Tensor,
    first: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """``(softmax - one hot) * scale`` of one tile, ``[n, columns]`` in ``dtype``.

    ``lse`` ``[n, 1]`` is the logarithm of the sum of all exponentials, ``scale`` ``[n, 1]`` the gradient of
    each row's loss.
    """
    tile = (x @ weight).to(lse.dtype).sub_(lse).exp_()
    local, inside = _inside(targets, first, tile.shape[1])
    tile.scatter_add_(1, local.unsqueeze(1), -inside.to(tile.dtype).unsqueeze(1))
    return tile.mul_(scale).to(dtype)


_KERNELS: dict[str, Callable[..., Any]] = {
    "lookup": _lookup,
    "lookup_backward": _lookup_backward,
    "logits": _logits,
    "logits_backward": _logits_backward,
}
for _name, _function in _KERNELS.items():
    _LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")


# ------------------------------------------------------------------------------ while tracing


def _fake_lookup(before: Any, tile: Any, indices: Any, first: int, total: int) -> Any:
    return tile.new_empty((*indices.shape, tile.shape[1]))


def _fake_lookup_backward(gradient: Any, indices: Any, mask: Any, first: int, rows: int) -> Any:
    return gradient.new_empty((rows, gradient.shape[-1]))


def _fake_logits(
    before: Any, x: Any, weight: Any, targets: Any, first: int, dtype: torch.dtype
) -> Any:
    return x.new_empty((3, x.shape[0]), dtype=dtype)


def _fake_logits_backward(
    x: Any, weight: Any, targets: Any, lse: Any, scale: Any, first: int, dtype: torch.dtype
) -> Any:
    return x.new_empty((x.shape[0], weight.shape[1]), dtype=dtype)


_FAKES: dict[str, Callable[..., Any]] = {
    "lookup": _fake_lookup,
    "lookup_backward": _fake_lookup_backward,
    "logits": _fake_logits,
    "logits_backward": _fake_logits_backward,
}
for _name, _function in _FAKES.items():
    torch.library.register_fake(f"zero3::{_name}", _function, lib=_LIBRARY)
