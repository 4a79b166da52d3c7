"""Joint graph: backward gathers again; it is never handed a gathered parameter.

Everything computed from parameters alone (a cast, a transpose, a weight norm) is recomputed too,
because saving it would keep a whole parameter alive from forward to backward. Reductions stay in
backward, also those of gradients that do not depend on it (zeros, say).
"""

import torch
from torch.fx import GraphModule, Node

from zero_runtime import compat
from zero_runtime.ir import ops

#: Beyond any region the user's own checkpointing makes.
_REGION = 100_000


def regather_in_backward(gm: GraphModule, *, derived_too: bool = True) -> GraphModule:
    """Tag gathers, and what derives from them alone, for recomputation by the partitioner, and reductions.

    ``derived_too`` is off where gathering costs nothing (stages 1 and 2): the partitioner then weighs
    a cast or a weight norm like anything else.
    """
    derived: set[Node] = set()
    for node in gm.graph.nodes:
        if node.target is ops.gather or (derived_too and _derives(node, derived)):
            derived.add(node)
            node.meta["recompute"] = compat.MUST_RECOMPUTE
            node.meta["ac_graph_id"] = _REGION
        elif node.target is ops.reduce:
            node.meta.update(compat.MUST_BE_IN_BACKWARD)
    return gm


def _derives(node: Node, derived: set[Node]) -> bool:
    inputs = node.all_input_nodes
    return (
        node.op == "call_function"
        and node.target is not ops.reduce
        and bool(inputs)
        and all(i in derived for i in inputs)
        and not _is_random(node)
    )


def _is_random(node: Node) -> bool:
    tags = node.target.tags if isinstance(node.target, torch._ops.OpOverload) else ()
    return torch.Tag.nondeterministic_seeded in tags
