"""bucket_gathers: one collective a bucket; each parameter is a view of what arrives."""

import pytest
import torch
from expecttest import TestCase
from torch import nn
from torch.fx import GraphModule

from graphs import (
    BACKWARD,
    FORWARD,
    INFERENCE,
    call_before,
    index,
    laid_out,
    mlp,
    record,
    snapshot,
    text,
    traced,
)
from zero_compile.analysis.fx_graph import calls, output_node
from zero_compile.passes.bucket_gathers import bucket_gathers
from zero_runtime.ir import ops

P, Q, X = torch.randn(8, 4), torch.randn(8, 4), torch.randn(8, 4)
as_strided = torch.ops.aten.as_strided.default


def bucketed(function, *inputs: torch.Tensor, bucket_bytes: int = 1 << 20) -> GraphModule:
    gm = traced(function, *inputs)
    buckets, places = laid_out(gm, bucket_bytes)
    return bucket_gathers(gm, buckets=buckets, places=places)


class Returns(nn.Module):
    """A model that returns what ``take`` makes of its parameter, beside a result."""

    def __init__(self, take) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 4))
        self.take = take

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x @ self.weight, self.take(self.weight)


class Snapshot(TestCase):
    @snapshot
    def test_before(self):
        self.assertExpectedInline(
            text(mlp().before("bucket_gathers", BACKWARD)),
            """\
primals_3: float32[3, 8]
primals_4: float32[8, 16]
primals_6: float32[4, 8]
relu: float32[3, 16]
relu_1: float32[3, 8]
tangents_1: float32[3, 4]
gather_4 = zero3.gather(primals_6, 4)  # recompute
permute_2 = aten.permute(gather_4, [1, 0])  # recompute
permute_3 = aten.permute(permute_2, [1, 0])  # recompute
mm = aten.mm(tangents_1, permute_3)
permute_4 = aten.permute(tangents_1, [1, 0])
mm_1 = aten.mm(permute_4, relu_1)
sum_1 = aten.sum.dim_IntList(tangents_1, [0], True)
view = aten.view(sum_1, [4])
le = aten.le.Scalar(relu_1, 0)
full_default = aten.full([], 0.0, dtype=float32, layout=torch.strided, device=cpu, pin_memory=False)
where = aten.where.self(le, full_default, mm)
gather_2 = zero3.gather(primals_4, 2)  # recompute
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
mm_4 = aten.mm(permute_11, primals_3)
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

    @snapshot
    def test_after(self):
        self.assertExpectedInline(
            text(mlp().after("bucket_gathers", BACKWARD)),
            """\
primals_3: float32[3, 8]
primals_4: float32[8, 16]
primals_6: float32[4, 8]
relu: float32[3, 16]
relu_1: float32[3, 8]
tangents_1: float32[3, 4]
token_default = zero3.token()
all_gather_start_default = zero3.all_gather_start(token_default, 2, float32)
all_gather_wait_default = zero3.all_gather_wait(all_gather_start_default, token_default, 2, 64, float32, cpu)
as_strided_default = aten.as_strided(all_gather_wait_default, [4, 8], [8, 1])
permute_2 = aten.permute(as_strided_default, [1, 0])  # recompute
permute_3 = aten.permute(permute_2, [1, 0])  # recompute
mm = aten.mm(tangents_1, permute_3)
permute_4 = aten.permute(tangents_1, [1, 0])
mm_1 = aten.mm(permute_4, relu_1)
sum_1 = aten.sum.dim_IntList(tangents_1, [0], True)
view = aten.view(sum_1, [4])
le = aten.le.Scalar(relu_1, 0)
full_default = aten.full([], 0.0, dtype=float32, layout=torch.strided, device=cpu, pin_memory=False)
where = aten.where.self(le, full_default, mm)
all_gather_start_default_1 = zero3.all_gather_start(token_default, 1, float32)
all_gather_wait_default_1 = zero3.all_gather_wait(all_gather_start_default_1, token_default, 1, 192, float32, cpu)
as_strided_default_1 = aten.as_strided(all_gather_wait_default_1, [8, 16], [16, 1])
permute_1 = aten.permute(as_strided_default_1, [1, 0])  # recompute
permute_7 = aten.permute(permute_1, [1, 0])  # recompute
mm_2 = aten.mm(where, permute_7)
permute_8 = aten.permute(where, [1, 0])
mm_3 = aten.mm(permute_8, relu)
sum_2 = aten.sum.dim_IntList(where, [0], True)
view_1 = aten.view(sum_2, [8])
le_1 = aten.le.Scalar(relu, 0)
where_1 = aten.where.self(le_1, full_default, mm_2)
permute_11 = aten.permute(where_1, [1, 0])
mm_4 = aten.mm(permute_11, primals_3)
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


def test_parameters_of_one_bucket_arrive_in_one_collective():
    gm = bucketed(lambda p, q: ops.gather(p, 0) + ops.gather(q, 1), P, Q)
    (wait,) = calls(gm.graph, ops.all_gather_wait)
    assert len(calls(gm.graph, ops.all_gather_start)) == 1
    views = calls(gm.graph, as_strided)
    assert [v.args for v in views] == [(wait, (8, 4), (4, 1)), (wait, (8, 4), (4, 1), 32)]
    assert not calls(gm.graph, ops.gather)


def test_views_have_the_parameters_own_strides():
    gm = bucketed(lambda p: ops.gather(p, 0) + 1, P.t())
    (view,) = calls(gm.graph, as_strided)
    assert view.args[1:3] == ((4, 8), (1, 4))
    assert view.meta["val"].stride() == (1, 4)


def test_buckets_share_one_channel_and_stand_at_their_first_use():
    gm = bucketed(
        lambda p, q, x: x.sin() * ops.gather(p, 0) + (x.cos() * ops.gather(q, 1)),
        P,
        Q,
        X,
        bucket_bytes=1,
    )
    assert len(calls(gm.graph, ops.token)) == 1
    starts, waits = calls(gm.graph, ops.all_gather_start), calls(gm.graph, ops.all_gather_wait)
    products = calls(gm.graph, torch.ops.aten.mul.Tensor)
    places = [index(gm, n) for pair in zip(starts, waits, products, strict=True) for n in pair]
    assert places == sorted(places)


@pytest.mark.parametrize(
    "view",
    [
        pytest.param(lambda w: w, id="itself"),
        pytest.param(lambda w: w.t(), id="transposed"),
        pytest.param(lambda w: w[1:3], id="slice"),
        pytest.param(lambda w: w.view(-1)[3:].unsqueeze(0), id="view of a view"),
        pytest.param(lambda w: w.chunk(2)[1], id="chunk"),
        pytest.param(lambda w: w.unbind()[2], id="unbind"),
        pytest.param(lambda w: w.expand(2, 8, 4), id="expanded"),
        pytest.param(lambda w: torch.ops.aten.clone.default(w), id="a copy that may vanish"),
    ],
)
def test_what_leaves_the_graph_is_copied_out_of_the_bucket(view):
    gm = bucketed(lambda p: view(ops.gather(p, 0)), P)
    (output,) = output_node(gm.graph).all_input_nodes
    assert output.target is ops.keep


def test_a_computed_output_is_not_copied():
    gm = bucketed(lambda p: ops.gather(p, 0) + 1, P)
    assert not calls(gm.graph, ops.keep)


def test_inner_readers_of_a_returned_view_read_the_bucket():
    def function(p, x):
        weight = ops.gather(p, 0)
        return weight, x * weight

    gm = bucketed(function, P, X)
    (view,) = calls(gm.graph, as_strided)
    (product,) = calls(gm.graph, torch.ops.aten.mul.Tensor)
    assert product.args[1] is view


@pytest.mark.parametrize("take", [lambda w: w.t(), lambda w: w[2:], lambda w: w.chunk(2)[0]])
def test_a_model_returns_a_copy_of_its_parameter(take):
    recording = record(Returns(take), torch.randn(2, 8), train=False, infer=True)
    gm = recording.scheduled(INFERENCE)
    assert output_node(gm.graph).all_input_nodes[-1].target is ops.keep


def test_a_tied_weight_is_gathered_once_a_graph():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(torch.relu(self.a(x)))

    recording = record(Tied(), torch.randn(2, 8))
    assert [len(b.slots) for b in recording.buckets] == [1]
    for graph in (FORWARD, BACKWARD):
        assert len(calls(recording.scheduled(graph).graph, ops.all_gather_start)) == 1


def test_a_parameter_that_no_graph_reads_is_in_no_bucket():
    model = nn.Linear(8, 8)
    model.register_parameter("idle", nn.Parameter(torch.ones(3)))
    recording = record(model, torch.randn(2, 8))
    assert [s.name for b in recording.buckets for s in b.slots] == ["weight", "bias"]
    assert model.idle.untyped_storage().nbytes() == 12
    assert torch.equal(model.idle.detach(), torch.ones(3))


def test_a_gather_that_nobody_reads_arrives_all_the_same():
    gm = traced(lambda p, x: x + 1, P, X)
    placeholder, _, first, _ = gm.graph.nodes
    call_before(first, ops.gather, placeholder, 0)
    buckets, places = laid_out(gm)
    bucket_gathers(gm, buckets=buckets, places=places)
    assert not calls(gm.graph, ops.gather)
    assert len(calls(gm.graph, ops.all_gather_wait)) == 1


def test_a_graph_without_parameters_is_left_alone():
    gm = traced(lambda x: x + 1, X)
    before = text(gm)
    assert text(bucket_gathers(gm, buckets=[], places={})) == before
