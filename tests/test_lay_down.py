"""lay_down: the program of a solved problem is sound, and its simulation agrees with evaluate."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_solve import chain, random_problem

from zero_compile.planner.evaluate import evaluate, exposed_seconds, held_bytes, peak_bytes
from zero_compile.planner.lay_down import lay_down
from zero_compile.planner.problem import Gather, Problem, Reduce, Schedule
from zero_compile.planner.prove import prove
from zero_compile.planner.simulate import exposed_by_channel, overlap_efficiency, simulate
from zero_compile.planner.solve import solve
from zero_runtime.errors import PlanError
from zero_runtime.plan import Channel
from zero_runtime.timeline import Category

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
    timeline = simulate(lay_down(problem, schedule, "x"))
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
    timeline = simulate(lay_down(problem, schedule, "x"))
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
        prove(lay_down(*found, "x"))


@pytest.mark.parametrize(("limit", "exposed"), [(None, 0.4), (4 << 20, 24 * 0.4)])
def test_a_chain(limit, exposed):
    problem = chain(24, limit)
    program = lay_down(problem, solve(problem), "chain", world_size=8)
    timeline = simulate(program)
    assert timeline.exposed == exposed_seconds(problem, solve(problem)) == pytest.approx(exposed)
    assert exposed_by_channel(program, timeline) == {Channel.ALL_GATHER: pytest.approx(exposed)}
    assert overlap_efficiency(timeline) == pytest.approx(1 - exposed / 9.6)
    assert (timeline.budget, timeline.world_size) == (limit, 8)


def test_operations_in_issue_order():
    problem = Problem(
        (1.0,) * 3, (10, 30, 20), (Gather(0, 0.5, 8, 1, 2),), (Reduce(0, 1.0, 4, 0),), limit=100
    )
    program = lay_down(problem, Schedule((0,), (2,)), "x", "backward", nodes=("a", "b", "c"))
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
    ops = lay_down(problem, Schedule((), ()), "x").ops
    taken = [[(b.bytes, b.category) for b in op.takes] for op in ops]
    activations = Category.ACTIVATIONS
    assert taken == [
        [(5, activations), (5, activations)],
        [(20, activations)],
        [],
        [(15, activations)],
    ]
    assert [len(op.frees) for op in ops] == [0, 2, 0, 2]
