"""schedule_ahead: gathers start ``depth`` buckets ahead of use, one reduction is in flight."""

import pytest
import torch
from expecttest import TestCase
from torch.fx import GraphModule

from graphs import BACKWARD, FORWARD, index, lower, lowered, mlp, snapshot, text, traced
from graphs import laid_out as lay_out
from zero_compile import pipeline
from zero_compile.analysis.fx_graph import bucket_number, calls
from zero_compile.passes.release_after_last_reader import release_after_last_reader
from zero_compile.passes.schedule_ahead import schedule_ahead
from zero_compile.verify import verify_scheduled
from zero_runtime.ir import ops

DEPTHS = (0, 1, 3, 100)
_SHORT = {
    ops.all_gather_start: "start",
    ops.all_gather_wait: "wait",
    ops.reduce_scatter_start: "reduce",
    ops.reduce_scatter_wait: "reduced",
    torch.ops.aten.mm.default: "mm",
}


def chain(layers: int = 5) -> GraphModule:
    """A chain of matmuls with one bucket each, before the schedule."""

    def function(x, *parameters):
        for number, parameter in enumerate(parameters):
            x = x @ ops.gather(parameter, number)
        return x

    gm = traced(function, torch.randn(4, 4), *(torch.randn(4, 4) for _ in range(layers)))
    buckets, places = lay_out(gm, bucket_bytes=1)
    return pipeline.run(lower(buckets, places)[:3], gm)


def schedule(gm: GraphModule) -> str:
    """The schedule's nodes, and the matmuls between them."""
    words = [
        f"{_SHORT[n.target]} {bucket_number(n)}" if n.target in ops.SCHEDULED else _SHORT[n.target]
        for n in gm.graph.nodes
        if n.target in _SHORT
    ]
    return "\n".join(words) + "\n"


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
            text(mlp().after("schedule_ahead", FORWARD)),
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
all_gather_start_default_2 = zero3.all_gather_start(token_default, 2, float32)
all_gather_wait_default_1 = zero3.all_gather_wait(all_gather_start_default_1, token_default, 1, 192, float32, cpu)
as_strided_default_2 = aten.as_strided(all_gather_wait_default_1, [8, 16], [16, 1])
as_strided_default_3 = aten.as_strided(all_gather_wait_default_1, [8], [1], 128)
permute_1 = aten.permute(as_strided_default_2, [1, 0])  # recompute
addmm_1 = aten.addmm(as_strided_default_3, relu, permute_1)
relu_1 = aten.relu(addmm_1)
all_gather_wait_default_2 = zero3.all_gather_wait(all_gather_start_default_2, token_default, 2, 64, float32, cpu)
as_strided_default_4 = aten.as_strided(all_gather_wait_default_2, [4, 8], [8, 1])
as_strided_default_5 = aten.as_strided(all_gather_wait_default_2, [4], [1], 32)
permute_2 = aten.permute(as_strided_default_4, [1, 0])  # recompute
addmm_2 = aten.addmm(as_strided_default_5, relu_1, permute_2)
return [addmm_2, primals_3, primals_4, primals_6, relu, relu_1]
""",
        )

    def test_depth_0_gathers_on_demand(self):
        self.assertExpectedInline(
            schedule(schedule_ahead(chain(3), depth=0)),
            """\
start 0
wait 0
mm
start 1
wait 1
mm
start 2
wait 2
mm
""",
        )

    def test_depth_1_gathers_the_next_bucket_while_one_is_used(self):
        self.assertExpectedInline(
            schedule(schedule_ahead(chain(), depth=1)),
            """\
start 0
start 1
wait 0
mm
start 2
wait 1
mm
start 3
wait 2
mm
start 4
wait 3
mm
wait 4
mm
""",
        )

    def test_depth_3_gathers_three_buckets_ahead(self):
        self.assertExpectedInline(
            schedule(schedule_ahead(chain(), depth=3)),
            """\
start 0
start 1
start 2
start 3
wait 0
mm
start 4
wait 1
mm
wait 2
mm
wait 3
mm
wait 4
mm
""",
        )


@pytest.mark.parametrize("depth", DEPTHS)
def test_the_order_of_collectives_does_not_depend_on_depth(depth):
    gm = schedule_ahead(chain(), depth=depth)
    for target in (ops.all_gather_start, ops.all_gather_wait):
        assert [bucket_number(n) for n in calls(gm.graph, target)] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("depth", DEPTHS)
def test_at_most_depth_buckets_are_on_their_way_while_one_is_waited_for(depth):
    gm, flying, most = schedule_ahead(chain(), depth=depth), 0, 0
    for node in gm.graph.nodes:
        flying += node.target is ops.all_gather_start
        flying -= node.target is ops.all_gather_wait
        most = max(most, flying)
    assert most == min(5, depth + 1)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("graph", [FORWARD, BACKWARD])
def test_any_depth_leaves_a_legal_graph(depth, graph):
    gm = schedule_ahead(mlp().before("schedule_ahead", graph), depth=depth)
    gm = release_after_last_reader(gm)
    gm.graph.lint()
    verify_scheduled(gm)


def test_waits_and_computation_stay_where_they_were():
    before, after = chain(), schedule_ahead(chain(), depth=2)
    moved = {ops.all_gather_start}
    left, right = (
        [n.name for n in g.graph.nodes if n.target not in moved] for g in (before, after)
    )
    assert left == right


def test_one_reduction_is_in_flight_and_overlaps_what_follows():
    def function(x):
        first = x @ x
        reduced = ops.reduce(first, 0)
        second = first @ x
        return reduced, ops.reduce(second, 1), second @ x

    gm = traced(function, torch.randn(4, 4))
    gathers = traced(lambda p, q: (ops.gather(p, 0), ops.gather(q, 1)), *torch.randn(2, 4, 4))
    buckets, places = lay_out(gathers, bucket_bytes=1)
    gm = pipeline.run(lower(buckets, places), gm)
    assert schedule(gm).split("\n") == [
        "mm",
        "reduce 0",
        "mm",
        "reduced 0",
        "reduce 1",
        "mm",
        "reduced 1",
        "",
    ]


def test_every_reduction_of_a_model_is_waited_for_before_the_next_starts():
    gm = mlp().after("schedule_ahead", BACKWARD)
    starts = calls(gm.graph, ops.reduce_scatter_start)
    waits = [next(iter(s.users)) for s in starts]
    for wait, following in zip(waits, starts[1:], strict=False):
        assert index(gm, wait) < index(gm, following)


def test_the_option_chooses_the_depth():
    for name, most in (("on_demand", 1), ("one_ahead", 2)):
        gm = lowered(
            lambda x, p, q: x @ ops.gather(p, 0) @ ops.gather(q, 1),
            *torch.randn(3, 4, 4),
            bucket_bytes=1,
            schedule=name,
        )
        first_wait = calls(gm.graph, ops.all_gather_wait)[0]
        starts = calls(gm.graph, ops.all_gather_start)
        assert sum(index(gm, s) < index(gm, first_wait) for s in starts) == most
