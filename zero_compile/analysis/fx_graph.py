"""Questions that several passes ask of an FX graph."""

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, Node

from zero_runtime import compat
from zero_runtime.ir import ops


def calls(graph: Graph, target: Any) -> list[Node]:
    """The graph's calls of ``target``, in order."""
    return list(graph.find_nodes(op="call_function", target=target, sort=True))


def parameter_number(node: Node) -> int:
    """Which parameter a logical ``zero3.gather`` or ``zero3.reduce`` is about."""
    number = node.args[1]
    assert isinstance(number, int)
    return number


def bucket_number(node: Node) -> int:
    """Which bucket a node of the schedule works on."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    number = node.args[names.index("bucket")]
    assert isinstance(number, int)
    return number


def saved_number(node: Node) -> int:
    """Which saved tensor a node of the schedule moves."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    number = node.args[names.index("number")]
    assert isinstance(number, int)
    return number


def reloads(graph: Graph) -> dict[int, tuple[Node, Node]]:
    """By saved tensor, where it sets out for the device and where it is waited for."""
    starts = {saved_number(start): start for start in calls(graph, ops.reload_start)}
    waits = {saved_number(wait): wait for wait in calls(graph, ops.reload_wait)}
    return {number: (start, waits[number]) for number, start in starts.items() if number in waits}


def positions(graph: Graph) -> dict[Node, int]:
    """Each node's place in execution order."""
    return {node: place for place, node in enumerate(graph.nodes)}


def output_node(graph: Graph) -> Node:
    """The graph's one output node."""
    node: Node = next(iter(reversed(graph.nodes)))
    return node


def is_view(node: Node) -> bool:
    """Whether the node's result shares memory with its first argument (or may, once lowered)."""
    target = node.target
    if target is operator.getitem:  # a part of what chunk, split or unbind return
        source = node.all_input_nodes[0]
        return is_view(source)
    if not isinstance(target, torch._ops.OpOverload) or ops.all_gather_wait is target:
        return False
    if not node.all_input_nodes:  # a view of a Python number
        return False
    if target in _COPIES_THAT_MAY_VANISH:
        return True
    return any(
        r.alias_info is not None and not r.alias_info.is_write for r in target._schema.returns
    )


#: Inductor lowers these to views, or removes them where they change nothing.
_COPIES_THAT_MAY_VANISH = {
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten.reshape.default,
    torch.ops.aten.clone.default,
    torch.ops.aten.contiguous.default,
}


def readers(gathered: Node) -> Iterator[Node]:
    """Nodes that read the gathered memory: users, through views of it. The views come too."""
    pending, seen = [gathered], {gathered}
    while pending:
        for user in pending.pop().users:
            if user in seen:
                continue
            seen.add(user)
            yield user
            if is_view(user):
                pending.append(user)


def last_touches(graph: Graph) -> dict[Node, Node]:
    """For each node, the node by which the compiler has surely executed it.

    Inductor delays elementwise work until something needs the result in memory (a matmul, a
    reduction, an output). A release placed after that node costs no fusion; placed earlier it
    would force the elementwise work into a kernel of its own.
    """
    order = positions(graph)
    last: dict[Node, Node] = {}
    for node in reversed(graph.nodes):
        last[node] = (
            node
            if not is_delayed(node)
            else max([node, *_delayed_until(node, last, order)], key=order.__getitem__)
        )
    return last


def _delayed_until(node: Node, last: dict[Node, Node], order: dict[Node, int]) -> Iterator[Node]:
    for user in sorted(node.users, key=order.__getitem__):
        if user.op == "output":
            continue
        if not is_delayed(user):
            yield user
            if compat.realizes_inputs(user.target) and not is_view(node):
                return  # later users read the result from memory
        else:
            yield last[user]
            if is_view(user) and not is_view(node) and _realized_through(user):
                return


def _realized_through(view: Node) -> bool:
    """Whether a kernel reads the memory behind a view, which puts it there."""
    return any(
        _realized_through(u)
        if is_view(u)
        else compat.realizes_inputs(u.target) and not is_delayed(u)
        for u in view.users
        if u.op != "output"
    )


def is_delayed(node: Node) -> bool:
    """Whether Inductor may fuse the node into its users instead of executing it in place."""
    target = node.target
    if node.op != "call_function":
        return False
    if is_view(node):
        return True
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return target.namespace in ("aten", "prims") and not compat.is_kernel(target)
