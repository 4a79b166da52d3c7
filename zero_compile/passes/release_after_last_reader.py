"""Every gathered bucket is released once, after its last reader."""

from torch.fx import Graph, GraphModule, Node

from zero_compile.analysis.fx_graph import calls, last_touches, output_node, positions, readers
from zero_compile.passes.insert import token_of
from zero_runtime.ir import ops


def release_after_last_reader(gm: GraphModule) -> GraphModule:
    """Insert ``zero3.release`` for every ``all_gather_wait``."""
    graph = gm.graph
    touches, order = last_touches(graph), positions(graph)
    for wait in calls(graph, ops.all_gather_wait):
        last = max([wait, *(touches[r] for r in readers(wait))], key=order.__getitem__)
        _release(graph, wait, output_node(graph) if last.op == "output" else last)
    graph.lint()
    return gm


def _release(graph: Graph, wait: Node, last: Node) -> None:
    place = graph.inserting_before(last) if last.op == "output" else graph.inserting_after(last)
    with place:
        node = graph.call_function(ops.release, (wait, token_of(graph), wait.args[2], wait.args[4]))
    node.meta["val"] = None
