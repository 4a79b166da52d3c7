"""sink_casts: casts move to the cheap side of a transfer."""

import pytest
import torch
from expecttest import TestCase
from torch import nn
from torch.fx import GraphModule

from graphs import BACKWARD, FORWARD, Autocast, Recording, make_mlp, record, snapshot, text, traced
from zero_compile.analysis.fx_graph import calls
from zero_compile.passes.sink_casts import sink_casts
from zero_runtime.ir import ops

aten, prims = torch.ops.aten, torch.ops.prims
P, X = torch.randn(4, 4), torch.randn(4, 4)


def cast(x: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return prims.convert_element_type.default(x, dtype)


def casts(gm: GraphModule) -> int:
    targets = (prims.convert_element_type.default, aten._to_copy.default)
    return sum(len(calls(gm.graph, target)) for target in targets)


def gathered(gm: GraphModule) -> list[torch.dtype | None]:
    """The dtype each gather asks for; None leaves it as stored."""
    return [g.args[2] if len(g.args) > 2 else None for g in calls(gm.graph, ops.gather)]


@pytest.fixture(scope="module")
def recording() -> Recording:
    return record(Autocast(make_mlp()), torch.randn(3, 8), bucket_bytes=512)


class Snapshot(TestCase):
    @pytest.fixture(autouse=True)
    def _recording(self, recording):
        self.recording = recording

    @snapshot
    def test_forward_before(self):
        self.assertExpectedInline(
            text(self.recording.before("sink_casts", FORWARD)),
            """\
primals_1: float32[16, 8]
primals_2: float32[16]
primals_3: float32[3, 8]
primals_4: float32[8, 16]
primals_5: float32[8]
primals_6: float32[4, 8]
primals_7: float32[4]
gather = zero3.gather(primals_1, 0)  # recompute
gather_1 = zero3.gather(primals_2, 1)  # recompute
gather_2 = zero3.gather(primals_4, 2)  # recompute
gather_3 = zero3.gather(primals_5, 3)  # recompute
gather_4 = zero3.gather(primals_6, 4)  # recompute
gather_5 = zero3.gather(primals_7, 5)  # recompute
convert_element_type = prims.convert_element_type(gather_1, bfloat16)  # recompute
convert_element_type_1 = prims.convert_element_type(gather, bfloat16)  # recompute
convert_element_type_2 = prims.convert_element_type(primals_3, bfloat16)
permute = aten.permute(convert_element_type_1, [1, 0])  # recompute
addmm = aten.addmm(convert_element_type, convert_element_type_2, permute)
relu = aten.relu(addmm)
convert_element_type_6 = prims.convert_element_type(gather_3, bfloat16)  # recompute
convert_element_type_7 = prims.convert_element_type(gather_2, bfloat16)  # recompute
permute_1 = aten.permute(convert_element_type_7, [1, 0])  # recompute
addmm_1 = aten.addmm(convert_element_type_6, relu, permute_1)
relu_1 = aten.relu(addmm_1)
convert_element_type_11 = prims.convert_element_type(gather_5, bfloat16)  # recompute
convert_element_type_12 = prims.convert_element_type(gather_4, bfloat16)  # recompute
permute_2 = aten.permute(convert_element_type_12, [1, 0])  # recompute
addmm_2 = aten.addmm(convert_element_type_11, relu_1, permute_2)
return [addmm_2, primals_4, primals_6, convert_element_type_2, relu, relu_1]
""",
        )

    @snapshot
    def test_forward_after(self):
        self.assertExpectedInline(
            text(self.recording.after("sink_casts", FORWARD)),
            """\
primals_1: float32[16, 8]
primals_2: float32[16]
primals_3: float32[3, 8]
primals_4: float32[8, 16]
primals_5: float32[8]
primals_6: float32[4, 8]
primals_7: float32[4]
gather = zero3.gather(primals_1, 0, bfloat16)  # recompute
gather_1 = zero3.gather(primals_2, 1, bfloat16)  # recompute
gather_2 = zero3.gather(primals_4, 2, bfloat16)  # recompute
gather_3 = zero3.gather(primals_5, 3, bfloat16)  # recompute
gather_4 = zero3.gather(primals_6, 4, bfloat16)  # recompute
gather_5 = zero3.gather(primals_7, 5, bfloat16)  # recompute
convert_element_type_2 = prims.convert_element_type(primals_3, bfloat16)
permute = aten.permute(gather, [1, 0])  # recompute
addmm = aten.addmm(gather_1, convert_element_type_2, permute)
relu = aten.relu(addmm)
permute_1 = aten.permute(gather_2, [1, 0])  # recompute
addmm_1 = aten.addmm(gather_3, relu, permute_1)
relu_1 = aten.relu(addmm_1)
permute_2 = aten.permute(gather_4, [1, 0])  # recompute
addmm_2 = aten.addmm(gather_5, relu_1, permute_2)
return [addmm_2, primals_4, primals_6, convert_element_type_2, relu, relu_1]
""",
        )

    @snapshot
    def test_backward_before(self):
        self.assertExpectedInline(
            text(self.recording.before("sink_casts", BACKWARD)),
            """\
primals_4: float32[8, 16]
primals_6: float32[4, 8]
convert_element_type_2: bfloat16[3, 8]
relu: bfloat16[3, 16]
relu_1: bfloat16[3, 8]
tangents_1: bfloat16[3, 4]
gather_4 = zero3.gather(primals_6, 4)  # recompute
convert_element_type_12 = prims.convert_element_type(gather_4, bfloat16)  # recompute
permute_2 = aten.permute(convert_element_type_12, [1, 0])  # recompute
permute_3 = aten.permute(permute_2, [1, 0])  # recompute
mm = aten.mm(tangents_1, permute_3)
permute_4 = aten.permute(tangents_1, [1, 0])
mm_1 = aten.mm(permute_4, relu_1)
sum_1 = aten.sum.dim_IntList(tangents_1, [0], True)
view = aten.view(sum_1, [4])
convert_element_type_20 = prims.convert_element_type(mm_1, float32)
convert_element_type_21 = prims.convert_element_type(view, float32)
le = aten.le.Scalar(relu_1, 0)
full_default = aten.full([], 0.0, dtype=bfloat16, layout=torch.strided, device=cpu, pin_memory=False)
where = aten.where.self(le, full_default, mm)
gather_2 = zero3.gather(primals_4, 2)  # recompute
convert_element_type_7 = prims.convert_element_type(gather_2, bfloat16)  # recompute
permute_1 = aten.permute(convert_element_type_7, [1, 0])  # recompute
permute_7 = aten.permute(permute_1, [1, 0])  # recompute
mm_2 = aten.mm(where, permute_7)
permute_8 = aten.permute(where, [1, 0])
mm_3 = aten.mm(permute_8, relu)
sum_2 = aten.sum.dim_IntList(where, [0], True)
view_1 = aten.view(sum_2, [8])
convert_element_type_26 = prims.convert_element_type(mm_3, float32)
convert_element_type_27 = prims.convert_element_type(view_1, float32)
le_1 = aten.le.Scalar(relu, 0)
where_1 = aten.where.self(le_1, full_default, mm_2)
permute_11 = aten.permute(where_1, [1, 0])
mm_4 = aten.mm(permute_11, convert_element_type_2)
sum_3 = aten.sum.dim_IntList(where_1, [0], True)
view_2 = aten.view(sum_3, [16])
convert_element_type_30 = prims.convert_element_type(mm_4, float32)
convert_element_type_31 = prims.convert_element_type(view_2, float32)
reduce = zero3.reduce(convert_element_type_21, 5)
reduce_1 = zero3.reduce(convert_element_type_20, 4)
reduce_2 = zero3.reduce(convert_element_type_27, 3)
reduce_3 = zero3.reduce(convert_element_type_26, 2)
reduce_4 = zero3.reduce(convert_element_type_31, 1)
reduce_5 = zero3.reduce(convert_element_type_30, 0)
return [reduce_5, reduce_4, None, reduce_3, reduce_2, reduce_1, reduce]
""",
        )

    @snapshot
    def test_backward_after(self):
        self.assertExpectedInline(
            text(self.recording.after("sink_casts", BACKWARD)),
            """\
primals_4: float32[8, 16]
primals_6: float32[4, 8]
convert_element_type_2: bfloat16[3, 8]
relu: bfloat16[3, 16]
relu_1: bfloat16[3, 8]
tangents_1: bfloat16[3, 4]
gather_4 = zero3.gather(primals_6, 4, bfloat16)  # recompute
permute_2 = aten.permute(gather_4, [1, 0])  # recompute
permute_3 = aten.permute(permute_2, [1, 0])  # recompute
mm = aten.mm(tangents_1, permute_3)
permute_4 = aten.permute(tangents_1, [1, 0])
mm_1 = aten.mm(permute_4, relu_1)
sum_1 = aten.sum.dim_IntList(tangents_1, [0], True)
view = aten.view(sum_1, [4])
le = aten.le.Scalar(relu_1, 0)
full_default = aten.full([], 0.0, dtype=bfloat16, layout=torch.strided, device=cpu, pin_memory=False)
where = aten.where.self(le, full_default, mm)
gather_2 = zero3.gather(primals_4, 2, bfloat16)  # recompute
permute_1 = aten.permute(gather_2, [1, 0])  # recompute
permute_7 = aten.permute(permute_1, [1, 0])  # recompute
mm_2 = aten.mm(where, permute_7)
permute_8 = aten.permute(where, [1, 0])
mm_3 = aten.mm(permute_8, relu)
sum_2 = aten.sum.dim_IntList(where, [0], True)
view_1 = aten.view(sum_2, [8])
le_1 = aten.le.Scalar(relu, 0)
where_1 = aten.where.self(le_1, full_default, mm_2)
permute_11 = aten.permute(where_1, [1, 0])
mm_4 = aten.mm(permute_11, convert_element_type_2)
sum_3 = aten.sum.dim_IntList(where_1, [0], True)
view_2 = aten.view(sum_3, [16])
reduce = zero3.reduce(view, 5)
reduce_1 = zero3.reduce(mm_1, 4)
reduce_2 = zero3.reduce(view_1, 3)
reduce_3 = zero3.reduce(mm_3, 2)
reduce_4 = zero3.reduce(view_2, 1)
reduce_5 = zero3.reduce(mm_4, 0)
return [reduce_5, reduce_4, None, reduce_3, reduce_2, reduce_1, reduce]
""",
        )


def test_autocast_gathers_float32_shards_in_bfloat16(recording):
    for graph in (FORWARD, BACKWARD):
        assert set(gathered(recording.after("sink_casts", graph))) == {torch.bfloat16}
    assert {bucket.dtype for bucket in recording.buckets} == {"float32"}
    starts = [s for p in recording.plans.values() for s in p.steps if s.kind == "all_gather_start"]
    assert {s.dtype for s in starts} == {"bfloat16"}
    assert all(s.bytes == recording.buckets[s.bucket].padded * 2 for s in starts)


def test_autocast_reduces_gradients_before_their_cast(recording):
    gm = recording.after("sink_casts", BACKWARD)
    reduced = [r.args[0].meta["val"].dtype for r in calls(gm.graph, ops.reduce)]
    assert set(reduced) == {torch.bfloat16}


@pytest.mark.parametrize("to", [cast, lambda x: x.to(torch.bfloat16)])
def test_a_cast_of_a_gather_becomes_a_narrow_gather(to):
    gm = sink_casts(traced(lambda p, x: to(ops.gather(p, 0)) @ to(x), P, X), bucket_of={0: 0})
    (gather,) = calls(gm.graph, ops.gather)
    assert gather.args[2] is torch.bfloat16
    assert gather.meta["val"].dtype is torch.bfloat16
    assert casts(gm) == 1, "the input's cast stays"


def test_several_casts_to_one_dtype_become_one_gather():
    def function(p, x):
        whole = ops.gather(p, 0)
        return cast(x) @ cast(whole), cast(whole) + 1

    gm = sink_casts(traced(function, P, X), bucket_of={0: 0})
    assert gathered(gm) == [torch.bfloat16]
    assert casts(gm) == 1


@pytest.mark.parametrize(
    "use",
    [
        pytest.param(lambda w, x: (cast(w) @ cast(x), w @ x), id="also read as stored"),
        pytest.param(lambda w, x: (cast(w), cast(w, torch.float16)), id="two dtypes"),
        pytest.param(lambda w, x: (cast(w, torch.float64) @ x.double(),), id="wider"),
        pytest.param(lambda w, x: (cast(w, torch.int8),), id="not floating point"),
        pytest.param(lambda w, x: (w @ x,), id="no cast"),
    ],
)
def test_a_gather_is_left_alone_unless_all_users_want_one_narrower_dtype(use):
    gm = traced(lambda p, x: use(ops.gather(p, 0), x), P, X)
    before = text(gm)
    assert text(sink_casts(gm, bucket_of={0: 0})) == before


def test_a_cast_that_also_moves_or_restrides_is_left_alone():
    def function(p):
        return aten._to_copy.default(
            ops.gather(p, 0), dtype=torch.bfloat16, memory_format=torch.contiguous_format
        )

    gm = sink_casts(traced(function, P), bucket_of={0: 0})
    assert gathered(gm) == [None]
    assert casts(gm) == 1


def test_a_bucket_is_narrowed_only_as_a_whole():
    def function(p, q, r):
        return cast(ops.gather(p, 0)), ops.gather(q, 1) + 1, cast(ops.gather(r, 2))

    gm = sink_casts(traced(function, P, P, P), bucket_of={0: 0, 1: 0, 2: 1})
    assert gathered(gm) == [None, None, torch.bfloat16]
    assert casts(gm) == 1


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
def test_an_exact_cast_of_a_gradient_is_left_to_packing(narrow):
    gm = traced(lambda g: ops.reduce(cast(g, torch.float32), 0), X.to(narrow))
    sink_casts(gm, bucket_of={0: 0})
    (reduce,) = calls(gm.graph, ops.reduce)
    assert reduce.args[0].op == "placeholder"
    assert not casts(gm)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (torch.float32, torch.bfloat16),
        (torch.float64, torch.float32),
        (torch.float16, torch.bfloat16),
        (torch.bfloat16, torch.float16),
        (torch.int32, torch.float32),
    ],
)
def test_a_cast_that_rounds_is_kept(source, target):
    gm = traced(lambda g: ops.reduce(cast(g, target), 0), torch.zeros(4, dtype=source))
    sink_casts(gm, bucket_of={0: 0})
    assert casts(gm) == 1


def test_a_cast_gradient_that_others_read_is_kept():
    def function(g):
        wide = cast(g, torch.float32)
        return ops.reduce(wide, 0), wide.sum()

    gm = sink_casts(traced(function, X.bfloat16()), bucket_of={0: 0})
    assert casts(gm) == 1


def test_a_plain_gradient_is_reduced_as_it_is():
    gm = traced(lambda g: ops.reduce(g + 1, 0), X)
    before = text(gm)
    assert text(sink_casts(gm, bucket_of={0: 0})) == before


def test_parameters_stored_narrow_need_no_cast():
    model = nn.Linear(8, 8, dtype=torch.bfloat16)
    recording = record(model, torch.randn(3, 8, dtype=torch.bfloat16))
    assert {s.dtype for p in recording.plans.values() for s in p.steps} == {"bfloat16"}
