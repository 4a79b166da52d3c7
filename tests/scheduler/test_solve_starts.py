"""solve: when gathers start and reductions are waited for, against an exhaustive search."""

import random
import time
from dataclasses import replace
from itertools import combinations_with_replacement, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zero_compile.scheduler.evaluate import evaluate, exposed_seconds, held_bytes, peak_bytes
from zero_compile.scheduler.problem import Gather, Problem, Reduce, Schedule
from zero_compile.scheduler.solve_starts import solve
from zero_runtime.errors import PlanError

MB = 1 << 20


def chain(nodes: int, limit: int | None = None, seconds: float = 0.4) -> Problem:
    """Each node takes a second and needs a bucket of 4 MB of its own."""
    gathers = tuple(Gather(k, seconds, 4 * MB, k, k) for k in range(nodes))
    return Problem((1.0,) * nodes, (0,) * nodes, gathers, limit=limit)


def random_problem(
    rng: random.Random, most: int = 6, buckets: int = 4, reduces: int = 2
) -> Problem:
    """Times are multiples of 1/8, so that sums are exact whatever their order."""
    n = rng.randint(1, most)
    gathers = []
    for bucket, first in enumerate(sorted(rng.choices(range(n), k=rng.randint(0, buckets)))):
        last = min(n - 1, first + rng.choice([0, 0, 0, 1, 2, n]))
        gathers.append(Gather(bucket, rng.randint(0, 24) / 8, rng.randint(0, 6), first, last))
    readies = sorted(rng.choices(range(n), k=rng.randint(0, reduces)))
    reductions = tuple(
        Reduce(j, rng.randint(0, 24) / 8, rng.randint(0, 6), ready)
        for j, ready in enumerate(readies)
    )
    compute = tuple(rng.randint(0, 16) / 8 for _ in range(n))
    live = tuple(rng.randint(0, 6) for _ in range(n))
    problem = Problem(compute, live, tuple(gathers), reductions)
    return replace(problem, limit=max(0, least_bytes(problem) + rng.randint(-2, 8)))


def least_bytes(problem: Problem) -> int:
    """What any schedule holds: each bucket gathered at its use, each reduction waited for at once."""
    starts = tuple(g.first for g in problem.gathers)
    return peak_bytes(problem, Schedule(starts, tuple(r.ready + 1 for r in problem.reductions)))


def all_starts(problem: Problem):
    choices = range(len(problem.compute))
    for starts in combinations_with_replacement(choices, len(problem.gathers)):
        if all(s <= g.first for s, g in zip(starts, problem.gathers, strict=True)):
            yield starts


def least_exposed(problem: Problem, floor: float) -> float | None:
    """By trying all starts and waits; stops early at ``floor``. None: nothing is legal."""
    n, best = len(problem.compute), None
    waits = list(product(*(range(r.ready + 1, n + 1) for r in problem.reductions)))
    for starts in all_starts(problem):
        for wait in waits:
            schedule = Schedule(starts, wait)
            if problem.limit is not None and peak_bytes(problem, schedule) > problem.limit:
                continue
            exposed = exposed_seconds(problem, schedule)
            best = exposed if best is None else min(best, exposed)
            if best <= floor:
                return best
    return best


def without_limit(problem: Problem) -> float:
    """What no schedule can hide: everything starts at once, nothing is waited for before the end."""
    n = len(problem.compute)
    schedule = Schedule((0,) * len(problem.gathers), (n,) * len(problem.reductions))
    return exposed_seconds(problem, schedule)


# ------------------------------------------------------------------------------ a chain


def test_a_chain_exposes_only_its_first_gather_and_holds_two_buckets():
    problem = chain(24)
    schedule = solve(problem)
    assert exposed_seconds(problem, schedule) == 0.4
    assert peak_bytes(problem, schedule) == 2 * 4 * MB
    assert schedule.gather_starts == (0, *range(23))


def test_with_memory_for_one_bucket_each_gather_is_exposed():
    problem = chain(24, limit=4 * MB)
    schedule = solve(problem)
    assert exposed_seconds(problem, schedule) == pytest.approx(24 * 0.4)
    assert peak_bytes(problem, schedule) == 4 * MB
    assert schedule.gather_starts == tuple(range(24))


def test_gathers_longer_than_compute_start_as_early_as_memory_allows():
    for buckets, exposed in [(1, 24 * 3.0), (2, 3 + 23 * 2.0), (3, 3 + 23 * 2.0)]:
        problem = chain(24, limit=buckets * 4 * MB, seconds=3.0)
        assert exposed_seconds(problem, solve(problem)) == exposed


def test_reductions_are_waited_for_once_they_have_ended():
    problem = Problem((1.0,) * 6, (0,) * 6, (), (Reduce(0, 2.5, 8, 0), Reduce(1, 1.0, 8, 1)))
    assert solve(problem).reduce_waits == (4, 5)


def test_what_has_not_ended_by_the_end_is_waited_for_there():
    problem = Problem((1.0,), (0,), (), (Reduce(0, 2.5, 8, 0),))
    schedule = solve(problem)
    assert schedule.reduce_waits == (1,)
    assert exposed_seconds(problem, schedule) == 2.5


def test_a_reduction_is_waited_for_early_where_its_memory_is_needed():
    problem = Problem((1.0,) * 4, (0, 0, 8, 0), (), (Reduce(0, 2.0, 8, 0),), limit=8)
    schedule = solve(problem)
    assert schedule.reduce_waits == (2,)
    assert exposed_seconds(problem, schedule) == 1.0


@pytest.mark.parametrize(("gather_seconds", "exposed"), [(0.125, 1.125), (3.0, 2.0)])
def test_of_a_gather_and_a_reduction_the_cheaper_waits(gather_seconds, exposed):
    """They fit together at no node. A short gather starts after the reduction, a long one before."""
    gather = Gather(0, gather_seconds, 8, 2, 2)
    problem = Problem((1.0,) * 6, (0,) * 6, (gather,), (Reduce(0, 2.0, 8, 0),), limit=15)
    assert exposed_seconds(problem, solve(problem)) == least_exposed(problem, 0.0) == exposed


# ------------------------------------------------------------------------------ bounds


def test_a_gather_starts_no_sooner_than_it_may():
    """Three seconds of transfer: without the bound it would start at once."""
    free = Problem((1.0,) * 4, (0,) * 4, (Gather(0, 3.0, 8, 3, 3),))
    bound = replace(free, gathers=(replace(free.gathers[0], earliest=2),))
    assert solve(free).gather_starts == (0,)
    assert solve(bound).gather_starts == (2,)
    assert exposed_seconds(bound, solve(bound)) == 2.0


def test_a_gather_that_may_not_start_holds_back_those_behind_it():
    gathers = (Gather(0, 1.0, 8, 2, 2, earliest=2), Gather(1, 1.0, 8, 3, 3))
    problem = Problem((1.0,) * 4, (0,) * 4, gathers)
    assert solve(problem).gather_starts == (2, 2)


def test_a_bound_earlier_than_needed_changes_nothing():
    problem = chain(6)
    gathers = tuple(replace(g, earliest=max(0, g.first - 1)) for g in problem.gathers)
    assert solve(replace(problem, gathers=gathers)) == solve(problem)


@pytest.mark.parametrize("earliest", [-1, 2])
def test_a_bound_out_of_order_is_refused(earliest):
    problem = Problem((1.0,) * 3, (0,) * 3, (Gather(5, 1.0, 8, 1, 1, earliest),))
    with pytest.raises(PlanError, match="bucket 5 is used from node 1 to node 1 of 3 nodes"):
        solve(problem)


@pytest.mark.parametrize(("latest", "wait"), [(None, 4), (6, 4), (3, 3), (2, 2), (1, 1), (0, 1)])
def test_a_reduction_is_waited_for_no_later_than_it_may_be(latest, wait):
    """It ends during node 3; what lies before its start means right after it."""
    problem = Problem((1.0,) * 6, (0,) * 6, (), (Reduce(0, 2.5, 8, 0, latest=latest),))
    assert solve(problem).reduce_waits == (wait,)


def test_the_latest_wait_holds_where_memory_is_short_as_well():
    reductions = (Reduce(0, 2.0, 8, 0, latest=2), Reduce(1, 2.0, 8, 1))
    problem = Problem((1.0,) * 5, (0, 0, 0, 8, 0), (), reductions, limit=16)
    schedule = solve(problem)
    assert schedule.reduce_waits[0] <= 2
    assert peak_bytes(problem, schedule) <= 16


@pytest.mark.parametrize("problem", [Problem((), (), ()), Problem((), (), (), limit=0)])
def test_nothing_to_solve(problem):
    assert solve(problem) == Schedule((), ())


# ------------------------------------------------------------------------------ refusals


def test_a_bucket_that_never_fits_is_named():
    problem = Problem(
        (1.0,) * 3, (5, 5, 5), (Gather(6, 1.0, 2, 0, 2), Gather(7, 1.0, 4, 1, 1)), limit=10
    )
    with pytest.raises(PlanError) as error:
        solve(problem)
    assert str(error.value) == (
        "bucket 7 does not fit at node 1: 11 bytes are needed (4 for the bucket, 2 for other "
        "buckets in use, 5 for activations and gradients), 1 more than the limit of 10; raise it, "
        "or use smaller buckets or a smaller batch"
    )


def test_a_node_too_large_by_itself_is_named():
    with pytest.raises(PlanError) as error:
        solve(Problem((1.0, 1.0), (5, 20), (), limit=10))
    assert str(error.value) == (
        "node 1 needs 20 bytes of activations and gradients, 10 more than the limit of 10; no bucket "
        "is used there: raise the limit, or use a smaller batch"
    )


def test_nodes_with_names_are_called_by_them():
    problem = Problem((1.0,) * 2, (0, 3), (Gather(4, 1.0, 8, 1, 1),), limit=10, names=("", "mm_1"))
    with pytest.raises(PlanError, match=r"bucket 4 does not fit at node 1 \(mm_1\): 11 bytes"):
        solve(problem)


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        (Problem((1.0,), (), ()), "0 nodes have a size in memory, but 1 a duration"),
        (
            Problem((1.0,), (0,), (Gather(3, 1.0, 1, 0, 1),)),
            "bucket 3 is used from node 0 to node 1",
        ),
        (
            Problem((1.0,), (0,), (), (Reduce(3, 1.0, 1, 1),)),
            "bucket 3 are ready after node 1 of 1",
        ),
        (
            Problem((1.0,) * 2, (0,) * 2, (Gather(0, 1.0, 1, 1, 1), Gather(1, 1.0, 1, 0, 0))),
            "order of their first uses",
        ),
        (
            Problem((1.0,) * 2, (0,) * 2, (), (Reduce(0, 1.0, 1, 1), Reduce(1, 1.0, 1, 0))),
            "order in which their gradients are ready",
        ),
    ],
)
def test_a_problem_out_of_order_is_refused(problem, message):
    with pytest.raises(PlanError, match=message):
        solve(problem)


# ------------------------------------------------------------------------------ the optimum


def test_small_problems_are_solved_as_well_as_by_exhaustive_search():
    rng = random.Random(0)
    worst, refused = 0.0, 0
    for number in range(1000):
        problem = random_problem(rng)
        try:
            schedule = solve(problem)
        except PlanError:
            refused += 1
            assert least_exposed(problem, 0.0) is None, (number, problem)
            continue
        if problem.limit is not None:
            assert peak_bytes(problem, schedule) <= problem.limit, (number, problem)
        exposed = exposed_seconds(problem, schedule)
        if exposed <= without_limit(problem):
            continue
        best = least_exposed(problem, without_limit(problem))
        assert exposed <= 1.05 * best, (number, problem, schedule)
        worst = max(worst, exposed / best)
    assert worst <= 1.0 + 1e-12
    assert 50 < refused < 500


# ------------------------------------------------------------------------------ just in time


def starts_of(problem: Problem, schedule: Schedule) -> list[float]:
    return evaluate(problem, schedule).starts


@settings(max_examples=300, deadline=None)
@given(st.randoms(use_true_random=False))
def test_no_gather_could_start_later_without_delaying_a_node(rng):
    problem = random_problem(rng, most=12, buckets=8, reduces=3)
    try:
        schedule = solve(problem)
    except PlanError:
        return
    times, starts = starts_of(problem, schedule), schedule.gather_starts
    for i, gather in enumerate(problem.gathers):
        later = (*starts[:i], starts[i] + 1, *starts[i + 1 :])
        if starts[i] == gather.first or list(later) != sorted(later):
            continue
        moved = starts_of(problem, Schedule(later, schedule.reduce_waits))
        assert any(a > b for a, b in zip(moved, times, strict=True)), i


def bounded(rng: random.Random, problem: Problem) -> Problem:
    """With bounds on some gathers and reductions."""
    gathers = tuple(
        replace(g, earliest=rng.choice([0, rng.randint(0, g.first)])) for g in problem.gathers
    )
    n = len(problem.compute)
    reductions = tuple(
        replace(r, latest=rng.choice([None, rng.randint(0, n)])) for r in problem.reductions
    )
    return replace(problem, gathers=gathers, reductions=reductions)


@settings(max_examples=300, deadline=None)
@given(st.randoms(use_true_random=False))
def test_bounds_are_kept(rng):
    problem = bounded(rng, random_problem(rng, most=12, buckets=8, reduces=5))
    try:
        schedule = solve(problem)
    except PlanError:
        return
    for gather, start in zip(problem.gathers, schedule.gather_starts, strict=True):
        assert gather.earliest <= start <= gather.first
    for reduction, wait in zip(problem.reductions, schedule.reduce_waits, strict=True):
        latest = len(problem.compute) if reduction.latest is None else reduction.latest
        assert reduction.ready < wait <= max(latest, reduction.ready + 1)
    assert problem.limit is None or max(held_bytes(problem, schedule)) <= problem.limit


@settings(max_examples=300, deadline=None)
@given(st.randoms(use_true_random=False))
def test_memory_is_kept_and_starts_are_legal(rng):
    problem = random_problem(rng, most=12, buckets=8, reduces=5)
    try:
        schedule = solve(problem)
    except PlanError:
        return
    starts, waits = schedule.gather_starts, schedule.reduce_waits
    assert list(starts) == sorted(starts)
    assert all(0 <= s <= g.first for s, g in zip(starts, problem.gathers, strict=True))
    n = len(problem.compute)
    assert all(r.ready < w <= n for r, w in zip(problem.reductions, waits, strict=True))
    assert problem.limit is None or max(held_bytes(problem, schedule)) <= problem.limit


# ------------------------------------------------------------------------------ size


def large(nodes: int, contended: bool) -> Problem:
    """A bucket every nine nodes, gathered and then reduced; contended: memory for few at a time."""
    rng = random.Random(nodes)
    compute = tuple(rng.uniform(1e-5, 1e-3) for _ in range(nodes))
    live = tuple(rng.randint(0, 40) * MB for _ in range(nodes))
    gathers = tuple(
        Gather(b, rng.uniform(1e-3, 5e-3), 8 * MB, k, min(nodes - 1, k + 8))
        for b, k in enumerate(range(0, nodes, 9))
    )
    reductions = tuple(Reduce(g.bucket, rng.uniform(1e-3, 5e-3), 16 * MB, g.last) for g in gathers)
    return Problem(compute, live, gathers, reductions, (80 if contended else 400) * MB)


def seconds_to_solve(problem: Problem) -> float:
    """Of this process, so that others do not count; the better of two."""
    seconds = []
    for _ in range(2):
        begin = time.process_time()
        solve(problem)
        seconds.append(time.process_time() - begin)
    return min(seconds)


@pytest.mark.parametrize("contended", [False, True])
def test_large_problems_are_solved_in_near_linear_time(contended):
    small = seconds_to_solve(large(9_000, contended))
    whole = seconds_to_solve(large(36_000, contended))
    assert whole < 10
    assert whole / small < 8
