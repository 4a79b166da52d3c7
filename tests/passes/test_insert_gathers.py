"""insert_gathers: every use of a parameter reads a gather of it."""

import torch
from expecttest import TestCase
from torch import nn
from torch.fx import Graph, GraphModule

from graphs import CAPTURED, mlp, names, snapshot, text
from zero_compile.passes.insert_gathers import insert_gathers
from zero_compile.verify import verify_captured
from zero_runtime.ir import ops


def graph_of(function, *inputs: str) -> GraphModule:
    """A graph without metadata, like ``function`` over nodes."""
    graph = Graph()
    placeholders = [graph.placeholder(name) for name in inputs]
    graph.output(function(graph, *placeholders))
    return GraphModule(nn.Module(), graph)


class Snapshot(TestCase):
    @snapshot
    def test_before(self):
        self.assertExpectedInline(
            text(mlp().before("insert_gathers", CAPTURED)),
            """\
l_fn_modules_0_parameters_weight_: float32[16, 8]
l_fn_modules_0_parameters_bias_: float32[16]
l_args_0_: float32[3, 8]
l_fn_modules_2_parameters_weight_: float32[8, 16]
l_fn_modules_2_parameters_bias_: float32[8]
l_fn_modules_4_parameters_weight_: float32[4, 8]
l_fn_modules_4_parameters_bias_: float32[4]
input_1 = linear(l_args_0_, l_fn_modules_0_parameters_weight_, l_fn_modules_0_parameters_bias_)
input_2 = relu(input_1, inplace=False)
input_3 = linear(input_2, l_fn_modules_2_parameters_weight_, l_fn_modules_2_parameters_bias_)
input_4 = relu(input_3, inplace=False)
input_5 = linear(input_4, l_fn_modules_4_parameters_weight_, l_fn_modules_4_parameters_bias_)
return [input_5]
""",
        )

    @snapshot
    def test_after(self):
        self.assertExpectedInline(
            text(mlp().after("insert_gathers", CAPTURED)),
            """\
l_fn_modules_0_parameters_weight_: float32[16, 8]
l_fn_modules_0_parameters_bias_: float32[16]
l_args_0_: float32[3, 8]
l_fn_modules_2_parameters_weight_: float32[8, 16]
l_fn_modules_2_parameters_bias_: float32[8]
l_fn_modules_4_parameters_weight_: float32[4, 8]
l_fn_modules_4_parameters_bias_: float32[4]
gather_default_5 = zero3.gather(l_fn_modules_0_parameters_weight_, 0)
gather_default_4 = zero3.gather(l_fn_modules_0_parameters_bias_, 1)
gather_default_3 = zero3.gather(l_fn_modules_2_parameters_weight_, 2)
gather_default_2 = zero3.gather(l_fn_modules_2_parameters_bias_, 3)
gather_default_1 = zero3.gather(l_fn_modules_4_parameters_weight_, 4)
gather_default = zero3.gather(l_fn_modules_4_parameters_bias_, 5)
input_1 = linear(l_args_0_, gather_default_5, gather_default_4)
input_2 = relu(input_1, inplace=False)
input_3 = linear(input_2, gather_default_3, gather_default_2)
input_4 = relu(input_3, inplace=False)
input_5 = linear(input_4, gather_default_1, gather_default)
return [input_5]
""",
        )


def test_all_users_of_a_parameter_read_its_one_gather():
    gm = graph_of(
        lambda g, w, x: (
            g.call_function(torch.mul, (x, w)),
            g.call_function(torch.add, (w, w)),
        ),
        "w",
        "x",
    )
    insert_gathers(gm, parameters={0: 0})
    parameter, x, gather, mul, add, _ = gm.graph.nodes
    assert list(parameter.users) == [gather]
    assert gather.args == (parameter, 0)
    assert mul.args == (x, gather)
    assert add.args == (gather, gather)


def test_a_returned_parameter_is_a_gather_too():
    gm = graph_of(lambda g, w: (w,), "w")
    insert_gathers(gm, parameters={0: 0})
    verify_captured(gm, parameters={0: 0})
    _, gather, output = gm.graph.nodes
    assert output.args == ((gather,),)


def test_a_parameter_nobody_reads_is_gathered_all_the_same():
    gm = graph_of(lambda g, w, x: (x,), "w", "x")
    insert_gathers(gm, parameters={0: 0})
    verify_captured(gm, parameters={0: 0})


def test_inputs_and_buffers_are_left_alone():
    gm = graph_of(lambda g, x, w, b: (g.call_function(torch.addcmul, (b, x, w)),), "x", "w", "b")
    insert_gathers(gm, parameters={1: 0})
    x, _, b, gather, addcmul, _ = gm.graph.nodes
    assert addcmul.args == (b, x, gather)


def test_gathers_stand_after_the_inputs_in_order_of_their_numbers():
    gm = graph_of(lambda g, a, x, b: (a, b, x), "a", "x", "b")
    insert_gathers(gm, parameters={0: 0, 2: 1})
    gathers = [n for n in gm.graph.nodes if n.op == "call_function"]
    assert [(g.args[0].name, g.args[1]) for g in gathers] == [("a", 0), ("b", 1)]
    assert names(gm)[:3] == ["a", "x", "b"]


def test_a_gather_carries_its_parameters_example_value():
    gm = mlp().after("insert_gathers", CAPTURED)
    for gather in gm.graph.find_nodes(op="call_function", target=ops.gather):
        assert gather.meta["example_value"] is gather.args[0].meta["example_value"]


def test_each_parameter_of_a_model_is_gathered_once():
    recording = mlp()
    gm = recording.after("insert_gathers", CAPTURED)
    parameters = recording.captures[0].parameters
    assert sorted(parameters.values()) == list(range(6))
    verify_captured(gm, parameters=parameters)
