"""The first schedule policy: gather ``depth`` buckets ahead of use, one reduction in flight.

A bucket's gather starts when the bucket ``depth`` places before it is about to be used; a
reduction is waited for before the next one starts. Replaceable: a policy only moves starts and
waits, so the graph stays legal whatever it chooses.
"""

from torch.fx import GraphModule

from zero_compile.analysis.fx_graph import calls, output_node
from zero_compile.passes.insert import assemble_last
from zero_runtime.ir import ops


def schedule_ahead(gm: GraphModule, *, depth: int) -> GraphModule:
    """Move ``all_gather_start`` up and ``reduce_scatter_wait`` down."""
    waits = calls(gm.graph, ops.all_gather_wait)
    starts = [wait.all_input_nodes[0] for wait in waits]
    for place, start in enumerate(starts):
        waits[max(0, place - depth)].prepend(start)
    reductions = calls(gm.graph, ops.reduce_scatter_start)
    for reduction, end in zip(reductions, [*reductions[1:], output_node(gm.graph)], strict=False):
        end.prepend(next(iter(reduction.users)))
    assemble_last(gm.graph)
    return gm
