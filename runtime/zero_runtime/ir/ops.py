"""The operators that stand in compiled graphs.

Three are logical and exist only between capture and lowering (``gather``, ``reduce``, ``join``); the
others are the schedule's nodes, and the executor says what they do (:func:`implement`). How their
order is pinned: every starting or releasing operator *mutates* the graph's token and every wait *reads* it, so
any compiler that respects mutation keeps them in sequence; ``release`` also mutates the gathered
buffer, and ``offload_wait`` the saved tensor, so every reader comes before it. ``all_gather_wait``
returns a view of its ticket: a compiler that tracks aliases then never reuses the gathered memory
for something else, and drops it right after the release. What ``reload_wait`` returns is the
graph's own, like any other result; it has no ticket, because Inductor takes results of operators
that read memory of the host for badly aligned, and those that read such results too.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

#: Bytes of the flat uint8 tensor that stands for a saved one on NVMe: its extent's number, little end first.
HANDLE_BYTES = 8

_LIBRARY = torch.library.Library("zero3", "DEF")


def _define(schema: str, fake: Callable[..., Any], *, any_layout: bool = False) -> OpOverload:
    """An operator of this schema, of which ``fake`` makes the results while it is traced.

    ``any_layout``: Inductor need not copy its operands to the strides they were traced with.
    """
    name = schema.split("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.flexible_layout,) if any_layout else ())
    torch.library.register_fake(f"zero3::{name}", fake, lib=_LIBRARY)
    operator: OpOverload = getattr(torch.ops.zero3, name).default
    return operator


def implement(operator: OpOverload, kernel: Callable[..., Any]) -> None:
    """Say what an operator does where it is run, on every device."""
    _LIBRARY.impl(operator.name().split("::")[1], kernel, "CompositeExplicitAutograd")


def ticket() -> torch.Tensor:
    """What a starting operator returns: a tensor ``[1]`` that says nothing."""
    return torch.empty(1, dtype=torch.int64)


# ------------------------------------------------------------------------------ results while tracing


def _ticket(*_: Any) -> torch.Tensor:
    return ticket()


def _nothing(*_: Any) -> None:
    pass


def _buffer(*operands: Any) -> torch.Tensor:
    """Of the last three operands: elements, dtype, device."""
    numel, dtype, device = operands[-3:]
    return torch.empty(numel, dtype=dtype, device=device)


def _alike(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(tensor)


def _on_host(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")


def _gathered(
    parameter: torch.Tensor, index: int, dtype: torch.dtype | None = None, size: Any = None
) -> torch.Tensor:
    if size is not None:
        return parameter.new_empty(size, dtype=dtype or parameter.dtype)
    return torch.empty_like(parameter, dtype=dtype or parameter.dtype)


def _joined(tiles: Any, index: int, size: Any) -> torch.Tensor:
    joined: torch.Tensor = tiles[0].new_empty(size)
    return joined


def _away(saved: torch.Tensor, token: Any, number: int, stride: Any, nvme: bool) -> torch.Tensor:
    if nvme:
        return torch.empty(HANDLE_BYTES, dtype=torch.uint8)
    return torch.empty(saved.numel(), dtype=saved.dtype)


# ------------------------------------------------------------------------------ the operators

gather = _define(
    "gather(Tensor parameter, int index, ScalarType? dtype=None, int[]? size=None) -> Tensor",
    _gathered,
)
reduce = _define("reduce(Tensor gradient, int index) -> Tensor", _alike)
join = _define("join(Tensor[] tiles, int index, int[] size) -> Tensor", _joined)
assemble = _define(
    "assemble(Tensor[] parts, Tensor(a!) token, int[] buckets, int numel, ScalarType dtype, "
    "Device device) -> Tensor",
    _buffer,
)
token = _define("token() -> Tensor", _ticket)
all_gather_start = _define(
    "all_gather_start(Tensor(a!) token, int bucket, ScalarType dtype) -> Tensor", _ticket
)
all_gather_wait = _define(
    "all_gather_wait(Tensor(a) ticket, Tensor token, int bucket, int numel, ScalarType dtype, "
    "Device device) -> Tensor(a)",
    _buffer,
)
release = _define(
    "release(Tensor(a!) gathered, Tensor(b!) token, int bucket, ScalarType dtype) -> ()", _nothing
)
read_start = _define("read_start(Tensor(a!) token, int bucket) -> ()", _nothing)
fetch_start = _define("fetch_start(Tensor(a!) token, int bucket) -> ()", _nothing)
evict = _define("evict(Tensor reduced, Tensor(a!) token, int bucket) -> Tensor", _on_host)
keep = _define("keep(Tensor gathered) -> Tensor", _alike)
offload_start = _define(
    "offload_start(Tensor saved, Tensor(a!) token, int number, int[] stride, bool nvme) -> Tensor",
    _away,
    any_layout=True,
)
offload_wait = _define(
    "offload_wait(Tensor(a!) saved, Tensor(b!) token, int number) -> ()",
    _nothing,
    any_layout=True,
)
recall_start = _define("recall_start(Tensor away, Tensor(a!) token, int number) -> ()", _nothing)
reload_start = _define(
    "reload_start(Tensor away, Tensor(a!) token, int number, Device device) -> ()", _nothing
)
reload_wait = _define(
    "reload_wait(Tensor token, int number, int numel, ScalarType dtype, Device device) -> Tensor",
    _buffer,
)
reduce_scatter_start = _define(
    "reduce_scatter_start(Tensor[] gradients, Tensor(a!) token, int bucket, int[] slots) -> Tensor",
    _ticket,
    any_layout=True,
)
reduce_scatter_wait = _define(
    "reduce_scatter_wait(Tensor(a) ticket, Tensor token, int bucket, int numel, ScalarType dtype, "
    "Device device) -> Tensor(a)",
    _buffer,
)

#: The schedule's operators that use a collective's channel or end a buffer's life, by graph target.
SCHEDULED = (
    all_gather_start,
    all_gather_wait,
    release,
    reduce_scatter_start,
    reduce_scatter_wait,
    read_start,
    fetch_start,
    evict,
    offload_start,
    offload_wait,
    recall_start,
    reload_start,
    reload_wait,
)


def _remember_index(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.index = inputs[1]


def _reduce_gradient(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    return reduce(gradient, ctx.index), None, None, None


torch.library.register_autograd(
    "zero3::gather", _reduce_gradient, setup_context=_remember_index, lib=_LIBRARY
)
