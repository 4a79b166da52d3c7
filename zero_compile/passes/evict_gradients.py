"""Reduced gradients go to the host where the optimizer works there.

Right after the wait for the reduction: the device's memory is free again as soon as it can be, and
the copy overlaps with the rest of backward.
"""

from collections.abc import Sequence

import torch
from torch.fx import GraphModule, Node

from zero_compile.analysis.fx_graph import bucket_number, calls, output_node
from zero_compile.analysis.tiers import is_evicted
from zero_compile.passes.insert import insert_call, token_of
from zero_runtime.ir import ops
from zero_runtime.ir.plan import BucketPlan, Stage


def evict_gradients(
    gm: GraphModule, *, buckets: Sequence[BucketPlan], stage: Stage = Stage.PARAMETERS
) -> GraphModule:
    """Insert ``zero3.evict`` behind each ``reduce_scatter_wait`` of a bucket with optimizer state off the
    device; the graph then returns what that gives.

    ``buckets`` by number; none of those left out is evicted. At stage 1 nothing is.
    """
    graph = gm.graph
    leaving = {n for n, bucket in enumerate(buckets) if is_evicted(bucket, stage)}
    for wait in calls(graph, ops.reduce_scatter_wait):
        if bucket_number(wait) in leaving:
            with graph.inserting_after(wait):
                evicted = insert_call(graph, ops.evict, wait, token_of(graph), bucket_number(wait))
            output_node(graph).replace_input_with(wait, evicted)
            for user in [user for user in wait.users if user.target is ops.assemble]:
                _assemble_on_host(user, wait)
    graph.lint()
    return gm


def _assemble_on_host(assemble: Node, wait: Node) -> None:
    """The tile's part leaves the device, so what puts tiles together has it there."""
    parts, *others, _ = assemble.args
    kept = [part for part in parts if part is not wait]  # type: ignore[union-attr]
    assemble.args = (kept, *others, torch.device("cpu"))
    assemble.meta["val"] = torch.empty_like(assemble.meta["val"], device="cpu")
