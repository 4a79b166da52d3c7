"""bucket_reductions: one collective a bucket, started once its last gradient is there."""

import pytest
import torch
from expecttest import TestCase
from torch import nn
from torch.fx import GraphModule

from graphs import BACKWARD, index, laid_out, mlp, record, snapshot, text, traced
from zero_compile.analysis.fx_graph import calls, output_node
from zero_compile.passes.bucket_reductions import bucket_reductions
from zero_runtime.ir import ops

P, Q, X = torch.randn(8, 4), torch.randn(8, 4), torch.randn(8, 4)


def bucketed(function, *inputs: torch.Tensor, buckets_of=(0, 0)) -> GraphModule:
    """Reductions of two parameters like P, in the buckets named."""
    gathers = traced(lambda p, q: (ops.gather(p, 0), ops.gather(q, 1)), P, Q)
    buckets, places = laid_out(gathers, 1 << 20 if buckets_of == (0, 0) else 1)
    return bucket_reductions(traced(function, *inputs), buckets=buckets, places=places)


class Snapshot(TestCase):
    @snapshot
    def test_before(self):
        self.assertExpectedInline(
            text(mlp().before("bucket_reductions", BACKWARD)),
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

    @snapshot
    def test_after(self):
        self.assertExpectedInline(
            text(mlp().after("bucket_reductions", BACKWARD)),
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
reduce_scatter_start_default = zero3.reduce_scatter_start([view, mm_1], token_default, 2, [1, 0])
reduce_scatter_wait_default = zero3.reduce_scatter_wait(reduce_scatter_start_default, token_default, 2, 32, float32, cpu)
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
reduce_scatter_start_default_1 = zero3.reduce_scatter_start([view_1, mm_3], token_default, 1, [1, 0])
reduce_scatter_wait_default_1 = zero3.reduce_scatter_wait(reduce_scatter_start_default_1, token_default, 1, 96, float32, cpu)
le_1 = aten.le.Scalar(relu, 0)
where_1 = aten.where.self(le_1, full_default, mm_2)
permute_11 = aten.permute(where_1, [1, 0])
mm_4 = aten.mm(permute_11, primals_3)
sum_3 = aten.sum.dim_IntList(where_1, [0], True)
view_2 = aten.view(sum_3, [16])
reduce_scatter_start_default_2 = zero3.reduce_scatter_start([view_2, mm_4], token_default, 0, [1, 0])
reduce_scatter_wait_default_2 = zero3.reduce_scatter_wait(reduce_scatter_start_default_2, token_default, 0, 96, float32, cpu)
return [reduce_scatter_wait_default_2, reduce_scatter_wait_default_2, None, reduce_scatter_wait_default_1, reduce_scatter_wait_default_1, reduce_scatter_wait_default, reduce_scatter_wait_default]
""",
        )


def test_gradients_of_one_bucket_leave_in_one_collective():
    gm = bucketed(lambda x: (ops.reduce(x.sin(), 0), ops.reduce(x.cos(), 1)), X)
    (start,) = calls(gm.graph, ops.reduce_scatter_start)
    (wait,) = calls(gm.graph, ops.reduce_scatter_wait)
    assert [g.name for g in start.args[0]] == ["sin", "cos"]
    assert start.args[2:] == (0, [0, 1])
    assert wait.args[2:4] == (0, 32), "this rank's chunk of two parameters of 32 elements"
    assert not calls(gm.graph, ops.reduce)


def test_every_output_of_a_bucket_is_the_same_flat_chunk():
    gm = bucketed(lambda x: (ops.reduce(x.sin(), 0), ops.reduce(x.cos(), 1)), X)
    (wait,) = calls(gm.graph, ops.reduce_scatter_wait)
    assert list(output_node(gm.graph).args[0]) == [wait, wait]


def test_slots_follow_the_gradients_whatever_their_order():
    gm = bucketed(lambda x: (ops.reduce(x.cos(), 1), ops.reduce(x.sin(), 0)), X)
    (start,) = calls(gm.graph, ops.reduce_scatter_start)
    slots = dict(zip((g.name for g in start.args[0]), start.args[3], strict=True))
    assert slots == {"sin": 0, "cos": 1}


def test_a_bucket_of_which_only_a_part_has_gradients():
    gm = bucketed(lambda x: ops.reduce(x.sin(), 1), X)
    (start,) = calls(gm.graph, ops.reduce_scatter_start)
    assert start.args[3] == [1]


def test_buckets_are_reduced_apart_on_one_channel():
    gm = bucketed(lambda x: (ops.reduce(x.sin(), 0), ops.reduce(x.cos(), 1)), X, buckets_of=(0, 1))
    starts = calls(gm.graph, ops.reduce_scatter_start)
    assert [s.args[2] for s in starts] == [0, 1]
    assert len(calls(gm.graph, ops.token)) == 1


def test_a_reduction_starts_once_its_last_gradient_is_there():
    def function(x):
        first = x.sin()
        later = x.cos() @ x.t()
        return ops.reduce(first, 0), later

    gm = bucketed(function, X)
    (start,) = calls(gm.graph, ops.reduce_scatter_start)
    assert start.args[0][0].next is start


def test_a_reduction_does_not_wait_for_work_it_does_not_need():
    """The joint graph puts every logical reduction at its end, whenever the gradient was ready."""

    def function(x):
        first = x.sin()
        later = x.cos() @ x.t()
        second = later @ x
        return ops.reduce(first, 0), ops.reduce(second, 1)

    gm = bucketed(function, X, buckets_of=(0, 1))
    first, second = calls(gm.graph, ops.reduce_scatter_start)
    product = calls(gm.graph, torch.ops.aten.mm.default)[0]
    assert index(gm, first) < index(gm, product) < index(gm, second)


def test_reductions_of_a_model_overlap_with_its_backward():
    gm = mlp().after("bucket_reductions", BACKWARD)
    for start in calls(gm.graph, ops.reduce_scatter_start):
        ready = max(index(gm, gradient) for gradient in start.args[0])
        between = list(gm.graph.nodes)[ready + 1 : index(gm, start)]
        assert not [n.name for n in between if n.target is torch.ops.aten.mm.default]


def test_frozen_parameters_are_gathered_and_never_reduced():
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    model[1].weight.requires_grad_(False)
    recording = record(model, torch.randn(2, 8))
    reduced = calls(recording.scheduled(BACKWARD).graph, ops.reduce_scatter_start)
    names = [recording.buckets[s.args[2]].slots[i].name for s in reduced for i in s.args[3]]
    assert names == ["0.weight"]


def test_one_gradient_of_two_parameters_is_reduced_for_both():
    class TwoBiases(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))

        def forward(self, x):
            return torch.relu(x + self.a + self.b)

    recording = record(TwoBiases(), torch.randn(2, 4))
    (start,) = calls(recording.scheduled(BACKWARD).graph, ops.reduce_scatter_start)
    assert sorted(start.args[3]) == [0, 1]


def test_a_graph_without_gradients_is_left_alone():
    gm = traced(lambda x: x + 1, X)
    before = text(gm)
    assert text(bucket_reductions(gm, buckets=[], places={})) == before


class Shift(nn.Module):
    """The bias's gradient is backward's own input."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.bias


@pytest.mark.parametrize("backend", ["zero1", "zero2", "zero3"])
def test_a_gradient_that_is_an_input_of_backward_is_reduced(backend: str) -> None:
    model = Shift()
    torch.compile(model, backend=backend)(torch.ones(6)).sum().backward()
    assert model.bias.grad is not None
    assert float(model.bias.grad.sum()) == 6.0
