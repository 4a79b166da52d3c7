"""pose and read_back: graphs as problems, and scheduled graphs as the schedules that they have."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch.fx import GraphModule

from graphs import (
    BACKWARD,
    FORWARD,
    HOST,
    INFERENCE,
    NVME,
    Recording,
    TinyGpt,
    mlp,
    record,
    traced,
)
from graphs import laid_out as lay_out
from zero_compile import pipeline
from zero_compile.analysis import hardware
from zero_compile.analysis.costs import (
    Role,
    collective_seconds,
    graph_seconds,
    role,
    transfer_seconds,
)
from zero_compile.analysis.fx_graph import bucket_number, calls, positions
from zero_compile.analysis.hardware import Hardware, Link
from zero_compile.scheduler.decide_schedule import (
    GraphSchedule,
    Limits,
    join,
    plan_graph,
    plan_step,
    split,
)
from zero_compile.scheduler.evaluate import exposed_seconds
from zero_compile.scheduler.feed_reads import solve_fed
from zero_compile.scheduler.pose_problem import MARGIN, Posed, pose_problem
from zero_compile.scheduler.problem import STAGING_SLOTS
from zero_compile.simulator.prove_order import prove_order
from zero_compile.simulator.read_back import Half, Scheduled, read_graph, read_step
from zero_compile.simulator.simulate import simulate
from zero_runtime.ir import ops
from zero_runtime.ir.plan import Channel, Residence, Stage, StatePolicy

CPU = hardware.load("cpu")
#: Transfers so slow that gathers want to start long before their uses.
SLOW = CPU.model_copy(update={"intra_node": Link(bandwidth=1e7, latency=1e-5)})
TOKENS = torch.zeros(2, 4, dtype=torch.int64)


@cache
def gpt(schedule: str, residence: Residence | None = None) -> Recording:
    options = {"bucket_bytes": 2048, "schedule": schedule, "residence": residence}
    return record(TinyGpt(), TOKENS, TOKENS, infer=True, **options)


def bucketed(recording: Recording, graph: str) -> GraphModule:
    """The graph that is to be scheduled."""
    return recording.before("schedule_planned", graph)


def posed(recording: Recording, gm: GraphModule, profile: Hardware = CPU) -> Posed:
    return pose_problem(gm.graph, recording.buckets, StatePolicy(), profile)


def offloaded(residence: Residence):
    """The GPT, as the others are recorded."""
    return lambda _, schedule: gpt(schedule, residence)


def kernels(gm: GraphModule) -> list[str]:
    return [n.name for n in gm.graph.nodes if role(n) is Role.KERNEL]


RECORDINGS = [pytest.param(mlp, id="mlp"), pytest.param(lambda _, s: gpt(s), id="gpt")]
both_models = pytest.mark.parametrize("recorded", RECORDINGS)


# ------------------------------------------------------------------------------ pose


@both_models
@pytest.mark.parametrize("graph", [FORWARD, BACKWARD, INFERENCE])
def test_units_begin_at_kernels(recorded, graph) -> None:
    recording = recorded(2, "planned")
    gm = bucketed(recording, graph)
    problem = posed(recording, gm)
    assert problem.anchors == ("", *kernels(gm)[1:])
    assert len(problem.compute) == len(problem.live) == len(problem.anchors)
    seconds = graph_seconds(gm.graph, CPU, {})
    assert sum(problem.compute) == pytest.approx(sum(seconds.values()))
    assert all(c >= CPU.launch_seconds for c in problem.compute)


@both_models
@pytest.mark.parametrize("graph", [FORWARD, BACKWARD, INFERENCE])
def test_gathers_are_those_of_the_graph_in_its_order(recorded, graph) -> None:
    recording = recorded(2, "planned")
    gm = bucketed(recording, graph)
    problem = posed(recording, gm)
    waits = calls(gm.graph, ops.all_gather_wait)
    assert [g.bucket for g in problem.gathers] == [bucket_number(w) for w in waits]
    for gather, dtype in zip(problem.gathers, problem.dtypes, strict=True):
        bucket = recording.buckets[gather.bucket]
        assert gather.bytes == bucket.padded * 4
        seconds = collective_seconds(Channel.ALL_GATHER, gather.bytes, 2, CPU)
        assert gather.seconds == pytest.approx(MARGIN * seconds)
        assert dtype == "float32"
        assert 0 <= gather.earliest <= gather.first <= gather.last < len(problem.anchors)
    firsts = [g.first for g in problem.gathers]
    assert firsts == sorted(firsts)


def test_reductions_are_those_of_the_graph_in_its_order() -> None:
    recording = mlp(2, "planned")
    gm = bucketed(recording, BACKWARD)
    problem = posed(recording, gm)
    starts = calls(gm.graph, ops.reduce_scatter_start)
    assert [r.bucket for r in problem.reductions] == [bucket_number(s) for s in starts] == [2, 1, 0]
    order, units = positions(gm.graph), kernels(gm)
    for start, reduction in zip(starts, problem.reductions, strict=True):
        bucket = recording.buckets[reduction.bucket]
        assert reduction.moved == bucket.padded * 4
        assert reduction.bytes == 2 * reduction.moved
        seconds = collective_seconds(Channel.REDUCE_SCATTER, reduction.moved, 2, CPU)
        assert reduction.seconds == pytest.approx(MARGIN * seconds)
        before = [n for n in gm.graph.nodes if n.name in units and order[n] < order[start]]
        assert reduction.ready == len(before) - 1
    assert posed(recording, bucketed(recording, FORWARD)).reductions == ()


def test_a_policy_changes_what_reductions_move_and_hold() -> None:
    recording = mlp(2, "planned")
    graph = bucketed(recording, BACKWARD).graph
    half = pose_problem(
        graph, recording.buckets, StatePolicy(reduce_dtype="bfloat16"), CPU
    ).reductions
    in_place = pose_problem(graph, recording.buckets, StatePolicy(Stage.OPTIMIZER), CPU).reductions
    for reduction in half:
        assert reduction.moved == 2 * recording.buckets[reduction.bucket].padded
        assert reduction.bytes == 2 * reduction.moved
    assert [r.bytes for r in in_place] == [0, 0, 0]


def test_what_brings_shards_and_takes_gradients_is_posed() -> None:
    recording = gpt("planned", NVME)
    forward = posed(recording, bucketed(recording, FORWARD))
    for gather, bare in zip(
        forward.gathers,
        posed(gpt("planned"), bucketed(gpt("planned"), FORWARD)).gathers,
        strict=True,
    ):
        shard = recording.buckets[gather.bucket].chunk * 4
        assert gather.shard == shard == gather.bytes // 2
        up = transfer_seconds(Channel.HOST_TO_DEVICE, shard, CPU)
        read = transfer_seconds(Channel.NVME_READ, shard, CPU)
        assert (gather.fetch, gather.read) == pytest.approx((MARGIN * up, MARGIN * read))
        assert replace(gather, fetch=0.0, read=0.0, shard=0) == bare
    for reduction in posed(recording, bucketed(recording, BACKWARD)).reductions:
        shard = recording.buckets[reduction.bucket].chunk * 4
        down = transfer_seconds(Channel.DEVICE_TO_HOST, shard, CPU)
        assert reduction.shard == shard
        assert reduction.evict == pytest.approx(MARGIN * down)
        assert reduction.bytes == 2 * reduction.moved + shard


def test_a_shard_on_the_host_is_not_read() -> None:
    recording = gpt("planned", HOST)
    gathers = posed(recording, bucketed(recording, FORWARD)).gathers
    assert all(g.fetch and not g.read and not g.in_place for g in gathers)


def test_one_rank_alone_gathers_in_the_memory_of_its_shard() -> None:
    recording = mlp(1, "planned", HOST)
    for gather in posed(recording, bucketed(recording, FORWARD)).gathers:
        assert gather.in_place
        assert gather.bytes == gather.shard == recording.buckets[gather.bucket].padded * 4
        assert gather.seconds == 0


def test_evicted_gradients_do_not_pile_up_in_backward() -> None:
    there, here = gpt("planned", HOST), gpt("planned")
    shards = sum(bucket.chunk * 4 for bucket in here.buckets)
    kept, gone = (posed(r, bucketed(r, BACKWARD)).live[-1] for r in (here, there))
    assert kept - gone >= shards - max(bucket.chunk * 4 for bucket in here.buckets)


def test_a_bucket_is_used_from_its_first_kernel_to_its_last() -> None:
    """``a``'s bucket twice, with ``b``'s between its uses."""

    def function(x, a, b):
        whole = ops.gather(a, 0)
        return ((x @ whole) @ ops.gather(b, 1)) @ whole

    gm = traced(function, *(torch.randn(4, 4) for _ in range(3)))
    buckets, places = lay_out(gm, bucket_bytes=1)
    gm = pipeline.run(pipeline.bucket(buckets, places), gm)
    found = pose_problem(gm.graph, buckets, StatePolicy(), CPU)
    assert [(g.bucket, g.first, g.last) for g in found.gathers] == [(0, 0, 2), (1, 1, 1)]
    assert found.anchors == ("", "mm_1", "mm_2")


def test_a_bucket_that_is_gathered_again_may_not_start_before_its_release() -> None:
    def function(x, a, b):
        first = ops.gather(a, 0)
        return ((x @ first) @ ops.gather(b, 1)) @ first

    gm = traced(function, *(torch.randn(8, 8) for _ in range(3)))
    buckets, places = lay_out(gm, bucket_bytes=1)
    gm = pipeline.run(pipeline.bucket(buckets, places, reuse_distance=0), gm)
    found = pose_problem(gm.graph, buckets, StatePolicy(), CPU)
    uses = [(g.bucket, g.first, g.last, g.earliest) for g in found.gathers]
    assert uses == [(0, 0, 0, 0), (1, 1, 1, 0), (0, 2, 2, 1)]


def test_saved_activations_are_live_at_the_end_of_forward_and_the_beginning_of_backward() -> None:
    recording = mlp(2, "planned")
    forward = posed(recording, bucketed(recording, FORWARD))
    backward = posed(recording, bucketed(recording, BACKWARD))
    saved = 3 * (16 + 8) * 4  # two results of relu for three rows
    assert forward.live[-1] >= saved
    assert backward.live[0] >= saved
    assert forward.live == tuple(sorted(forward.live))


def test_reduced_gradients_pile_up_in_backward() -> None:
    recording = mlp(2, "planned")
    backward = posed(recording, bucketed(recording, BACKWARD))
    shards = sum(recording.buckets[b].chunk * 4 for b in (2, 1))
    assert backward.live[-1] >= shards


def test_a_graph_without_kernels_has_one_unit() -> None:
    gm = traced(lambda x: x + 1, torch.randn(4))
    found = pose_problem(gm.graph, [], StatePolicy(), CPU)
    assert (found.anchors, len(found.compute), found.gathers) == (("",), 1, ())
    assert plan_graph(found, Limits()) == GraphSchedule()


# ------------------------------------------------------------------------------ read back


def halves(
    recorded, schedule: GraphSchedule, graph: str, profile: Hardware, slots: int = STAGING_SLOTS
) -> Half:
    """The graph scheduled anew, as the pipeline does it."""
    recording = recorded(2, "planned")
    stages = pipeline.schedule("planned", schedule, buckets=recording.buckets, slots=slots)
    gm = pipeline.run(stages, bucketed(recording, graph))
    return Half(gm.graph, posed(recording, gm, profile), schedule)


LIMITS = {
    "none": Limits(),
    "ample": Limits(1 << 20, keep=True),
    "no keeping": Limits(1 << 20),
    "gathered": Limits(gathered=10_000),
    "ahead": Limits(1 << 20, ahead=0),
    "persistent": Limits(persistent=frozenset({0, 1})),
    "few slots": Limits(slots=2),
}

OFFLOADED = [
    pytest.param(offloaded(NVME), id="gpt on nvme"),
    pytest.param(offloaded(HOST), id="gpt on host"),
    pytest.param(lambda n, s: mlp(n, s, NVME), id="mlp on nvme"),
]


@pytest.mark.parametrize("recorded", [*RECORDINGS, *OFFLOADED])
@pytest.mark.parametrize("profile", [CPU, SLOW], ids=["fast", "slow"])
@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS)
def test_what_was_decided_is_read_back(recorded, profile, limits) -> None:
    recording = recorded(2, "planned")
    forward, backward = (
        posed(recording, bucketed(recording, g), profile) for g in (FORWARD, BACKWARD)
    )
    decided = plan_step(forward, backward, limits)
    one, two = (
        halves(recorded, s, g, profile, limits.slots)
        for s, g in zip(decided, (FORWARD, BACKWARD), strict=True)
    )
    found = read_step(one, two, limits.total, limits.slots)
    _same_as_chosen(found, forward, backward, decided, limits)
    legal(found)


def _same_as_chosen(
    found: Scheduled,
    forward: Posed,
    backward: Posed,
    decided: tuple[GraphSchedule, GraphSchedule],
    limits: Limits,
) -> None:
    """The schedule is one of the joined problem's, with or without what costs nothing to keep."""
    kept = {
        i: j
        for i, g in enumerate(forward.gathers)
        for j in decided[1].carried_in
        if g.bucket in decided[0].kept and backward.gathers[j].bucket == g.bucket
    }
    joined = join(forward, backward, limits, kept)
    solved = solve_fed(joined.problem)
    assert split(forward, backward, joined, solved) == decided
    assert found.schedule == solved
    uses = [(g.bucket, g.bytes, g.first, g.last) for g in found.problem.gathers]
    assert uses == [(g.bucket, g.bytes, g.first, g.last) for g in joined.problem.gathers]
    if limits.ahead is None:
        earliest = [g.earliest for g in joined.problem.gathers]
        assert [g.earliest for g in found.problem.gathers] == earliest
    assert found.shift == len(forward.compute)
    assert found.problem.compute == forward.compute + backward.compute
    # Where transfers stand decides what Inductor fuses across, which may move a small value, and which
    # dead memory it keeps: without reduced gradients that pile up, one that is not small.
    tolerance = 0.02 if not any(r.evict for r in backward.reductions) else 0.5
    assert found.problem.live == pytest.approx(forward.live + backward.live, rel=tolerance)


def legal(found: Scheduled) -> None:
    problem, schedule = found.problem, found.schedule
    for gather, start in zip(problem.gathers, schedule.gather_starts, strict=True):
        assert 0 <= start <= gather.first <= gather.last
    for reduction, wait in zip(problem.reductions, schedule.reduce_waits, strict=True):
        assert reduction.ready < wait <= len(problem.compute)
    program = found.program("graph0", 2)
    prove_order(program)
    timeline = simulate(program)
    assert timeline.exposed == pytest.approx(exposed_seconds(problem, schedule))
    phases = {e.name: e.phase for e in timeline.events}
    nodes = [phases[f"step.node.{k}"] for k in range(len(problem.compute))]
    assert nodes == ["forward"] * found.shift + ["backward"] * (len(nodes) - found.shift)


@pytest.mark.parametrize("recorded", [*RECORDINGS, *OFFLOADED])
@pytest.mark.parametrize("policy", ["one_ahead", "on_demand"])
def test_schedules_without_a_planner_are_read_back(recorded, policy) -> None:
    recording = recorded(2, policy)
    away = recording.buckets[0].residence != Residence()
    one, two = (
        Half(gm.graph, posed(recording, gm), GraphSchedule())
        for gm in (recording.scheduled(g) for g in (FORWARD, BACKWARD))
    )
    found = read_step(one, two)
    legal(found)
    assert found.problem.fetched == (tuple(range(len(found.problem.gathers))) if away else ())
    starts = found.schedule.gather_starts
    firsts = [g.first for g in found.problem.gathers]
    if policy == "on_demand":
        assert list(starts) == firsts
    else:
        split_at = len(one.posed.gathers)
        assert starts[:split_at] == (firsts[0], *firsts[: split_at - 1])
        assert starts[split_at:] == (firsts[split_at], *firsts[split_at:-1])


@pytest.mark.parametrize("recorded", [*RECORDINGS, *OFFLOADED])
def test_a_graph_that_runs_alone_is_read_back(recorded) -> None:
    recording = recorded(2, "planned")
    alone = posed(recording, bucketed(recording, INFERENCE), SLOW)
    decided = plan_graph(alone, Limits())
    found = read_graph(halves(recorded, decided, INFERENCE, SLOW), 1 << 20)
    legal(found)
    anchors = [alone.anchors[start] for start in found.schedule.gather_starts]
    assert anchors == [decided.starts[i] for i in range(len(anchors))]
    for indices, start, departures in (
        (found.problem.fetched, found.schedule.fetch_start, decided.fetches),
        (found.problem.read, found.schedule.read_start, decided.reads),
    ):
        assert [alone.anchors[start(i)] for i in indices] == [d.before for d in departures]
    assert found.problem.limit == 1 << 20


def test_elementwise_work_holds_its_bucket_until_the_kernel_that_it_is_fused_into() -> None:
    """``b``'s only reader is an addition between two matmuls; its release follows the second."""

    def function(x, a, b, c):
        return ((x @ ops.gather(a, 0)) + ops.gather(b, 1)) @ ops.gather(c, 2)

    gm = traced(function, torch.randn(4, 4), torch.randn(4, 4), torch.randn(4), torch.randn(4, 4))
    buckets, places = lay_out(gm, bucket_bytes=1)
    gm = pipeline.run(pipeline.bucket(buckets, places), gm)
    before = pose_problem(gm.graph, buckets, StatePolicy(), CPU)
    gm = pipeline.run(pipeline.schedule("on_demand"), gm)
    assert pose_problem(gm.graph, buckets, StatePolicy(), CPU) == before
    uses = [(g.bucket, g.first, g.last) for g in before.gathers]
    assert uses == [(0, 0, 0), (1, 1, 1), (2, 1, 1)]
