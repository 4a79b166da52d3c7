"""feed: shards set out in time for their gathers, within staging slots and memory."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_solve_starts import random_problem

from offloaded import layers, offloaded
from zero_compile.scheduler.evaluate import Times, evaluate, exposed_seconds, peak_bytes
from zero_compile.scheduler.feed_reads import feed, solve_fed, staging_bytes, unfed
from zero_compile.scheduler.issue import Kind, issue_order
from zero_compile.scheduler.problem import Gather, Problem, Reduce, Schedule
from zero_compile.scheduler.solve_starts import solve
from zero_compile.simulator.build_program import build_program
from zero_compile.simulator.prove_order import prove_order
from zero_compile.simulator.simulate import simulate
from zero_runtime.errors import PlanError

SEEDS = st.integers(0, 1 << 32)
many = settings(max_examples=300, deadline=None)


def fed(seed: int) -> tuple[Problem, Schedule] | None:
    """A random problem that has a schedule."""
    rng = random.Random(seed)
    problem = offloaded(rng, random_problem(rng, most=15, buckets=8, reduces=5))
    assert problem.limit is not None
    problem = replace(problem, limit=problem.limit + staging_bytes(problem))
    try:
        return problem, solve_fed(problem)
    except PlanError:
        return None


# ------------------------------------------------------------------------------ by hand


def test_a_shard_on_the_host_is_fetched_before_its_gather_starts():
    """Gather ``k`` starts before node ``k - 1``, so its fetch must start before node ``k - 2``."""
    problem = layers(5)
    schedule = solve_fed(problem)
    assert schedule.gather_starts == (0, 0, 1, 2, 3)
    assert schedule.fetch_starts == (0, 0, 0, 1, 2)
    times = evaluate(problem, schedule)
    assert times.fetch_begins == {0: 0, 1: 0.25, 2: 0.5, 3: 1.5, 4: 2.5}
    assert times.gather_issues == [0.25, 0.5, 1.5, 2.5, 3.5]
    assert exposed_seconds(problem, schedule) == 0.5


def test_a_shard_on_nvme_is_read_before_that():
    """Fetch ``k`` begins a quarter before gather ``k`` at the latest, and its read half before that."""
    problem = layers(5, read=0.5)
    schedule = solve_fed(problem)
    assert schedule.gather_starts == (0, 0, 1, 2, 3)
    assert schedule.fetch_starts == (0, 0, 0, 1, 2)
    assert schedule.read_starts == (0, 0, 0, 1, 2)
    times = evaluate(problem, schedule)
    assert times.read_begins == {0: 0, 1: 0.5, 2: 1.0, 3: 2.25, 4: 3.25}
    assert times.fetch_begins == {0: 0.5, 1: 1.0, 2: 1.5, 3: 2.75, 4: 3.75}
    assert times.gather_issues == [0.75, 1.25, 2.25, 3.25, 4.25]
    assert exposed_seconds(problem, schedule) == 1.25


def test_a_long_read_sets_out_several_layers_ahead_and_pushes_those_before_it():
    """Read 6 takes two and a half nodes and must end at 5.375, so read 5 must end by 2.875."""
    gathers = tuple(
        replace(g, read=2.5 if k == 6 else 0.125) for k, g in enumerate(layers(8).gathers)
    )
    problem = replace(layers(8), gathers=gathers)
    schedule = solve_fed(problem)
    assert schedule.gather_starts == (0, 0, 1, 2, 3, 4, 5, 6)
    assert schedule.read_starts == (0, 0, 0, 1, 2, 2, 2, 5)
    assert exposed_seconds(problem, schedule) == 0.125 + 0.25 + 0.25


def test_reads_wait_for_staging_slots():
    """Two slots: read ``k`` cannot start before gather ``k - 2`` has."""
    problem = layers(6, read=3.0, slots=2)
    schedule = solve_fed(problem)
    assert schedule.gather_starts == (0, 0, 1, 2, 3, 4)
    assert schedule.read_starts == (0, 0, 0, 0, 1, 2)
    begins = evaluate(problem, schedule).read_begins
    assert begins == {k: 3.0 * k for k in range(6)}


def test_one_slot_holds_one_shard_at_a_time():
    problem = layers(4, read=3.0, slots=1)
    times = evaluate(problem, solve_fed(problem))
    for k in range(3):
        assert times.read_begins[k + 1] >= times.gather_issues[k]


def test_with_memory_for_one_fetched_shard_the_next_follows_the_gather():
    problem = layers(5, limit=2 * 4 + 1)
    schedule = solve_fed(problem)
    assert peak_bytes(problem, schedule) <= 9
    times = evaluate(problem, schedule)
    for k in range(4):
        assert times.fetch_begins[k + 1] >= times.gather_issues[k]


def test_what_lies_on_the_device_is_not_moved():
    problem = layers(4, fetch=0.0)
    assert solve_fed(problem) == solve(problem)
    assert unfed(problem) is problem


def test_a_bucket_that_is_gathered_again_is_read_again_once_it_has_been_gathered():
    one = Gather(0, 0.25, 4, 0, 0, 0, 0.25, 0.5, 1)
    problem = Problem((1.0,) * 4, (0,) * 4, (one, replace(one, first=3, last=3, earliest=1)))
    issued = [i for position in issue_order(problem, solve_fed(problem)) for i in position]
    assert [(i.kind, i.gather) for i in issued] == [
        (kind, gather) for gather in (0, 1) for kind in (Kind.READ, Kind.FETCH, Kind.GATHER)
    ]


def test_room_is_left_for_the_largest_shard_that_comes_and_the_largest_that_goes():
    gathers = (
        Gather(0, 1.0, 8, 0, 0, 0, 1.0, 0.0, 3),
        Gather(1, 1.0, 9, 0, 0, 0, 1.0, 0.0, 9, in_place=True),
        Gather(2, 1.0, 8, 0, 0),
    )
    reductions = (Reduce(0, 1.0, 8, 0, 8, evict=1.0, shard=2), Reduce(1, 1.0, 8, 0))
    problem = Problem((1.0,), (10,), gathers, reductions)
    assert staging_bytes(problem) == 5
    assert unfed(problem).live == (15,)
    assert unfed(problem).fetched == unfed(problem).read == ()


# ------------------------------------------------------------------------------ always


@many
@given(SEEDS)
def test_every_start_is_legal(seed):
    found = fed(seed)
    if found is None:
        return
    problem, schedule = found
    for i in problem.fetched:
        assert 0 <= schedule.fetch_start(i) <= schedule.gather_starts[i]
    for i in problem.read:
        assert schedule.read_start(i) <= schedule.fetch_start(i)
    for starts, who in (
        (schedule.fetch_start, problem.fetched),
        (schedule.read_start, problem.read),
    ):
        assert all(starts(i) <= starts(j) for i, j in pairwise(who))
    assert problem.limit is None or peak_bytes(problem, schedule) <= problem.limit


@many
@given(SEEDS)
def test_slots_suffice_and_a_bucket_is_on_its_way_once_at_a_time(seed):
    found = fed(seed)
    if found is None:
        return
    problem, schedule = found
    taken, under_way = set(), set()
    for k, issues in enumerate(issue_order(problem, schedule)):
        for kind, i in issues:
            bucket = problem.gathers[i].bucket
            if kind is Kind.GATHER:
                taken.discard(i)
                under_way.discard(bucket)
                continue
            # As planned, not put off for want of a slot.
            start = schedule.read_start if kind is Kind.READ else schedule.fetch_start
            assert start(i) == k
            if kind is Kind.READ or not problem.gathers[i].read:
                assert bucket not in under_way
            under_way.add(bucket)
            if kind is Kind.READ:
                taken.add(i)
        assert len(taken) <= problem.slots
    assert not taken
    assert not under_way


@many
@given(SEEDS)
def test_no_gather_begins_later_than_with_all_reads_as_early_as_slots_allow(seed):
    found = fed(seed)
    if found is None:
        return
    problem, schedule = found
    eager = replace(schedule, read_starts=(0,) * len(problem.gathers))
    assert evaluate(problem, schedule).gather_begins == evaluate(problem, eager).gather_begins
    free = replace(problem, limit=None)
    schedule = feed(free, schedule)
    eager = replace(eager, fetch_starts=(0,) * len(problem.gathers))
    assert evaluate(free, schedule).gather_begins == evaluate(free, eager).gather_begins


def latest(times: Times, start: int, gather_start: int) -> bool:
    """Whether a shard could set out at the next position, which is not its gather's."""
    return start + 1 >= gather_start or times.issued[start + 1] < times.behind[start + 1]


@many
@given(SEEDS)
def test_no_shard_could_set_out_later_without_delaying_a_gather(seed):
    found = fed(seed)
    if found is None or not all(found[0].compute):
        return
    problem, schedule = found
    times = evaluate(problem, schedule)
    n = len(problem.gathers)
    fetches = [schedule.fetch_start(i) for i in range(n)]
    reads = [schedule.read_start(i) for i in range(n)]
    for starts, who, name in (
        (fetches, problem.fetched, "fetch_starts"),
        (reads, problem.read, "read_starts"),
    ):
        for i in who:
            later = (*starts[:i], starts[i] + 1, *starts[i + 1 :])
            in_order = all(later[a] <= later[b] for a, b in pairwise(who))
            if name == "read_starts":
                in_order &= later[i] <= fetches[i]
            if not in_order or latest(times, starts[i], schedule.gather_starts[i]):
                continue
            full = replace(schedule, fetch_starts=tuple(fetches), read_starts=tuple(reads))
            moved = evaluate(problem, replace(full, **{name: later}))
            assert moved.gather_issues != times.gather_issues, (name, i)


@pytest.mark.parametrize("slots", [1, 2, 5])
@pytest.mark.parametrize("seconds", [10.0, 1000.0])
def test_a_drive_far_too_slow_is_kept_busy(slots, seconds):
    """The whole step takes as long as the reads, and what comes before and after the last of them."""
    problem = layers(20, read=seconds, slots=slots)
    schedule = solve_fed(problem)
    prove_order(build_program(problem, schedule, "x"))
    timeline = simulate(build_program(problem, schedule, "x"))
    idle = 20 * 0.25 if slots == 1 else 0.25 * 2  # a slot is held until its fetch has ended
    assert timeline.seconds <= 20 * seconds + idle + 0.5 + 2.0 + 1e-9


@pytest.mark.parametrize("seed", range(40))
def test_with_compute_longer_than_transfers_a_step_takes_at_most_1_1_times_as_long(seed):
    """Than with all shards on the device: forward, then backward, every layer's transfers shorter
    than its compute.
    """
    rng = random.Random(seed)
    count = rng.randint(24, 48)
    forward = [rng.uniform(1.0, 2.0) for _ in range(count)]
    order = [*range(count), *reversed(range(count))]
    compute = tuple(forward[b] * (1 if k < count else 2) for k, b in enumerate(order))
    parts = [[rng.uniform(0.1, 0.9) * forward[b] for _ in range(4)] for b in range(count)]
    gathers = []
    for k, b in enumerate(order):
        read, fetch, gather, _ = parts[b]
        tier = rng.choice([read, read, 0.0])
        gathers.append(Gather(b, gather / 2, 8, k, k, b + 1 if k >= count else 0, fetch, tier, 2))
    reductions = tuple(
        Reduce(b, parts[b][2], 16, count + k, 8, evict=parts[b][3], shard=2)
        for k, b in enumerate(reversed(range(count)))
    )
    problem = Problem(
        compute, (0,) * 2 * count, tuple(gathers), reductions, slots=rng.randint(2, 6)
    )
    bare = unfed(replace(problem, reductions=tuple(replace(r, evict=0.0) for r in reductions)))
    without = simulate(build_program(bare, solve(bare), "without")).seconds
    offloaded_step = simulate(build_program(problem, solve_fed(problem), "with")).seconds
    assert without <= offloaded_step < 1.1 * without
