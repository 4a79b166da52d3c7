"""Nodes of the schedule, inserted with the metadata that Inductor needs."""

from typing import Any

import torch
from torch.fx import Graph, Node

from zero_compile.fx_graph import calls, is_view, output_node
from zero_runtime import compat, ops


def insert_call(graph: Graph, target: Any, *args: Any) -> Node:
    """A call at the graph's insertion point, its fake value computed from its arguments'."""
    node = graph.call_function(target, args)
    mode = compat.fake_mode_of(graph)
    values = torch.fx.node.map_arg(args, lambda n: n.meta["val"])
    with mode:
        node.meta["val"] = target(*values)
    return node


def channel_of(graph: Graph) -> Node:
    """The graph's channel: the tensor whose mutation keeps the schedule's nodes in order."""
    existing = calls(graph, ops.channel)
    if existing:
        return existing[0]
    inputs = list(graph.find_nodes(op="placeholder"))
    first = (
        next(n for n in graph.nodes if n.op != "placeholder") if inputs else next(iter(graph.nodes))
    )
    with graph.inserting_before(first):
        return insert_call(graph, ops.channel)


def node_at(graph: Graph, name: str | None) -> Node:
    """The node that a schedule's name means: "" is the first one behind the channel, None the output."""
    if name is None:
        return output_node(graph)
    if not name:
        return channel_of(graph).next
    named: Node = next(node for node in graph.nodes if node.name == name)
    return named


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
