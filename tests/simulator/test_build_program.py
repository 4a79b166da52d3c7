"""lay_down: the program of a solved problem is sound, and its simulation agrees with evaluate."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_feed_reads import fed
from test_solve_starts import chain, random_problem

from zero_compile.scheduler.evaluate import evaluate, exposed_seconds, held_bytes, peak_bytes
from zero_compile.scheduler.feed_reads import solve_fed
from zero_compile.scheduler.problem import Gather, Problem, Reduce, Schedule
from zero_compile.scheduler.solve_starts import solve
from zero_compile.simulator.build_program import build_program
from zero_compile.simulator.prove_order import prove_order
from zero_compile.simulator.simulate import exposed_by_channel, overlap_efficiency, simulate
from zero_runtime.errors import PlanError
from zero_runtime.ir.plan import Channel
from zero_runtime.ir.timeline import Category

SEEDS = st.integers(0, 1 << 32)


def solved(seed: int) -> tuple[Problem, Schedule] | None:
    problem = random_problem(random.Random(seed), most=15, buckets=8, reduces=5)
    try:
        return problem, solve(problem)
    except PlanError:
        return None


def held_at(timeline, name: str) -> int:
    """The most bytes held at the moment an operation starts: what came before has been returned."""
    (event,) = [e for e in timeline.events if e.name == name]
    until = [s for s in timeline.memory if s.time <= event.start]
    return until[-1].total


@settings(max_examples=200, deadline=None)
@given(SEEDS)
def test_the_simulation_equals_the_evaluation(seed):
    found = solved(seed)
    if found is None:
        return
    problem, schedule = found
    timeline = simulate(build_program(problem, schedule, "x"))
    times = evaluate(problem, schedule)
    by_kind = {kind: [] for kind in ("node", "all_gather", "reduce_scatter", "wait", "late_wait")}
    for event in timeline.events:
        by_kind[event.name.split(".")[1]].append(event)
    assert [(e.start, e.end) for e in by_kind["node"]] == list(
        zip(times.starts, times.ends, strict=True)
    )
    assert [e.start for e in by_kind["all_gather"]] == times.gather_begins
    assert [e.end for e in by_kind["all_gather"]] == times.gather_ends
    assert [e.end for e in by_kind["reduce_scatter"]] == times.reduce_ends
    assert timeline.exposed == exposed_seconds(problem, schedule)


@settings(max_examples=200, deadline=None)
@given(SEEDS)
def test_the_memory_simulated_at_each_node_is_the_evaluated(seed):
    found = solved(seed)
    if found is None or not all(found[0].compute):
        return
    problem, schedule = found
    timeline = simulate(build_program(problem, schedule, "x"))
    at_nodes = [held_at(timeline, f"forward.node.{k}") for k in range(len(problem.compute))]
    assert at_nodes == held_bytes(problem, schedule)
    assert timeline.memory[-1].total == 0
    if not problem.reductions:
        assert timeline.peak == peak_bytes(problem, schedule)


@settings(max_examples=200, deadline=None)
@given(SEEDS)
def test_every_solved_problem_is_proved(seed):
    found = solved(seed)
    if found is not None:
        prove_order(build_program(*found, "x"))


# ------------------------------------------------------------------------------ off the device


@settings(max_examples=300, deadline=None)
@given(SEEDS)
def test_the_simulation_of_shards_equals_the_evaluation(seed):
    found = fed(seed)
    if found is None:
        return
    problem, schedule = found
    timeline, times = simulate(build_program(problem, schedule, "x")), evaluate(problem, schedule)
    spans = {e.name.removeprefix("forward."): (e.start, e.end) for e in timeline.events}
    for i in range(len(problem.gathers)):
        assert spans[f"all_gather.{i}"] == (times.gather_begins[i], times.gather_ends[i])
    for kind, begins, ends in (
        ("fetch", times.fetch_begins, times.fetch_ends),
        ("read", times.read_begins, times.read_ends),
        ("evict", times.evict_begins, times.evict_ends),
    ):
        played = {
            int(n.split(".")[1]): span for n, span in spans.items() if n.startswith(f"{kind}.")
        }
        assert played == {i: (begins[i], ends[i]) for i in begins}
    assert {i for i, g in enumerate(problem.gathers) if g.fetch} == set(times.fetch_ends)
    assert {i for i, g in enumerate(problem.gathers) if g.read} == set(times.read_ends)
    assert {j for j, r in enumerate(problem.reductions) if r.evict} == set(times.evict_ends)
    assert [spans[f"node.{k}"][0] for k in range(len(times.starts))] == times.starts
    assert timeline.exposed == exposed_seconds(problem, schedule)


@settings(max_examples=300, deadline=None)
@given(SEEDS)
def test_the_memory_of_shards_is_the_evaluated_and_within_the_limit(seed):
    """What is on its way to the host after its wait is held in addition."""
    found = fed(seed)
    if found is None or not all(found[0].compute):
        return
    problem, schedule = found
    timeline, times = simulate(build_program(problem, schedule, "x")), evaluate(problem, schedule)
    for k, held in enumerate(held_bytes(problem, schedule)):
        leaving = sum(
            problem.reductions[j].shard
            for j, end in times.evict_ends.items()
            if schedule.reduce_waits[j] <= k and end > times.starts[k]
        )
        assert held_at(timeline, f"forward.node.{k}") == held + leaving
    assert timeline.memory[-1].total == 0
    if not problem.reductions:
        assert problem.limit is None or timeline.peak <= problem.limit


@settings(max_examples=300, deadline=None)
@given(SEEDS)
def test_programs_that_bring_shards_are_proved(seed):
    found = fed(seed)
    if found is not None:
        prove_order(build_program(*found, "x"))


def test_bytes_and_exposed_time_of_each_channel():
    """Two layers, each a second; what comes before the first and after the last is exposed."""
    gathers = tuple(Gather(k, 0.25, 8, k, k, 0, 0.125, 0.5, 4) for k in range(2))
    reductions = tuple(Reduce(k, 0.5, 16, k, 8, evict=0.25, shard=4) for k in (0, 1))
    problem = Problem((1.0, 1.0), (0, 0), gathers, reductions)
    program = build_program(problem, solve_fed(problem), "x", world_size=2)
    timeline = simulate(program)
    moved = {
        channel: sum(e.bytes for e in timeline.events if e.channel is channel)
        for channel in Channel
        if channel is not Channel.COMPUTE
    }
    assert moved == {
        Channel.ALL_GATHER: 16,
        Channel.REDUCE_SCATTER: 16,
        Channel.HOST_TO_DEVICE: 8,
        Channel.DEVICE_TO_HOST: 8,
        Channel.NVME_READ: 8,
        Channel.NVME_WRITE: 0,
    }
    # Gather 1 starts before node 0, so node 0 waits for both shards, and gather 0 has arrived by then.
    assert exposed_by_channel(program, timeline) == {
        Channel.HOST_TO_DEVICE: 1.125,
        Channel.REDUCE_SCATTER: 0.5,
        Channel.DEVICE_TO_HOST: 0.5,  # reduction 0 ends while node 1 runs: both leave at the end
    }
    assert timeline.seconds == 2 + 1.125 + 0.5 + 0.5


def test_operations_that_bring_a_shard_in_issue_order():
    gathers = (Gather(7, 0.5, 8, 1, 2, 0, 0.25, 0.5, 4),)
    problem = Problem((1.0,) * 3, (0,) * 3, gathers)
    program = build_program(problem, Schedule((1,), (), (0,), (0,)), "x", nodes=("a", "b", "c"))
    assert [(op.name, op.channel, op.after, op.node) for op in program.ops] == [
        ("forward.read.0", Channel.NVME_READ, (), "b"),
        ("forward.fetch.0", Channel.HOST_TO_DEVICE, ("forward.read.0",), "b"),
        ("forward.node.0", Channel.COMPUTE, (), "a"),
        ("forward.shard.0", Channel.COMPUTE, ("forward.fetch.0",), "b"),
        ("forward.all_gather.0", Channel.ALL_GATHER, (), "b"),
        ("forward.node.1", Channel.COMPUTE, ("forward.all_gather.0",), "b"),
        ("forward.node.2", Channel.COMPUTE, (), "c"),
    ]
    assert [op.bucket for op in program.ops] == [7, 7, None, None, 7, None, None]


@pytest.mark.parametrize(("in_place", "heights"), [(False, (4, 12, 8)), (True, (8, 8))])
def test_a_shard_is_copied_into_its_bucket_unless_it_is_the_bucket(in_place, heights):
    gather = Gather(0, 0.0, 8, 1, 1, 0, 0.25, 0.0, 8 if in_place else 4, in_place)
    problem = Problem((1.0, 1.0), (0, 0), (gather,))
    timeline = simulate(build_program(problem, Schedule((1,), (), (0,)), "x"))
    assert tuple(s.total for s in timeline.memory if s.total) == heights


@pytest.mark.parametrize(("limit", "exposed"), [(None, 0.4), (4 << 20, 24 * 0.4)])
def test_a_chain(limit, exposed):
    problem = chain(24, limit)
    program = build_program(problem, solve(problem), "chain", world_size=8)
    timeline = simulate(program)
    assert timeline.exposed == exposed_seconds(problem, solve(problem)) == pytest.approx(exposed)
    assert exposed_by_channel(program, timeline) == {Channel.ALL_GATHER: pytest.approx(exposed)}
    assert overlap_efficiency(timeline) == pytest.approx(1 - exposed / 9.6)
    assert (timeline.budget, timeline.world_size) == (limit, 8)


def test_operations_in_issue_order():
    problem = Problem(
        (1.0,) * 3, (10, 30, 20), (Gather(0, 0.5, 8, 1, 2),), (Reduce(0, 1.0, 4, 0),), limit=100
    )
    program = build_program(problem, Schedule((0,), (2,)), "x", "backward", nodes=("a", "b", "c"))
    assert [(op.name, op.node) for op in program.ops] == [
        ("backward.all_gather.0", "b"),
        ("backward.node.0", "a"),
        ("backward.reduce_scatter.0", "a"),
        ("backward.node.1", "b"),
        ("backward.wait.2", "c"),
        ("backward.node.2", "c"),
    ]
    assert {op.phase for op in program.ops} == {"backward"}


def test_live_memory_becomes_buffers_of_what_changes():
    problem = Problem((1.0,) * 4, (10, 30, 5, 20), ())
    ops = build_program(problem, Schedule((), ()), "x").ops
    taken = [[(b.bytes, b.category) for b in op.takes] for op in ops]
    activations = Category.ACTIVATIONS
    assert taken == [
        [(5, activations), (5, activations)],
        [(20, activations)],
        [],
        [(15, activations)],
    ]
    assert [len(op.frees) for op in ops] == [0, 2, 0, 2]
