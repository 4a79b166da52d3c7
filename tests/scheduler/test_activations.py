"""The planner's choice of saved tensors that leave the device, and when they do."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from torch import nn

from graphs import BACKWARD, FORWARD, record, traced
from zero_compile.analysis import hardware
from zero_compile.analysis.costs import transfer_seconds
from zero_compile.analysis.fx_graph import output_node
from zero_compile.analysis.hardware import Hardware, Link
from zero_compile.scheduler.activations import (
    Candidate,
    Course,
    Stay,
    choose,
    course_of,
    itinerary,
    plan_activations,
)
from zero_compile.scheduler.decide_schedule import Limits
from zero_compile.scheduler.pose_problem import MARGIN, pose_problem
from zero_compile.scheduler.saved_values import Wanted, candidates
from zero_runtime.ir.plan import BucketPlan, Channel, StatePolicy, Tier

SIZE = 10


def chain(
    layers: int, seconds: float = 1.0, out: float = 0.5, back: float = 0.5, nvme: float = 0.0
) -> tuple[Course, list[Candidate]]:
    """Each layer of forward saves a tensor of ten bytes; backward, twice as slow, reads the last first.

    Names are the layers' numbers. A layer reads the tensor of the layer before it.
    """
    ends = 2 * layers
    saved = [
        Candidate(str(k), SIZE, k + 1, min(k + 1, layers - 1), ends - 1 - k, out, back, nvme, nvme)
        for k in range(layers)
    ]
    held = [SIZE * (k + 1) for k in range(layers)] + [SIZE * (layers - k) for k in range(layers)]
    compute = (seconds,) * layers + (2 * seconds,) * layers
    return Course(compute, tuple(held), layers), saved


def left(course: Course, saved: Sequence[Candidate], stays: Mapping[str, Stay]) -> list[int]:
    """Bytes held at each unit."""
    sizes = {c.name: c.bytes for c in saved}
    return [
        held - sum(sizes[n] for n, s in stays.items() if s.wait <= k < s.reload)
        for k, held in enumerate(course.held)
    ]


def exposed(course: Course, saved: Sequence[Candidate], stays: Mapping[str, Stay]) -> float:
    """Seconds that compute waits, by playing the step: each channel is serial, first in first out."""
    moving = [c for c in saved if c.name in stays]
    out_free = back_free = written = read_free = now = waited = 0.0
    out: dict[str, float] = {}
    on_nvme: dict[str, float] = {}
    on_host: dict[str, float] = {}
    back: dict[str, float] = {}
    for k in range(len(course.compute) + 1):
        for c in sorted(moving, key=lambda c: (c.ready, c.first)):
            if stays[c.name].start == k:
                out[c.name] = out_free = max(now, out_free) + c.out
        for c in sorted(moving, key=lambda c: (c.ready, c.first)):
            if stays[c.name].wait == k:
                waited += max(0.0, out[c.name] - now)
                now = max(now, out[c.name])
                on_nvme[c.name] = written = max(now, written) + c.write
        for c in sorted(moving, key=lambda c: c.first):
            if stays[c.name].recall == k and c.read:
                on_host[c.name] = read_free = max(now, read_free, on_nvme[c.name]) + c.read
        for c in sorted(moving, key=lambda c: c.first):
            if stays[c.name].reload == k:
                begin = max(now, on_host.get(c.name, 0.0))
                waited, now = waited + begin - now, begin
                back[c.name] = back_free = max(now, back_free) + c.back
        for c in moving:
            if c.first == k:
                waited += max(0.0, back[c.name] - now)
                now = max(now, back[c.name])
        now += course.compute[k] if k < len(course.compute) else 0.0
    return waited


# ------------------------------------------------------------------------------ without a limit


def test_what_is_held_longest_leaves_and_what_comes_back_at_once_stays() -> None:
    course, saved = chain(8)
    stays = choose(course, saved)
    assert {"0", "1", "2", "3"} <= stays.keys()
    assert "7" not in stays, "forward ends with it and backward begins with it"
    assert max(left(course, saved, stays)) < max(course.held)
    assert exposed(course, saved, stays) == 0


def test_a_tensor_sets_out_when_it_is_made_is_free_after_its_use_and_back_just_in_time() -> None:
    course, saved = chain(8)
    first = choose(course, saved)["0"]
    # Made by unit 0, read by unit 1; half a second before unit 15, of which each takes two.
    assert first == Stay(start=1, wait=2, recall=14, reload=14)


def test_slow_channels_are_refused() -> None:
    for slow in ({"out": 100.0}, {"back": 100.0}, {"nvme": 100.0}):
        course, saved = chain(8, **slow)
        assert choose(course, saved) == {}, slow


def test_a_channel_that_carries_half_takes_what_is_worth_most() -> None:
    course, saved = chain(8, out=2.0, back=2.0)
    stays = choose(course, saved)
    assert 0 < len(stays) < 8
    assert "0" in stays
    assert exposed(course, saved, stays) == 0
    longest = sorted(stays, key=int)
    assert [int(n) for n in longest] != list(range(8))


def test_nothing_leaves_where_the_peak_is_elsewhere() -> None:
    course, saved = chain(8)
    elsewhere = replace(course, held=(1000, *course.held[1:]))
    assert choose(elsewhere, saved) == {}


def test_of_two_equally_long_stays_the_larger_tensor_is_tried_first() -> None:
    course, _ = chain(8)
    small = Candidate("small", 4, 1, 1, 15, 6.0, 1.0)
    large = Candidate("large", 40, 1, 1, 15, 6.0, 1.0)  # the way out has no time for both
    held = tuple(h + 44 for h in course.held)
    assert choose(replace(course, held=held), [small, large]).keys() == {"large"}


def test_the_way_back_is_shared_with_shards_that_are_fetched() -> None:
    course, saved = chain(8)
    busy = tuple((float(t), 1.9) for t in range(10, 24, 2))  # nearly all of backward
    assert len(choose(replace(course, fetches=busy), saved)) < len(choose(course, saved))


def test_nvme_takes_less_than_the_host_where_it_is_slower() -> None:
    course, saved = chain(12)
    slower, written = chain(12, nvme=3.5)
    stays = choose(slower, written)
    assert 0 < len(stays) < len(choose(course, saved))
    assert exposed(slower, written, stays) == 0
    assert all(s.recall <= s.reload for s in stays.values())


def random_step(rng: random.Random) -> tuple[Course, list[Candidate]]:
    """Times are multiples of 1/8, so that sums are exact whatever their order."""
    forward, backward = rng.randint(2, 12), rng.randint(2, 12)
    units = forward + backward
    saved = []
    held = [rng.randint(0, 20) for _ in range(units)]
    nvme = rng.random() < 0.3
    for number in range(rng.randint(1, 8)):
        ready = rng.randint(1, forward)
        last = rng.randint(ready - 1, forward - 1)
        first = rng.randint(forward, units - 1)
        size = rng.randint(1, 30)
        seconds = [rng.randint(1, 24) / 8 for _ in range(4 if nvme else 2)]
        saved.append(Candidate(f"t{number}", size, ready, last, first, *seconds))
        for k in range(ready - 1, first + 1):
            held[k] += size
    compute = tuple(rng.randint(1, 16) / 8 for _ in range(units))
    return Course(compute, tuple(held), forward), saved


@pytest.mark.parametrize("seed", range(300))
def test_nothing_that_is_chosen_without_a_limit_is_waited_for_or_is_in_vain(seed: int) -> None:
    course, saved = random_step(random.Random(seed))
    stays = choose(course, saved)
    assert exposed(course, saved, stays) == 0
    peak = max(left(course, saved, stays))
    assert peak <= max(course.held)
    for name in stays:
        others = {n: s for n, s in stays.items() if n != name}
        assert max(left(course, saved, others)) > peak


# ------------------------------------------------------------------------------ within a limit


def test_a_limit_that_holds_moves_nothing() -> None:
    course, saved = chain(8)
    assert choose(course, saved, limit=max(course.held)) == {}


@pytest.mark.parametrize("limit", range(40, 80, 10))
def test_only_as_many_leave_as_the_limit_needs(limit: int) -> None:
    course, saved = chain(8, out=0.25, back=0.25)
    stays = choose(course, saved, limit)
    held = left(course, saved, stays)
    assert max(held) <= limit
    assert exposed(course, saved, stays) == 0
    assert len(stays) == (80 - limit) // 10
    assert sorted(stays, key=int) == [str(k) for k in range(len(stays))], "the longest first"


def test_hidden_transfers_leave_room_to_gather_ahead() -> None:
    course, saved = chain(8, out=0.25, back=0.25)
    assert len(choose(course, saved, 70, spare=20)) == 3
    assert len(choose(course, saved, 70, spare=0)) == 1


def test_where_hidden_transfers_do_not_do_compute_waits() -> None:
    course, saved = chain(8, out=3.0, back=3.0)
    free = choose(course, saved)
    assert max(left(course, saved, free)) > 40
    stays = choose(course, saved, 40)
    assert max(left(course, saved, stays)) <= 40
    assert exposed(course, saved, stays) > 0


@pytest.mark.parametrize("seed", range(300))
def test_whatever_can_be_made_to_fit_fits(seed: int) -> None:
    rng = random.Random(seed)
    course, saved = random_step(rng)
    everything = {c.name: Stay(c.ready, c.last + 1, c.first, c.first) for c in saved}
    least = max(left(course, saved, everything))
    limit = rng.randint(least, max(course.held))
    stays = choose(course, saved, limit, rng.randint(0, 10))
    assert max(left(course, saved, stays)) <= limit
    assert all(s.wait < s.reload for s in stays.values())


@pytest.mark.parametrize("seed", range(100))
def test_hidden_means_that_nothing_waits(seed: int) -> None:
    course, saved = random_step(random.Random(1000 + seed))
    some = [c for c in saved if itinerary(course, [c]).hidden]
    for count in range(len(some) + 1):
        found = itinerary(course, some[:count])
        assert not found.hidden or exposed(course, saved, found.stays) == 0


# ------------------------------------------------------------------------------ graphs

CPU = hardware.load("cpu")
ANYTHING = Wanted(Tier.HOST, 1)


@pytest.fixture(scope="module")
def step():  # type: ignore[no-untyped-def]
    """Forward and backward of four linears, as they are before anything leaves, and their buckets."""
    layers = [nn.Linear(64, 64) for _ in range(4)]
    model = nn.Sequential(*(m for layer in layers for m in (layer, nn.GELU())))
    options = {"offload_activations": {"device": "cpu", "min_bytes": 1}}
    recording = record(model, torch.randn(4096, 64), bucket_bytes=1 << 14, **options)
    forward = recording.before("offload_activations", FORWARD)
    return forward, recording.before("reload_activations", BACKWARD), recording.buckets


def found(step, wanted=ANYTHING, profile: Hardware = CPU) -> list[Candidate]:  # type: ignore[no-untyped-def]
    forward, backward, buckets = step
    return candidates(forward.graph, backward.graph, buckets, StatePolicy(), profile, wanted)


def moves(step, limits: Limits = Limits(), profile: Hardware = CPU, tier: Tier = Tier.HOST):  # type: ignore[no-untyped-def]  # noqa: B008
    forward, backward, buckets = step
    halves = [pose_problem(gm.graph, buckets, StatePolicy(), profile) for gm in (forward, backward)]
    return plan_activations(*halves, limits, tier, found(step, Wanted(tier, 1), profile))


def test_candidates_are_what_forward_makes_and_backward_reads(step) -> None:
    names = [c.name for c in found(step)]
    assert names == ["addmm", "mul_2", "addmm_1", "mul_5", "addmm_2", "mul_8", "addmm_3"]
    for c in found(step):
        assert c.bytes == 4096 * 64 * 4
        assert c.out == MARGIN * transfer_seconds(Channel.DEVICE_TO_HOST, c.bytes, CPU)
        assert (c.write, c.read) == (0.0, 0.0)


def test_candidates_know_when_they_are_made_and_used(step) -> None:
    spans = {c.name: (c.ready, c.last, c.first) for c in found(step)}
    # Forward is four matmuls and backward eight; a GELU is fused in front of the matmul that reads it.
    assert spans["addmm"][:2] == (1, 1)
    assert spans["mul_2"][:2] == (2, 1)
    assert spans["addmm_3"][0] == 4
    firsts = [spans[n][2] for n in ("addmm_3", "mul_8", "addmm_2", "mul_5", "addmm_1", "mul_2")]
    assert firsts == sorted(firsts)
    assert firsts[0] == 4


def test_small_tensors_are_no_candidates(step) -> None:
    size = 4096 * 64 * 4
    assert len(found(step, Wanted(Tier.HOST, size))) == 7
    assert found(step, Wanted(Tier.HOST, size + 1)) == []


def test_nvme_costs_its_own_way_too(step) -> None:
    for c in found(step, Wanted(Tier.NVME, 1)):
        assert c.write == MARGIN * transfer_seconds(Channel.NVME_WRITE, c.bytes, CPU)
        assert c.read == MARGIN * transfer_seconds(Channel.NVME_READ, c.bytes, CPU)


def test_the_longest_stay_is_chosen_on_a_machine_with_a_fast_link(step) -> None:
    chosen = moves(step)
    assert chosen[0].name == "addmm"
    assert {m.tier for m in chosen} == {Tier.HOST}
    forward, backward, _ = step
    places = ({n.name for n in g.graph.nodes} | {"", None} for g in (forward, backward))
    ahead, behind = places
    assert all(m.start in ahead and m.wait in ahead and m.reload in behind for m in chosen)


def test_nothing_is_chosen_on_a_machine_with_a_slow_link(step) -> None:
    slow = CPU.model_copy(update={"device_to_host": Link(bandwidth=1e6, latency=0.0)})
    assert moves(step, profile=slow) == ()


def test_a_budget_takes_as_many_as_it_needs(step) -> None:
    forward, backward, buckets = step
    halves = [pose_problem(gm.graph, buckets, StatePolicy(), CPU) for gm in (forward, backward)]
    most = max(course_of(*halves, Limits(total=1 << 40)).held)
    assert moves(step, Limits(total=most + (1 << 20))) == ()
    counts = [len(moves(step, Limits(total=most * part // 10))) for part in (9, 7, 5)]
    assert counts == sorted(counts)
    assert 0 < counts[0] < counts[-1]


def test_memory_that_others_share_is_no_candidate() -> None:
    """Saved twice under two shapes, an input under another shape, a copy, and a value with gaps."""

    def forward(x):
        made = x @ x
        product = made @ made
        whole = product @ product
        return [made, made.t(), x.t(), x.clone(), whole[:, ::2], product]

    def backward(mm, permute, permute_1, clone, slice_1, mm_1, tangents_1):
        return [mm @ permute, permute_1 @ clone, slice_1 @ tangents_1, tangents_1 @ mm_1]

    x = torch.randn(64, 64)
    ahead = traced(forward, x)
    behind = traced(backward, x, x.t(), x.t(), x, x[:, ::2], x, x[:32])
    saved = [node.name for node in output_node(ahead.graph).args[0]]
    inputs = behind.graph.find_nodes(op="placeholder")
    for node, name in zip(inputs, saved, strict=False):
        node.name = name
    bucket = BucketPlan("float32", "cpu", 1, 32, ())
    names = [
        c.name
        for c in candidates(ahead.graph, behind.graph, [bucket], StatePolicy(), CPU, ANYTHING)
    ]
    assert names == [saved[-1]]
    elsewhere = replace(bucket, device="cuda:0")
    assert candidates(ahead.graph, behind.graph, [elsewhere], StatePolicy(), CPU, ANYTHING) == []
