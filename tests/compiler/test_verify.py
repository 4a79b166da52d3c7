"""verify: every rule about a legal graph, broken by hand, is an error that names what is wrong."""

import pytest
import torch
from torch.fx import GraphModule, Node

from graphs import BACKWARD, CAPTURED, FORWARD, call_before, lowered, mlp, traced
from zero_compile.analysis.fx_graph import calls, output_node
from zero_compile.verify import verify_bucketed, verify_captured, verify_scheduled
from zero_runtime.errors import PlanError
from zero_runtime.ir import ops

P, X = torch.randn(4, 4), torch.randn(4, 4)


def forward() -> GraphModule:
    return mlp().scheduled(FORWARD)


def backward() -> GraphModule:
    return mlp().scheduled(BACKWARD)


def first(gm: GraphModule, target: object) -> Node:
    return calls(gm.graph, target)[0]


def copy_before(place: Node, node: Node) -> Node:
    with place.graph.inserting_before(place):
        return place.graph.node_copy(node)


@pytest.mark.parametrize("graph", [FORWARD, BACKWARD])
def test_scheduled_graphs_of_a_model_are_legal(graph):
    gm = mlp().scheduled(graph)
    verify_bucketed(gm, buckets=mlp().buckets)
    verify_scheduled(gm)


class TestCaptured:
    def verify(self, gm):
        verify_captured(gm, parameters=mlp().captures[0].parameters)

    def gm(self):
        return mlp().after("insert_gathers", CAPTURED)

    def test_a_parameter_read_directly(self):
        gm = self.gm()
        first(gm, ops.gather).next.next.prepend(
            gm.graph.call_function(torch.neg, (next(iter(gm.graph.nodes)),))
        )
        with pytest.raises(PlanError, match=r"parameter 0 is read by \['gather_.*', 'neg'\]"):
            self.verify(gm)

    def test_a_parameter_gathered_under_another_number(self):
        gm = self.gm()
        first(gm, ops.gather).update_arg(1, 5)
        with pytest.raises(PlanError, match="parameter 0 is read by"):
            self.verify(gm)

    def test_a_parameter_that_no_gather_reads(self):
        gm = self.gm()
        first(gm, ops.gather).update_arg(0, list(gm.graph.nodes)[2])
        with pytest.raises(PlanError, match=r"parameter 0 is read by \[\]"):
            self.verify(gm)


class TestBucketed:
    def verify(self, gm):
        verify_bucketed(gm, buckets=mlp().buckets)

    @pytest.mark.parametrize("target", [ops.gather, ops.reduce])
    def test_a_logical_operator_left_over(self, target):
        gm = traced(lambda x: target(x, 0), X)
        with pytest.raises(PlanError, match=rf"\['{target._schema.name[7:]}'\] reached no bucket"):
            self.verify(gm)

    def test_a_bucket_gathered_twice(self):
        gm = forward()
        copy_before(output_node(gm.graph), first(gm, ops.all_gather_start))
        with pytest.raises(PlanError, match=r"all_gather_start.* runs \{0: 2, .* times a bucket"):
            self.verify(gm)

    def test_a_bucket_reduced_twice(self):
        gm = backward()
        copy_before(output_node(gm.graph), first(gm, ops.reduce_scatter_start))
        with pytest.raises(PlanError, match=r"reduce_scatter_start.* runs \{2: 2, .*a bucket"):
            self.verify(gm)

    @pytest.mark.parametrize(
        ("graph", "target", "place"),
        [(FORWARD, ops.all_gather_start, 1), (BACKWARD, ops.reduce_scatter_start, 2)],
    )
    def test_a_bucket_that_does_not_exist(self, graph, target, place):
        gm = mlp().scheduled(graph)
        first(gm, target).update_arg(place, 17)
        with pytest.raises(PlanError, match="17: 1"):
            self.verify(gm)

    def test_a_parameter_reduced_twice_in_one_collective(self):
        gm = backward()
        start = first(gm, ops.reduce_scatter_start)
        start.update_arg(3, [0, 0])
        with pytest.raises(PlanError, match=rf"{start.name} reduces a parameter twice: \[0, 0\]"):
            self.verify(gm)


class TestScheduled:
    def test_a_gather_that_nobody_waits_for(self):
        gm = forward()
        start = copy_before(output_node(gm.graph), first(gm, ops.all_gather_start))
        with pytest.raises(PlanError, match=rf"{start.name} is waited for by \[\] instead of once"):
            verify_scheduled(gm)

    def test_a_gather_waited_for_twice(self):
        gm = forward()
        wait = first(gm, ops.all_gather_wait)
        copy_before(output_node(gm.graph), wait)
        with pytest.raises(PlanError, match=f"{wait.args[0].name} is waited for by .*{wait.name}"):
            verify_scheduled(gm)

    def test_a_gather_waited_for_before_it_starts(self):
        gm = forward()
        start, wait = first(gm, ops.all_gather_start), first(gm, ops.all_gather_wait)
        start.prepend(wait)
        with pytest.raises(PlanError, match=f"{wait.name} stands before {start.name}"):
            verify_scheduled(gm)

    def test_a_bucket_never_released(self):
        gm = forward()
        gm.graph.erase_node(first(gm, ops.release))
        wait = first(gm, ops.all_gather_wait)
        with pytest.raises(PlanError, match=f"{wait.name} is released 0 times"):
            verify_scheduled(gm)

    def test_a_bucket_released_twice(self):
        gm = forward()
        copy_before(output_node(gm.graph), first(gm, ops.release))
        wait = first(gm, ops.all_gather_wait)
        with pytest.raises(PlanError, match=f"{wait.name} is released 2 times"):
            verify_scheduled(gm)

    @pytest.mark.parametrize(
        "read",
        [
            pytest.param(lambda w: w, id="directly"),
            pytest.param(lambda w: w.t(), id="through a view"),
            pytest.param(lambda w: w.chunk(2)[1], id="through a chunk"),
        ],
    )
    def test_a_reader_after_the_release(self, read):
        gm = reading(read)
        verify_scheduled(gm)
        release = first(gm, ops.release)
        first(gm, torch.ops.aten.sin.default).prepend(release)
        with pytest.raises(PlanError, match=r"\[.*'sin'.*\] read all_gather_wait.* after"):
            verify_scheduled(gm)

    @pytest.mark.parametrize(
        "view",
        [
            pytest.param(lambda w: w, id="itself"),
            pytest.param(lambda w: w.t(), id="view"),
            pytest.param(lambda w: w.chunk(2)[1], id="chunk"),
        ],
    )
    def test_gathered_memory_that_leaves_the_graph(self, view):
        gm = reading(view)
        read = first(gm, torch.ops.aten.sin.default)
        output_node(gm.graph).replace_input_with(read, read.args[0])
        with pytest.raises(PlanError, match=r"all_gather_wait.* leaves the graph without being"):
            verify_scheduled(gm)

    def test_a_reduction_that_nobody_waits_for(self):
        gm = backward()
        start = first(gm, ops.reduce_scatter_start)
        (wait,) = start.users
        wait.replace_all_uses_with(start)
        gm.graph.erase_node(wait)
        with pytest.raises(PlanError, match=f"{start.name} is waited for by .* instead of once"):
            verify_scheduled(gm)

    def test_a_reduction_waited_for_before_it_starts(self):
        gm = backward()
        start = first(gm, ops.reduce_scatter_start)
        (wait,) = start.users
        start.prepend(wait)
        with pytest.raises(PlanError, match=f"{wait.name} stands before {start.name}"):
            verify_scheduled(gm)

    def test_two_channels(self):
        gm = forward()
        call_before(output_node(gm.graph), ops.token)
        with pytest.raises(PlanError, match="2 tokens: collectives have no single order"):
            verify_scheduled(gm)

    @pytest.mark.parametrize(
        ("target", "place"), [(ops.all_gather_start, 0), (ops.all_gather_wait, 1), (ops.release, 1)]
    )
    def test_a_step_outside_the_channel(self, target, place):
        gm = forward()
        node = first(gm, target)
        node.update_arg(place, next(iter(gm.graph.nodes)))
        with pytest.raises(PlanError, match=f"{node.name} is not ordered by the token"):
            verify_scheduled(gm)


def reading(read) -> GraphModule:
    """A legal graph in which ``sin`` reads what ``read`` makes of a parameter."""
    return lowered(lambda p, x: (read(ops.gather(p, 0)).sin(), x + 1), P, X)


def test_the_error_asks_for_a_report():
    gm = forward()
    gm.graph.erase_node(first(gm, ops.release))
    with pytest.raises(PlanError, match=r"zero_compile produced an illegal graph.*Please report"):
        verify_scheduled(gm)
