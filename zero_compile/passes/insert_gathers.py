"""Dynamo graph: every use of a parameter reads a gather of it.

Done before AOTAutograd, so that a returned parameter, or a returned view of one, is a fresh
tensor: AOTAutograd would otherwise rebuild the alias from memory that is no longer there.
"""

from collections.abc import Mapping

from torch.fx import GraphModule, Node

from zero_runtime.ir import ops


def insert_gathers(gm: GraphModule, *, parameters: Mapping[int, int]) -> GraphModule:
    """``parameters`` maps placeholder positions to parameter numbers.

    Afterwards each such placeholder has one user, ``zero3.gather(placeholder, number)``.
    """
    placeholders = list(gm.graph.find_nodes(op="placeholder"))
    for position, number in reversed(list(parameters.items())):
        _gather(gm, placeholders[position], placeholders[-1], number)
    return gm


def _gather(gm: GraphModule, parameter: Node, after: Node, number: int) -> None:
    users = list(parameter.users)
    with gm.graph.inserting_after(after):
        gathered = gm.graph.call_function(ops.gather, (parameter, number))
    example = parameter.meta.get("example_value")
    if example is not None:
        gathered.meta["example_value"] = example
    for user in users:
        user.replace_input_with(parameter, gathered)
