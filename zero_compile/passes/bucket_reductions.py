"""Reductions become one collective a bucket, started once its last gradient is there.

    flat = reduce_scatter_wait(reduce_scatter_start([gradients], token, bucket, [slots]))

``flat`` is this rank's chunk; the executor cuts each parameter's part out of it. The tiles of one
parameter, each reduced alone, are its gradient again once all of them are there:

    gradient = assemble([flats], channel, [buckets])
"""

from collections.abc import Mapping, Sequence

import torch
from torch.fx import Graph, GraphModule, Node

from zero_compile.analysis.fx_graph import bucket_number, calls, parameter_number, positions
from zero_compile.passes.insert import insert_call, token_of
from zero_runtime.ir import ops
from zero_runtime.ir.plan import BucketPlan, Stage, reduced_numel


def bucket_reductions(
    gm: GraphModule,
    *,
    buckets: Sequence[BucketPlan],
    places: Mapping[int, tuple[int, int]],
    stage: Stage = Stage.PARAMETERS,
) -> GraphModule:
    """``places`` maps parameter numbers to (bucket, slot). Afterwards no ``zero3.reduce`` is left."""
    together = _together(calls(gm.graph, ops.reduce), places)
    if together:
        token_of(gm.graph)  # before positions are taken
    order = positions(gm.graph)
    for bucket, reduces in together:
        _reduce_bucket(gm.graph, bucket, buckets[bucket], reduces, places, stage, order)
    for join in calls(gm.graph, ops.join):
        _assemble(gm.graph, join, buckets)
    gm.graph.lint()
    return gm


def _together(
    reduces: Sequence[Node], places: Mapping[int, tuple[int, int]]
) -> list[tuple[int, list[Node]]]:
    """One reduction a bucket; several where a tile has several gradients, which are added when reduced."""
    groups: list[tuple[int, list[Node]]] = []
    open_groups: dict[int, tuple[set[int], list[Node]]] = {}
    for reduce in reduces:
        bucket, slot = places[parameter_number(reduce)]
        slots, members = open_groups.get(bucket, ({slot}, []))
        if bucket not in open_groups or slot in slots:
            slots, members = open_groups[bucket] = set(), []
            groups.append((bucket, members))
        slots.add(slot)
        members.append(reduce)
    return groups


def _assemble(graph: Graph, join: Node, buckets: Sequence[BucketPlan]) -> None:
    parts: list[Node] = join.args[0]  # type: ignore[assignment]
    tiles = list(dict.fromkeys(bucket_number(part) for part in parts))
    first = buckets[tiles[0]]
    with graph.inserting_before(join):
        gradient = insert_call(
            graph,
            ops.assemble,
            parts,
            token_of(graph),
            tiles,
            sum(buckets[tile].chunk for tile in tiles),
            first.torch_dtype,
            torch.device(first.device),
        )
    join.replace_all_uses_with(gradient)
    graph.erase_node(join)


def _reduce_bucket(
    graph: Graph,
    number: int,
    bucket: BucketPlan,
    reduces: Sequence[Node],
    places: Mapping[int, tuple[int, int]],
    stage: Stage,
    order: Mapping[Node, int],
) -> None:
    token = token_of(graph)
    gradients = [reduce.all_input_nodes[0] for reduce in reduces]
    # Autograd puts the reductions themselves last; a gradient may be an input, before the channel.
    last = max([token, *gradients], key=order.__getitem__)
    slots = [places[parameter_number(reduce)][1] for reduce in reduces]
    device = torch.device(bucket.device)
    with graph.inserting_after(last):
        ticket = insert_call(graph, ops.reduce_scatter_start, gradients, token, number, slots)
    with graph.inserting_after(ticket):
        flat = insert_call(
            graph,
            ops.reduce_scatter_wait,
            ticket,
            token,
            number,
            reduced_numel(bucket, stage),
            bucket.torch_dtype,
            device,
        )
    for reduce in reduces:
        reduce.replace_all_uses_with(flat)
        graph.erase_node(reduce)
