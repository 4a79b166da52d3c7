"""regather_in_backward: backward is handed shards and activations, never a gathered parameter."""

import torch
import torch.nn.functional as F
from expecttest import TestCase
from torch import nn
from torch.fx import GraphModule, Node

from graphs import BACKWARD, FORWARD, JOINT, mlp, named, record, snapshot, text, traced
from zero_compile.analysis.fx_graph import calls, output_node
from zero_compile.passes.regather_in_backward import regather_in_backward
from zero_runtime import compat
from zero_runtime.ir import ops


class WeightNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8, 1))
        self.direction = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        norm = self.direction.norm(dim=1, keepdim=True)
        return torch.relu(F.linear(x, self.scale * self.direction / norm))


class DroppedWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ F.dropout(self.weight, 0.5))


def tagged(gm: GraphModule) -> list[str]:
    return [n.name for n in gm.graph.nodes if n.meta.get("recompute") is compat.MUST_RECOMPUTE]


def derived_from_parameters_alone(gm: GraphModule) -> set[Node]:
    """By definition: a computation all of whose inputs are gathers, or computations of that kind."""
    found: set[Node] = set()
    for node in gm.graph.nodes:
        inputs = node.all_input_nodes
        if node.target is ops.gather or (
            node.op == "call_function" and inputs and found.issuperset(inputs)
        ):
            found.add(node)
    return found


class Snapshot(TestCase):
    @snapshot
    def test_before(self):
        gm = record(WeightNorm(), torch.randn(3, 8)).before("regather_in_backward", JOINT)
        self.assertExpectedInline(
            text(gm),
            """\
primals_1: float32[8, 8]
primals_2: float32[8, 1]
primals_3: float32[3, 8]
tangents_1: float32[3, 8]
gather = zero3.gather(primals_1, 0)
gather_1 = zero3.gather(primals_2, 1)
pow_1 = aten.pow.Tensor_Scalar(gather, 2)
sum_1 = aten.sum.dim_IntList(pow_1, [1], True)
pow_2 = aten.pow.Tensor_Scalar(sum_1, 0.5)
mul = aten.mul.Tensor(gather_1, gather)
div = aten.div.Tensor(mul, pow_2)
permute = aten.permute(div, [1, 0])
mm = aten.mm(primals_3, permute)
relu = aten.relu(mm)
le = aten.le.Scalar(relu, 0)
full_default = aten.full([], 0.0, dtype=float32, layout=torch.strided, device=cpu, pin_memory=False)
where = aten.where.self(le, full_default, tangents_1)
permute_1 = aten.permute(where, [1, 0])
mm_1 = aten.mm(permute_1, primals_3)
div_1 = aten.div.Tensor(mul, pow_2)
div_2 = aten.div.Tensor(div_1, pow_2)
neg = aten.neg(mm_1)
mul_1 = aten.mul.Tensor(neg, div_2)
div_3 = aten.div.Tensor(mm_1, pow_2)
sum_2 = aten.sum.dim_IntList(mul_1, [1], True)
mul_2 = aten.mul.Tensor(div_3, gather_1)
mul_3 = aten.mul.Tensor(div_3, gather)
sum_3 = aten.sum.dim_IntList(mul_3, [1], True)
div_4 = aten.div.Tensor(gather, pow_2)
eq = aten.eq.Scalar(pow_2, 0)
full_default_1 = aten.full([], 0.0, dtype=float32, layout=torch.strided, device=cpu, pin_memory=False)
where_1 = aten.where.self(eq, full_default_1, div_4)
mul_4 = aten.mul.Tensor(sum_2, where_1)
add = aten.add.Tensor(mul_2, mul_4)
reduce = zero3.reduce(sum_3, 1)
reduce_1 = zero3.reduce(add, 0)
return [relu, reduce_1, reduce, None]
""",
        )

    @snapshot
    def test_after(self):
        gm = record(WeightNorm(), torch.randn(3, 8)).after("regather_in_backward", JOINT)
        self.assertExpectedInline(
            text(gm),
            """\
primals_1: float32[8, 8]
primals_2: float32[8, 1]
primals_3: float32[3, 8]
tangents_1: float32[3, 8]
gather = zero3.gather(primals_1, 0)  # recompute
gather_1 = zero3.gather(primals_2, 1)  # recompute
pow_1 = aten.pow.Tensor_Scalar(gather, 2)  # recompute
sum_1 = aten.sum.dim_IntList(pow_1, [1], True)  # recompute
pow_2 = aten.pow.Tensor_Scalar(sum_1, 0.5)  # recompute
mul = aten.mul.Tensor(gather_1, gather)  # recompute
div = aten.div.Tensor(mul, pow_2)  # recompute
permute = aten.permute(div, [1, 0])  # recompute
mm = aten.mm(primals_3, permute)
relu = aten.relu(mm)
le = aten.le.Scalar(relu, 0)
full_default = aten.full([], 0.0, dtype=float32, layout=torch.strided, device=cpu, pin_memory=False)
where = aten.where.self(le, full_default, tangents_1)
permute_1 = aten.permute(where, [1, 0])
mm_1 = aten.mm(permute_1, primals_3)
div_1 = aten.div.Tensor(mul, pow_2)  # recompute
div_2 = aten.div.Tensor(div_1, pow_2)  # recompute
neg = aten.neg(mm_1)
mul_1 = aten.mul.Tensor(neg, div_2)
div_3 = aten.div.Tensor(mm_1, pow_2)
sum_2 = aten.sum.dim_IntList(mul_1, [1], True)
mul_2 = aten.mul.Tensor(div_3, gather_1)
mul_3 = aten.mul.Tensor(div_3, gather)
sum_3 = aten.sum.dim_IntList(mul_3, [1], True)
div_4 = aten.div.Tensor(gather, pow_2)  # recompute
eq = aten.eq.Scalar(pow_2, 0)  # recompute
full_default_1 = aten.full([], 0.0, dtype=float32, layout=torch.strided, device=cpu, pin_memory=False)
where_1 = aten.where.self(eq, full_default_1, div_4)
mul_4 = aten.mul.Tensor(sum_2, where_1)
add = aten.add.Tensor(mul_2, mul_4)
reduce = zero3.reduce(sum_3, 1)
reduce_1 = zero3.reduce(add, 0)
return [relu, reduce_1, reduce, None]
""",
        )


def test_what_derives_from_parameters_alone_is_tagged_and_nothing_else():
    gm = traced(
        lambda p, q, x: (x @ (ops.gather(p, 0) * ops.gather(q, 1)).t()).relu(),
        *(torch.randn(4, 4) for _ in range(3)),
    )
    regather_in_backward(gm)
    assert tagged(gm) == ["gather", "gather_1", "mul", "t"]


def test_tags_are_one_region_beyond_the_users_own():
    gm = traced(lambda p, x: x @ ops.gather(p, 0).t(), torch.randn(4, 4), torch.randn(4, 4))
    regather_in_backward(gm)
    assert {named(gm, n).meta["ac_graph_id"] for n in tagged(gm)} == {100_000}


def test_a_random_operation_on_a_parameter_is_not_recomputed():
    gm = traced(
        lambda p, x: x @ (torch.bernoulli(ops.gather(p, 0)) * ops.gather(p, 0)),
        torch.rand(4, 4),
        torch.randn(4, 4),
    )
    regather_in_backward(gm)
    assert tagged(gm) == ["gather", "gather_1"]


def test_a_reduction_is_not_recomputed():
    gm = traced(lambda p: ops.reduce(ops.gather(p, 0), 0), torch.randn(4, 4))
    regather_in_backward(gm)
    assert tagged(gm) == ["gather"]


def test_forward_saves_no_gathered_or_derived_tensor():
    for model in (WeightNorm(), nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))):
        recording = record(model, torch.randn(3, 8))
        forward = recording.before("sink_casts", FORWARD)
        saved = set(output_node(forward.graph).all_input_nodes)
        assert not saved & derived_from_parameters_alone(forward)


def test_backward_gathers_what_it_reads_of_parameters():
    recording = record(WeightNorm(), torch.randn(3, 8))
    backward = recording.before("sink_casts", BACKWARD)
    gathers = calls(backward.graph, ops.gather)
    assert sorted(g.args[1] for g in gathers) == [0, 1]
    assert all(g.args[0].op == "placeholder" for g in gathers)


def test_backward_does_not_gather_what_it_does_not_read():
    backward = mlp().before("sink_casts", BACKWARD)
    read = {g.args[1] for g in calls(backward.graph, ops.gather)}
    assert read == {2, 4}, "the weights that carry the gradient on, not the first, and no bias"


def test_activations_are_saved_not_recomputed():
    backward = mlp().before("sink_casts", BACKWARD)
    assert not calls(backward.graph, torch.ops.aten.addmm.default)
    assert not calls(backward.graph, torch.ops.aten.relu.default)


def test_backward_reuses_the_mask_that_forward_drew():
    recording = record(DroppedWeight(), torch.randn(3, 8))
    random = {torch.ops.prims.inductor_random.default, torch.ops.aten.bernoulli.p}
    assert any(n.target in random for n in recording.scheduled(FORWARD).graph.nodes)
    assert not any(n.target in random for n in recording.scheduled(BACKWARD).graph.nodes)
