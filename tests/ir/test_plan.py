"""plan: bucket arithmetic, JSON and fingerprints."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from graphs import BACKWARD, FORWARD, gpt, mlp
from zero_compile.bucketing import Use, plan_bucket
from zero_runtime.ir.plan import (
    ALIGNMENT,
    BucketPlan,
    Channel,
    Phase,
    Plan,
    Range,
    Slot,
    Stage,
    StatePolicy,
    Step,
    StepKind,
    dtype_name,
    dtype_of,
    reducing_bytes,
)

SHAPES = st.lists(st.integers(0, 40), max_size=3).map(tuple)


@st.composite
def buckets(draw) -> BucketPlan:
    """Buckets as the layout makes them."""
    world_size = draw(st.integers(1, 9))
    uses = [
        Use(
            number=i,
            name=f"p{i}",
            shape=shape,
            stride=torch.empty(shape, device="meta").stride(),
            numel=math.prod(shape),
            dtype=torch.float32,
            gather_dtype=torch.float32,
            device=torch.device("cpu"),
            trainable=True,
        )
        for i, shape in enumerate(draw(st.lists(SHAPES, min_size=1, max_size=6)))
    ]
    return plan_bucket(uses, world_size)


def bucket(world_size: int = 2, dtype: str = "float32") -> BucketPlan:
    slots = (
        Slot("a", (8, 5), (5, 1), True, 0, 40),
        Slot("b", (3,), (1,), True, 64, 3),
    )
    return BucketPlan(dtype, "cpu", world_size, 64, slots)


def step(kind: StepKind = StepKind.ALL_GATHER_START, **changes) -> Step:
    fields = {
        "position": 0,
        "kind": kind,
        "bucket": 0,
        "dtype": "float32",
        "bytes": 512,
        "channel": Channel.ALL_GATHER,
        "before": "mm",
        "gathered_bytes": 512,
        "reducing_bytes": 0,
        "gradient_bytes": 0,
    }
    return Step(**{**fields, **changes})


def plan(*steps: Step, **changes) -> Plan:
    fields = {
        "name": "graph0.forward",
        "phase": Phase.FORWARD,
        "world_size": 2,
        "policy": "one_ahead",
        "buckets": (bucket(),),
        "steps": steps or (step(),),
    }
    return Plan(**{**fields, **changes})


# ------------------------------------------------------------------------------ arithmetic


@settings(max_examples=60, deadline=None)
@given(buckets())
def test_the_ranks_own_every_element_of_every_slot_once(plan):
    for slot in plan.slots:
        owned: list[int] = []
        for rank in range(plan.world_size):
            part, chunk = plan.owned(slot, rank), plan.chunk_range(rank)
            assert 0 <= part.start <= part.stop <= plan.chunk
            owned += range(chunk.start + part.start, chunk.start + part.stop)
        assert owned == list(range(slot.span.start, slot.span.stop))


@settings(max_examples=60, deadline=None)
@given(buckets())
def test_slots_are_aligned_disjoint_and_inside_the_bucket(plan):
    end = 0
    for slot in plan.slots:
        assert slot.offset % ALIGNMENT == 0
        assert slot.span.start >= end
        end = slot.span.stop
    assert end <= plan.padded


@settings(max_examples=60, deadline=None)
@given(buckets())
def test_chunks_are_equal_aligned_and_cover_the_bucket(plan):
    chunks = [plan.chunk_range(rank) for rank in range(plan.world_size)]
    assert {len(c) for c in chunks} == {plan.chunk}
    assert chunks[0].start == 0
    assert chunks[-1].stop == plan.padded
    assert all(a.stop == b.start for a, b in pairwise(chunks))
    assert plan.chunk % ALIGNMENT == 0


def test_a_slot_across_a_chunk_border_is_owned_by_both():
    plan = BucketPlan("float32", "cpu", 2, 32, (Slot("a", (40,), (1,), True, 0, 40),))
    assert plan.owned(plan.slots[0], 0) == Range(0, 32)
    assert plan.owned(plan.slots[0], 1) == Range(0, 8)


def test_a_rank_may_own_nothing_of_a_slot():
    assert len(bucket().owned(bucket().slots[1], 0)) == 0
    assert len(bucket().owned(bucket().slots[0], 1)) == 0


def test_the_length_of_a_range_is_never_negative():
    assert (len(Range(2, 5)), len(Range(5, 5)), len(Range(5, 2))) == (3, 0, 0)


# ------------------------------------------------------------------------------ bytes


def test_a_gather_occupies_the_padded_bucket_in_its_own_dtype():
    assert bucket().padded == 128
    assert bucket().gathered_bytes(torch.float32) == 512
    assert bucket().gathered_bytes(torch.bfloat16) == 256


def test_a_reduction_occupies_what_is_sent_and_what_is_received():
    assert reducing_bytes(bucket(), StatePolicy()) == 2 * 512
    assert reducing_bytes(bucket(dtype="bfloat16"), StatePolicy()) == 2 * 256


def test_one_rank_alone_moves_nothing_unless_a_cast_needs_room():
    alone = bucket(world_size=1)
    assert alone.gathered_bytes(torch.float32) == 0
    assert alone.gathered_bytes(torch.bfloat16) == 64 * 2
    assert reducing_bytes(alone, StatePolicy()) == 0
    assert reducing_bytes(alone, StatePolicy(reduce_dtype="bfloat16")) == alone.padded * 2


def test_stage_1_averages_in_place_unless_a_cast_needs_room() -> None:
    first, plan = Stage.OPTIMIZER, bucket()
    assert reducing_bytes(plan, StatePolicy(first)) == 0
    assert reducing_bytes(plan, StatePolicy(first, reduce_dtype="bfloat16")) == plan.padded * 2


def test_peaks_are_the_most_held_by_any_step():
    many = plan(
        step(gathered_bytes=100, reducing_bytes=5, gradient_bytes=1),
        step(gathered_bytes=40, reducing_bytes=90, gradient_bytes=2),
        step(gathered_bytes=10, reducing_bytes=20, gradient_bytes=70),
    )
    assert (many.peak_gathered_bytes, many.peak_reducing_bytes, many.peak_bytes) == (100, 90, 132)


def test_a_plan_without_steps_holds_nothing():
    empty = plan(steps=())
    assert (empty.peak_gathered_bytes, empty.peak_reducing_bytes, empty.peak_bytes) == (0, 0, 0)


# ------------------------------------------------------------------------------ JSON


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("recording", [mlp, gpt])
def test_a_plan_survives_json(recording, indent):
    for written in recording().plans.values():
        assert Plan.from_json(written.to_json(indent)) == written


@settings(max_examples=30, deadline=None)
@given(buckets())
def test_any_bucket_survives_json(bucket):
    written = plan(buckets=(bucket,))
    assert Plan.from_json(written.to_json()) == written


def test_json_that_is_not_a_plan_is_an_error_that_names_the_field():
    text = plan().to_json().replace('"all_gather_start"', '"all_gather_begin"')
    with pytest.raises(ValidationError, match=r"steps\.0\.kind"):
        Plan.from_json(text)


def test_plans_are_frozen():
    for frozen in (plan(), bucket(), step(), bucket().slots[0], Range(0, 1)):
        with pytest.raises(AttributeError):
            setattr(frozen, next(iter(frozen.__dataclass_fields__)), None)


# ------------------------------------------------------------------------------ fingerprints


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"name": "graph7.forward"}, id="name"),
        pytest.param({"policy": "on_demand"}, id="policy"),
        pytest.param({"steps": (step(before="relu"),)}, id="what a step stands before"),
        pytest.param({"steps": (step(gradient_bytes=7),)}, id="bytes held"),
    ],
)
def test_the_fingerprint_ignores_what_ranks_may_differ_in(changed):
    assert replace(plan(), **changed).fingerprint() == plan().fingerprint()


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"phase": Phase.INFERENCE}, id="phase"),
        pytest.param({"steps": ()}, id="a step less"),
        pytest.param({"steps": (step(), step())}, id="a step more"),
        pytest.param({"steps": (step(StepKind.ALL_GATHER_WAIT),)}, id="kind"),
        pytest.param({"steps": (step(bucket=1),), "buckets": 2 * plan().buckets}, id="bucket"),
        pytest.param({"steps": (step(dtype="bfloat16"),)}, id="dtype"),
        pytest.param({"steps": (step(bytes=1024),)}, id="bytes"),
    ],
)
def test_the_fingerprint_tells_collectives_apart(changed):
    assert replace(plan(), **changed).fingerprint() != plan().fingerprint()


def test_the_fingerprint_depends_on_order():
    first, second = step(bucket=0), step(bucket=1)
    one, other = (
        replace(plan(*steps), buckets=2 * plan().buckets)
        for steps in ((first, second), (second, first))
    )
    assert one.fingerprint() != other.fingerprint()


def test_the_fingerprint_is_the_same_in_every_process():
    assert plan().fingerprint() == "68c461cd0d1ce04b"


def test_forward_and_backward_have_fingerprints_of_their_own():
    assert mlp().plans[FORWARD].fingerprint() != mlp().plans[BACKWARD].fingerprint()


# ------------------------------------------------------------------------------ dtypes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
def test_dtype_names_are_torchs_own(dtype):
    assert dtype_of(dtype_name(dtype)) is dtype


@pytest.mark.parametrize("name", ["float33", "nn", ""])
def test_a_name_that_is_no_dtype_is_an_error(name):
    with pytest.raises(ValueError, match=f"'{name}' is not a torch dtype"):
        dtype_of(name)
