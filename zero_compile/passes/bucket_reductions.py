"""Reductions become one collective a bucket, started once its last gradient is there.

    flat = reduce_scatter_wait(reduce_scatter_start([gradients], channel, bucket, [slots]))

``flat`` is this rank's chunk; the executor cuts each parameter's part out of it.
"""

from collections.abc import Mapping, Sequence

import torch
from torch.fx import Graph, GraphModule, Node

from zero_compile.fx_graph import calls, parameter_number, positions
from zero_compile.passes.effects import channel_of, insert_call
from zero_runtime import ops
from zero_runtime.bucket import reduced_numel
from zero_runtime.plan import BucketPlan, Stage


def bucket_reductions(
    gm: GraphModule,
    *,
    buckets: Sequence[BucketPlan],
    places: Mapping[int, tuple[int, int]],
    stage: Stage = Stage.PARAMETERS,
) -> GraphModule:
    """``places`` maps parameter numbers to (bucket, slot). Afterwards no ``zero3.reduce`` is left."""
    by_bucket: dict[int, list[Node]] = {}
    for reduce in calls(gm.graph, ops.reduce):
        by_bucket.setdefault(places[parameter_number(reduce)][0], []).append(reduce)
    if by_bucket:
        channel_of(gm.graph)  # before positions are taken
    order = positions(gm.graph)
    for bucket, reduces in by_bucket.items():
        _reduce_bucket(gm.graph, bucket, buckets[bucket], reduces, places, stage, order)
    gm.graph.lint()
    return gm


def _reduce_bucket(
    graph: Graph,
    number: int,
    bucket: BucketPlan,
    reduces: Sequence[Node],
    places: Mapping[int, tuple[int, int]],
    stage: Stage,
    order: Mapping[Node, int],
) -> None:
    channel = channel_of(graph)
    gradients = [reduce.all_input_nodes[0] for reduce in reduces]
    # Autograd puts the reductions themselves last; a gradient may be an input, before the channel.
    last = max([channel, *gradients], key=order.__getitem__)
    slots = [places[parameter_number(reduce)][1] for reduce in reduces]
    device = torch.device(bucket.device)
    with graph.inserting_after(last):
        ticket = insert_call(graph, ops.reduce_scatter_start, gradients, channel, number, slots)
    with graph.inserting_after(ticket):
        flat = insert_call(
            graph,
            ops.reduce_scatter_wait,
            ticket,
            channel,
            number,
            reduced_numel(bucket, stage),
            bucket.torch_dtype,
            device,
        )
    for reduce in reduces:
        reduce.replace_all_uses_with(flat)
        graph.erase_node(reduce)
