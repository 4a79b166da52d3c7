"""layout: which parameters share a bucket, and where in it they lie."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from graphs import Autocast, make_mlp, mlp, record
from zero_compile.bucketing import (
    LayoutPolicy,
    MiB,
    Use,
    default_bucket_bytes,
    group_uses,
    plan_bucket,
)
from zero_runtime.ir.plan import ALIGNMENT


def use(number: int, numel: int = 100, **changes) -> Use:
    fields = {
        "number": number,
        "name": f"p{number}",
        "shape": (numel,),
        "stride": (1,),
        "numel": numel,
        "dtype": torch.float32,
        "gather_dtype": torch.float32,
        "device": torch.device("cpu"),
        "trainable": True,
    }
    return Use(**{**fields, **changes})


def numbers(groups: list[list[Use]]) -> list[list[int]]:
    return [[u.number for u in group] for group in groups]


USES = st.lists(
    st.builds(
        use,
        st.integers(0, 9),
        st.integers(1, 300),
        gather_dtype=st.sampled_from([torch.float32, torch.bfloat16]),
        trainable=st.booleans(),
    ),
    max_size=20,
)


# ------------------------------------------------------------------------------ groups


def test_buckets_fill_in_order_of_use():
    uses = [use(i) for i in range(5)]
    assert numbers(group_uses(uses, LayoutPolicy(800))) == [[0, 1], [2, 3], [4]]


def test_a_bucket_may_exceed_its_size_by_an_eighth():
    """So that a layer's bias joins its weight."""
    assert numbers(group_uses([use(0, 100), use(1, 12)], LayoutPolicy(400))) == [[0, 1]]
    assert numbers(group_uses([use(0, 100), use(1, 13)], LayoutPolicy(400))) == [[0], [1]]


def test_a_parameter_larger_than_a_bucket_has_its_own():
    assert numbers(group_uses([use(0, 5), use(1, 5000), use(2, 5)], LayoutPolicy(400))) == [
        [0],
        [1],
        [2],
    ]


def test_size_is_what_the_gather_moves():
    uses = [use(i, gather_dtype=torch.bfloat16) for i in range(4)]
    assert numbers(group_uses(uses, LayoutPolicy(800))) == [[0, 1, 2, 3]]


@pytest.mark.parametrize(
    "other",
    [
        {"trainable": False},
        {"gather_dtype": torch.bfloat16},
        {"dtype": torch.float64, "gather_dtype": torch.float64},
        {"device": torch.device("meta")},
    ],
    ids=lambda other: next(iter(other)),
)
def test_kinds_never_mix_and_do_not_end_each_others_buckets(other):
    uses = [use(0), use(1, **other), use(2), use(3, **other)]
    assert numbers(group_uses(uses, LayoutPolicy(1 << 20))) == [[0, 2], [1, 3]]


def test_buckets_are_ordered_by_their_first_use():
    uses = [use(0), use(1, trainable=False), use(2), use(3), use(4, trainable=False)]
    assert numbers(group_uses(uses, LayoutPolicy(800))) == [[0, 2], [1, 4], [3]]


def test_nothing_to_group():
    assert group_uses([], LayoutPolicy(400)) == []
    assert group_uses([], LayoutPolicy(None)) == []


@pytest.mark.parametrize(
    ("total", "bucket_bytes"),
    [(0, MiB), (MiB, MiB), (64 * MiB, 4 * MiB), (10_000 * MiB, 16 * MiB)],
)
def test_buckets_are_a_sixteenth_of_the_whole_within_limits(total, bucket_bytes):
    uses = [use(i, total // 16) for i in range(4)]
    assert default_bucket_bytes(uses) == bucket_bytes


def test_without_a_size_the_default_is_taken():
    uses = [use(i, MiB) for i in range(16)]
    assert group_uses(uses, LayoutPolicy(None)) == group_uses(uses, LayoutPolicy(4 * MiB))
    assert len(group_uses(uses, LayoutPolicy(None))) == 16


@settings(max_examples=60, deadline=None)
@given(USES, st.integers(1, 2000))
def test_every_use_is_in_one_bucket_of_its_kind_and_in_order(uses, bucket_bytes):
    uses = [u._replace(number=i) for i, u in enumerate(uses)]
    groups = group_uses(uses, LayoutPolicy(bucket_bytes))
    assert sorted(n for group in numbers(groups) for n in group) == list(range(len(uses)))
    firsts = [group[0].number for group in groups]
    assert firsts == sorted(firsts)
    for group in groups:
        assert len({u.kind for u in group}) == 1
        assert [u.number for u in group] == sorted(u.number for u in group)
        held = sum(u.gathered_bytes for u in group)
        assert len(group) == 1 or held <= bucket_bytes * 1.125


@settings(max_examples=20, deadline=None)
@given(USES, st.integers(1, 2000), st.integers(1, 5))
def test_equal_uses_give_equal_layouts(uses, bucket_bytes, world_size):
    first, second = (
        [
            plan_bucket(group, world_size)
            for group in group_uses(list(uses), LayoutPolicy(bucket_bytes))
        ]
        for _ in range(2)
    )
    assert first == second


# ------------------------------------------------------------------------------ one bucket


def test_slots_begin_at_aligned_offsets_in_order():
    plan = plan_bucket([use(0, 33), use(1, 1), use(2, 64)], 2)
    assert [(s.name, s.offset, s.numel) for s in plan.slots] == [
        ("p0", 0, 33),
        ("p1", 64, 1),
        ("p2", 96, 64),
    ]


@pytest.mark.parametrize(
    ("numel", "world_size", "chunk"),
    [(1, 1, 32), (1, 4, 32), (64, 2, 32), (65, 2, 64), (96, 1, 96), (1000, 3, 352)],
)
def test_chunks_are_rounded_up_to_the_alignment(numel, world_size, chunk):
    plan = plan_bucket([use(0, numel)], world_size)
    assert plan.chunk == chunk
    assert plan.padded == chunk * world_size >= numel


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 500), min_size=1, max_size=6), st.integers(1, 9))
def test_padding_is_bounded(numels, world_size):
    plan = plan_bucket([use(i, n) for i, n in enumerate(numels)], world_size)
    assert plan.padded - sum(numels) < ALIGNMENT * (len(numels) + world_size)


def test_a_slot_keeps_shape_stride_and_what_trains():
    plan = plan_bucket([use(0, 6, shape=(2, 3), stride=(1, 2), trainable=False)], 2)
    (slot,) = plan.slots
    assert (slot.shape, slot.stride, slot.trainable) == ((2, 3), (1, 2), False)


def test_a_bucket_stores_the_parameters_dtype_not_the_gathers():
    plan = plan_bucket([use(0, gather_dtype=torch.bfloat16)], 2)
    assert (plan.dtype, plan.device, plan.world_size) == ("float32", "cpu", 2)


# ------------------------------------------------------------------------------ of a model


def test_a_models_layers_are_laid_out_in_order_of_use():
    assert [[s.name for s in b.slots] for b in mlp().buckets] == [
        ["0.weight", "0.bias"],
        ["2.weight", "2.bias"],
        ["4.weight", "4.bias"],
    ]


def test_the_layout_does_not_depend_on_activation_shapes():
    layouts = [
        record(make_mlp(), torch.randn(batch, 8), bucket_bytes=512).buckets for batch in (1, 5)
    ]
    assert layouts[0] == layouts[1]


def test_world_sizes_differ_only_in_chunks():
    layouts = [mlp(world_size).buckets for world_size in (1, 2, 4)]
    assert len({tuple(b.slots for b in layout) for layout in layouts}) == 1
    for layout, world_size in zip(layouts, (1, 2, 4), strict=True):
        for b in layout:
            assert b.world_size == world_size
            assert b.chunk == math.ceil(math.ceil(_extent(b) / world_size) / 32) * 32


def _extent(bucket) -> int:
    last = bucket.slots[-1]
    return last.offset + math.ceil(last.numel / 32) * 32


def test_frozen_parameters_have_buckets_of_their_own():
    model = make_mlp()
    model[2].requires_grad_(False)
    buckets = record(model, torch.randn(3, 8)).buckets
    assert [{s.trainable for s in b.slots} for b in buckets] == [{True}, {False}]


def test_parameters_gathered_narrow_and_as_stored_are_kept_apart():
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.low, self.high = Autocast(nn.Linear(8, 8)), nn.LayerNorm(8)

        def forward(self, x):
            return self.high(self.low(x).float())

    recording = record(Mixed(), torch.randn(3, 8))
    assert [[s.name for s in b.slots] for b in recording.buckets] == [
        ["low.inner.bias", "low.inner.weight"],
        ["high.weight", "high.bias"],
    ]
    gathered = {s.bucket: s.dtype for p in recording.plans.values() for s in p.steps[:4]}
    assert gathered == {0: "bfloat16", 1: "float32"}


def test_small_parameters_share_buckets_with_their_like_only():
    uses = [use(0, 100), use(1, 8), use(2, 100), use(3, 8)]
    assert numbers(group_uses(uses, LayoutPolicy(1 << 20, small=8))) == [[0, 2], [1, 3]]


def test_a_bucket_holds_no_more_elements_than_asked_for():
    uses = [use(0, 60), use(1, 60), use(2, 200)]
    assert numbers(group_uses(uses, LayoutPolicy(1 << 20, elements=120))) == [[0, 1], [2]]
