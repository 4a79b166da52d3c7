"""emit_plan: steps and the bytes held while each runs, against a slow recount from the graph."""

import itertools
from collections.abc import Callable, Sequence
from functools import cache

import pytest
import torch
from torch import nn
from torch.fx import GraphModule, Node

from graphs import (
    BACKWARD,
    FORWARD,
    HOST,
    INFERENCE,
    NVME,
    Autocast,
    Recording,
    call_before,
    gpt,
    make_mlp,
    mlp,
    record,
)
from zero_compile.analysis.fx_graph import bucket_number, calls
from zero_compile.emit_plan import emit_plan
from zero_compile.passes.insert_fetches import insert_fetches
from zero_compile.passes.release_after_last_reader import release_after_last_reader
from zero_compile.passes.schedule_ahead import schedule_ahead
from zero_compile.scheduler.decide_schedule import GraphSchedule
from zero_runtime.ir import ops
from zero_runtime.ir.plan import (
    BucketPlan,
    Channel,
    Phase,
    Plan,
    Residence,
    StatePolicy,
    StepKind,
    Tier,
    reducing_bytes,
)

GRAPHS = (FORWARD, BACKWARD, INFERENCE)


class TwoBiases(nn.Module):
    """Two parameters with one gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.a + self.b)


@cache
def two_biases() -> Recording:
    return record(TwoBiases(), torch.randn(2, 4), infer=True)


@cache
def autocast() -> Recording:
    return record(Autocast(make_mlp()), torch.randn(3, 8), infer=True, bucket_bytes=512)


def mlp_on_demand() -> Recording:
    return mlp(schedule="on_demand")


def mlp_alone() -> Recording:
    return mlp(world_size=1)


def offloaded(world_size: int, schedule: str, residence: Residence) -> Callable[[], Recording]:
    return lambda: mlp(world_size, schedule, residence)


@cache
def autocast_on_host() -> Recording:
    model = Autocast(make_mlp())
    return record(model, torch.randn(3, 8), infer=True, bucket_bytes=512, residence=HOST)


RECORDINGS = [mlp, mlp_on_demand, mlp_alone, gpt, autocast, two_biases]
OFFLOADED = [
    offloaded(2, "one_ahead", NVME),
    offloaded(2, "on_demand", HOST),
    offloaded(2, "all_first", Residence(optimizer=Tier.HOST)),
    offloaded(1, "one_ahead", NVME),
    autocast_on_host,
]


def nbytes(node: Node) -> int:
    return node.meta["val"].numel() * node.meta["val"].dtype.itemsize


def chunk_bytes(bucket: BucketPlan) -> int:
    return bucket.chunk * bucket.torch_dtype.itemsize


def fetched(gm: GraphModule, buckets: Sequence[BucketPlan]) -> list[tuple[int, int, int]]:
    """From each fetch up to its gather: included, where the shard is copied into the bucket then."""
    place = list(gm.graph.nodes).index
    starts = [
        (bucket_number(s), place(s), s.args[2]) for s in calls(gm.graph, ops.all_gather_start)
    ]
    found = []
    for fetch in calls(gm.graph, ops.fetch_start):
        number = bucket_number(fetch)
        last, dtype = min((p, d) for b, p, d in starts if b == number and p > place(fetch))
        bucket = buckets[number]
        is_bucket = bucket.world_size == 1 and dtype is bucket.torch_dtype
        found.append((place(fetch), last - is_bucket, chunk_bytes(bucket)))
    return found


def recount(gm: GraphModule, buckets: Sequence[BucketPlan]) -> list[tuple[int, int, int]]:
    """What is held while each step runs: every interval is looked at anew for every step."""
    nodes = list(gm.graph.nodes)
    place = nodes.index
    gathers = [
        (place(start), place(release), buckets[bucket_number(start)].gathered_bytes(start.args[2]))
        for start in calls(gm.graph, ops.all_gather_start)
        for release in calls(gm.graph, ops.release)
        if release.args[0].args[0] is start
    ]
    reductions = [
        (start, next(iter(start.users)), buckets[bucket_number(start)])
        for start in calls(gm.graph, ops.reduce_scatter_start)
    ]
    shards = fetched(gm, buckets)
    evicted = {evict.args[0]: place(evict) for evict in calls(gm.graph, ops.evict)}
    last_start: dict[Node, int] = {}
    for start, _, _ in reductions:
        for gradient in start.args[0]:
            last_start[gradient] = max(last_start.get(gradient, 0), place(start))
    held = []
    for now, node in enumerate(nodes):
        if node.target not in ops.SCHEDULED:
            continue
        gathered = sum(size for first, last, size in [*gathers, *shards] if first <= now <= last)
        reducing = sum(
            reducing_bytes(b, StatePolicy())
            for first, last, b in reductions
            if place(first) <= now <= place(last)
        )
        whole = sum(nbytes(g) for g, last in last_start.items() if place(g) < now <= last)
        reduced = sum(
            chunk_bytes(b)
            for first, last, b in reductions
            if place(first) <= now <= evicted.get(last, len(nodes))
        )
        held.append((gathered, reducing, whole + reduced))
    return held


@pytest.mark.parametrize(
    ("recorded", "graph"), list(itertools.product([*RECORDINGS, *OFFLOADED], GRAPHS))
)
def test_bytes_held_agree_with_a_slow_recount(recorded, graph):
    recording = recorded()
    plan = recording.plans[graph]
    counted = recount(recording.scheduled(graph), plan.buckets)
    steps = [(s.gathered_bytes, s.reducing_bytes, s.gradient_bytes) for s in plan.steps]
    assert steps == counted
    assert plan.peak_bytes == max(map(sum, counted))


@pytest.mark.parametrize(("recorded", "graph"), list(itertools.product([mlp, gpt], GRAPHS)))
def test_steps_are_the_graphs_in_order(recorded, graph):
    recording = recorded()
    nodes = [n for n in recording.scheduled(graph).graph.nodes if n.target in ops.SCHEDULED]
    plan = recording.plans[graph]
    assert [s.position for s in plan.steps] == list(range(len(nodes)))
    for step, node in zip(plan.steps, nodes, strict=True):
        assert step.kind == node.target._schema.name.removeprefix("zero3::")
        assert step.bucket == bucket_number(node)
        assert step.bytes == plan.buckets[step.bucket].padded * getattr(torch, step.dtype).itemsize


@pytest.mark.parametrize("graph", GRAPHS)
def test_steps_that_move_shards_are_the_graphs_and_move_a_chunk_as_it_is_stored(graph):
    recording = mlp(2, "one_ahead", NVME)
    nodes = [n for n in recording.scheduled(graph).graph.nodes if n.target in ops.SCHEDULED]
    plan = recording.plans[graph]
    assert [(s.kind, s.bucket) for s in plan.steps] == [
        (n.target._schema.name.removeprefix("zero3::"), bucket_number(n)) for n in nodes
    ]
    moving = (StepKind.READ_START, StepKind.FETCH_START, StepKind.EVICT)
    steps = [s for s in plan.steps if s.kind in moving]
    assert steps
    for step in steps:
        bucket = plan.buckets[step.bucket]
        assert (step.bytes, step.dtype) == (chunk_bytes(bucket), bucket.dtype)


def test_plans_with_shards_survive_json():
    for plan in mlp(2, "one_ahead", NVME).plans.values():
        assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(("recorded", "graph"), list(itertools.product([mlp, gpt], GRAPHS)))
def test_all_that_was_gathered_is_released(recorded, graph):
    steps = recorded().plans[graph].steps
    started, released = (
        sorted((s.bucket, s.dtype) for s in steps if s.kind is kind)
        for kind in (StepKind.ALL_GATHER_START, StepKind.RELEASE)
    )
    assert started == released


def test_each_kind_of_step_occupies_its_channel():
    channels = {s.kind: s.channel for g in GRAPHS for s in mlp().plans[g].steps}
    assert channels == {
        StepKind.ALL_GATHER_START: Channel.ALL_GATHER,
        StepKind.ALL_GATHER_WAIT: Channel.ALL_GATHER,
        StepKind.RELEASE: Channel.COMPUTE,
        StepKind.REDUCE_SCATTER_START: Channel.REDUCE_SCATTER,
        StepKind.REDUCE_SCATTER_WAIT: Channel.REDUCE_SCATTER,
    }
    offload = {s.kind: s.channel for s in mlp(2, "one_ahead", NVME).plans[BACKWARD].steps}
    assert offload == {
        **channels,
        StepKind.READ_START: Channel.NVME_READ,
        StepKind.FETCH_START: Channel.HOST_TO_DEVICE,
        StepKind.EVICT: Channel.DEVICE_TO_HOST,
    }


@pytest.mark.parametrize("graph", GRAPHS)
def test_before_names_the_next_node_that_computes(graph):
    nodes = list(mlp().scheduled(graph).graph.nodes)
    scheduled = [n for n in nodes if n.target in ops.SCHEDULED]
    for step, node in zip(mlp().plans[graph].steps, scheduled, strict=True):
        after = nodes[nodes.index(node) + 1 :]
        plumbing = {*ops.SCHEDULED, torch.ops.aten.as_strided.default}
        assert step.before == next(n.name for n in after if n.target not in plumbing)


def test_a_reduction_moves_the_storage_dtype_whatever_was_gathered():
    steps = autocast().plans[BACKWARD].steps
    assert {s.dtype for s in steps if s.channel is Channel.REDUCE_SCATTER} == {"float32"}
    assert {s.dtype for s in steps if s.channel is Channel.ALL_GATHER} == {"bfloat16"}


# ------------------------------------------------------------------------------ peaks


def at_depth(depth: int, graph: str) -> Plan:
    gm = schedule_ahead(mlp().before("schedule_ahead", graph), depth=depth)
    return emit_plan(
        release_after_last_reader(gm),
        name="test",
        phase=Phase(graph),
        world_size=2,
        policy=str(depth),
        buckets=mlp().buckets,
    )


@pytest.mark.parametrize("graph", GRAPHS)
def test_on_demand_holds_one_bucket_of_a_chain_at_a_time(graph):
    plan = mlp(schedule="on_demand").plans[graph]
    used = {s.bucket for s in plan.steps if s.kind is StepKind.ALL_GATHER_START}
    largest = max(plan.buckets[b].gathered_bytes(torch.float32) for b in used)
    assert plan.peak_gathered_bytes == largest


@pytest.mark.parametrize("graph", GRAPHS)
def test_gathering_further_ahead_never_holds_less_and_never_more_than_everything(graph):
    peaks = [at_depth(depth, graph).peak_gathered_bytes for depth in (0, 1, 2, 9)]
    assert peaks == sorted(peaks)
    gathered = [s.bytes for s in at_depth(0, graph).steps if s.kind is StepKind.ALL_GATHER_START]
    assert peaks[0] < peaks[-1] == sum(gathered)


def test_one_reduction_is_held_at_a_time():
    plan = mlp().plans[BACKWARD]
    assert plan.peak_reducing_bytes == max(reducing_bytes(b, StatePolicy()) for b in plan.buckets)


def test_one_rank_alone_holds_nothing_that_moves():
    for graph in GRAPHS:
        plan = mlp(world_size=1).plans[graph]
        assert (plan.peak_gathered_bytes, plan.peak_reducing_bytes) == (0, 0)


def test_backward_ends_with_the_shards_of_all_gradients():
    plan = mlp().plans[BACKWARD]
    shards = sum(b.chunk * b.torch_dtype.itemsize for b in plan.buckets)
    assert plan.steps[-1].gradient_bytes == shards


@pytest.mark.parametrize("recorded", [*RECORDINGS, *OFFLOADED])
def test_no_step_holds_less_than_nothing(recorded):
    for plan in recorded().plans.values():
        for step in plan.steps:
            assert min(step.gathered_bytes, step.reducing_bytes, step.gradient_bytes) >= 0


def test_backward_ends_without_the_gradients_that_it_has_evicted():
    plan = mlp(2, "one_ahead", HOST).plans[BACKWARD]
    last = plan.steps[-1]
    assert last.kind is StepKind.EVICT
    assert last.gradient_bytes == chunk_bytes(plan.buckets[last.bucket])


def test_a_gather_whose_shard_nothing_has_fetched_holds_both():
    """What a graph without the nodes does: everything at the gather."""
    gm = mlp(2, "on_demand", HOST).before("insert_fetches", FORWARD)
    buckets = mlp(2, "on_demand", HOST).buckets
    plan = emit_plan(
        release_after_last_reader(gm),
        name="test",
        phase=Phase.FORWARD,
        world_size=2,
        policy="on_demand",
        buckets=buckets,
    )
    for step in plan.steps:
        whole = buckets[step.bucket].gathered_bytes(torch.float32)
        start = step.kind is StepKind.ALL_GATHER_START
        assert step.gathered_bytes == whole + (chunk_bytes(buckets[step.bucket]) if start else 0)


def test_shards_that_arrive_fetched_are_held_from_the_beginning_of_the_graph():
    recording = mlp(2, "on_demand", HOST)
    gm = recording.before("insert_fetches", FORWARD)
    schedule = GraphSchedule(fetched=frozenset({2}), carried_in=frozenset({0}))
    gm = insert_fetches(gm, buckets=recording.buckets, schedule=schedule)
    plan = emit_plan(
        release_after_last_reader(gm),
        name="test",
        phase=Phase.FORWARD,
        world_size=2,
        policy="planned",
        buckets=recording.buckets,
        schedule=schedule,
    )
    whole = [bucket.gathered_bytes(torch.float32) for bucket in recording.buckets]
    shard = [chunk_bytes(bucket) for bucket in recording.buckets]
    assert [(s.kind, s.bucket, s.gathered_bytes) for s in plan.steps] == [
        (StepKind.ALL_GATHER_START, 0, shard[2] + whole[0]),
        (StepKind.ALL_GATHER_WAIT, 0, shard[2] + whole[0]),
        (StepKind.RELEASE, 0, shard[2] + whole[0]),
        (StepKind.FETCH_START, 1, shard[2] + shard[1]),
        (StepKind.ALL_GATHER_START, 1, shard[2] + shard[1] + whole[1]),
        (StepKind.ALL_GATHER_WAIT, 1, shard[2] + whole[1]),
        (StepKind.RELEASE, 1, shard[2] + whole[1]),
        (StepKind.ALL_GATHER_START, 2, shard[2] + whole[2]),
        (StepKind.ALL_GATHER_WAIT, 2, whole[2]),
        (StepKind.RELEASE, 2, whole[2]),
    ]


def test_a_peak_is_at_least_its_parts_and_at_most_their_sum():
    plan = gpt().plans[BACKWARD]
    gradients = max(s.gradient_bytes for s in plan.steps)
    parts = (plan.peak_gathered_bytes, plan.peak_reducing_bytes, gradients)
    assert max(parts) <= plan.peak_bytes <= sum(parts)


def test_a_graph_without_steps_has_an_empty_plan():
    gm = mlp().before("bucket_gathers", FORWARD)
    plan = emit_plan(
        gm, name="n", phase=Phase.FORWARD, world_size=2, policy="p", buckets=mlp().buckets
    )
    assert plan.steps == ()
    assert plan.peak_bytes == 0


def test_a_plan_is_named_after_its_graph():
    plan = mlp().plans[FORWARD]
    assert (plan.name, plan.phase, plan.policy) == ("graph0.forward", "forward", "one_ahead")
    assert plan.world_size == 2


def test_bucket_number_is_read_from_every_scheduled_operator():
    gm = mlp().scheduled(FORWARD)
    node = next(n for n in gm.graph.nodes if n.target is ops.all_gather_start)
    start = call_before(node, ops.all_gather_start, node.args[0], 7, torch.float32)
    assert bucket_number(start) == 7
