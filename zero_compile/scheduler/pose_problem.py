"""A bucketed graph as a scheduling problem: its kernels in order, its transfers, and memory over time.

A *unit* is one kernel with the elementwise work that is fused around it; transfers start and are
waited for between units. Costs come from a hardware profile and the sizes that the graph was traced
with, so ranks that trace equal sizes pose equal problems.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch.fx import Graph

from zero_compile.analysis.costs import (
    Role,
    collective_seconds,
    graph_seconds,
    role,
    transfer_seconds,
)
from zero_compile.analysis.fx_graph import bucket_number, calls, last_touches, positions, readers
from zero_compile.analysis.hardware import Hardware
from zero_compile.analysis.liveness import Liveness
from zero_compile.analysis.sizes import traced_sizes
from zero_compile.analysis.tiers import (
    gathered_in_place,
    is_evicted,
    is_fetched,
    is_read,
    shard_bytes,
)
from zero_compile.scheduler.problem import Gather, Problem, Reduce
from zero_runtime.ir import ops
from zero_runtime.ir.plan import (
    BucketPlan,
    Channel,
    StatePolicy,
    dtype_name,
    dtype_of,
    reduce_dtype,
    reducing_bytes,
)
from zero_runtime.ir.timeline import Category

#: Transfers are planned as if they took this much longer, so that a late one still hides.
MARGIN = 1.25


@dataclass(frozen=True)
class Posed:
    """One graph's part of a problem. ``anchors[k]`` is the name of unit ``k``'s first node, and for the
    first unit empty: the beginning of the graph.

    ``gathers`` and ``reductions`` are in the order of their problem; ``dtypes`` are the gathers'.
    """

    anchors: tuple[str, ...]
    compute: tuple[float, ...]
    live: tuple[int, ...]
    gathers: tuple[Gather, ...]
    dtypes: tuple[str, ...]
    reductions: tuple[Reduce, ...]

    def problem(self, limit: int | None) -> Problem:
        """The graph alone, within ``limit`` bytes."""
        names = ("the beginning", *self.anchors[1:])
        return Problem(self.compute, self.live, self.gathers, self.reductions, limit, names)


def pose_problem(
    graph: Graph, buckets: Sequence[BucketPlan], policy: StatePolicy, hardware: Hardware
) -> Posed:
    """The problem of one graph whose gathers and reductions are bucketed and stand at their uses."""
    units = _units(graph)
    sizes = traced_sizes(graph)
    liveness = Liveness.of(graph, buckets, policy).evaluate(sizes)
    curve = liveness.live([Category.ACTIVATIONS, Category.GRADIENTS])
    at = dict(zip(liveness.names, units.of, strict=True))
    needed = dict(zip(liveness.names, units.before, strict=True))
    released = {wait: at[last] for wait, last in _last_readers(graph)}
    gathers, dtypes = _gathers(graph, buckets, hardware, needed, released)
    seconds = {node.name: t for node, t in graph_seconds(graph, hardware, sizes).items()}
    return Posed(
        anchors=tuple(units.anchors),
        compute=tuple(_sums(units, [seconds.get(n, 0.0) for n in liveness.names])),
        live=tuple(_peaks(units, curve)),
        gathers=tuple(gathers),
        dtypes=tuple(dtypes),
        reductions=tuple(_reductions(graph, buckets, policy, hardware, at)),
    )


@dataclass(frozen=True)
class _Units:
    """``of[i]`` is the unit that the graph's node ``i`` ends with; ``anchors[k]`` the first node of unit ``k``.

    ``before[i]`` is the first unit that has not begun there: where something needed at ``i`` is waited for.
    """

    of: list[int]
    before: list[int]
    anchors: list[str]


def _units(graph: Graph) -> _Units:
    """Each kernel begins a unit, so that what stands before its anchor precedes the kernel.

    What stands before the first kernel belongs to the first unit, together with it.
    """
    of: list[int] = []
    before: list[int] = []
    anchors: list[str] = []
    for node in graph.nodes:
        before.append(len(anchors))
        if role(node) is Role.KERNEL:
            anchors.append(node.name if anchors else "")
        of.append(max(0, len(anchors) - 1))
    anchors = anchors or [""]
    return _Units(of, [min(k, len(anchors) - 1) for k in before], anchors)


def _sums(units: _Units, values: Sequence[float]) -> list[float]:
    sums = [0.0] * len(units.anchors)
    for unit, value in zip(units.of, values, strict=True):
        sums[unit] += value
    return sums


def _peaks(units: _Units, values: Sequence[int]) -> list[int]:
    peaks = [0] * len(units.anchors)
    for unit, value in zip(units.of, values, strict=True):
        peaks[unit] = max(peaks[unit], value)
    return peaks


def _last_readers(graph: Graph) -> Iterator[tuple[str, str]]:
    """Each gather and the node that its release will follow, or follows: elementwise work that is
    delayed into a kernel reads the bucket until that kernel has run.
    """
    touches, order = last_touches(graph), positions(graph)
    for wait in calls(graph, ops.all_gather_wait):
        last = max([wait, *(touches[r] for r in readers(wait))], key=order.__getitem__)
        yield wait.name, last.name


def _gathers(
    graph: Graph,
    buckets: Sequence[BucketPlan],
    hardware: Hardware,
    needed: dict[str, int],
    released: dict[str, int],
) -> tuple[list[Gather], list[str]]:
    gathers, dtypes = [], []
    free: dict[int, int] = {}
    for wait in calls(graph, ops.all_gather_wait):
        number, dtype = bucket_number(wait), dtype_name(wait.args[4])  # type: ignore[arg-type]
        bucket = buckets[number]
        size = bucket.gathered_bytes(dtype_of(dtype))
        seconds = collective_seconds(Channel.ALL_GATHER, size, bucket.world_size, hardware)
        first = needed[wait.name]
        last = max(first, released.get(wait.name, first))
        earliest = min(free.get(number, 0), first)
        gather = Gather(number, MARGIN * seconds, size, first, last, earliest)
        gathers.append(_fed(gather, bucket, dtype, hardware))
        free[number] = last + 1
        dtypes.append(dtype)
    return gathers, dtypes


def _fed(gather: Gather, bucket: BucketPlan, dtype: str, hardware: Hardware) -> Gather:
    """With what it takes to bring its shard to the device."""
    if not is_fetched(bucket):
        return gather
    shard, on_nvme = shard_bytes(bucket), is_read(bucket)
    return replace(
        gather,
        fetch=MARGIN * transfer_seconds(Channel.HOST_TO_DEVICE, shard, hardware),
        read=MARGIN * transfer_seconds(Channel.NVME_READ, shard, hardware) if on_nvme else 0.0,
        shard=shard,
        in_place=gathered_in_place(bucket, dtype_of(dtype)),
    )


def _reductions(
    graph: Graph,
    buckets: Sequence[BucketPlan],
    policy: StatePolicy,
    hardware: Hardware,
    at: dict[str, int],
) -> list[Reduce]:
    return [
        _reduction(bucket_number(start), buckets, policy, hardware, at[start.name])
        for start in calls(graph, ops.reduce_scatter_start)
    ]


def _reduction(
    number: int, buckets: Sequence[BucketPlan], policy: StatePolicy, hardware: Hardware, ready: int
) -> Reduce:
    bucket = buckets[number]
    moved = bucket.padded * reduce_dtype(bucket, policy).itemsize
    seconds = collective_seconds(Channel.REDUCE_SCATTER, moved, bucket.world_size, hardware)
    held = reducing_bytes(bucket, policy)
    reduction = Reduce(number, MARGIN * seconds, held, ready, moved)
    if not is_evicted(bucket, policy.stage):
        return reduction
    shard = shard_bytes(bucket)
    evict = MARGIN * transfer_seconds(Channel.DEVICE_TO_HOST, shard, hardware)
    return replace(reduction, bytes=held + shard, evict=evict, shard=shard)
