"""Storages, their lives and sizes, on small graphs; the prediction of real memory is tested elsewhere."""

import time
from collections.abc import Callable

import pytest
import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from graphs import (
    BACKWARD,
    FORWARD,
    HOST,
    NVME,
    call_before,
    copy_of,
    gpt,
    lowered,
    mlp,
    named,
    traced,
)
from zero_compile.analysis.fx_graph import calls
from zero_compile.analysis.liveness import Liveness, Origin, Storage, keep_for_reuse, seam
from zero_runtime.ir import ops
from zero_runtime.ir.plan import Residence, StatePolicy, Tier, reducing_bytes
from zero_runtime.ir.timeline import Category

aten = torch.ops.aten
SQUARE, OTHER = torch.zeros(8, 8), torch.zeros(8, 8)
BYTES = 8 * 8 * 4


def of(function: Callable[..., object], *inputs: torch.Tensor) -> Liveness:
    return Liveness.of(traced(function, *inputs).graph)


def storage_of(found: Liveness, value: str) -> Storage:
    """The storage that holds a value."""
    return next(s for s in found.storages if value in s.values)


def made(found: Liveness) -> list[str]:
    """The storages that the graph itself makes."""
    return [s.name for s in found.storages if s.origin is Origin.VALUE]


# ------------------------------------------------------------------------------ storages


def test_views_share_the_storage_of_their_base() -> None:
    found = of(lambda x: (x @ x).t()[1:].unsqueeze(0)[0] + 1, SQUARE)
    assert made(found) == ["mm", "add"]
    assert len(storage_of(found, "mm").values) == 5
    assert storage_of(found, "mm").bytes == BYTES


def test_parts_of_a_split_share_its_storage() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        left, right = (x @ x).split(4, dim=1)
        return left @ right.t()

    found = of(function, SQUARE)
    assert made(found) == ["mm", "mm_1"]
    assert {"getitem", "getitem_1"} <= set(storage_of(found, "mm").values)


def test_results_of_one_kernel_are_storages_of_their_own_from_where_it_runs() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, places = aten.topk.default(x @ x, 3)
        return values @ values.t(), places

    found = of(function, SQUARE)
    place = found.names.index("topk")
    assert [storage_of(found, n).defined for n in ("getitem", "getitem_1")] == [place, place]
    assert storage_of(found, "getitem").bytes == 8 * 3 * 4
    assert storage_of(found, "getitem_1").bytes == 8 * 3 * 8


def test_in_place_operations_write_into_the_storage_of_their_target() -> None:
    gm = traced(lambda x: (x @ x) @ x, SQUARE)
    product = named(gm, "mm")
    added = call_before(named(gm, "mm_1"), aten.add_.Tensor, product, named(gm, "x_1"))
    named(gm, "mm_1").replace_input_with(product, added)
    found = Liveness.of(gm.graph)
    assert made(found) == ["mm", "mm_1"]
    assert storage_of(found, "mm").values == ("mm", "add__tensor")


def test_elementwise_results_take_memory_only_where_something_needs_it() -> None:
    assert made(of(lambda x: ((x + 1) * 2).relu(), SQUARE)) == ["relu"]
    assert made(of(lambda x: (x + 1).relu() @ x, SQUARE)) == ["relu", "mm"]
    assert made(of(lambda x: ((x + 1) * 2).sum(), SQUARE)) == ["sum_1"]


def test_an_expensive_result_with_readers_in_two_kernels_is_put_into_memory() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        heavy = x.exp()
        return (heavy + (heavy.sum(0) @ x)).sum()

    found = of(function, SQUARE)
    assert "exp" in made(found)
    assert "exp" not in made(of(lambda x: (x.exp() * x.exp().sum()).sum(), SQUARE))


def test_a_matmul_that_is_added_to_something_becomes_part_of_the_addition() -> None:
    found = of(lambda x, y: (x @ x) + (y.exp() @ y).exp(), SQUARE, OTHER)
    assert "mm" not in made(found)
    assert storage_of(found, "x_1").last == found.names.index("add")


def test_a_kernel_writes_over_what_it_reads_for_the_last_time() -> None:
    found = of(lambda x: (x @ x).relu() @ x, SQUARE)
    product, relu = storage_of(found, "mm"), storage_of(found, "relu")
    assert (product.last, product.freed) == (relu.defined, relu.defined)
    assert found.peak().bytes == 2 * BYTES
    assert of(lambda x: (x @ x).relu() @ (x @ x), SQUARE).peak().bytes == 3 * BYTES


def test_dead_memory_is_kept_for_a_result_of_its_size_where_the_estimated_peak_allows() -> None:
    def value(name: str, defined: int, last: int, size: int) -> Storage:
        return Storage((name,), size, Category.ACTIVATIONS, defined, last, last + 1)

    dead, later = value("dead", 0, 1, 100), value("later", 5, 6, 100)
    peak, low = value("peak", 0, 0, 300), value("low", 2, 4, 200)
    kept = keep_for_reuse([dead, peak, low, later], frozenset({"later"}), range(8), {})
    assert [s.freed for s in kept] == [5, 1, 5, 7]
    high = value("high", 2, 4, 350)
    kept = keep_for_reuse([dead, peak, high, later], frozenset({"later"}), range(8), {})
    assert [s.freed for s in kept] == [2, 1, 5, 7]


def test_arguments_are_in_no_curve_and_outputs_live_to_the_end() -> None:
    found = of(lambda x: (x @ x, (x @ x).sum()), SQUARE)
    assert storage_of(found, "x_1").origin is Origin.ARGUMENT
    assert found.live()[0] == 0
    output = storage_of(found, "mm")
    assert (output.output, output.last) == (True, len(found.names) - 1)
    assert found.live()[-1] == BYTES + 4


# ------------------------------------------------------------------------------ gathers, reductions


def one_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return ops.gather(weight, 0) @ x  # type: ignore[no-any-return]


def test_a_gathered_bucket_lives_from_its_start_to_its_release() -> None:
    gm = lowered(one_linear, SQUARE, OTHER)
    found = Liveness.of(gm.graph)
    bucket = next(s for s in found.storages if s.category is Category.GATHERED)
    assert found.names[bucket.defined] == "all_gather_start_default"
    assert found.names[bucket.last] == "release_default"
    assert "as_strided_default" in bucket.values
    assert "weight_1" not in {v for s in found.storages for v in s.values}


def test_a_logical_gather_lives_from_its_first_use_to_its_last() -> None:
    found = of(one_linear, SQUARE, OTHER)
    gathered = storage_of(found, "gather")
    place = found.names.index("mm")
    assert (gathered.category, gathered.bytes) == (Category.GATHERED, BYTES)
    assert (gathered.defined, gathered.last) == (place, place)


def test_a_whole_gradient_is_free_when_its_reduction_starts() -> None:
    gm = lowered(lambda x, w: ops.reduce(ops.gather(w, 0) @ x, 0), SQUARE, OTHER)
    found = Liveness.of(gm.graph)
    gradient = storage_of(found, "mm")
    start = found.names.index("reduce_scatter_start_default")
    assert (gradient.category, gradient.last) == (Category.GRADIENTS, start)
    reducing = next(s for s in found.storages if s.category is Category.REDUCING)
    assert (reducing.defined, reducing.bytes) == (start, 2 * BYTES)
    assert found.names[reducing.last] == "reduce_scatter_wait_default"


@pytest.mark.parametrize("graph", [FORWARD, BACKWARD])
@pytest.mark.parametrize("recorded", [mlp, gpt])
def test_the_schedule_holds_what_its_plan_says(recorded: Callable[[], object], graph: str) -> None:
    recording = recorded()
    plan = recording.plans[graph]  # type: ignore[attr-defined]
    gm = recording.scheduled(graph)  # type: ignore[attr-defined]
    found = Liveness.of(gm.graph, plan.buckets)
    assert found.peak([Category.GATHERED]).bytes == plan.peak_gathered_bytes
    assert found.peak([Category.REDUCING]).bytes == plan.peak_reducing_bytes


@pytest.mark.parametrize("graph", [FORWARD, BACKWARD])
@pytest.mark.parametrize("residence", [NVME, HOST, Residence(optimizer=Tier.HOST)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_fetched_shards_count_up_to_their_gathers(ranks, residence, graph) -> None:
    """Together with what is gathered at every step of the plan."""
    recording = mlp(ranks, "one_ahead", residence)
    plan, found = (
        recording.plans[graph],
        Liveness.of(recording.scheduled(graph).graph, recording.buckets),
    )
    curve = found.live([Category.GATHERED, Category.STAGING])
    nodes = [n.name for n in recording.scheduled(graph).graph.nodes if n.target in ops.SCHEDULED]
    held = [curve[found.names.index(name)] for name in nodes]
    assert held == [step.gathered_bytes for step in plan.steps]


@pytest.mark.parametrize("residence", [None, HOST])
def test_a_reduced_gradient_that_is_evicted_is_no_output(residence) -> None:
    recording = mlp(2, "one_ahead", residence)
    found = Liveness.of(recording.scheduled(BACKWARD).graph, recording.buckets)
    waits = [n.name for n in calls(recording.scheduled(BACKWARD).graph, ops.reduce_scatter_wait)]
    kept = {s.name for s in found.storages if s.output}
    assert kept & set(waits) == (set() if residence else set(waits))
    reducing = [s.bytes for s in found.storages if s.category is Category.REDUCING]
    buckets = [recording.buckets[b] for b in (2, 1, 0)]
    shards = [b.chunk * 4 if residence else 0 for b in buckets]
    assert reducing == [
        reducing_bytes(b, StatePolicy()) + s for b, s in zip(buckets, shards, strict=True)
    ]


def test_categories_add_up() -> None:
    found = Liveness.of(gpt().scheduled(BACKWARD).graph)
    parts = found.by_category().values()
    assert [sum(column) for column in zip(*parts, strict=True)] == found.live()


# ------------------------------------------------------------------------------ the seam


def both(recording: object) -> tuple[Liveness, Liveness]:
    scheduled = recording.scheduled  # type: ignore[attr-defined]
    return Liveness.of(scheduled(FORWARD).graph), Liveness.of(scheduled(BACKWARD).graph)


def test_backward_frees_what_forward_saved_after_the_last_touch() -> None:
    forward, backward = both(mlp())
    saved = dict(seam(forward, backward).saved)
    assert saved
    for name in saved:
        handed = storage_of(backward, name)
        assert handed.origin is Origin.SAVED
        assert handed.freed <= len(backward.names)


def test_a_step_carries_each_saved_storage_once() -> None:
    forward, backward = both(gpt())
    step = Liveness.step(forward, backward)
    offset = len(forward.names)
    assert step.names[offset] == f"backward/{backward.names[0]}"
    assert step.live()[:offset] == forward.live()
    for name, _ in seam(forward, backward).saved:
        carried = [s for s in step.storages if f"backward/{name}" in s.values]
        assert [s.defined < offset <= s.last for s in carried] == [True]
        assert f"forward/{name}" in carried[0].values
        assert step.dependencies.has_edge(f"forward/{name}", f"backward/{name}")


def test_only_gradients_and_results_are_left_after_a_step() -> None:
    forward, backward = both(mlp())
    step = Liveness.step(forward, backward)
    left = [s for s in step.storages if s.freed == len(step.names) and s.bytes]
    assert {s.category for s in left if s.name.startswith("backward/")} == {Category.GRADIENTS}


# ------------------------------------------------------------------------------ symbols


def test_symbolic_sizes_are_evaluated_on_demand() -> None:
    gm = make_fx(lambda x: (x @ x.t()).relu() @ x, tracing_mode="symbolic")(torch.zeros(5, 7))
    found = Liveness.of(gm.graph)
    with pytest.raises(ValueError, match="evaluate"):
        found.live()
    assert found.evaluate().peak().bytes == (5 * 5 + 5 * 7) * 4
    rows = next(name for name, size in found.sizes.items() if size == 5)
    assert found.evaluate({rows: 10}).peak().bytes == (10 * 10 + 10 * 7) * 4


# ------------------------------------------------------------------------------ the critical path


def test_the_critical_path_is_the_longest_chain_in_seconds() -> None:
    found = of(lambda x: ((x @ x) @ x) @ (x @ x.t()), SQUARE)
    path = found.critical_path({"mm": 1.0, "mm_1": 1.0, "mm_2": 5.0, "mm_3": 1.0})
    assert path.seconds == 6.0
    assert [n for n in path.nodes if n.startswith("mm")] == ["mm_2", "mm_3"]
    assert found.critical_path({}).seconds == 0.0


# ------------------------------------------------------------------------------ size


def large_graph(layers: int) -> Graph:
    """Four nodes a layer; every layer's result is an output, as if saved for backward."""
    value = traced(lambda x: x + 1, SQUARE).graph
    meta = dict(next(iter(value.nodes)).meta)
    graph = Graph()

    def node(target: object, *args: Node) -> Node:
        made = graph.call_function(target, args)  # type: ignore[arg-type]
        made.meta = dict(meta)
        return made

    x = weight = graph.placeholder("x")
    x.meta = meta
    saved = []
    for _ in range(layers):
        product = node(aten.mm.default, x, weight)
        gate = node(aten.sigmoid.default, product)
        x = node(aten.mul.Tensor, node(aten.t.default, gate), product)
        saved.append(x)
    graph.output(saved)
    return graph


def test_a_graph_of_36000_nodes_takes_few_seconds() -> None:
    graph = large_graph(9000)
    start = time.process_time()
    found = Liveness.of(graph)
    peak = found.peak()
    seconds = time.process_time() - start
    print(f"{len(found.names)} nodes in {seconds:.2f} s")
    assert peak.bytes >= 9000 * BYTES
    assert seconds < 6, "quadratic work?"


def test_the_graph_is_left_as_it_was() -> None:
    gm = gpt().scheduled(BACKWARD)
    before = copy_of(gm)
    Liveness.of(gm.graph)
    assert _code(gm) == _code(before)


def _code(gm: GraphModule) -> list[str]:
    return [n.format_node() or "" for n in gm.graph.nodes]
