"""split_distant_uses: a bucket is gathered again where too much was gathered since its last use."""

import torch
from expecttest import TestCase
from torch.fx import GraphModule

from graphs import laid_out as lay_out
from graphs import snapshot, text, traced
from zero_compile import pipeline
from zero_compile.analysis.fx_graph import bucket_number, calls
from zero_compile.passes.split_distant_uses import split_distant_uses
from zero_runtime.ir import ops


def tied(layers: int = 3, transposed: bool = True) -> tuple[GraphModule, list]:
    """A weight used first and last, with ``layers`` of 64 elements between."""

    def function(x, shared, *parameters):
        whole = ops.gather(shared, 0)
        x = x @ whole
        for number, parameter in enumerate(parameters):
            x = x @ ops.gather(parameter, number + 1)
        return x @ (whole.t() if transposed else whole)

    gm = traced(function, torch.randn(4, 8), *(torch.randn(8, 8) for _ in range(layers + 1)))
    buckets, places = lay_out(gm, bucket_bytes=1)
    return pipeline.run(pipeline.bucket(buckets, places), gm), buckets


def gathered(gm: GraphModule) -> list[int]:
    """Buckets in the order in which they are waited for."""
    return [bucket_number(wait) for wait in calls(gm.graph, ops.all_gather_wait)]


def test_a_weight_used_first_and_last_is_gathered_twice() -> None:
    gm, buckets = tied()
    assert gathered(split_distant_uses(gm, buckets=buckets, distance=191)) == [0, 1, 2, 3, 0]


def test_a_distance_that_is_not_exceeded_leaves_it_gathered() -> None:
    gm, buckets = tied()
    assert gathered(split_distant_uses(gm, buckets=buckets, distance=192)) == [0, 1, 2, 3]


def test_the_split_graph_computes_the_same_and_releases_in_between() -> None:
    for transposed in (True, False):
        gm, buckets = tied(transposed=transposed)
        gm = split_distant_uses(gm, buckets=buckets, distance=0)
        gm = pipeline.run(pipeline.schedule("on_demand"), gm)
        assert gathered(gm) == [0, 1, 2, 3, 0]
        releases = [bucket_number(n) for n in calls(gm.graph, ops.release)]
        assert releases == [0, 1, 2, 3, 0]
        starts = {wait.all_input_nodes[0] for wait in calls(gm.graph, ops.all_gather_wait)}
        assert len(starts) == 5


class Snapshot(TestCase):
    @snapshot
    def test_before(self):
        self.assertExpectedInline(
            text(tied(2)[0]),
            """\
arg0_1: float32[4, 8]
arg1_1: float32[8, 8]
arg2_1: float32[8, 8]
arg3_1: float32[8, 8]
token_default = zero3.token()
all_gather_start_default = zero3.all_gather_start(token_default, 0, float32)
all_gather_wait_default = zero3.all_gather_wait(all_gather_start_default, token_default, 0, 64, float32, cpu)
as_strided_default = aten.as_strided(all_gather_wait_default, [8, 8], [8, 1])
mm = aten.mm(arg0_1, as_strided_default)
all_gather_start_default_1 = zero3.all_gather_start(token_default, 1, float32)
all_gather_wait_default_1 = zero3.all_gather_wait(all_gather_start_default_1, token_default, 1, 64, float32, cpu)
as_strided_default_1 = aten.as_strided(all_gather_wait_default_1, [8, 8], [8, 1])
mm_1 = aten.mm(mm, as_strided_default_1)
all_gather_start_default_2 = zero3.all_gather_start(token_default, 2, float32)
all_gather_wait_default_2 = zero3.all_gather_wait(all_gather_start_default_2, token_default, 2, 64, float32, cpu)
as_strided_default_2 = aten.as_strided(all_gather_wait_default_2, [8, 8], [8, 1])
mm_2 = aten.mm(mm_1, as_strided_default_2)
t = aten.t(as_strided_default)
mm_3 = aten.mm(mm_2, t)
return mm_3
""",
        )

    @snapshot
    def test_after(self):
        gm, buckets = tied(2)
        self.assertExpectedInline(
            text(split_distant_uses(gm, buckets=buckets, distance=0)),
            """\
arg0_1: float32[4, 8]
arg1_1: float32[8, 8]
arg2_1: float32[8, 8]
arg3_1: float32[8, 8]
token_default = zero3.token()
all_gather_start_default = zero3.all_gather_start(token_default, 0, float32)
all_gather_wait_default = zero3.all_gather_wait(all_gather_start_default, token_default, 0, 64, float32, cpu)
as_strided_default = aten.as_strided(all_gather_wait_default, [8, 8], [8, 1])
mm = aten.mm(arg0_1, as_strided_default)
all_gather_start_default_1 = zero3.all_gather_start(token_default, 1, float32)
all_gather_wait_default_1 = zero3.all_gather_wait(all_gather_start_default_1, token_default, 1, 64, float32, cpu)
as_strided_default_1 = aten.as_strided(all_gather_wait_default_1, [8, 8], [8, 1])
mm_1 = aten.mm(mm, as_strided_default_1)
all_gather_start_default_2 = zero3.all_gather_start(token_default, 2, float32)
all_gather_wait_default_2 = zero3.all_gather_wait(all_gather_start_default_2, token_default, 2, 64, float32, cpu)
as_strided_default_2 = aten.as_strided(all_gather_wait_default_2, [8, 8], [8, 1])
mm_2 = aten.mm(mm_1, as_strided_default_2)
all_gather_start_default_3 = zero3.all_gather_start(token_default, 0, float32)
all_gather_wait_default_3 = zero3.all_gather_wait(all_gather_start_default_3, token_default, 0, 64, float32, cpu)
as_strided_default_3 = aten.as_strided(all_gather_wait_default_3, [8, 8], [8, 1])
t_1 = aten.t(as_strided_default_3)
mm_3 = aten.mm(mm_2, t_1)
return mm_3
""",
        )
