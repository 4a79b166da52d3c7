"""Read the plan off a scheduled graph."""

from collections.abc import Mapping, Sequence, Set
from typing import Any

from torch.fx import Graph, GraphModule, Node

from zero_compile.analysis.fx_graph import bucket_number, calls, reloads, saved_number
from zero_compile.analysis.tiers import gathered_in_place, is_fetched, shard_bytes
from zero_compile.scheduler.decide_schedule import GraphSchedule
from zero_runtime.ir import ops
from zero_runtime.ir.plan import (
    OF_SAVED,
    BucketPlan,
    Channel,
    Phase,
    Plan,
    Saved,
    StatePolicy,
    Step,
    StepKind,
    Tier,
    dtype_name,
    dtype_of,
    reduced_numel,
    reducing_bytes,
)

_DEFAULT = StatePolicy()
_ALONE = GraphSchedule()

_KINDS = {
    ops.all_gather_start: (StepKind.ALL_GATHER_START, Channel.ALL_GATHER),
    ops.all_gather_wait: (StepKind.ALL_GATHER_WAIT, Channel.ALL_GATHER),
    ops.release: (StepKind.RELEASE, Channel.COMPUTE),
    ops.reduce_scatter_start: (StepKind.REDUCE_SCATTER_START, Channel.REDUCE_SCATTER),
    ops.reduce_scatter_wait: (StepKind.REDUCE_SCATTER_WAIT, Channel.REDUCE_SCATTER),
    ops.read_start: (StepKind.READ_START, Channel.NVME_READ),
    ops.fetch_start: (StepKind.FETCH_START, Channel.HOST_TO_DEVICE),
    ops.evict: (StepKind.EVICT, Channel.DEVICE_TO_HOST),
    ops.offload_start: (StepKind.OFFLOAD_START, Channel.DEVICE_TO_HOST),
    ops.offload_wait: (StepKind.OFFLOAD_WAIT, Channel.DEVICE_TO_HOST),
    ops.recall_start: (StepKind.RECALL_START, Channel.NVME_READ),
    ops.reload_start: (StepKind.RELOAD_START, Channel.HOST_TO_DEVICE),
    ops.reload_wait: (StepKind.RELOAD_WAIT, Channel.HOST_TO_DEVICE),
}

#: Steps that move one rank's shard between tiers.
_OF_SHARDS = (StepKind.READ_START, StepKind.FETCH_START, StepKind.EVICT)


def emit_plan(
    gm: GraphModule,
    *,
    name: str,
    phase: Phase,
    world_size: int,
    policy: str,
    buckets: Sequence[BucketPlan],
    policy_of_state: StatePolicy = _DEFAULT,
    schedule: GraphSchedule = _ALONE,
) -> Plan:
    """The graph's steps in order, with the bytes each moves and what is held while it runs.

    A shard that was fetched counts with what is gathered, from its fetch until its gather has started.
    """
    waits = calls(gm.graph, ops.all_gather_wait)
    ledger = _Ledger(buckets, policy_of_state, schedule.kept)
    ledger.arrived = {waits[number].all_input_nodes[0] for number in schedule.carried_in}
    for number in schedule.fetched:
        ledger.fetch(bucket_number(waits[number]))
    saved = _saved(gm.graph)
    steps: list[Step] = []
    for node in gm.graph.nodes:
        ledger.last_reader.update(dict.fromkeys(_gradients(node), node))
    for node in gm.graph.nodes:
        if node in ledger.last_reader:
            ledger.gradients += _nbytes(node)
        if node.target in _KINDS:
            steps.append(_step(len(steps), node, ledger, saved))
    kept, early = tuple(sorted(schedule.kept)), tuple(e.bucket for e in schedule.early)
    away = tuple(saved[number] for number in sorted(saved))
    return Plan(name, phase, world_size, policy, tuple(buckets), tuple(steps), kept, early, away)


def _saved(graph: Graph) -> dict[int, Saved]:
    """What a forward sends off the device, or a backward brings back, by number."""
    found = {}
    for start in calls(graph, ops.offload_start):
        leaving, nvme = start.args[0], bool(start.args[4])
        value = leaving.meta["val"]  # type: ignore[union-attr]
        found[saved_number(start)] = _saved_as(leaving, value.numel(), value.dtype, nvme)
    for number, (start, wait) in reloads(graph).items():
        away = start.all_input_nodes[0]
        nvme = any(user.target is ops.recall_start for user in away.users)
        numel, dtype = wait.args[2], wait.args[3]
        found[number] = _saved_as(away, numel, dtype, nvme)
    return found


def _saved_as(node: Any, numel: Any, dtype: Any, nvme: bool) -> Saved:
    return Saved(node.name, int(numel), dtype_name(dtype), Tier.NVME if nvme else Tier.HOST)


class _Ledger:
    """Bytes held at one point of the graph."""

    def __init__(self, buckets: Sequence[BucketPlan], policy: StatePolicy, kept: Set[int]) -> None:
        self.buckets = buckets
        self._kept = kept
        self._policy = policy
        self.gathered = self.reducing = self.gradients = 0
        self.last_reader: dict[Node, Node] = {}
        """Each whole gradient and the reduction after which it is free."""
        self.arrived: set[Node] = set()
        """Gathers of buckets that the graph before has gathered, or started to."""
        self._fetched: set[int] = set()

    def fetch(self, number: int) -> None:
        """The bucket's shard gets memory on the device, unless it has."""
        if number not in self._fetched:
            self._fetched.add(number)
            self.gathered += shard_bytes(self.buckets[number])

    def _gather(self, node: Node, bucket: BucketPlan, dtype: str) -> None:
        """In place the bucket takes over its shard's memory."""
        if is_fetched(bucket) and node not in self.arrived:
            self.fetch(bucket_number(node))
            if gathered_in_place(bucket, dtype_of(dtype)):
                self._gathered(bucket_number(node))
        self.gathered += bucket.gathered_bytes(dtype_of(dtype))

    def _gathered(self, number: int) -> None:
        """The fetched shard is no longer needed."""
        if number in self._fetched:
            self._fetched.remove(number)
            self.gathered -= shard_bytes(self.buckets[number])

    def open(self, kind: StepKind, bucket: BucketPlan, dtype: str, node: Node) -> None:
        """What the step needs before it can run."""
        if kind is StepKind.FETCH_START:
            self.fetch(bucket_number(node))
        if kind is StepKind.ALL_GATHER_START:
            self._gather(node, bucket, dtype)
        if kind is StepKind.REDUCE_SCATTER_START:
            self.reducing += reducing_bytes(bucket, self._policy)
            self.gradients += (
                reduced_numel(bucket, self._policy.stage) * bucket.torch_dtype.itemsize
            )

    def close(self, kind: StepKind, bucket: BucketPlan, dtype: str, node: Node) -> None:
        """What is free once the step has run."""
        if kind is StepKind.ALL_GATHER_START and node not in self.arrived:
            self._gathered(bucket_number(node))
        if kind is StepKind.EVICT:
            self.gradients -= shard_bytes(bucket)
        if kind is StepKind.RELEASE and bucket_number(node) not in self._kept:
            self.gathered -= bucket.gathered_bytes(dtype_of(dtype))
        if kind is StepKind.REDUCE_SCATTER_START:
            free = {g for g in _gradients(node) if self.last_reader[g] is node}
            self.gradients -= sum(_nbytes(g) for g in free)
        if kind is StepKind.REDUCE_SCATTER_WAIT:
            self.reducing -= reducing_bytes(bucket, self._policy)


def _step(position: int, node: Node, ledger: _Ledger, saved: Mapping[int, Saved]) -> Step:
    kind, channel = _KINDS[node.target]  # type: ignore[index]
    if kind in OF_SAVED:
        number, held = saved_number(node), (ledger.gathered, ledger.reducing, ledger.gradients)
        moved, dtype = saved[number].bytes, saved[number].dtype
        return Step(position, kind, number, dtype, moved, channel, _before(node), *held)
    number = bucket_number(node)
    bucket = ledger.buckets[number]
    dtype = _dtype(node, kind, bucket)
    moved = bucket.padded * dtype_of(dtype).itemsize
    if kind in _OF_SHARDS:
        moved = shard_bytes(bucket)
    ledger.open(kind, bucket, dtype, node)
    held = (ledger.gathered, ledger.reducing, ledger.gradients)
    ledger.close(kind, bucket, dtype, node)
    return Step(position, kind, number, dtype, moved, channel, _before(node), *held)


def _dtype(node: Node, kind: StepKind, bucket: BucketPlan) -> str:
    if kind in (StepKind.REDUCE_SCATTER_START, StepKind.REDUCE_SCATTER_WAIT, *_OF_SHARDS):
        return bucket.dtype
    place = {StepKind.ALL_GATHER_START: 2, StepKind.ALL_GATHER_WAIT: 4, StepKind.RELEASE: 3}[kind]
    return dtype_name(node.args[place])  # type: ignore[arg-type]


def _gradients(node: Node) -> list[Node]:
    """The whole gradients a reduction consumes."""
    return list(node.args[0]) if node.target is ops.reduce_scatter_start else []  # type: ignore[arg-type]


def _nbytes(node: Node) -> int:
    value = node.meta["val"]
    return int(value.numel()) * int(value.dtype.itemsize)


def _before(node: Node) -> str:
    """The next node that computes: what the step stands in front of."""
    following = node.next
    while following.target in _KINDS or _is_plumbing(following):
        following = following.next
    return following.name


def _is_plumbing(node: Node) -> bool:
    names = ("aten.as_strided.default", "zero3.token.default")
    return node.op == "call_function" and str(node.target) in names
