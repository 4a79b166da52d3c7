"""Nodes of the schedule, inserted with the metadata that Inductor needs."""

from typing import Any

import torch
from torch.fx import Graph, Node

from zero_compile.analysis.fx_graph import calls, is_view, output_node
from zero_runtime import compat
from zero_runtime.ir import ops


def insert_call(graph: Graph, target: Any, *args: Any, **kwargs: Any) -> Node:
    """A call at the graph's insertion point, its fake value computed from its arguments'."""
    node = graph.call_function(target, args, kwargs)
    mode = compat.fake_mode_of(graph)
    values = torch.fx.node.map_arg(args, lambda n: n.meta["val"])
    with mode:
        node.meta["val"] = target(*values, **kwargs)
    return node


#: What tells AOTAutograd's partitioner, and readers of a graph, where a node comes from.
_ORIGIN = (
    *("partitioner_tag", "seq_nr", "autograd_backward"),
    *("recompute", "ac_graph_id", "nn_module_stack", "stack_trace"),
)


def insert_part(origin: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
    """As :func:`insert_call`, for a node that does a part of what ``origin`` does, in its graph."""
    node = insert_call(origin.graph, target, *args, **kwargs)
    node.meta.update({key: origin.meta[key] for key in _ORIGIN if key in origin.meta})
    return node


def replace_node(node: Node, by: Node) -> None:
    """Everybody reads ``by`` instead of ``node``, which goes, and what was made for it alone."""
    node.replace_all_uses_with(by)
    erase_unread(node)


def erase_unread(node: Node) -> None:
    """Erase a call that nobody reads, and then what nobody else read. Idempotent."""
    erased = node.prev.next is not node
    if node.op == "call_function" and not node.users and not erased:
        inputs = node.all_input_nodes
        node.graph.erase_node(node)
        for source in inputs:
            erase_unread(source)


def token_of(graph: Graph) -> Node:
    """The graph's token: the tensor whose mutation keeps the schedule's nodes in order."""
    existing = calls(graph, ops.token)
    if existing:
        return existing[0]
    inputs = list(graph.find_nodes(op="placeholder"))
    first = (
        next(n for n in graph.nodes if n.op != "placeholder") if inputs else next(iter(graph.nodes))
    )
    with graph.inserting_before(first):
        return insert_call(graph, ops.token)


def node_at(graph: Graph, name: str | None) -> Node:
    """The node that a schedule's name means: "" is the first one behind the token, None the output."""
    if name is None:
        return output_node(graph)
    if not name:
        return token_of(graph).next
    named: Node = next(node for node in graph.nodes if node.name == name)
    return named


def assemble_last(graph: Graph) -> None:
    """Gradients in tiles are put together at the end, behind every wait for a tile, wherever it was moved."""
    for node in calls(graph, ops.assemble):
        output_node(graph).prepend(node)


def keep_what_escapes(graph: Graph, memory: Node) -> None:
    """An output that shares memory with a bucket would lose it, or change under it: copy it out."""
    output = output_node(graph)
    for node in [n for n in (memory, *_aliases(memory)) if output in n.users]:
        with graph.inserting_after(node):
            kept = insert_call(graph, ops.keep, node)
        output.replace_input_with(node, kept)


def _aliases(node: Node) -> list[Node]:
    found = [user for user in node.users if is_view(user)]
    return found + [alias for view in found for alias in _aliases(view)]
