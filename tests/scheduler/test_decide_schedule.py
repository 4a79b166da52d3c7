"""decide: forward and backward planned as one step, on problems made by hand and at random."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from zero_compile.scheduler.decide_schedule import (
    Early,
    GraphSchedule,
    Limits,
    join,
    plan_graph,
    plan_step,
    within,
)
from zero_compile.scheduler.evaluate import exposed_seconds, held_bytes, peak_bytes
from zero_compile.scheduler.pose_problem import Posed
from zero_compile.scheduler.problem import Gather, Problem, Reduce, Schedule
from zero_compile.simulator.build_program import build_program
from zero_compile.simulator.prove_order import prove_order
from zero_compile.simulator.simulate import simulate
from zero_runtime.errors import PlanError

SIZE = 4

# ------------------------------------------------------------------------------ problems


def pose_problem(
    name: str,
    compute: Sequence[float],
    gathers: Sequence[Gather],
    reductions: Sequence[Reduce] = (),
    live: Sequence[int] | None = None,
) -> Posed:
    """A graph whose unit ``k`` begins at node ``name`` + ``k``, the first at its beginning."""
    anchors = ("", *(f"{name}{k}" for k in range(1, len(compute))))
    return Posed(
        anchors,
        tuple(compute),
        tuple(live or (0,) * len(compute)),
        tuple(gathers),
        ("float32",) * len(gathers),
        tuple(reductions),
    )


def chain(
    layers: int, seconds: float = 0.4, reducing: float = 0.4, live: int = 0
) -> tuple[Posed, Posed]:
    """A bucket a layer, a second a layer in forward and two in backward, which reduces it too."""
    order = list(reversed(range(layers)))
    forward = [Gather(k, seconds, SIZE, k, k) for k in range(layers)]
    backward = [Gather(b, seconds, SIZE, k, k) for k, b in enumerate(order)]
    reductions = [Reduce(b, reducing, 2 * SIZE, k, SIZE) for k, b in enumerate(order)]
    up, down = ([live * (k + 1) for k in ks] for ks in (range(layers), order))
    return (
        pose_problem("f", (1.0,) * layers, forward, (), up),
        pose_problem("b", (2.0,) * layers, backward, reductions, down),
    )


def bare(posed: Posed) -> Posed:
    """Without activations: what is held is buckets alone."""
    return replace(posed, live=(0,) * len(posed.live))


def position(posed: Posed, name: str | None) -> int:
    return len(posed.anchors) if name is None else posed.anchors.index(name)


class Step:
    """What two schedules do, put together from their names: one problem and one schedule."""

    def __init__(
        self, forward: Posed, backward: Posed, one: GraphSchedule, two: GraphSchedule
    ) -> None:
        shift = len(forward.compute)
        takers = {backward.gathers[j].bucket: j for j in two.carried_in}
        early = {e.bucket: position(forward, e.before) for e in one.early}
        gathers, starts = [], []
        for i, gather in enumerate(forward.gathers):
            mate = takers.get(gather.bucket) if gather.bucket in one.kept else None
            last = gather.last if mate is None else backward.gathers[mate].last + shift
            gathers.append(replace(gather, last=last))
            starts.append(position(forward, one.starts[i]))
        for j, gather in enumerate(backward.gathers):
            if j in two.carried_in and gather.bucket in one.kept:
                continue
            moved = replace(gather, first=gather.first + shift, last=gather.last + shift)
            gathers.append(moved)
            starts.append(
                early[gather.bucket]
                if j in two.carried_in
                else shift + position(backward, two.starts[j])
            )
        self.problem = Problem(
            (*forward.compute, *backward.compute),
            (*forward.live, *backward.live),
            tuple(gathers),
            tuple(replace(r, ready=r.ready + shift) for r in backward.reductions),
        )
        waits = [two.waits[k] for k in range(len(backward.reductions))]
        self.schedule = Schedule(
            tuple(starts),
            tuple(shift + position(backward, w) for w in waits),
            *(
                self._departures(
                    [(d.bucket, position(forward, d.before)) for d in ours]
                    + [(d.bucket, shift + position(backward, d.before)) for d in theirs],
                    indices,
                    starts,
                )
                for ours, theirs, indices in (
                    (one.fetches, two.fetches, self.problem.fetched),
                    (one.reads, two.reads, self.problem.read),
                )
            ),
        )

    def _departures(
        self, found: list[tuple[int, int]], indices: Sequence[int], starts: Sequence[int]
    ) -> tuple[int, ...]:
        """Each gather takes the first of its bucket that is left, and none is left over."""
        result = list(starts)
        for i in indices:
            mine = next(d for d in found if d[0] == self.problem.gathers[i].bucket)
            found.remove(mine)
            result[i] = mine[1]
        assert not found
        return tuple(result)

    @property
    def held(self) -> list[int]:
        return held_bytes(self.problem, self.schedule)

    @property
    def peak(self) -> int:
        """As it is simulated: also between units."""
        return simulate(build_program(self.problem, self.schedule, "step")).peak

    @property
    def exposed(self) -> float:
        return exposed_seconds(self.problem, self.schedule)

    def check(self) -> None:
        """In order, and sound as a program."""
        starts, waits = self.schedule.gather_starts, self.schedule.reduce_waits
        assert list(starts) == sorted(starts)
        free: dict[int, int] = {}
        for gather, start in zip(self.problem.gathers, starts, strict=True):
            assert free.get(gather.bucket, 0) <= start <= gather.first, gather
            free[gather.bucket] = gather.last + 1
        assert all(
            r.ready < w <= len(self.problem.compute)
            for r, w in zip(self.problem.reductions, waits, strict=True)
        )
        for i in self.problem.fetched:
            assert self.schedule.fetch_start(i) <= starts[i]
        for i in self.problem.read:
            assert self.schedule.read_start(i) <= self.schedule.fetch_start(i)
        program = build_program(self.problem, self.schedule, "step", world_size=2)
        prove_order(program)
        assert simulate(program).exposed == self.exposed


def planned(forward: Posed, backward: Posed, limits: Limits) -> Step:
    step = Step(forward, backward, *plan_step(forward, backward, limits))
    step.check()
    return step


def kept(forward: Posed, backward: Posed, limits: Limits) -> set[int]:
    planned(forward, backward, limits)
    one, two = plan_step(forward, backward, limits)
    assert {backward.gathers[j].bucket for j in two.carried_in} == one.carried_out
    return set(one.kept)


def one_ahead_bytes(posed: Posed) -> int:
    """What buckets hold if each gather starts at the use before its own, and each reduction ends
    where the next one starts.
    """
    starts = [0, *(g.first for g in posed.gathers)][: len(posed.gathers)]
    waits = [*(r.ready + 1 for r in posed.reductions[1:]), len(posed.compute)]
    schedule = Schedule(tuple(starts), tuple(waits[: len(posed.reductions)]))
    return peak_bytes(bare(posed).problem(None), schedule)


# ------------------------------------------------------------------------------ without a budget


def test_a_chain_exposes_its_first_gather_and_its_last_reduction() -> None:
    step = planned(*chain(8), Limits())
    assert step.exposed == pytest.approx(0.8)
    assert len(step.problem.gathers) == 15  # the last of forward is the first of backward


def test_names_of_a_graph_that_runs_alone() -> None:
    found = plan_graph(chain(4)[0], Limits())
    assert found == GraphSchedule({0: "", 1: "", 2: "f1", 3: "f2"}, waits={})
    backward = plan_graph(chain(3)[1], Limits())
    assert backward.starts == {0: "", 1: "", 2: "b1"}
    assert backward.waits == {0: "b2", 1: None, 2: None}


def test_a_gather_for_backward_starts_in_forward_where_compute_hides_it() -> None:
    forward = pose_problem("f", (1.0,) * 4, [Gather(0, 0.4, SIZE, 0, 0)])
    backward = pose_problem(
        "b", (1.0,) * 2, [Gather(1, 1.5, SIZE, 0, 0), Gather(0, 0.4, SIZE, 1, 1)]
    )
    one, two = plan_step(forward, backward, Limits())
    assert one.early == (Early(1, "float32", "f2"),)
    assert (one.kept, one.carried_out) == (frozenset(), frozenset({1}))
    assert (two.carried_in, two.starts) == (frozenset({0}), {1: ""})
    assert planned(forward, backward, Limits()).exposed == pytest.approx(0.4)


def test_an_early_gather_does_not_start_before_forward_has_released_its_bucket() -> None:
    """Backward wants it for two units, so it is no candidate to be kept; five seconds on its way."""
    forward = pose_problem("f", (1.0,) * 6, [Gather(0, 0.1, SIZE, 0, 2)])
    twice = [Gather(0, 5.0, SIZE, 0, 0), Gather(0, 5.0, SIZE, 2, 2, earliest=1)]
    backward = pose_problem("b", (1.0,) * 3, twice)
    one, _ = plan_step(forward, backward, Limits(total=100, keep=True))
    assert [e.before for e in one.early] == ["f3"]
    planned(forward, backward, Limits(total=100, keep=True))


def test_the_bucket_of_the_turn_is_kept() -> None:
    assert kept(*chain(6), Limits()) == {5}


def test_a_bucket_that_is_gathered_in_another_dtype_is_not_kept() -> None:
    forward, backward = chain(3)
    other = replace(backward, dtypes=("bfloat16", *backward.dtypes[1:]))
    assert kept(forward, other, Limits()) == set()


def test_a_bucket_that_would_be_gathered_again_at_once_is_kept() -> None:
    """The last of forward is not the first of backward, yet nothing runs between its uses."""
    forward = pose_problem(
        "f", (1.0,) * 2, [Gather(0, 3.0, SIZE, 0, 0), Gather(1, 3.0, SIZE, 1, 1)]
    )
    backward = pose_problem(
        "b", (1.0,) * 2, [Gather(2, 0.1, SIZE, 0, 0), Gather(1, 3.0, SIZE, 1, 1)]
    )
    assert kept(forward, backward, Limits(gathered=2 * SIZE)) == {1}


@pytest.mark.parametrize("seconds", [0.1, 0.4, 3.0])
def test_without_limits_buckets_take_no_more_than_one_ahead(seconds: float) -> None:
    forward, backward = chain(6, seconds, seconds)
    step = planned(bare(forward), bare(backward), Limits())
    assert max(step.held[:6]) <= one_ahead_bytes(forward) == 2 * SIZE
    assert max(step.held[6:]) <= one_ahead_bytes(backward) == 4 * SIZE


# ------------------------------------------------------------------------------ limits


def test_with_room_for_all_every_bucket_is_kept() -> None:
    limits = Limits(total=10 * SIZE, keep=True)
    assert kept(*chain(6), limits) == set(range(6))
    step = planned(*chain(6), limits)
    assert step.exposed == pytest.approx(0.8)
    assert max(step.held) <= 10 * SIZE


@pytest.mark.parametrize(
    ("buckets", "oldest"), [(3, 5), (4, 5), (5, 4), (6, 4), (7, 3), (8, 2), (9, 1), (10, 0)]
)
def test_the_more_memory_the_more_is_kept_and_never_too_much(buckets: int, oldest: int) -> None:
    """The latest first: they are held for the shortest time. Room stays free for the next bucket and,
    where gradients are reduced, for one reduction.
    """
    limits = Limits(total=buckets * SIZE, keep=True)
    assert kept(*chain(6), limits) == set(range(oldest, 6))
    assert max(planned(*chain(6), limits).held) <= buckets * SIZE


@pytest.mark.parametrize("seconds", [0.4, 1.5])
@pytest.mark.parametrize("reducing", [0.4, 1.5])
def test_keeping_never_costs_time(seconds: float, reducing: float) -> None:
    for buckets in range(3, 16):
        keeping, not_keeping = (
            planned(*chain(8, seconds, reducing), Limits(buckets * SIZE, keep=keep)).exposed
            for keep in (True, False)
        )
        assert keeping <= not_keeping + 1e-9, buckets


def test_a_budget_keeps_nothing_where_it_may_not() -> None:
    assert kept(*chain(6), Limits(total=100 * SIZE)) == {5}


def test_what_saves_most_seconds_a_byte_is_kept_first() -> None:
    """Bucket 0 is slow for its size: latency."""
    forward, backward = chain(4)
    slow = [replace(g, seconds=g.seconds * (2 if g.bucket == 0 else 1)) for g in forward.gathers]
    limits = Limits(total=7 * SIZE, keep=True)
    assert kept(forward, backward, limits) == {1, 2, 3}
    assert kept(replace(forward, gathers=tuple(slow)), backward, limits) == {0, 2, 3}


def test_a_budget_counts_activations() -> None:
    forward, backward = chain(4, live=3)
    limits = Limits(total=12 + 3 * SIZE, keep=True)
    assert kept(forward, backward, limits) == {3}
    assert max(planned(forward, backward, limits).held) <= 12 + 3 * SIZE


def test_persistent_buckets_are_kept() -> None:
    assert kept(*chain(6), Limits(persistent=frozenset({2}))) == {2, 5}


def test_persistent_buckets_are_kept_beside_what_one_ahead_takes() -> None:
    """Small ones, each of its own, in a chain of large ones: all together exceed one ahead's memory."""
    small = [Gather(k, 0.1, 1, k, k) for k in range(9)]
    forward = pose_problem("f", (1.0,) * 9, small)
    again = [Gather(8 - k, 0.1, 1, k, k) for k in range(9)]
    backward = pose_problem("b", (1.0,) * 9, again)
    assert kept(forward, backward, Limits(persistent=frozenset(range(9)))) == set(range(9))


def test_persistent_buckets_come_before_others_in_a_budget() -> None:
    limits = Limits(total=5 * SIZE, keep=True, persistent=frozenset({0, 1}))
    assert kept(*chain(6), limits) == {0, 1, 5}


def test_persistent_buckets_are_given_up_where_the_budget_cannot_hold_them() -> None:
    limits = Limits(total=3 * SIZE, persistent=frozenset({0}))
    assert kept(*chain(4), limits) == {3}


def unused(problem: Problem, schedule: Schedule) -> list[int]:
    """Buckets gathered, or on their way, that nothing has used yet, at each unit."""
    pairs = list(zip(schedule.gather_starts, problem.gathers, strict=True))
    return [sum(s <= k < g.first for s, g in pairs) for k in range(len(problem.compute))]


@pytest.mark.parametrize(("ahead", "buckets"), [(0, 1), (SIZE, 1), (2 * SIZE, 2), (3 * SIZE, 3)])
def test_the_prefetch_limit(ahead: int, buckets: int) -> None:
    """A long unit wants to hide all gathers behind it; the next one always may start."""
    forward = pose_problem("f", (100.0, *[0.1] * 7), [Gather(k, 5.0, SIZE, k, k) for k in range(8)])
    for limits, most in ((Limits(total=100 * SIZE), 7), (Limits(100 * SIZE, ahead=ahead), buckets)):
        found = plan_graph(forward, limits)
        starts = tuple(position(forward, found.starts[i]) for i in range(8))
        assert max(unused(forward.problem(None), Schedule(starts, ()))) == most


def test_the_prefetch_limit_holds_from_forward_into_backward() -> None:
    """A long unit at the end of forward could hide all of backward's gathers."""
    forward, backward = chain(5, seconds=5.0)
    forward = replace(forward, compute=(1.0,) * 4 + (100.0,))
    for limits, most in ((Limits(100 * SIZE), 3), (Limits(100 * SIZE, ahead=SIZE), 1)):
        step = planned(forward, backward, limits)
        assert max(unused(step.problem, step.schedule)) >= min(most, 2)
        assert max(unused(step.problem, step.schedule)) <= most


@pytest.mark.parametrize("buckets", [1, 2, 3])
def test_the_limit_on_gathered_memory(buckets: int) -> None:
    forward, backward = chain(6, seconds=3.0, live=2)
    step = planned(forward, backward, Limits(gathered=buckets * SIZE))
    held = [h - live for h, live in zip(step.held, step.problem.live, strict=True)]
    assert max(held) == buckets * SIZE


def test_both_limits_hold() -> None:
    forward, backward = chain(6, seconds=3.0, live=SIZE)
    step = planned(forward, backward, Limits(total=10 * SIZE, gathered=4 * SIZE))
    held = [h - live for h, live in zip(step.held, step.problem.live, strict=True)]
    assert max(step.held) <= 10 * SIZE
    assert max(held) <= 4 * SIZE


def test_a_limit_on_everything_alone_stays_as_it_is() -> None:
    problem = chain(3)[0].problem(None)
    assert within(problem, [None] * 3, 17) == replace(problem, limit=17)


# ------------------------------------------------------------------------------ refusals


def test_a_budget_too_small_names_bucket_node_and_bytes() -> None:
    forward, backward = chain(4, live=3)
    with pytest.raises(PlanError) as error:
        plan_step(forward, replace(backward, reductions=()), Limits(total=13, keep=True))
    assert str(error.value) == (
        "bucket 3 does not fit at node 3 (f3): 16 bytes are needed (4 for the bucket, 0 for other "
        "buckets in use, 12 for activations and gradients), 3 more than the limit of 13; raise it, "
        "or use smaller buckets or a smaller batch"
    )


def test_a_node_of_backward_is_named() -> None:
    forward, backward = chain(2)
    backward = replace(backward, live=(0, 20))
    with pytest.raises(PlanError, match=r"bucket 0 does not fit at node 3 \(b1\): 32 bytes .* 22 "):
        plan_step(forward, backward, Limits(total=10, keep=True))


def test_a_reduction_counts_where_it_starts_even_if_it_is_waited_for_at_once() -> None:
    """A bucket and its gradient's reduction, 12 bytes together, at the first unit of backward."""
    forward, backward = chain(1)
    assert planned(forward, backward, Limits(total=12)).held == [SIZE, SIZE]
    message = r"bucket 0 does not fit at node 1 \(the beginning of backward\): 12 bytes .* 1 more"
    with pytest.raises(PlanError, match=message):
        plan_step(forward, backward, Limits(total=11))


def test_a_limit_on_gathered_memory_below_one_bucket_names_it() -> None:
    with pytest.raises(PlanError, match=r"bucket 0 does not fit at node 0.*1 more than the limit"):
        plan_graph(chain(2)[0], Limits(gathered=SIZE - 1))


# ------------------------------------------------------------------------------ at random


def random_half(rng: random.Random, name: str, buckets: dict[int, tuple[float, int]]) -> Posed:
    """Buckets used at random, some twice; times are multiples of 1/8."""
    units = rng.randint(1, 7)
    free: dict[int, int] = {}
    gathers = []
    for first in sorted(rng.choices(range(units), k=rng.randint(0, 5))):
        bucket = rng.choice(sorted(buckets))
        if free.get(bucket, 0) > first:
            continue
        last = min(units - 1, first + rng.choice([0, 0, 1, 3]))
        gathers.append(Gather(bucket, *buckets[bucket], first, last, free.get(bucket, 0)))
        free[bucket] = last + 1
    compute = [rng.randint(1, 16) / 8 for _ in range(units)]
    return pose_problem(name, compute, gathers, (), [rng.randint(0, 6) for _ in range(units)])


def random_step(rng: random.Random) -> tuple[Posed, Posed]:
    buckets = {b: (rng.randint(0, 24) / 8, rng.randint(1, 6)) for b in range(4)}
    forward, backward = random_half(rng, "f", buckets), random_half(rng, "b", buckets)
    units = len(backward.compute)
    readies = sorted(rng.choices(range(units), k=rng.randint(0, 4)))
    reductions = tuple(Reduce(b, rng.randint(0, 24) / 8, 8, k) for b, k in enumerate(readies))
    return forward, replace(backward, reductions=reductions)


def random_limits(rng: random.Random, least: int) -> Limits:
    total = rng.choice([None, least + rng.randint(-1, 12)])
    gathered = rng.choice([None, None, rng.randint(4, 30)])
    ahead = rng.choice([None, 0, rng.randint(1, 12)])
    persistent = frozenset(b for b in range(4) if rng.random() < 0.2)
    keep = total is not None and rng.random() < 0.5
    return Limits(total, gathered, ahead, keep, persistent)


def at_uses(forward: Posed, backward: Posed) -> tuple[list[int], list[int]]:
    """Bytes of buckets, and of everything, at each unit if all is held for its uses alone, and
    reductions where they start.
    """
    halves = (forward, backward)
    gathered = [
        sum(g.bytes for g in half.gathers if g.first <= k <= g.last)
        for half in halves
        for k in range(len(half.compute))
    ]
    live = [size for half in halves for size in half.live]
    for reduction in backward.reductions:
        live[len(forward.compute) + reduction.ready] += reduction.bytes
    return gathered, [a + b for a, b in zip(gathered, live, strict=True)]


def test_random_steps_are_legal_and_within_their_limits() -> None:
    rng = random.Random(7)
    refused = gather_cache = 0
    for number in range(1500):
        forward, backward = random_step(rng)
        buckets, everything = at_uses(forward, backward)
        limits = random_limits(rng, max(everything))
        too_small = (limits.total is not None and limits.total < max(everything)) or (
            limits.gathered is not None and limits.gathered < max(buckets)
        )
        if too_small:
            refused += 1
            with pytest.raises(PlanError, match=r"node \d+ \("):
                plan_step(forward, backward, limits)
            continue
        step = planned(forward, backward, limits)
        one, _ = plan_step(forward, backward, limits)
        gather_cache += len(one.carried_out)
        held = [h - live for h, live in zip(step.held, step.problem.live, strict=True)]
        assert limits.total is None or step.peak <= limits.total, number
        assert limits.gathered is None or max(held) <= limits.gathered, number
    assert 50 < refused < 750
    assert gather_cache > 500


def test_random_steps_without_limits_take_no_more_than_one_ahead() -> None:
    rng = random.Random(11)
    for number in range(500):
        forward, backward = map(bare, random_step(rng))
        held, split = planned(forward, backward, Limits()).held, len(forward.compute)
        for posed, part in ((forward, held[:split]), (backward, held[split:])):
            assert max(part) <= _one_ahead_where_allowed(posed), number


def _one_ahead_where_allowed(posed: Posed) -> int:
    """As :func:`one_ahead_bytes`, where a bucket may still be in its earlier place."""
    starts = [0, *(g.first for g in posed.gathers)][: len(posed.gathers)]
    starts = [max(s, g.earliest) for s, g in zip(starts, posed.gathers, strict=True)]
    waits = [*(r.ready + 1 for r in posed.reductions[1:]), len(posed.compute)]
    schedule = Schedule(tuple(starts), tuple(waits[: len(posed.reductions)]))
    return peak_bytes(posed.problem(None), schedule)


def test_a_joined_problem_holds_each_gather_once() -> None:
    rng = random.Random(3)
    for _ in range(300):
        forward, backward = random_step(rng)
        joined = join(forward, backward, Limits(total=1000, keep=True))
        ours = [i for i, _ in joined.owners if i is not None]
        theirs = [j for _, j in joined.owners if j is not None]
        assert ours == list(range(len(forward.gathers)))
        assert sorted(theirs) == list(range(len(backward.gathers)))
        assert len(joined.problem.gathers) == len(joined.owners)
