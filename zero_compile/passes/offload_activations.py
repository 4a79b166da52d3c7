"""Saved tensors leave the device in forward: autograd gets what stands for them instead.

    away = zero3.offload_start(saved, token, number, stride, nvme)
    ...
    zero3.offload_wait(saved, token, number)

``away`` takes the place of ``saved`` among the graph's outputs, so how long it is kept, and for how
many backwards, is autograd's affair. The other half of the contract is the pass
:mod:`~zero_compile.passes.reload_activations`, which is given the same moves: the backward's input
of the same name and place is then ``away``.
"""

from collections.abc import Mapping, Sequence

from torch.fx import Graph, GraphModule, Node

from zero_compile.analysis.fx_graph import is_view, last_touches, output_node, positions, readers
from zero_compile.passes.insert import insert_call, node_at, token_of
from zero_compile.scheduler.activations import Move
from zero_runtime.ir import ops
from zero_runtime.ir.plan import Tier


def offload_activations(gm: GraphModule, *, moves: Sequence[Move]) -> GraphModule:
    """Insert ``zero3.offload_start`` and ``zero3.offload_wait`` for each of ``moves``, in their order.

    Each stands where its move says, but not before the compiler has surely computed the tensor, and
    the wait not before it has read it for the last time. Afterwards the graph returns none of the tensors.
    """
    graph = gm.graph
    nodes = {node.name: node for node in graph.nodes}
    token_of(graph)  # before positions are taken
    leaving = [_Leaving.of(graph, nodes[move.name]) for move in moves]
    order = positions(graph)
    starts = []
    for number, (move, one) in enumerate(zip(moves, leaving, strict=True)):
        with graph.inserting_before(_place(graph, move.start, one.made, order)):
            starts.append(_start(graph, number, one.saved, move.tier is Tier.NVME))
    order = positions(graph)
    for number, (move, one, start) in enumerate(zip(moves, leaving, starts, strict=True)):
        after = max(one.read, start, key=order.__getitem__)
        with graph.inserting_before(_place(graph, move.wait, after, order)):
            wait = graph.call_function(ops.offload_wait, (one.saved, token_of(graph), number))
        wait.meta["val"] = None
    graph.lint()
    return gm


class _Leaving:
    """A saved tensor, and the nodes by which it has been computed, and read for the last time."""

    def __init__(self, saved: Node, made: Node, read: Node) -> None:
        self.saved = saved
        self.made = made
        self.read = read

    @staticmethod
    def of(graph: Graph, saved: Node) -> "_Leaving":
        """Whatever reads its memory reads it, under any view."""
        touches, order = last_touches(graph), positions(graph)
        base = saved
        while is_view(base):
            base = base.all_input_nodes[0]
        made = max(saved, touches[base], key=order.__getitem__)
        users = (touches[r] for r in readers(base) if r.op != "output")
        return _Leaving(saved, made, max([made, *users], key=order.__getitem__))


def _start(graph: Graph, number: int, saved: Node, nvme: bool) -> Node:
    stride = list(saved.meta["val"].stride())
    away = insert_call(graph, ops.offload_start, saved, token_of(graph), number, stride, nvme)
    output_node(graph).replace_input_with(saved, away)
    return away


def _place(graph: Graph, name: str | None, after: Node, order: Mapping[Node, int]) -> Node:
    """The node in front of which something named stands, which is to stand behind ``after``."""
    wanted = node_at(graph, name)
    return wanted if order.get(wanted, 0) > order[after] else after.next
