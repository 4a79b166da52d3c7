"""Gathers become one collective a bucket; each parameter is a view of the bucket's buffer.

    full = all_gather_wait(all_gather_start(token, bucket))
    weight = as_strided(full, shape, stride, offset)

Everything stands at the bucket's first use; where it starts is the schedule's affair.
"""

from collections.abc import Mapping, Sequence

import torch
from torch.fx import Graph, GraphModule, Node

from zero_compile.analysis.fx_graph import calls, parameter_number, positions
from zero_compile.passes.insert import insert_call, keep_what_escapes, token_of
from zero_runtime.ir import ops
from zero_runtime.ir.plan import BucketPlan


def bucket_gathers(
    gm: GraphModule, *, buckets: Sequence[BucketPlan], places: Mapping[int, tuple[int, int]]
) -> GraphModule:
    """``places`` maps parameter numbers to (bucket, slot). Afterwards no ``zero3.gather`` is left."""
    by_bucket: dict[int, list[Node]] = {}
    for gather in calls(gm.graph, ops.gather):
        by_bucket.setdefault(places[parameter_number(gather)][0], []).append(gather)
    order = positions(gm.graph)  # of the nodes there are now, which stay in this order
    for bucket, gathers in by_bucket.items():
        with gm.graph.inserting_before(_first_use(gathers, order)):
            _gather_bucket(gm.graph, bucket, buckets[bucket], gathers, places)
    gm.graph.lint()
    return gm


def _gather_bucket(
    graph: Graph,
    number: int,
    bucket: BucketPlan,
    gathers: Sequence[Node],
    places: Mapping[int, tuple[int, int]],
) -> None:
    token = token_of(graph)
    dtype, device = gathers[0].meta["val"].dtype, torch.device(bucket.device)
    ticket = insert_call(graph, ops.all_gather_start, token, number, dtype)
    full = insert_call(
        graph, ops.all_gather_wait, ticket, token, number, bucket.padded, dtype, device
    )
    for gather in gathers:
        slot = bucket.slots[places[parameter_number(gather)][1]]
        offset = [slot.offset] if slot.offset else []  # without: of the memory that is waited for
        view = insert_call(
            graph, torch.ops.aten.as_strided.default, full, slot.shape, slot.stride, *offset
        )
        gather.replace_all_uses_with(view)
        graph.erase_node(gather)
    keep_what_escapes(graph, full)


def _first_use(gathers: Sequence[Node], order: Mapping[Node, int]) -> Node:
    """Before the first use; a gather whose value nobody reads stays where it is."""
    users = [user for gather in gathers for user in gather.users]
    return min(users or gathers, key=order.__getitem__)
