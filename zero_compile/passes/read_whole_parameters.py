"""Stages 1 and 2: parameters are whole on every rank, so a gather is the parameter itself."""

from torch.fx import GraphModule

from zero_compile.analysis.fx_graph import calls
from zero_compile.passes.insert import keep_what_escapes
from zero_runtime.ir import ops


def read_whole_parameters(gm: GraphModule) -> GraphModule:
    """Replace every logical gather by its parameter; what would leave the graph as a view is copied.

    Afterwards no ``zero3.gather`` is left, and nothing is gathered.
    """
    for gather in calls(gm.graph, ops.gather):
        parameter = gather.all_input_nodes[0]
        keep_what_escapes(gm.graph, gather)
        gather.replace_all_uses_with(parameter)
        gm.graph.erase_node(gather)
    gm.graph.lint()
    return gm
