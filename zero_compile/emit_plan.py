"""Read the plan off a scheduled graph."""

from collections.abc import Sequence

from torch.fx import GraphModule, Node

from zero_runtime import ops
from zero_runtime.plan import BucketPlan, Channel, Phase, Plan, Step, StepKind, dtype_name, dtype_of

_KINDS = {
    ops.all_gather_start: (StepKind.ALL_GATHER_START, Channel.ALL_GATHER),
    ops.all_gather_wait: (StepKind.ALL_GATHER_WAIT, Channel.ALL_GATHER),
    ops.release: (StepKind.RELEASE, Channel.COMPUTE),
    ops.reduce_scatter_start: (StepKind.REDUCE_SCATTER_START, Channel.REDUCE_SCATTER),
    ops.reduce_scatter_wait: (StepKind.REDUCE_SCATTER_WAIT, Channel.REDUCE_SCATTER),
}


def emit_plan(
    gm: GraphModule,
    *,
    name: str,
    phase: Phase,
    world_size: int,
    policy: str,
    buckets: Sequence[BucketPlan],
) -> Plan:
    """The graph's steps in order, with the bytes each moves and what is held after it."""
    steps: list[Step] = []
    gathered = reducing = 0
    for node in gm.graph.nodes:
        if node.target not in _KINDS:
            continue
        kind, channel = _KINDS[node.target]
        number = bucket_number(node)
        bucket = buckets[number]
        dtype = _dtype(node, kind, bucket)
        gathered += _sign(kind, StepKind.ALL_GATHER_START, StepKind.RELEASE) * (
            bucket.gathered_bytes(dtype_of(dtype))
        )
        reducing += _sign(kind, StepKind.REDUCE_SCATTER_START, StepKind.REDUCE_SCATTER_WAIT) * (
            bucket.reducing_bytes()
        )
        moved = bucket.padded * dtype_of(dtype).itemsize
        steps.append(
            Step(len(steps), kind, number, dtype, moved, channel, _before(node), gathered, reducing)
        )
    return Plan(name, phase, world_size, policy, tuple(buckets), tuple(steps))


def bucket_number(node: Node) -> int:
    """Which bucket a node of the schedule works on."""
    place = next(
        i
        for i, arg in enumerate(node.target._schema.arguments)  # type: ignore[union-attr]
        if arg.name == "bucket"
    )
    return int(node.args[place])  # type: ignore[arg-type]


def _dtype(node: Node, kind: StepKind, bucket: BucketPlan) -> str:
    if kind in (StepKind.REDUCE_SCATTER_START, StepKind.REDUCE_SCATTER_WAIT):
        return bucket.dtype
    place = {StepKind.ALL_GATHER_START: 2, StepKind.ALL_GATHER_WAIT: 4, StepKind.RELEASE: 3}[kind]
    return dtype_name(node.args[place])  # type: ignore[arg-type]


def _sign(kind: StepKind, plus: StepKind, minus: StepKind) -> int:
    return int(kind is plus) - int(kind is minus)


def _before(node: Node) -> str:
    """The next node that computes: what the step stands in front of."""
    following = node.next
    while following.target in _KINDS or _is_plumbing(following):
        following = following.next
    return following.name


def _is_plumbing(node: Node) -> bool:
    return node.op == "call_function" and str(node.target) in (
        "aten.as_strided.default",
        "zero3.channel.default",
    )
