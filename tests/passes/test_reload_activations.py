"""reload_activations: what left the device in forward is there again for its first use in backward."""

import pytest
from expecttest import TestCase
from test_offload_activations import recorded
from torch.fx import GraphModule

from graphs import BACKWARD, named, names, snapshot, text
from zero_compile.analysis.fx_graph import calls
from zero_compile.passes.reload_activations import reload_activations
from zero_compile.scheduler.activations import Move
from zero_compile.verify import verify_moved
from zero_runtime.errors import PlanError
from zero_runtime.ir import ops
from zero_runtime.ir.plan import Tier


class Snapshot(TestCase):
    maxDiff = None

    @snapshot
    def test_before(self):
        gm = recorded().before("reload_activations", BACKWARD)
        self.assertExpectedInline(
            text(gm),
            """\
primals_3: float32[4096, 64]
primals_4: float32[64, 64]
primals_6: float32[64, 64]
primals_8: float32[64, 64]
relu: float32[4096, 64]
relu_1: float32[4096, 64]
relu_2: float32[4096, 64]
le: bool[4096, 64]
tangents_1: float32[4096, 64]
token_default = zero3.token()
full_default = aten.full([], 0.0, dtype=float32, layout=torch.strided, device=cpu, pin_memory=False)
where = aten.where.self(le, full_default, tangents_1)
all_gather_start_default = zero3.all_gather_start(token_default, 0, float32)
all_gather_wait_default = zero3.all_gather_wait(all_gather_start_default, token_default, 0, 16640, float32, cpu)
as_strided_default = aten.as_strided(all_gather_wait_default, [64, 64], [64, 1], 12480)
as_strided_default_1 = aten.as_strided(all_gather_wait_default, [64, 64], [64, 1], 8320)
as_strided_default_2 = aten.as_strided(all_gather_wait_default, [64, 64], [64, 1], 4160)
permute_3 = aten.permute(as_strided_default, [1, 0])  # recompute
permute_4 = aten.permute(permute_3, [1, 0])  # recompute
mm = aten.mm(where, permute_4)
permute_5 = aten.permute(where, [1, 0])
mm_1 = aten.mm(permute_5, relu_2)
sum_1 = aten.sum.dim_IntList(where, [0], True)
view = aten.view(sum_1, [64])
le_1 = aten.le.Scalar(relu_2, 0)
where_1 = aten.where.self(le_1, full_default, mm)
permute_2 = aten.permute(as_strided_default_1, [1, 0])  # recompute
permute_8 = aten.permute(permute_2, [1, 0])  # recompute
mm_2 = aten.mm(where_1, permute_8)
permute_9 = aten.permute(where_1, [1, 0])
mm_3 = aten.mm(permute_9, relu_1)
sum_2 = aten.sum.dim_IntList(where_1, [0], True)
view_1 = aten.view(sum_2, [64])
le_2 = aten.le.Scalar(relu_1, 0)
where_2 = aten.where.self(le_2, full_default, mm_2)
permute_1 = aten.permute(as_strided_default_2, [1, 0])  # recompute
permute_12 = aten.permute(permute_1, [1, 0])  # recompute
mm_4 = aten.mm(where_2, permute_12)
permute_13 = aten.permute(where_2, [1, 0])
mm_5 = aten.mm(permute_13, relu)
sum_3 = aten.sum.dim_IntList(where_2, [0], True)
view_2 = aten.view(sum_3, [64])
le_3 = aten.le.Scalar(relu, 0)
where_3 = aten.where.self(le_3, full_default, mm_4)
permute_16 = aten.permute(where_3, [1, 0])
mm_6 = aten.mm(permute_16, primals_3)
sum_4 = aten.sum.dim_IntList(where_3, [0], True)
view_3 = aten.view(sum_4, [64])
reduce_scatter_start_default = zero3.reduce_scatter_start([view, mm_1, view_1, mm_3, view_2, mm_5, view_3, mm_6], token_default, 0, [7, 6, 5, 4, 3, 2, 1, 0])
reduce_scatter_wait_default = zero3.reduce_scatter_wait(reduce_scatter_start_default, token_default, 0, 8320, float32, cpu)
return [reduce_scatter_wait_default, reduce_scatter_wait_default, None, reduce_scatter_wait_default, reduce_scatter_wait_default, reduce_scatter_wait_default, reduce_scatter_wait_default, reduce_scatter_wait_default, reduce_scatter_wait_default]
""",
        )

    @snapshot
    def test_after(self):
        gm = recorded().after("reload_activations", BACKWARD)
        self.assertExpectedInline(
            text(gm),
            """\
primals_3: float32[4096, 64]
primals_4: float32[64, 64]
primals_6: float32[64, 64]
primals_8: float32[64, 64]
relu: float32[262144]
relu_1: float32[4096, 64]
relu_2: float32[4096, 64]
le: bool[4096, 64]
tangents_1: float32[4096, 64]
token_default = zero3.token()
full_default = aten.full([], 0.0, dtype=float32, layout=torch.strided, device=cpu, pin_memory=False)
where = aten.where.self(le, full_default, tangents_1)
all_gather_start_default = zero3.all_gather_start(token_default, 0, float32)
all_gather_wait_default = zero3.all_gather_wait(all_gather_start_default, token_default, 0, 16640, float32, cpu)
as_strided_default = aten.as_strided(all_gather_wait_default, [64, 64], [64, 1], 12480)
as_strided_default_1 = aten.as_strided(all_gather_wait_default, [64, 64], [64, 1], 8320)
as_strided_default_2 = aten.as_strided(all_gather_wait_default, [64, 64], [64, 1], 4160)
permute_3 = aten.permute(as_strided_default, [1, 0])  # recompute
permute_4 = aten.permute(permute_3, [1, 0])  # recompute
mm = aten.mm(where, permute_4)
permute_5 = aten.permute(where, [1, 0])
mm_1 = aten.mm(permute_5, relu_2)
sum_1 = aten.sum.dim_IntList(where, [0], True)
view = aten.view(sum_1, [64])
le_1 = aten.le.Scalar(relu_2, 0)
where_1 = aten.where.self(le_1, full_default, mm)
permute_2 = aten.permute(as_strided_default_1, [1, 0])  # recompute
permute_8 = aten.permute(permute_2, [1, 0])  # recompute
mm_2 = aten.mm(where_1, permute_8)
permute_9 = aten.permute(where_1, [1, 0])
reload_start_default = zero3.reload_start(relu, token_default, 0, cpu)
mm_3 = aten.mm(permute_9, relu_1)
sum_2 = aten.sum.dim_IntList(where_1, [0], True)
view_1 = aten.view(sum_2, [64])
le_2 = aten.le.Scalar(relu_1, 0)
where_2 = aten.where.self(le_2, full_default, mm_2)
permute_1 = aten.permute(as_strided_default_2, [1, 0])  # recompute
permute_12 = aten.permute(permute_1, [1, 0])  # recompute
mm_4 = aten.mm(where_2, permute_12)
permute_13 = aten.permute(where_2, [1, 0])
reload_wait_default = zero3.reload_wait(token_default, 0, 262144, float32, cpu)
as_strided_default_3 = aten.as_strided(reload_wait_default, [4096, 64], [64, 1])
mm_5 = aten.mm(permute_13, as_strided_default_3)
sum_3 = aten.sum.dim_IntList(where_2, [0], True)
view_2 = aten.view(sum_3, [64])
le_3 = aten.le.Scalar(as_strided_default_3, 0)
where_3 = aten.where.self(le_3, full_default, mm_4)
permute_16 = aten.permute(where_3, [1, 0])
mm_6 = aten.mm(permute_16, primals_3)
sum_4 = aten.sum.dim_IntList(where_3, [0], True)
view_3 = aten.view(sum_4, [64])
reduce_scatter_start_default = zero3.reduce_scatter_start([view, mm_1, view_1, mm_3, view_2, mm_5, view_3, mm_6], token_default, 0, [7, 6, 5, 4, 3, 2, 1, 0])
reduce_scatter_wait_default = zero3.reduce_scatter_wait(reduce_scatter_start_default, token_default, 0, 8320, float32, cpu)
return [reduce_scatter_wait_default, reduce_scatter_wait_default, None, reduce_scatter_wait_default, reduce_scatter_wait_default, reduce_scatter_wait_default, reduce_scatter_wait_default, reduce_scatter_wait_default, reduce_scatter_wait_default]
""",
        )


def back(*moves: Move) -> GraphModule:
    """The backward with ``moves``, checked."""
    gm = recorded().before("reload_activations", BACKWARD)
    reload_activations(gm, moves=moves)
    verify_moved(gm)
    return gm


def move(name: str, reload: str | None, recall: str | None = "", tier: Tier = Tier.HOST) -> Move:
    return Move(name, tier, "", None, recall, reload)


@pytest.mark.parametrize("place", ["", "mm_1", "mm_3", "mm_6", None])
def test_a_tensor_sets_out_where_the_move_says_and_not_after_its_first_use(
    place: str | None,
) -> None:
    gm = back(move("relu_1", place))
    order, before = names(gm), names(recorded().before("reload_activations", BACKWARD))
    (start,), (wait,) = calls(gm.graph, ops.reload_start), calls(gm.graph, ops.reload_wait)
    first = next(u for u in wait.users).users
    assert order.index(start.name) < order.index(wait.name)
    assert order.index(wait.name) + 2 == min(order.index(u.name) for u in first)
    if place and before.index(place) < before.index(
        min(first, key=lambda u: order.index(u.name)).name
    ):
        assert order.index(start.name) + 1 == order.index(place)


def test_the_input_is_flat_and_on_the_host_and_its_copy_is_what_forward_had() -> None:
    gm = back(move("relu", ""))
    away, (wait,) = named(gm, "relu"), calls(gm.graph, ops.reload_wait)
    assert away.meta["val"].shape == (4096 * 64,)
    (saved,) = wait.users
    assert (saved.meta["val"].shape, saved.meta["val"].stride()) == ((4096, 64), (64, 1))


def test_tensors_set_out_in_the_order_of_their_first_uses() -> None:
    gm = back(move("relu", ""), move("relu_1", ""), move("relu_2", ""))
    starts = [start.all_input_nodes[0].name for start in calls(gm.graph, ops.reload_start)]
    assert starts == ["relu_2", "relu_1", "relu"]
    assert [start.args[2] for start in calls(gm.graph, ops.reload_start)] == [2, 1, 0]


def test_from_nvme_a_tensor_is_recalled_first() -> None:
    gm = back(move("relu", "mm_3", "mm_1", Tier.NVME))
    assert named(gm, "relu").meta["val"].shape == (8,)
    order = names(gm)
    recall = order.index("recall_start_default")
    assert recall + 1 == order.index("mm_1")
    assert recall < order.index("reload_start_default") < order.index("reload_wait_default")


def test_a_tensor_that_is_awaited_before_it_sets_out_is_refused() -> None:
    gm = back(move("relu", ""))
    (start,), (wait,) = calls(gm.graph, ops.reload_start), calls(gm.graph, ops.reload_wait)
    wait.append(start)
    with pytest.raises(PlanError, match="reload_wait_default stands before reload_start_default"):
        verify_moved(gm)


def test_a_tensor_that_never_arrives_is_refused() -> None:
    gm = back(move("relu", ""))
    gm.graph.erase_node(named(gm, "reload_start_default"))
    with pytest.raises(PlanError, match=r"reload_wait\.default moves \[0\], not \[\]"):
        verify_moved(gm)


def test_code_that_reads_what_is_off_the_device_is_refused() -> None:
    gm = back(move("relu", ""))
    product = named(gm, "mm_1")
    product.args = (named(gm, "relu"), product.args[1])
    with pytest.raises(PlanError, match=r"\['mm_1'\] read relu, which is off the device"):
        verify_moved(gm)
