"""tile_linears: what reads a large weight becomes a sequence of tiles, and computes the same."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import TestCase
from torch import nn
from torch.fx import GraphModule, Interpreter

from graphs import BACKWARD, FORWARD, JOINT, Autocast, Recording, record, snapshot, text, traced
from tiles import Gpt, Mlp
from zero_compile.analysis.fx_graph import bucket_number, calls
from zero_compile.api.preview import preview
from zero_compile.passes.tile_linears import tile_linears, tileable
from zero_compile.tiling import Cut
from zero_compile.verify import verify_tiled
from zero_runtime.errors import PlanError
from zero_runtime.ir import ops

aten = torch.ops.aten

#: A weight of eight rows and four columns in tiles; 0 is its own number.
ROWS, COLUMNS = Cut(0, (3, 3, 2), (10, 11, 12)), Cut(1, (3, 1), (10, 11))
BOTH = pytest.mark.parametrize("cut", [ROWS, COLUMNS], ids=["rows", "columns"])


def whole_numbers(*shape: int) -> torch.Tensor:
    """Small enough that sums are exact in any order."""
    return torch.randint(-4, 5, shape).float()


W, X, DY, INDICES = (
    whole_numbers(8, 4),
    whole_numbers(5, 4),
    whole_numbers(5, 8),
    torch.tensor([[7, 0], [3, 3]]),
)


class Evaluated(Interpreter):
    """Runs a graph with logical gathers and reductions on one rank."""

    def __init__(self, gm: GraphModule, cut: Cut) -> None:
        super().__init__(gm)
        self._cut = cut

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is ops.gather:
            return self._gather(*args)
        if target is ops.reduce:
            return args
        if target is ops.join:
            tiles: dict[int, torch.Tensor] = {}
            for gradient, number in args[0]:
                tiles[number] = tiles[number] + gradient if number in tiles else gradient
            return torch.cat([tiles[n] for n in self._cut.numbers], self._cut.dim), args[1]
        return super().call_function(target, args, kwargs)

    def _gather(
        self, parameter: torch.Tensor, number: int, dtype: Any = None, size: Any = None
    ) -> Any:
        if size is not None:
            start, stop = self._cut.bounds[self._cut.numbers.index(number)]
            parameter = parameter.narrow(self._cut.dim, start, stop - start)
            assert list(parameter.shape) == size
        return parameter.to(dtype or parameter.dtype)


def values(gm: GraphModule, cut: Cut, *inputs: torch.Tensor) -> list[torch.Tensor]:
    results = Evaluated(gm, cut).run(*inputs)
    results = results if isinstance(results, list | tuple) else [results]
    flat = [r[0] if isinstance(r, tuple) else r for r in results]
    return [r for r in flat if isinstance(r, torch.Tensor)]


def _right(w: Any, x: Any, dy: Any, i: Any) -> Any:
    return x @ ops.gather(w, 0).t()


def _with_bias(w: Any, x: Any, dy: Any, i: Any) -> Any:
    return torch.addmm(dy[0], x, ops.gather(w, 0).t())


def _with_rows_of_bias(w: Any, x: Any, dy: Any, i: Any) -> Any:
    return torch.addmm(dy, x, ops.gather(w, 0).t())


def _with_a_column_of_bias(w: Any, x: Any, dy: Any, i: Any) -> Any:
    return torch.addmm(dy[:, :1], x, ops.gather(w, 0).t())


def _untransposed(w: Any, x: Any, dy: Any, i: Any) -> Any:
    return torch.addmm(x, dy, ops.gather(w, 0))


def _left(w: Any, x: Any, dy: Any, i: Any) -> Any:
    return ops.gather(w, 0) @ x.t(), ops.gather(w, 0).t() @ dy.t()


def _cast(w: Any, x: Any, dy: Any, i: Any) -> Any:
    return x.double() @ ops.gather(w, 0).double().t()


def _lookup(w: Any, x: Any, dy: Any, i: Any) -> Any:
    return F.embedding(i, ops.gather(w, 0))


def _twice(w: Any, x: Any, dy: Any, i: Any) -> Any:
    weight = ops.gather(w, 0)
    return (F.embedding(i, weight).flatten(0, 1) @ weight.t()) @ weight


def _gradient(w: Any, x: Any, dy: Any, i: Any) -> Any:
    return ops.reduce(dy.t() @ x, 0)


def _transposed_gradient(w: Any, x: Any, dy: Any, i: Any) -> Any:
    return ops.reduce((x.t() @ dy).t().double(), 0)


def _gradients_of_two_uses(w: Any, x: Any, dy: Any, i: Any) -> Any:
    looked_up = aten.embedding_dense_backward(x[:4].view(2, 2, 4), i, 8, 3, False)
    return ops.reduce(dy.t() @ x + looked_up, 0)


def _gradient_put(w: Any, x: Any, dy: Any, i: Any) -> Any:
    zeros = torch.full([8, 4], 0.0)
    return ops.reduce(aten.index_put(zeros, [i], x[:4].view(2, 2, 4), True), 0)


TILEABLE = [
    _right, _with_bias, _with_rows_of_bias, _with_a_column_of_bias, _untransposed, _left, _cast, _lookup,
    _twice, _gradient, _transposed_gradient, _gradients_of_two_uses, _gradient_put,
]  # fmt: skip


def _scaled(w: Any, x: Any, dy: Any, i: Any) -> Any:
    return x @ (ops.gather(w, 0) * 2).t()


def _returned(w: Any, x: Any, dy: Any, i: Any) -> Any:
    return ops.gather(w, 0).t()


def _elementwise_gradient(w: Any, x: Any, dy: Any, i: Any) -> Any:
    return ops.reduce(ops.gather(w, 0) * 2, 0)


def _weighted_addition(w: Any, x: Any, dy: Any, i: Any) -> Any:
    return torch.addmm(dy, x, ops.gather(w, 0).t(), beta=2)


UNTILEABLE = [_scaled, _returned, _elementwise_gradient, _weighted_addition]

by_name = {"ids": lambda f: f.__name__.strip("_").replace("_", " ")}


@BOTH
@pytest.mark.parametrize("function", TILEABLE + UNTILEABLE, **by_name)
def test_a_tiled_graph_computes_the_same(function: Callable[..., Any], cut: Cut) -> None:
    inputs = (W, X, DY, INDICES)
    expected = values(traced(function, *inputs), cut, *inputs)
    gm = tile_linears(traced(function, *inputs), cuts={0: cut})
    verify_tiled(gm, cuts={0: cut})
    for ours, theirs in zip(values(gm, cut, *inputs), expected, strict=True):
        assert ours.dtype is theirs.dtype
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("function", TILEABLE[:9], **by_name)
def test_what_multiplies_or_looks_up_is_tileable(function: Callable[..., Any]) -> None:
    gm = traced(function, W, X, DY, INDICES)
    assert all(map(tileable, calls(gm.graph, ops.gather)))


@pytest.mark.parametrize("function", UNTILEABLE, **by_name)
def test_what_needs_the_whole_weight_is_not_tileable(function: Callable[..., Any]) -> None:
    gm = traced(function, W, X, DY, INDICES)
    assert not any(map(tileable, calls(gm.graph, ops.gather)))


def test_a_weight_whose_gradient_needs_the_whole_is_not_tileable() -> None:
    def function(w: Any, x: Any, dy: Any) -> Any:
        return x @ ops.gather(w, 0).t(), ops.reduce(dy.t() @ x * 2, 0)

    gm = traced(function, W, X, DY)
    assert not tileable(calls(gm.graph, ops.gather)[0])


def test_an_index_outside_the_table_is_an_error() -> None:
    gm = tile_linears(traced(_lookup, W, X, DY, INDICES), cuts={0: ROWS})
    for wrong in (8, -1):
        with pytest.raises(RuntimeError, match="out of range of 8 embeddings"):
            values(gm, ROWS, W, X, DY, torch.tensor([[0, wrong]]))


def test_the_check_refuses_a_weight_that_is_moved_whole_or_lacks_a_tile() -> None:
    gm = traced(_right, W, X, DY, INDICES)
    with pytest.raises(PlanError, match="moves parameter 0 whole"):
        verify_tiled(gm, cuts={0: ROWS})
    gm = tile_linears(traced(_gradient, W, X, DY, INDICES), cuts={0: ROWS})
    (join,) = calls(gm.graph, ops.join)
    join.args = (join.args[0][1:], *join.args[1:])
    with pytest.raises(PlanError, match="joins tiles"):
        verify_tiled(gm, cuts={0: ROWS})


# ------------------------------------------------------------------------------ whole models


def of_mlp(**options: Any) -> Recording:
    """The wide linear and the one behind it in 16 tiles of 2 KiB, or 4."""
    return record(Mlp(), torch.randn(6, 32), tile_bytes=2048, **options)


@pytest.mark.parametrize("over", ["rows", "columns"])
def test_sixteen_tiles_take_a_sixteenth_of_the_memory(over: str) -> None:
    whole = record(Mlp(), torch.randn(6, 32), schedule="on_demand", bucket_bytes=1)
    tiled = of_mlp(schedule="on_demand", tile_over=over)
    bias = 256 * 4
    for graph, room in ((FORWARD, bias), (BACKWARD, 0)):
        expected = whole.plans[graph].peak_gathered_bytes - room
        assert tiled.plans[graph].peak_gathered_bytes - room <= max(expected // 16, 2048)
    reducing = whole.plans[BACKWARD].peak_reducing_bytes
    assert reducing == 2 * 32 * 256 * 4
    assert tiled.plans[BACKWARD].peak_reducing_bytes == reducing // 16
    assert (
        len({s.name for b in tiled.buckets for s in b.slots if s.name.startswith("up.weight[")})
        == 16
    )


def test_the_planner_holds_a_few_tiles_at_once() -> None:
    plans = of_mlp(schedule="planned").plans.values()
    assert all(plan.peak_gathered_bytes <= 4 * 2048 for plan in plans)
    assert all(plan.peak_reducing_bytes <= 2 * 2048 for plan in plans)


def test_a_tile_is_gathered_for_each_use_and_released_before_the_next() -> None:
    tokens = torch.zeros(2, 4, dtype=torch.int64)
    recording = record(Gpt(), tokens, tokens, tile_bytes=4096, schedule="on_demand")
    gm = recording.scheduled(FORWARD)
    held: set[int] = set()
    most = 0
    for node in gm.graph.nodes:
        if node.target is ops.all_gather_start:
            held.add(bucket_number(node))
        if node.target is ops.release:
            held.remove(bucket_number(node))
        tiles = {b for b in held if "[" in recording.buckets[b].slots[0].name}
        most = max(most, len(tiles))
    names = [
        recording.buckets[bucket_number(s)].slots[0].name
        for s in calls(gm.graph, ops.all_gather_start)
    ]
    assert most == 1
    assert names.count("embedding.weight[0:32]") == 2  # looked up first, multiplied last


def test_the_gradient_of_each_tile_is_reduced_before_the_next_is_computed() -> None:
    gm = of_mlp(schedule="on_demand").scheduled(BACKWARD)
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    starts = [
        s
        for s in calls(gm.graph, ops.reduce_scatter_start)
        if s.args[0][0].target is aten.mm.default
    ]
    assert len(starts) == 20
    for earlier, later in pairwise(starts):
        assert order[earlier] < order[later.args[0][0]]


def test_a_weight_that_is_read_in_a_narrower_dtype_is_gathered_in_it_and_cut_by_its_bytes() -> None:
    recording = record(Autocast(Mlp()), torch.randn(6, 32), tile_bytes=2048)
    waits = calls(recording.scheduled(FORWARD).graph, ops.all_gather_wait)
    assert {wait.args[4] for wait in waits} == {torch.bfloat16}
    assert sum("up.weight" in b.slots[0].name for b in recording.buckets) == 8


def test_small_weights_and_models_without_the_option_stay_whole() -> None:
    recording = record(Mlp(), torch.randn(6, 32), tile_bytes=1 << 20)
    assert [s.name for b in recording.buckets for s in b.slots] == [
        "up.weight",
        "up.bias",
        "down.weight",
    ]


def test_with_a_budget_only_what_has_no_room_is_tiled() -> None:
    for room, cut in ((1 << 20, False), (300_000, True)):
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 512), nn.Linear(512, 8))
        state = sum(p.numel() for p in model.parameters()) * 12 // 2  # shards and two moments
        recording = record(
            model, torch.randn(2, 64), device_memory=state + room, schedule="planned"
        )
        names = [s.name for b in recording.buckets for s in b.slots]
        assert any(name.startswith("1.weight[") for name in names) is cut
        assert "0.weight" in names


ON_NVME = {"device": "nvme", "nvme_path": "/nowhere"}


@pytest.mark.parametrize(
    "options", [{}, {"offload_param": ON_NVME, "offload_optimizer": ON_NVME}], ids=["", "on NVMe"]
)
def test_plans_of_tiles_are_proved_and_take_less(options: dict[str, Any]) -> None:
    def make() -> tuple[nn.Module, Any, Any]:
        tokens = torch.zeros(2, 4, dtype=torch.int64)
        return Gpt(4096, 64), (tokens, tokens), {}

    peaks = [
        preview(make, world_size=4, options={**options, **tiles}).graphs[0].timeline.peak
        for tiles in ({}, {"tile_bytes": 1 << 16})
    ]
    whole = 4096 * 64 * 4
    assert peaks[0] - peaks[1] > 2 * whole  # gathered, or a gradient, packed and received


class Snapshot(TestCase):
    def setUp(self) -> None:
        torch.manual_seed(0)

    @snapshot
    def test_before(self):
        gm = of_small().before("tile_linears", JOINT)
        self.assertExpectedInline(
            text(gm),
            """\
primals_1: float32[8, 16]
primals_2: int64[3]
primals_3: float32[8, 16]
primals_4: float32[8]
tangents_1: float32[3, 8]
gather = zero3.gather(primals_1, 0)
gather_1 = zero3.gather(primals_3, 1)
gather_2 = zero3.gather(primals_4, 2)
embedding = aten.embedding(gather, primals_2)
permute = aten.permute(gather_1, [1, 0])
addmm = aten.addmm(gather_2, embedding, permute)
permute_1 = aten.permute(permute, [1, 0])
mm = aten.mm(tangents_1, permute_1)
permute_2 = aten.permute(tangents_1, [1, 0])
mm_1 = aten.mm(permute_2, embedding)
sum_1 = aten.sum.dim_IntList(tangents_1, [0], True)
view = aten.view(sum_1, [8])
ge = aten.ge.Scalar(primals_2, 0)
lt = aten.lt.Scalar(primals_2, 8)
bitwise_and = aten.bitwise_and.Tensor(ge, lt)
ne = aten.ne.Scalar(primals_2, -1)
bitwise_and_1 = aten.bitwise_and.Tensor(bitwise_and, ne)
unsqueeze = aten.unsqueeze(bitwise_and_1, -1)
full_default = aten.full([8, 16], 0, dtype=float32, layout=torch.strided, device=cpu, pin_memory=False)
_unsafe_masked_index_put_accumulate = aten._unsafe_masked_index_put_accumulate(full_default, unsqueeze, [primals_2], mm)
reduce = zero3.reduce(view, 2)
reduce_1 = zero3.reduce(mm_1, 1)
reduce_2 = zero3.reduce(_unsafe_masked_index_put_accumulate, 0)
return [addmm, reduce_2, None, reduce_1, reduce]
""",
        )

    @snapshot
    def test_over_rows(self):
        gm = of_small().after("tile_linears", JOINT)
        self.assertExpectedInline(
            text(gm),
            """\
primals_1: float32[8, 16]
primals_2: int64[3]
primals_3: float32[8, 16]
primals_4: float32[8]
tangents_1: float32[3, 8]
gather_default = zero3.gather(primals_1, 3, None, [4, 16])
gather_default_1 = zero3.gather(primals_1, 4, None, [4, 16])
gather_default_2 = zero3.gather(primals_3, 5, None, [4, 16])
gather_default_3 = zero3.gather(primals_3, 6, None, [4, 16])
gather_2 = zero3.gather(primals_4, 2)
lookup_default = zero3.lookup(None, gather_default, primals_2, 0, 8)
lookup_default_1 = zero3.lookup(lookup_default, gather_default_1, primals_2, 4, 8)
permute_default_4 = aten.permute(gather_default_2, [1, 0])
slice_tensor_2 = aten.slice.Tensor(gather_2, 0, 0, 4)
addmm_default_1 = aten.addmm(slice_tensor_2, lookup_default_1, permute_default_4)
permute_default_5 = aten.permute(gather_default_3, [1, 0])
slice_tensor_3 = aten.slice.Tensor(gather_2, 0, 4, 8)
addmm_default_2 = aten.addmm(slice_tensor_3, lookup_default_1, permute_default_5)
cat_default = aten.cat([addmm_default_1, addmm_default_2], 1)
permute_default = aten.permute(gather_default_2, [1, 0])
permute_default_1 = aten.permute(permute_default, [1, 0])
slice_tensor = aten.slice.Tensor(tangents_1, 1, 0, 4)
mm_default = aten.mm(slice_tensor, permute_default_1)
permute_default_2 = aten.permute(gather_default_3, [1, 0])
permute_default_3 = aten.permute(permute_default_2, [1, 0])
slice_tensor_1 = aten.slice.Tensor(tangents_1, 1, 4, 8)
addmm_default = aten.addmm(mm_default, slice_tensor_1, permute_default_3)
permute_2 = aten.permute(tangents_1, [1, 0])
slice_tensor_4 = aten.slice.Tensor(permute_2, 0, 0, 4)
mm_default_1 = aten.mm(slice_tensor_4, lookup_default_1)
reduce_default = zero3.reduce(mm_default_1, 5)
slice_tensor_5 = aten.slice.Tensor(permute_2, 0, 4, 8)
mm_default_2 = aten.mm(slice_tensor_5, lookup_default_1)
reduce_default_1 = zero3.reduce(mm_default_2, 6)
sum_1 = aten.sum.dim_IntList(tangents_1, [0], True)
view = aten.view(sum_1, [8])
ge = aten.ge.Scalar(primals_2, 0)
lt = aten.lt.Scalar(primals_2, 8)
bitwise_and = aten.bitwise_and.Tensor(ge, lt)
ne = aten.ne.Scalar(primals_2, -1)
bitwise_and_1 = aten.bitwise_and.Tensor(bitwise_and, ne)
unsqueeze = aten.unsqueeze(bitwise_and_1, -1)
lookup_backward_default = zero3.lookup_backward(addmm_default, primals_2, unsqueeze, 0, 4)
reduce_default_2 = zero3.reduce(lookup_backward_default, 3)
lookup_backward_default_1 = zero3.lookup_backward(addmm_default, primals_2, unsqueeze, 4, 4)
reduce_default_3 = zero3.reduce(lookup_backward_default_1, 4)
reduce = zero3.reduce(view, 2)
join_default = zero3.join([reduce_default, reduce_default_1], 1, [8, 16])
join_default_1 = zero3.join([reduce_default_2, reduce_default_3], 0, [8, 16])
return [cat_default, join_default_1, None, join_default, reduce]
""",
        )

    @snapshot
    def test_over_columns(self):
        gm = of_small(tile_over="columns").after("tile_linears", JOINT)
        self.assertExpectedInline(
            text(gm),
            """\
primals_1: float32[8, 16]
primals_2: int64[3]
primals_3: float32[8, 16]
primals_4: float32[8]
tangents_1: float32[3, 8]
gather_default = zero3.gather(primals_1, 3, None, [8, 8])
gather_default_1 = zero3.gather(primals_1, 4, None, [8, 8])
gather_default_2 = zero3.gather(primals_3, 5, None, [8, 8])
gather_default_3 = zero3.gather(primals_3, 6, None, [8, 8])
gather_2 = zero3.gather(primals_4, 2)
lookup_default = zero3.lookup(None, gather_default, primals_2, 0, 8)
lookup_default_1 = zero3.lookup(None, gather_default_1, primals_2, 0, 8)
cat_default = aten.cat([lookup_default, lookup_default_1], -1)
permute_default_4 = aten.permute(gather_default_2, [1, 0])
slice_tensor = aten.slice.Tensor(cat_default, 1, 0, 8)
addmm_default = aten.addmm(gather_2, slice_tensor, permute_default_4)
permute_default_5 = aten.permute(gather_default_3, [1, 0])
slice_tensor_1 = aten.slice.Tensor(cat_default, 1, 8, 16)
addmm_default_1 = aten.addmm(addmm_default, slice_tensor_1, permute_default_5)
permute_default = aten.permute(gather_default_2, [1, 0])
permute_default_1 = aten.permute(permute_default, [1, 0])
mm_default = aten.mm(tangents_1, permute_default_1)
permute_default_2 = aten.permute(gather_default_3, [1, 0])
permute_default_3 = aten.permute(permute_default_2, [1, 0])
mm_default_1 = aten.mm(tangents_1, permute_default_3)
cat_default_1 = aten.cat([mm_default, mm_default_1], 1)
permute_2 = aten.permute(tangents_1, [1, 0])
slice_tensor_2 = aten.slice.Tensor(cat_default, 1, 0, 8)
mm_default_2 = aten.mm(permute_2, slice_tensor_2)
reduce_default = zero3.reduce(mm_default_2, 5)
slice_tensor_3 = aten.slice.Tensor(cat_default, 1, 8, 16)
mm_default_3 = aten.mm(permute_2, slice_tensor_3)
reduce_default_1 = zero3.reduce(mm_default_3, 6)
sum_1 = aten.sum.dim_IntList(tangents_1, [0], True)
view = aten.view(sum_1, [8])
ge = aten.ge.Scalar(primals_2, 0)
lt = aten.lt.Scalar(primals_2, 8)
bitwise_and = aten.bitwise_and.Tensor(ge, lt)
ne = aten.ne.Scalar(primals_2, -1)
bitwise_and_1 = aten.bitwise_and.Tensor(bitwise_and, ne)
unsqueeze = aten.unsqueeze(bitwise_and_1, -1)
slice_tensor_4 = aten.slice.Tensor(cat_default_1, 1, 0, 8)
lookup_backward_default = zero3.lookup_backward(slice_tensor_4, primals_2, unsqueeze, 0, 8)
reduce_default_2 = zero3.reduce(lookup_backward_default, 3)
slice_tensor_5 = aten.slice.Tensor(cat_default_1, 1, 8, 16)
lookup_backward_default_1 = zero3.lookup_backward(slice_tensor_5, primals_2, unsqueeze, 0, 8)
reduce_default_3 = zero3.reduce(lookup_backward_default_1, 4)
reduce = zero3.reduce(view, 2)
join_default = zero3.join([reduce_default, reduce_default_1], 1, [8, 16])
join_default_1 = zero3.join([reduce_default_2, reduce_default_3], 0, [8, 16])
return [addmm_default_1, join_default_1, None, join_default, reduce]
""",
        )

    @snapshot
    def test_backward_as_it_is_compiled(self):
        gm = of_small(schedule="on_demand").scheduled(BACKWARD)
        self.assertExpectedInline(
            text(gm),
            """\
primals_2: int64[3]
primals_3: float32[8, 16]
lookup_default_1: float32[3, 16]
tangents_1: float32[3, 8]
token_default = zero3.token()
slice_tensor = aten.slice.Tensor(tangents_1, 1, 0, 4)
all_gather_start_default = zero3.all_gather_start(token_default, 2, float32)
all_gather_wait_default = zero3.all_gather_wait(all_gather_start_default, token_default, 2, 64, float32, cpu)
as_strided_default = aten.as_strided(all_gather_wait_default, [4, 16], [16, 1])
permute_default_4 = aten.permute(as_strided_default, [1, 0])  # recompute
permute_default_1 = aten.permute(permute_default_4, [1, 0])  # recompute
mm_default = aten.mm(slice_tensor, permute_default_1)
release_default = zero3.release(all_gather_wait_default, token_default, 2, float32)
all_gather_start_default_1 = zero3.all_gather_start(token_default, 4, float32)
all_gather_wait_default_1 = zero3.all_gather_wait(all_gather_start_default_1, token_default, 4, 64, float32, cpu)
as_strided_default_1 = aten.as_strided(all_gather_wait_default_1, [4, 16], [16, 1])
permute_default_5 = aten.permute(as_strided_default_1, [1, 0])  # recompute
permute_default_3 = aten.permute(permute_default_5, [1, 0])  # recompute
slice_tensor_1 = aten.slice.Tensor(tangents_1, 1, 4, 8)
addmm_default = aten.addmm(mm_default, slice_tensor_1, permute_default_3)
release_default_1 = zero3.release(all_gather_wait_default_1, token_default, 4, float32)
permute_2 = aten.permute(tangents_1, [1, 0])
slice_tensor_4 = aten.slice.Tensor(permute_2, 0, 0, 4)
mm_default_1 = aten.mm(slice_tensor_4, lookup_default_1)
reduce_scatter_start_default = zero3.reduce_scatter_start([mm_default_1], token_default, 2, [0])
slice_tensor_5 = aten.slice.Tensor(permute_2, 0, 4, 8)
mm_default_2 = aten.mm(slice_tensor_5, lookup_default_1)
reduce_scatter_wait_default = zero3.reduce_scatter_wait(reduce_scatter_start_default, token_default, 2, 32, float32, cpu)
reduce_scatter_start_default_1 = zero3.reduce_scatter_start([mm_default_2], token_default, 4, [0])
sum_1 = aten.sum.dim_IntList(tangents_1, [0], True)
view = aten.view(sum_1, [8])
reduce_scatter_wait_default_1 = zero3.reduce_scatter_wait(reduce_scatter_start_default_1, token_default, 4, 32, float32, cpu)
reduce_scatter_start_default_4 = zero3.reduce_scatter_start([view], token_default, 3, [0])
ge = aten.ge.Scalar(primals_2, 0)
lt = aten.lt.Scalar(primals_2, 8)
bitwise_and = aten.bitwise_and.Tensor(ge, lt)
ne = aten.ne.Scalar(primals_2, -1)
bitwise_and_1 = aten.bitwise_and.Tensor(bitwise_and, ne)
unsqueeze = aten.unsqueeze(bitwise_and_1, -1)
lookup_backward_default = zero3.lookup_backward(addmm_default, primals_2, unsqueeze, 0, 4)
reduce_scatter_wait_default_4 = zero3.reduce_scatter_wait(reduce_scatter_start_default_4, token_default, 3, 32, float32, cpu)
reduce_scatter_start_default_2 = zero3.reduce_scatter_start([lookup_backward_default], token_default, 0, [0])
lookup_backward_default_1 = zero3.lookup_backward(addmm_default, primals_2, unsqueeze, 4, 4)
reduce_scatter_wait_default_2 = zero3.reduce_scatter_wait(reduce_scatter_start_default_2, token_default, 0, 32, float32, cpu)
reduce_scatter_start_default_3 = zero3.reduce_scatter_start([lookup_backward_default_1], token_default, 1, [0])
reduce_scatter_wait_default_3 = zero3.reduce_scatter_wait(reduce_scatter_start_default_3, token_default, 1, 32, float32, cpu)
assemble_default = zero3.assemble([reduce_scatter_wait_default, reduce_scatter_wait_default_1], token_default, [2, 4], 64, float32, cpu)
assemble_default_1 = zero3.assemble([reduce_scatter_wait_default_2, reduce_scatter_wait_default_3], token_default, [0, 1], 64, float32, cpu)
return [assemble_default_1, None, assemble_default, reduce_scatter_wait_default_4]
""",
        )


class Small(nn.Module):
    """A table that is looked up, and a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 16)
        self.linear = nn.Linear(16, 8)

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        return self.linear(self.table(indices))


def of_small(**options: Any) -> Recording:
    """Two tiles each."""
    return record(Small(), torch.zeros(3, dtype=torch.int64), tile_bytes=256, **options)
