"""The cost model, against counts by hand."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from graphs import BACKWARD, FORWARD, gpt, named, traced
from zero_compile.analysis import costs
from zero_compile.analysis.costs import (
    Cost,
    Role,
    collective_seconds,
    evaluate,
    fused_costs,
    graph_cost,
    graph_seconds,
    node_cost,
    role,
    seconds,
    transfer_seconds,
)
from zero_compile.analysis.hardware import load
from zero_compile.analysis.sizes import traced_sizes
from zero_runtime import compat
from zero_runtime.errors import OptionError
from zero_runtime.ir.plan import Channel

aten = torch.ops.aten
H100 = load("h100")
B, IN, OUT = 24, 16, 40


def aot(model: nn.Module, *inputs: torch.Tensor, dynamic: bool = False) -> list[GraphModule]:
    """The forward and the backward graph that Inductor would be given."""
    found: list[GraphModule] = []

    def keep(gm: GraphModule, inputs: Any, **_: Any) -> Callable[..., Any]:
        found.append(gm)
        run = partial(_call, gm)
        run._boxed_call = True  # AOTAutograd passes one list
        return run

    torch._dynamo.reset()
    run = torch.compile(
        model, dynamic=dynamic, backend=lambda gm, x: compat.compile_fx(gm, x, inner_compile=keep)
    )
    run(*inputs).sum().backward()
    torch._dynamo.reset()
    return found


def _call(gm: GraphModule, args: list[Any]) -> Any:
    return gm(*args)


@cache
def linear(dynamic: bool = False) -> list[GraphModule]:
    x = torch.randn(B, IN, requires_grad=True)
    return aot(nn.Sequential(nn.Linear(IN, OUT, bias=False), nn.GELU()), x, dynamic=dynamic)


def of(graph: Graph, *targets: Any) -> Cost:
    found = [node_cost(n) for n in graph.nodes if n.target in targets]
    return Cost(sum(c.flops for c in found), sum(c.bytes for c in found))


def only(gm: GraphModule, target: Any) -> Node:
    (node,) = gm.graph.find_nodes(op="call_function", target=target)
    return node


# ------------------------------------------------------------------------------ operations


def test_a_linears_backward_takes_twice_its_forward():
    forward, backward = (of(gm.graph, aten.mm.default).flops for gm in linear())
    assert forward == 2 * B * IN * OUT
    assert forward + backward == 3 * forward


def test_a_matmul_reads_both_sides_and_writes_the_product():
    (mm,) = linear()[0].graph.find_nodes(op="call_function", target=aten.mm.default)
    assert node_cost(mm).bytes == 4 * (B * IN + IN * OUT + B * OUT)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_a_convolutions_backward_takes_twice_its_forward(groups: int):
    conv = nn.Conv2d(8, 12, 3, padding=1, groups=groups)
    forward, backward = aot(conv, torch.randn(2, 8, 5, 7, requires_grad=True))
    counted = of(forward.graph, aten.convolution.default).flops
    assert counted == 2 * 2 * 12 * 5 * 7 * (8 // groups) * 9
    assert of(backward.graph, aten.convolution_backward.default).flops == 2 * counted


def test_a_first_convolution_needs_no_gradient_of_its_input():
    forward, backward = aot(nn.Conv1d(4, 6, 3), torch.randn(2, 4, 9))
    once = of(forward.graph, aten.convolution.default).flops
    assert of(backward.graph, aten.convolution_backward.default).flops == once


def test_attention_is_two_matmuls_forward_and_five_backward():
    class Attention(nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(q, k, v)

    q, k = torch.randn(2, 3, 10, 8, requires_grad=True), torch.randn(2, 3, 14, 8)
    forward, backward = aot(Attention(), q, k, k)
    matmul = 2 * 2 * 3 * 10 * 14 * 8
    kernels = [aten._scaled_dot_product_flash_attention_for_cpu.default]
    assert of(forward.graph, *kernels).flops == 2 * matmul
    kernels = [aten._scaled_dot_product_flash_attention_for_cpu_backward.default]
    assert of(backward.graph, *kernels).flops == 5 * matmul


def test_matmul_operations_agree_with_torchs_counter():
    def f(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.bmm(torch.addmm(b, x, w).unflatten(0, (2, -1)), y)

    inputs = (torch.randn(6, 5), torch.randn(5, 7), torch.randn(7), torch.randn(2, 7, 9))
    with FlopCounterMode(display=False) as counter:
        f(*inputs)
    gm = traced(f, *inputs)
    kernels = [node_cost(n).flops for n in gm.graph.nodes if role(n) is Role.KERNEL]
    assert sum(kernels) == counter.get_total_flops()


# ------------------------------------------------------------------------------ traffic


def test_elementwise_work_counts_one_operation_an_element_and_reads_what_is_there():
    gm = traced(lambda x, b: x + b, torch.randn(6, 5), torch.randn(5))
    assert node_cost(only(gm, aten.add.Tensor)) == Cost(sympy.Integer(30), sympy.Integer(4 * 65))


def test_an_expanded_input_is_read_at_the_size_it_has():
    gm = traced(lambda x, b: x * b.expand(6, 5), torch.randn(6, 5), torch.randn(5))
    assert node_cost(only(gm, aten.mul.Tensor)).bytes == 4 * (30 + 5 + 30)


def test_views_and_parts_cost_nothing():
    gm = traced(lambda x: x.t().view(-1).split(10)[1], torch.randn(5, 4).t())
    assert graph_cost(gm.graph) == Cost()


def test_half_the_bytes_at_half_the_width():
    cast = torch.ops.prims.convert_element_type.default
    gm = traced(lambda x: cast(x, torch.bfloat16), torch.randn(8))
    assert node_cost(only(gm, cast)).bytes == 8 * 4 + 8 * 2


def by_hand(target: Any, *arguments: torch.Tensor | tuple[torch.Tensor, ...]) -> Node:
    """A node of ``target``; its result's fake value is computed."""
    graph, values = Graph(), []
    for number, value in enumerate(arguments):
        node = graph.placeholder(f"x{number}")
        node.meta["val"] = value
        values.append(node)
    node = graph.call_function(target, tuple(values))
    node.meta["val"] = target(*arguments)
    return node


def test_what_works_in_place_reads_and_writes_its_argument():
    assert node_cost(by_hand(aten.add_.Tensor, torch.ones(5), torch.ones(5))).bytes == 4 * 15


def test_a_copy_does_not_read_what_it_overwrites():
    assert node_cost(by_hand(aten.copy_.default, torch.ones(5), torch.ones(5))).bytes == 4 * 10


def test_a_lookup_reads_rows_not_the_table():
    node = by_hand(aten.embedding.default, torch.ones(1000, 4), torch.zeros(3, dtype=torch.int64))
    assert node_cost(node).bytes == 4 * 12 + 8 * 3 + 4 * 12


# ------------------------------------------------------------------------------ fusion


def fused_bytes(function: Callable[..., Any], *inputs: torch.Tensor) -> sympy.Expr:
    return graph_cost(traced(function, *inputs).graph).bytes


def test_a_chain_of_elementwise_work_reads_and_writes_once():
    x = torch.randn(100)
    assert fused_bytes(lambda x: x.sin().cos().exp(), x) == 2 * 400


def test_fused_readers_of_one_tensor_read_it_once():
    x = torch.randn(10, 10)
    assert fused_bytes(lambda x: (x - x.amax(1, keepdim=True)).exp(), x) == 2 * 400


def test_a_kernel_between_makes_readers_read_again():
    x, w = torch.randn(10, 10), torch.randn(10, 10)
    # sin reads x and writes for mm, which reads and writes; the sum reads that and x again
    assert fused_bytes(lambda x, w: torch.mm(x.sin(), w) + x, x, w) == 400 * (2 + 3 + 3)


def test_a_value_is_written_if_a_kernel_reads_it_through_a_view():
    gm = traced(lambda x, w: torch.mm(x.sin().view(4, 5), w), torch.randn(20), torch.randn(5, 3))
    assert fused_costs(gm.graph)[only(gm, aten.sin.default)].bytes == 4 * 40


def test_fusion_never_costs_more_than_the_nodes_alone():
    for graph in (FORWARD, BACKWARD):
        nodes = gpt().scheduled(graph).graph
        alone = sum(node_cost(n).bytes for n in nodes.nodes)
        assert 0 < graph_cost(nodes).bytes < alone


def test_the_schedules_own_operators_cost_nothing():
    graph = gpt().scheduled(FORWARD).graph
    ours = [n for n in graph.nodes if str(n.target).startswith("zero3.")]
    taken = graph_seconds(graph, H100)
    assert ours
    assert {taken[n] for n in ours} == {0.0}


# ------------------------------------------------------------------------------ symbols


def test_a_dynamic_batch_stays_a_symbol_in_which_cost_is_linear():
    for gm, fixed in zip(linear(dynamic=True), linear(), strict=True):
        cost = graph_cost(gm.graph)
        batch = next(s for s in cost.flops.free_symbols if "16" not in s.name)
        sizes = traced_sizes(gm.graph)
        for formula in (cost.flops, cost.bytes):
            rest = formula.subs({s: sizes[s.name] for s in formula.free_symbols - {batch}})
            assert sympy.degree(rest, batch) == 1
        assert cost.at(sizes).flops == graph_cost(fixed.graph).flops


def test_symbolic_shapes_get_no_new_guards():
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, w).relu()

    gm = make_fx(f, tracing_mode="symbolic")(torch.randn(6, 4), torch.randn(4, 3))
    environment = named(gm, "mm").meta["val"].shape[0].node.shape_env
    before = len(environment.guards)
    formula = graph_cost(gm.graph)
    assert len(environment.guards) == before
    assert formula.at(traced_sizes(gm.graph)).flops == 2 * 6 * 4 * 3 + 18


def test_evaluate_takes_symbols_or_their_names():
    n, m = sympy.Symbol("n", positive=True), sympy.Symbol("m")
    assert evaluate(n * m + 1, {"n": 3, m: 4}) == 13
    assert evaluate(n * m, {"n": 3}) == 3 * m


def test_seconds_of_a_formula_name_the_missing_sizes():
    n = sympy.Symbol("s7")
    with pytest.raises(OptionError, match="give sizes for s7"):
        seconds(Cost(n, n), torch.float32, H100)


# ------------------------------------------------------------------------------ seconds


def test_roofline_takes_the_longer_and_the_launches():
    arithmetic = Cost(sympy.Integer(10**15), sympy.Integer(1))
    rate = H100.peaks.bfloat16 * 0.7
    assert seconds(arithmetic, torch.bfloat16, H100, launches=0) == pytest.approx(1e15 / rate)
    traffic = Cost(sympy.Integer(1), sympy.Integer(10**12))
    expected = 1e12 / (H100.memory_bandwidth * 0.9) + 2 * H100.launch_seconds
    assert seconds(traffic, torch.float32, H100, launches=2) == pytest.approx(expected)


def test_elementwise_work_is_bound_by_memory_and_a_large_matmul_by_arithmetic():
    with torch.device("meta"):
        x = torch.empty(4096, 4096, dtype=torch.bfloat16)
    product, activation = by_hand(aten.mm.default, x, x), by_hand(aten.relu.default, x)
    bound = []
    for node in (product, activation):
        cost = node_cost(node)
        taken = seconds(cost, costs.compute_dtype(node), H100, launches=0)
        bound.append(taken > float(cost.bytes) / H100.memory_bytes_per_second * 1.001)
    assert bound == [True, False]


def test_kernels_are_launched_and_fused_work_is_not():
    gm = traced(lambda x, w: torch.mm(x, w).relu(), torch.randn(2, 2), torch.randn(2, 2))
    taken = graph_seconds(gm.graph, H100)
    assert taken[only(gm, aten.mm.default)] > H100.launch_seconds
    assert 0 < taken[only(gm, aten.relu.default)] < H100.launch_seconds


def test_arithmetic_runs_at_the_dtype_of_the_inputs():
    x = torch.ones(2, 2, dtype=torch.float16)
    assert costs.compute_dtype(by_hand(aten.mm.default, x, x)) is torch.float16


# ------------------------------------------------------------------------------ links


COLLECTIVES = (Channel.ALL_GATHER, Channel.REDUCE_SCATTER)


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_a_ring_within_a_node(kind: Channel):
    link, nbytes, n = H100.intra_node, 10**9, 4
    expected = (n - 1) * link.latency + (n - 1) / n * nbytes / (link.bandwidth * 0.8)
    assert collective_seconds(kind, nbytes, n, H100) == pytest.approx(expected)


def test_a_ring_over_nodes_adds_the_network():
    nbytes = 10**9
    within = collective_seconds(Channel.ALL_GATHER, nbytes, 8, H100)
    network = H100.inter_node
    expected = within + 3 * network.latency + 3 / 4 * (nbytes / 8) / (network.bandwidth * 0.8)
    assert collective_seconds(Channel.ALL_GATHER, nbytes, 32, H100) == pytest.approx(expected)


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_one_rank_takes_no_time_and_more_never_less(kind: Channel):
    taken = [collective_seconds(kind, 10**6, n, H100) for n in range(1, 40)]
    assert taken[0] == 0.0
    assert taken == sorted(taken)
    assert taken[8] > taken[7]  # the ninth rank is on another node


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_nothing_to_gather_takes_no_time_and_more_bytes_more(kind: Channel):
    taken = [collective_seconds(kind, nbytes, 16, H100) for nbytes in (0, 1, 10**6, 10**9)]
    assert taken[0] == 0.0
    assert taken == sorted(set(taken))


def test_transfers_take_their_links():
    read = transfer_seconds(Channel.NVME_READ, 10**9, H100)
    write = transfer_seconds(Channel.NVME_WRITE, 10**9, H100)
    copy = transfer_seconds(Channel.HOST_TO_DEVICE, 10**9, H100)
    assert copy == transfer_seconds(Channel.DEVICE_TO_HOST, 10**9, H100)
    assert copy == pytest.approx(1e-5 + 1e9 / (64e9 * 0.8))
    assert copy < read < write


def test_channels_are_not_mistaken_for_one_another():
    with pytest.raises(OptionError, match="'nvme_read' carries no collective"):
        collective_seconds(Channel.NVME_READ, 1, 2, H100)
    with pytest.raises(OptionError, match="'all_gather' carries no copies"):
        transfer_seconds(Channel.ALL_GATHER, 1, H100)
    with pytest.raises(OptionError, match="at least one rank, got 0"):
        collective_seconds(Channel.ALL_GATHER, 1, 0, H100)
