"""schedule_planned: starts and waits stand where the schedule names, and order stays legal."""

import pytest
import torch
from expecttest import TestCase
from torch.fx import GraphModule

from graphs import BACKWARD, FORWARD, mlp, snapshot, text, traced
from graphs import laid_out as lay_out
from zero_compile import pipeline
from zero_compile.analysis.fx_graph import bucket_number, calls
from zero_compile.passes.release_after_last_reader import release_after_last_reader
from zero_compile.passes.schedule_planned import schedule_planned
from zero_compile.scheduler.decide_schedule import Early, GraphSchedule
from zero_compile.verify import verify_scheduled
from zero_runtime.ir import ops


def chain(layers: int = 4) -> GraphModule:
    """A chain of matmuls with one bucket each, before the schedule."""

    def function(x, *parameters):
        for number, parameter in enumerate(parameters):
            x = x @ ops.gather(parameter, number)
        return x

    gm = traced(function, torch.randn(4, 4), *(torch.randn(4, 4) for _ in range(layers)))
    buckets, places = lay_out(gm, bucket_bytes=1)
    return pipeline.run(pipeline.bucket(buckets, places), gm)


def order(gm: GraphModule) -> list[str]:
    """Starts, waits and matmuls, with their buckets."""
    short = {ops.all_gather_start: "start", ops.all_gather_wait: "wait"}
    return [
        f"{short[n.target]} {bucket_number(n)}" if n.target in short else "mm"
        for n in gm.graph.nodes
        if n.target in short or n.target is torch.ops.aten.mm.default
    ]


def scheduled(gm: GraphModule, schedule: GraphSchedule) -> list[str]:
    """The order after the pass, the release and the check."""
    gm = release_after_last_reader(schedule_planned(gm, schedule=schedule))
    verify_scheduled(gm, gather_cache=schedule.carried_out)
    return order(gm)


def test_a_gather_starts_before_the_node_that_is_named() -> None:
    starts = {0: "", 1: "", 2: "mm_1", 3: "mm_1"}
    assert scheduled(chain(), GraphSchedule(starts)) == [
        *("start 0", "start 1", "wait 0", "mm", "wait 1", "start 2", "start 3", "mm"),
        *("wait 2", "mm", "wait 3", "mm"),
    ]


def test_a_gather_without_an_order_stays_at_its_use() -> None:
    assert scheduled(chain(2), GraphSchedule()) == [
        "start 0",
        "wait 0",
        "mm",
        "start 1",
        "wait 1",
        "mm",
    ]


def test_a_place_after_the_use_is_not_taken() -> None:
    found = scheduled(chain(2), GraphSchedule({0: "mm_1", 1: "mm_1"}))
    assert found == ["start 0", "wait 0", "mm", "start 1", "wait 1", "mm"]


def test_gathers_for_the_next_graph_start_here_and_are_not_waited_for() -> None:
    early = (Early(0, "float32", "mm_1"), Early(1, "float32", None))
    assert scheduled(chain(2), GraphSchedule({0: "", 1: ""}, early=early)) == [
        *("start 0", "start 1", "wait 0", "mm", "wait 1", "start 0", "mm", "start 1"),
    ]


def test_what_arrives_gathered_is_taken_over_first() -> None:
    found = scheduled(chain(3), GraphSchedule({0: "", 1: "mm_1"}, carried_in=frozenset({2})))
    assert found == [
        "start 2",
        "start 0",
        "wait 0",
        "mm",
        "start 1",
        "wait 1",
        "mm",
        "wait 2",
        "mm",
    ]


def test_a_reduction_is_waited_for_at_its_place_but_before_one_that_starts_there() -> None:
    gm = mlp().before("schedule_ahead", BACKWARD)
    gm = schedule_planned(gm, schedule=GraphSchedule(waits={0: None, 1: None, 2: None}))
    kinds = {ops.reduce_scatter_start: "start", ops.reduce_scatter_wait: "wait"}
    found = [f"{kinds[n.target]} {bucket_number(n)}" for n in gm.graph.nodes if n.target in kinds]
    assert found == ["start 2", "start 1", "wait 2", "wait 1", "start 0", "wait 0"]


@pytest.mark.parametrize("graph", [FORWARD, BACKWARD])
def test_an_empty_schedule_changes_nothing(graph: str) -> None:
    before = mlp().before("schedule_ahead", graph)
    after = schedule_planned(mlp().before("schedule_ahead", graph), schedule=GraphSchedule())
    assert [n.name for n in before.graph.nodes] == [n.name for n in after.graph.nodes]


def _moved() -> GraphModule:
    """All gathers of the MLP's forward at the beginning, but the last."""
    last = calls(mlp().before("schedule_ahead", FORWARD).graph, torch.ops.aten.addmm.default)[-1]
    schedule = GraphSchedule({0: "", 1: "", 2: last.name}, kept=frozenset({2}))
    return schedule_planned(mlp().before("schedule_ahead", FORWARD), schedule=schedule)


class Snapshot(TestCase):
    @snapshot
    def test_before(self):
        self.assertExpectedInline(
            text(mlp().before("schedule_ahead", FORWARD)),
            """\
primals_1: float32[16, 8]
primals_2: float32[16]
primals_3: float32[3, 8]
primals_4: float32[8, 16]
primals_5: float32[8]
primals_6: float32[4, 8]
primals_7: float32[4]
token_default = zero3.token()
all_gather_start_default = zero3.all_gather_start(token_default, 0, float32)
all_gather_wait_default = zero3.all_gather_wait(all_gather_start_default, token_default, 0, 192, float32, cpu)
as_strided_default = aten.as_strided(all_gather_wait_default, [16, 8], [8, 1])
as_strided_default_1 = aten.as_strided(all_gather_wait_default, [16], [1], 128)
permute = aten.permute(as_strided_default, [1, 0])  # recompute
addmm = aten.addmm(as_strided_default_1, primals_3, permute)
relu = aten.relu(addmm)
all_gather_start_default_1 = zero3.all_gather_start(token_default, 1, float32)
all_gather_wait_default_1 = zero3.all_gather_wait(all_gather_start_default_1, token_default, 1, 192, float32, cpu)
as_strided_default_2 = aten.as_strided(all_gather_wait_default_1, [8, 16], [16, 1])
as_strided_default_3 = aten.as_strided(all_gather_wait_default_1, [8], [1], 128)
permute_1 = aten.permute(as_strided_default_2, [1, 0])  # recompute
addmm_1 = aten.addmm(as_strided_default_3, relu, permute_1)
relu_1 = aten.relu(addmm_1)
all_gather_start_default_2 = zero3.all_gather_start(token_default, 2, float32)
all_gather_wait_default_2 = zero3.all_gather_wait(all_gather_start_default_2, token_default, 2, 64, float32, cpu)
as_strided_default_4 = aten.as_strided(all_gather_wait_default_2, [4, 8], [8, 1])
as_strided_default_5 = aten.as_strided(all_gather_wait_default_2, [4], [1], 32)
permute_2 = aten.permute(as_strided_default_4, [1, 0])  # recompute
addmm_2 = aten.addmm(as_strided_default_5, relu_1, permute_2)
return [addmm_2, primals_3, primals_4, primals_6, relu, relu_1]
""",
        )

    @snapshot
    def test_after(self):
        self.assertExpectedInline(
            text(_moved()),
            """\
primals_1: float32[16, 8]
primals_2: float32[16]
primals_3: float32[3, 8]
primals_4: float32[8, 16]
primals_5: float32[8]
primals_6: float32[4, 8]
primals_7: float32[4]
token_default = zero3.token()
all_gather_start_default = zero3.all_gather_start(token_default, 0, float32)
all_gather_start_default_1 = zero3.all_gather_start(token_default, 1, float32)
all_gather_wait_default = zero3.all_gather_wait(all_gather_start_default, token_default, 0, 192, float32, cpu)
as_strided_default = aten.as_strided(all_gather_wait_default, [16, 8], [8, 1])
as_strided_default_1 = aten.as_strided(all_gather_wait_default, [16], [1], 128)
permute = aten.permute(as_strided_default, [1, 0])  # recompute
addmm = aten.addmm(as_strided_default_1, primals_3, permute)
relu = aten.relu(addmm)
all_gather_wait_default_1 = zero3.all_gather_wait(all_gather_start_default_1, token_default, 1, 192, float32, cpu)
as_strided_default_2 = aten.as_strided(all_gather_wait_default_1, [8, 16], [16, 1])
as_strided_default_3 = aten.as_strided(all_gather_wait_default_1, [8], [1], 128)
permute_1 = aten.permute(as_strided_default_2, [1, 0])  # recompute
addmm_1 = aten.addmm(as_strided_default_3, relu, permute_1)
relu_1 = aten.relu(addmm_1)
all_gather_start_default_2 = zero3.all_gather_start(token_default, 2, float32)
all_gather_wait_default_2 = zero3.all_gather_wait(all_gather_start_default_2, token_default, 2, 64, float32, cpu)
as_strided_default_4 = aten.as_strided(all_gather_wait_default_2, [4, 8], [8, 1])
as_strided_default_5 = aten.as_strided(all_gather_wait_default_2, [4], [1], 32)
permute_2 = aten.permute(as_strided_default_4, [1, 0])  # recompute
addmm_2 = aten.addmm(as_strided_default_5, relu_1, permute_2)
return [addmm_2, primals_3, primals_4, primals_6, relu, relu_1]
""",
        )
