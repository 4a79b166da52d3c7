"""Saved tensors come back to the device in backward, just before they are used.

    zero3.recall_start(away, token, number)            NVMe to the host
    zero3.reload_start(away, token, number, device)    the host to the device
    flat = zero3.reload_wait(token, number, numel, dtype, device)
    saved = as_strided(flat, shape, stride)

The graph's input is what :mod:`~zero_compile.passes.offload_activations` has forward return: the
copy on the host, ``[numel]``, or a handle of what is on NVMe. It keeps the tensor's name and place
among the inputs. ``stride`` is the one that the tensor was traced with, in whose order it left.
"""

from collections.abc import Mapping, Sequence

import torch
from torch.fx import Graph, GraphModule, Node

from zero_compile.analysis.fx_graph import positions
from zero_compile.passes.insert import insert_call, node_at, token_of
from zero_compile.scheduler.activations import Move
from zero_runtime import compat
from zero_runtime.ir import ops
from zero_runtime.ir.ops import HANDLE_BYTES
from zero_runtime.ir.plan import Tier


def reload_activations(gm: GraphModule, *, moves: Sequence[Move]) -> GraphModule:
    """Bring each of ``moves`` back where it says, at the latest before its first use, where it is awaited.

    They are numbered in their order, and set out in that of their first uses. Afterwards nothing else
    reads those inputs.
    """
    graph = gm.graph
    inputs = {node.name: node for node in graph.find_nodes(op="placeholder")}
    token_of(graph)  # before positions are taken
    order = positions(graph)
    first = {m.name: min(inputs[m.name].users, key=order.__getitem__) for m in moves}
    numbered = sorted(enumerate(moves), key=lambda nm: (order[first[nm[1].name]], nm[0]))
    beginning = node_at(graph, "")
    for number, move in numbered:
        if move.tier is Tier.NVME:
            place = _place(graph, move.recall, beginning, first[move.name], order)
            with graph.inserting_before(place):
                insert_call(graph, ops.recall_start, inputs[move.name], token_of(graph), number)
    for number, move in numbered:
        place = _place(graph, move.reload, beginning, first[move.name], order)
        _bring_back(graph, number, move, inputs[move.name], place, first[move.name])
    graph.lint()
    return gm


def _bring_back(
    graph: Graph, number: int, move: Move, away: Node, place: Node, first: Node
) -> None:
    value, token = away.meta["val"], token_of(graph)
    users = [user for user in away.users if user.target is not ops.recall_start]
    away.meta = {**away.meta, "val": _stand_in(graph, value, move.tier)}
    away.meta.pop("tensor_meta", None)
    with graph.inserting_before(place):
        insert_call(graph, ops.reload_start, away, token, number, value.device)
    with graph.inserting_before(first):
        what = (value.numel(), value.dtype, value.device)
        flat = insert_call(graph, ops.reload_wait, token, number, *what)
        shape, stride = list(value.shape), list(value.stride())
        saved = insert_call(graph, torch.ops.aten.as_strided.default, flat, shape, stride)
    for user in users:
        user.replace_input_with(away, saved)


def _stand_in(graph: Graph, value: torch.Tensor, tier: Tier) -> torch.Tensor:
    """What forward returns for a saved tensor: fake, on the host."""
    with compat.fake_mode_of(graph):
        if tier is Tier.NVME:
            return torch.empty(HANDLE_BYTES, dtype=torch.uint8)
        return torch.empty(value.numel(), dtype=value.dtype)


def _place(
    graph: Graph, name: str | None, beginning: Node, latest: Node, order: Mapping[Node, int]
) -> Node:
    wanted = beginning if name == "" else node_at(graph, name)
    return wanted if order.get(wanted, 0) < order[latest] else latest
