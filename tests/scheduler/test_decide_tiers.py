"""decide: steps whose buckets live on the host or on NVMe, across the seam of forward and backward."""

import random
from dataclasses import replace

from test_decide_schedule import SIZE, at_uses, kept, planned, pose_problem, random_step

from zero_compile.scheduler.decide_schedule import Departure, Limits, plan_graph, plan_step
from zero_compile.scheduler.pose_problem import Posed
from zero_compile.scheduler.problem import Gather


def on_tiers(rng: random.Random, halves: tuple[Posed, Posed]) -> tuple[Posed, Posed]:
    """The same with buckets at random on the device, the host and NVMe."""
    tiers = {
        b: rng.choice([(0.0, 0.0, 0), (rng.randint(1, 12) / 8, rng.randint(0, 20) / 8, 2)])
        for b in range(4)
    }

    def moved(gather: Gather) -> Gather:
        fetch, read, shard = tiers[gather.bucket]
        return replace(gather, fetch=fetch, read=read, shard=shard)

    forward, backward = (replace(h, gathers=tuple(map(moved, h.gathers))) for h in halves)
    return forward, backward


def test_random_steps_off_the_device_are_legal_and_within_their_limits() -> None:
    rng = random.Random(13)
    sent = fetched = read = 0
    for number in range(800):
        forward, backward = on_tiers(rng, random_step(rng))
        _, everything = at_uses(forward, backward)
        slots = rng.randint(1, 4)
        total = max(everything) + 2 + rng.randint(0, 12)  # no shard is larger than two bytes
        limits = Limits(rng.choice([total, None]), keep=rng.random() < 0.5, slots=slots)
        step = planned(forward, backward, limits)
        one, two = plan_step(forward, backward, limits)
        assert limits.total is None or step.peak <= limits.total, number
        arriving = [backward.gathers[j].bucket for j in sorted(two.fetched | two.read)]
        assert list(one.sent) == arriving
        assert two.fetched <= two.read | {j for j, g in enumerate(backward.gathers) if not g.read}
        assert not two.carried_in & (two.fetched | two.read)
        sent, fetched, read = (
            sent + len(one.sent),
            fetched + len(two.fetched),
            read + len(two.read - two.fetched),
        )
    assert min(sent, fetched, read) > 50


def test_a_shard_for_backward_sets_out_in_forward() -> None:
    """Three seconds to read, two to fetch, and nothing before the third unit of backward needs it."""
    forward = pose_problem("f", (1.0,) * 4, [Gather(0, 0.5, SIZE, 0, 0)])
    far = Gather(1, 0.5, SIZE, 2, 2, 0, 2.0, 3.0, 1)
    backward = pose_problem("b", (1.0,) * 3, [far])
    one, two = plan_step(forward, backward, Limits())
    # Its gather starts at 5.5, where unit b1 does; so the fetch at 3.5 and the read at 0.5.
    assert (one.early, two.starts) == ((), {0: "b1"})
    assert (one.reads, one.fetches, one.sent) == (
        (Departure(1, ""),),
        (Departure(1, "f3"),),
        (1,),
    )
    assert (two.reads, two.fetches) == ((), ())
    assert (two.read, two.fetched) == (frozenset({0}), frozenset({0}))
    assert planned(forward, backward, Limits()).exposed == 0.5


def test_a_kept_bucket_saves_its_shards_way_too() -> None:
    """There is room for one of two that take as long to gather; bucket 2 is that of the turn."""
    for way, worthiest in (((0.25, 0.5, 1), 1), ((0.0, 0.0, 0), 0)):
        gathers = [Gather(0, 0.5, SIZE, 0, 0), Gather(1, 0.5, SIZE, 1, 1, 0, *way)]
        last = Gather(2, 0.5, SIZE, 2, 2)
        forward = pose_problem("f", (1.0,) * 3, [*gathers, last])
        again = [replace(g, first=k, last=k) for k, g in enumerate((last, *gathers))]
        backward = pose_problem("b", (1.0,) * 3, again)
        assert kept(forward, backward, Limits(total=3 * SIZE + 1, keep=True)) == {worthiest, 2}


def test_a_graph_that_runs_alone_reads_and_fetches_ahead() -> None:
    gathers = [Gather(k, 0.25, SIZE, k, k, 0, 0.25, 0.5, 1) for k in range(5)]
    found = plan_graph(pose_problem("f", (1.0,) * 5, gathers), Limits())
    assert found.starts == {0: "", 1: "", 2: "f1", 3: "f2", 4: "f3"}
    assert found.fetches == tuple(map(Departure, range(5), ("", "", "", "f1", "f2")))
    assert found.reads == tuple(map(Departure, range(5), ("", "", "", "f1", "f2")))


def test_slots_bound_what_is_read_ahead() -> None:
    gathers = [Gather(k, 0.25, SIZE, k, k, 0, 0.25, 5.0, 1) for k in range(5)]
    found = plan_graph(pose_problem("f", (1.0,) * 5, gathers), Limits(slots=2))
    assert [d.before for d in found.reads] == ["", "", "", "", "f1"]
    one = plan_graph(pose_problem("f", (1.0,) * 5, gathers), Limits(slots=1))
    assert [d.before for d in one.reads] == ["", "", "", "f1", "f2"]
