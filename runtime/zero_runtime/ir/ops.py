"""The operators that stand in compiled graphs.

Three are logical and exist only between capture and lowering (``gather``, ``reduce``, ``join``); the
others are the schedule's nodes and call the running graph's executor. How their order is pinned: every
starting or releasing operator *mutates* the graph's channel tensor and every wait *reads* it, so
any compiler that respects mutation keeps them in sequence; ``release`` also mutates the gathered
buffer, and ``offload_wait`` the saved tensor, so every reader comes before it. ``all_gather_wait``
returns a view of its ticket: a compiler that tracks aliases then never reuses the gathered memory
for something else, and drops it right after the release. What ``reload_wait`` returns is the
graph's own, like any other result; it has no ticket, because Inductor takes results of operators
that read memory of the host for badly aligned, and those that read such results too.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from zero_runtime import executor
from zero_runtime.offload.saved_tensors import HANDLE_BYTES

_LIBRARY = torch.library.Library("zero3", "DEF")
_LIBRARY.define(
    "gather(Tensor parameter, int index, ScalarType? dtype=None, int[]? size=None) -> Tensor"
)
_LIBRARY.define("reduce(Tensor gradient, int index) -> Tensor")
_LIBRARY.define("join(Tensor[] tiles, int index, int[] size) -> Tensor")
_LIBRARY.define(
    "assemble(Tensor[] parts, Tensor(a!) channel, int[] buckets, int numel, ScalarType dtype, "
    "Device device) -> Tensor"
)
_LIBRARY.define("channel() -> Tensor")
_LIBRARY.define("all_gather_start(Tensor(a!) channel, int bucket, ScalarType dtype) -> Tensor")
_LIBRARY.define(
    "all_gather_wait(Tensor(a) ticket, Tensor channel, int bucket, int numel, ScalarType dtype, "
    "Device device) -> Tensor(a)"
)
_LIBRARY.define(
    "release(Tensor(a!) gathered, Tensor(b!) channel, int bucket, ScalarType dtype) -> ()"
)
_LIBRARY.define("read_start(Tensor(a!) channel, int bucket) -> ()")
_LIBRARY.define("fetch_start(Tensor(a!) channel, int bucket) -> ()")
_LIBRARY.define("evict(Tensor reduced, Tensor(a!) channel, int bucket) -> Tensor")
_LIBRARY.define("keep(Tensor gathered) -> Tensor")
_LIBRARY.define(
    "offload_start(Tensor saved, Tensor(a!) channel, int number, int[] stride, bool nvme) -> Tensor",
    tags=(torch.Tag.flexible_layout,),
)
_LIBRARY.define(
    "offload_wait(Tensor(a!) saved, Tensor(b!) channel, int number) -> ()",
    tags=(torch.Tag.flexible_layout,),
)
_LIBRARY.define("recall_start(Tensor away, Tensor(a!) channel, int number) -> ()")
_LIBRARY.define("reload_start(Tensor away, Tensor(a!) channel, int number, Device device) -> ()")
_LIBRARY.define(
    "reload_wait(Tensor channel, int number, int numel, ScalarType dtype, Device device) -> Tensor"
)
_LIBRARY.define(
    "reduce_scatter_start(Tensor[] gradients, Tensor(a!) channel, int bucket, int[] slots) -> Tensor",
    tags=(torch.Tag.flexible_layout,),
)
_LIBRARY.define(
    "reduce_scatter_wait(Tensor(a) ticket, Tensor channel, int bucket, int numel, ScalarType dtype, "
    "Device device) -> Tensor(a)"
)

gather = torch.ops.zero3.gather.default
reduce = torch.ops.zero3.reduce.default
join = torch.ops.zero3.join.default
assemble = torch.ops.zero3.assemble.default
channel = torch.ops.zero3.channel.default
all_gather_start = torch.ops.zero3.all_gather_start.default
all_gather_wait = torch.ops.zero3.all_gather_wait.default
release = torch.ops.zero3.release.default
read_start = torch.ops.zero3.read_start.default
fetch_start = torch.ops.zero3.fetch_start.default
evict = torch.ops.zero3.evict.default
keep = torch.ops.zero3.keep.default
offload_start = torch.ops.zero3.offload_start.default
offload_wait = torch.ops.zero3.offload_wait.default
recall_start = torch.ops.zero3.recall_start.default
reload_start = torch.ops.zero3.reload_start.default
reload_wait = torch.ops.zero3.reload_wait.default
reduce_scatter_start = torch.ops.zero3.reduce_scatter_start.default
reduce_scatter_wait = torch.ops.zero3.reduce_scatter_wait.default

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


def _ticket() -> torch.Tensor:
    return torch.empty(1, dtype=torch.int64)


# ------------------------------------------------------------------------------ at run time


def _channel() -> torch.Tensor:
    return _ticket()


def _all_gather_start(channel: torch.Tensor, bucket: int, dtype: torch.dtype) -> torch.Tensor:
    executor.current().start_gather(bucket, dtype)
    return _ticket()


def _all_gather_wait(
    ticket: torch.Tensor, channel: torch.Tensor, bucket: int, numel: int, dtype: Any, device: Any
) -> torch.Tensor:
    return executor.current().finish_gather(bucket)


def _release(
    gathered: torch.Tensor, channel: torch.Tensor, bucket: int, dtype: torch.dtype
) -> None:
    executor.current().release(bucket, dtype)


def _read_start(channel: torch.Tensor, bucket: int) -> None:
    executor.current().start_read(bucket)


def _fetch_start(channel: torch.Tensor, bucket: int) -> None:
    executor.current().start_fetch(bucket)


def _evict(reduced: torch.Tensor, channel: torch.Tensor, bucket: int) -> torch.Tensor:
    return executor.current().evict(bucket, reduced)


def _keep(gathered: torch.Tensor) -> torch.Tensor:
    return gathered.clone(memory_format=torch.preserve_format)


def _offload_start(
    saved: torch.Tensor, channel: torch.Tensor, number: int, stride: Sequence[int], nvme: bool
) -> torch.Tensor:
    return executor.current().start_offload(number, saved, tuple(stride))


def _offload_wait(saved: torch.Tensor, channel: torch.Tensor, number: int) -> None:
    executor.current().finish_offload(number, saved)


def _recall_start(away: torch.Tensor, channel: torch.Tensor, number: int) -> None:
    executor.current().start_recall(number, away)


def _reload_start(
    away: torch.Tensor, channel: torch.Tensor, number: int, device: torch.device
) -> None:
    executor.current().start_reload(number, away, device)


def _reload_wait(
    channel: torch.Tensor, number: int, numel: int, dtype: Any, device: Any
) -> torch.Tensor:
    return executor.current().finish_reload(number)


def _reduce_scatter_start(
    gradients: Sequence[torch.Tensor], channel: torch.Tensor, bucket: int, slots: Sequence[int]
) -> torch.Tensor:
    executor.current().start_reduce(bucket, slots, gradients)
    return _ticket()


def _reduce_scatter_wait(
    ticket: torch.Tensor, channel: torch.Tensor, bucket: int, numel: int, dtype: Any, device: Any
) -> torch.Tensor:
    return executor.current().finish_reduce(bucket)


def _assemble(
    parts: Sequence[torch.Tensor],
    channel: torch.Tensor,
    buckets: Sequence[int],
    numel: int,
    dtype: Any,
    device: Any,
) -> torch.Tensor:
    return executor.current().assemble(buckets)


_KERNELS: dict[str, Callable[..., Any]] = {
    "channel": _channel,
    "all_gather_start": _all_gather_start,
    "all_gather_wait": _all_gather_wait,
    "release": _release,
    "read_start": _read_start,
    "fetch_start": _fetch_start,
    "evict": _evict,
    "keep": _keep,
    "offload_start": _offload_start,
    "offload_wait": _offload_wait,
    "recall_start": _recall_start,
    "reload_start": _reload_start,
    "reload_wait": _reload_wait,
    "reduce_scatter_start": _reduce_scatter_start,
    "reduce_scatter_wait": _reduce_scatter_wait,
    "assemble": _assemble,
}
for _name, _function in _KERNELS.items():
    _LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")


# ------------------------------------------------------------------------------ while tracing


def _fake_gather(
    parameter: torch.Tensor,
    index: int,
    dtype: torch.dtype | None = None,
    size: Sequence[int] | None = None,
) -> torch.Tensor:
    if size is not None:
        return parameter.new_empty(size, dtype=dtype or parameter.dtype)
    return torch.empty_like(parameter, dtype=dtype or parameter.dtype)


def _fake_join(tiles: Any, index: int, size: Any) -> torch.Tensor:
    joined: torch.Tensor = tiles[0].new_empty(size)
    return joined


def _fake_assemble(
    parts: Any, channel: Any, buckets: Any, numel: int, dtype: Any, device: Any
) -> torch.Tensor:
    return torch.empty(numel, dtype=dtype, device=device)


def _fake_reduce(gradient: torch.Tensor, index: int) -> torch.Tensor:
    return torch.empty_like(gradient)


def _fake_channel() -> torch.Tensor:
    return _ticket()


def _fake_all_gather_start(channel: torch.Tensor, bucket: int, dtype: torch.dtype) -> torch.Tensor:
    return _ticket()


def _fake_all_gather_wait(
    ticket: torch.Tensor, channel: Any, bucket: int, numel: int, dtype: Any, device: Any
) -> Any:
    return torch.empty(numel, dtype=dtype, device=device)


def _fake_release(
    gathered: torch.Tensor, channel: torch.Tensor, bucket: int, dtype: torch.dtype
) -> None:
    pass


def _fake_start(channel: torch.Tensor, bucket: int) -> None:
    pass


def _fake_evict(reduced: torch.Tensor, channel: torch.Tensor, bucket: int) -> torch.Tensor:
    return torch.empty(reduced.shape, dtype=reduced.dtype, device="cpu")


def _fake_keep(gathered: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(gathered)


def _fake_offload_start(
    saved: torch.Tensor, channel: torch.Tensor, number: int, stride: Sequence[int], nvme: bool
) -> torch.Tensor:
    if nvme:
        return torch.empty(HANDLE_BYTES, dtype=torch.uint8)
    return torch.empty(saved.numel(), dtype=saved.dtype)


def _fake_offload_wait(saved: torch.Tensor, channel: torch.Tensor, number: int) -> None:
    pass


def _fake_recall_start(away: torch.Tensor, channel: torch.Tensor, number: int) -> None:
    pass


def _fake_reload_start(
    away: torch.Tensor, channel: torch.Tensor, number: int, device: torch.device
) -> None:
    pass


def _fake_reload_wait(channel: Any, number: int, numel: int, dtype: Any, device: Any) -> Any:
    return torch.empty(numel, dtype=dtype, device=device)


def _fake_reduce_scatter_start(
    gradients: Any, channel: Any, bucket: int, slots: Any
) -> torch.Tensor:
    return _ticket()


def _fake_reduce_scatter_wait(
    ticket: torch.Tensor, channel: Any, bucket: int, numel: int, dtype: Any, device: Any
) -> Any:
    return torch.empty(numel, dtype=dtype, device=device)


_FAKES: dict[str, Callable[..., Any]] = {
    "gather": _fake_gather,
    "reduce": _fake_reduce,
    "join": _fake_join,
    "assemble": _fake_assemble,
    "channel": _fake_channel,
    "all_gather_start": _fake_all_gather_start,
    "all_gather_wait": _fake_all_gather_wait,
    "release": _fake_release,
    "read_start": _fake_start,
    "fetch_start": _fake_start,
    "evict": _fake_evict,
    "keep": _fake_keep,
    "offload_start": _fake_offload_start,
    "offload_wait": _fake_offload_wait,
    "recall_start": _fake_recall_start,
    "reload_start": _fake_reload_start,
    "reload_wait": _fake_reload_wait,
    "reduce_scatter_start": _fake_reduce_scatter_start,
    "reduce_scatter_wait": _fake_reduce_scatter_wait,
}
for _name, _function in _FAKES.items():
    torch.library.register_fake(f"zero3::{_name}", _function, lib=_LIBRARY)


def _remember_index(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.index = inputs[1]


def _reduce_gradient(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    return reduce(gradient, ctx.index), None, None, None


torch.library.register_autograd(
    "zero3::gather", _reduce_gradient, setup_context=_remember_index, lib=_LIBRARY
)
