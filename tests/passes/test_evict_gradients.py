"""evict_gradients: reduced gradients go to the host where the optimizer works there."""

import pytest
import torch
from expecttest import TestCase
from torch import nn
from torch.fx import GraphModule

from graphs import BACKWARD, HOST, mlp, record, snapshot, text
from zero_compile.analysis.fx_graph import bucket_number, calls, output_node
from zero_compile.passes.evict_gradients import evict_gradients
from zero_compile.verify import verify_scheduled
from zero_runtime.errors import PlanError
from zero_runtime.ir import ops
from zero_runtime.ir.plan import Residence, Stage, Tier

ON_HOST = Residence(optimizer=Tier.HOST)


def before() -> GraphModule:
    return mlp(2, "one_ahead", HOST).before("evict_gradients", BACKWARD)


def after() -> GraphModule:
    return mlp(2, "one_ahead", HOST).after("evict_gradients", BACKWARD)


def scheduled() -> GraphModule:
    return mlp(2, "one_ahead", HOST).scheduled(BACKWARD)


def test_each_reduced_gradient_is_evicted_right_after_its_wait() -> None:
    gm = after()
    waits, evicts = calls(gm.graph, ops.reduce_scatter_wait), calls(gm.graph, ops.evict)
    assert [bucket_number(n) for n in evicts] == [bucket_number(n) for n in waits] == [2, 1, 0]
    for wait, evict in zip(waits, evicts, strict=True):
        assert wait.next is evict
        assert list(wait.users) == [evict]
        assert list(evict.users) == [output_node(gm.graph)]


def test_what_is_returned_is_the_same_chunk_on_the_host() -> None:
    for evict in calls(after().graph, ops.evict):
        wait = evict.all_input_nodes[0]
        assert evict.meta["val"].shape == wait.meta["val"].shape
        assert evict.meta["val"].dtype is wait.meta["val"].dtype
        assert evict.meta["val"].device == torch.device("cpu")


@pytest.mark.parametrize("residence", [None, Residence(parameters=Tier.HOST)])
def test_gradients_stay_where_the_optimizer_works_on_the_device(residence) -> None:
    assert not calls(
        mlp(2, "one_ahead", residence).after("evict_gradients", BACKWARD).graph, ops.evict
    )


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.NVME])
def test_where_the_optimizer_state_lies_off_the_device_does_not_matter(tier) -> None:
    residence = Residence(optimizer=tier)
    assert len(calls(mlp(2, "one_ahead", residence).scheduled(BACKWARD).graph, ops.evict)) == 3


@pytest.mark.parametrize(("stage", "count"), [(1, 0), (2, 3), (3, 3)])
def test_at_stage_1_gradients_are_whole_and_stay(stage, count) -> None:
    buckets = mlp(2, "one_ahead", HOST).buckets
    gm = evict_gradients(before(), buckets=buckets, stage=Stage(stage))
    assert len(calls(gm.graph, ops.evict)) == count


def test_a_planned_graph_evicts_too() -> None:
    gm = mlp(2, "planned", ON_HOST).scheduled(BACKWARD)
    assert len(calls(gm.graph, ops.evict)) == 3
    verify_scheduled(gm, gather_cache=frozenset(range(3)))


def test_a_gradient_of_two_parameters_is_evicted_once() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))

        def forward(self, x):
            return torch.relu(x + self.a + self.b)

    gm = record(Twice(), torch.randn(2, 4), residence=ON_HOST).scheduled(BACKWARD)
    (evict,) = calls(gm.graph, ops.evict)
    returned = output_node(gm.graph).args[0]
    assert [value is evict for value in returned].count(True) == 2


# ------------------------------------------------------------------------------ the check


def test_an_eviction_away_from_its_wait_is_refused() -> None:
    gm = scheduled()
    evict = calls(gm.graph, ops.evict)[0]
    calls(gm.graph, ops.evict)[1].append(evict)
    with pytest.raises(PlanError, match=f"{evict.name} does not directly follow the wait"):
        verify_scheduled(gm)


def test_a_gradient_that_is_returned_beside_its_eviction_is_refused() -> None:
    gm = scheduled()
    evict = calls(gm.graph, ops.evict)[0]
    wait, output = evict.all_input_nodes[0], output_node(gm.graph)
    output.args = ([wait, *output.args[0]],)
    with pytest.raises(PlanError, match=f"'output'.* read {wait.name}, which is evicted"):
        verify_scheduled(gm)


class Snapshot(TestCase):
    @snapshot
    def test_before(self):
        self.assertExpectedInline(
            text(before()),
            """\
primals_3: float32[3, 8]
primals_4: float32[8, 16]
primals_6: float32[4, 8]
relu: float32[3, 16]
relu_1: float32[3, 8]
tangents_1: float32[3, 4]
token_default = zero3.token()
fetch_start_default = zero3.fetch_start(token_default, 2)
all_gather_start_default = zero3.all_gather_start(token_default, 2, float32)
fetch_start_default_1 = zero3.fetch_start(token_default, 1)
all_gather_start_default_1 = zero3.all_gather_start(token_default, 1, float32)
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
le = aten.le.Scalar(relu_1, 0)
full_default = aten.full([], 0.0, dtype=float32, layout=torch.strided, device=cpu, pin_memory=False)
where = aten.where.self(le, full_default, mm)
all_gather_wait_default_1 = zero3.all_gather_wait(all_gather_start_default_1, token_default, 1, 192, float32, cpu)
as_strided_default_1 = aten.as_strided(all_gather_wait_default_1, [8, 16], [16, 1])
permute_1 = aten.permute(as_strided_default_1, [1, 0])  # recompute
permute_7 = aten.permute(permute_1, [1, 0])  # recompute
mm_2 = aten.mm(where, permute_7)
permute_8 = aten.permute(where, [1, 0])
mm_3 = aten.mm(permute_8, relu)
sum_2 = aten.sum.dim_IntList(where, [0], True)
view_1 = aten.view(sum_2, [8])
reduce_scatter_wait_default = zero3.reduce_scatter_wait(reduce_scatter_start_default, token_default, 2, 32, float32, cpu)
reduce_scatter_start_default_1 = zero3.reduce_scatter_start([view_1, mm_3], token_default, 1, [1, 0])
le_1 = aten.le.Scalar(relu, 0)
where_1 = aten.where.self(le_1, full_default, mm_2)
permute_11 = aten.permute(where_1, [1, 0])
mm_4 = aten.mm(permute_11, primals_3)
sum_3 = aten.sum.dim_IntList(where_1, [0], True)
view_2 = aten.view(sum_3, [16])
reduce_scatter_wait_default_1 = zero3.reduce_scatter_wait(reduce_scatter_start_default_1, token_default, 1, 96, float32, cpu)
reduce_scatter_start_default_2 = zero3.reduce_scatter_start([view_2, mm_4], token_default, 0, [1, 0])
reduce_scatter_wait_default_2 = zero3.reduce_scatter_wait(reduce_scatter_start_default_2, token_default, 0, 96, float32, cpu)
return [reduce_scatter_wait_default_2, reduce_scatter_wait_default_2, None, reduce_scatter_wait_default_1, reduce_scatter_wait_default_1, reduce_scatter_wait_default, reduce_scatter_wait_default]
""",
        )

    @snapshot
    def test_after(self):
        self.assertExpectedInline(
            text(after()),
            """\
primals_3: float32[3, 8]
primals_4: float32[8, 16]
primals_6: float32[4, 8]
relu: float32[3, 16]
relu_1: float32[3, 8]
tangents_1: float32[3, 4]
token_default = zero3.token()
fetch_start_default = zero3.fetch_start(token_default, 2)
all_gather_start_default = zero3.all_gather_start(token_default, 2, float32)
fetch_start_default_1 = zero3.fetch_start(token_default, 1)
all_gather_start_default_1 = zero3.all_gather_start(token_default, 1, float32)
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
le = aten.le.Scalar(relu_1, 0)
full_default = aten.full([], 0.0, dtype=float32, layout=torch.strided, device=cpu, pin_memory=False)
where = aten.where.self(le, full_default, mm)
all_gather_wait_default_1 = zero3.all_gather_wait(all_gather_start_default_1, token_default, 1, 192, float32, cpu)
as_strided_default_1 = aten.as_strided(all_gather_wait_default_1, [8, 16], [16, 1])
permute_1 = aten.permute(as_strided_default_1, [1, 0])  # recompute
permute_7 = aten.permute(permute_1, [1, 0])  # recompute
mm_2 = aten.mm(where, permute_7)
permute_8 = aten.permute(where, [1, 0])
mm_3 = aten.mm(permute_8, relu)
sum_2 = aten.sum.dim_IntList(where, [0], True)
view_1 = aten.view(sum_2, [8])
reduce_scatter_wait_default = zero3.reduce_scatter_wait(reduce_scatter_start_default, token_default, 2, 32, float32, cpu)
evict_default = zero3.evict(reduce_scatter_wait_default, token_default, 2)
reduce_scatter_start_default_1 = zero3.reduce_scatter_start([view_1, mm_3], token_default, 1, [1, 0])
le_1 = aten.le.Scalar(relu, 0)
where_1 = aten.where.self(le_1, full_default, mm_2)
permute_11 = aten.permute(where_1, [1, 0])
mm_4 = aten.mm(permute_11, primals_3)
sum_3 = aten.sum.dim_IntList(where_1, [0], True)
view_2 = aten.view(sum_3, [16])
reduce_scatter_wait_default_1 = zero3.reduce_scatter_wait(reduce_scatter_start_default_1, token_default, 1, 96, float32, cpu)
evict_default_1 = zero3.evict(reduce_scatter_wait_default_1, token_default, 1)
reduce_scatter_start_default_2 = zero3.reduce_scatter_start([view_2, mm_4], token_default, 0, [1, 0])
reduce_scatter_wait_default_2 = zero3.reduce_scatter_wait(reduce_scatter_start_default_2, token_default, 0, 96, float32, cpu)
evict_default_2 = zero3.evict(reduce_scatter_wait_default_2, token_default, 0)
return [evict_default_2, evict_default_2, None, evict_default_1, evict_default_1, evict_default, evict_default]
""",
        )
