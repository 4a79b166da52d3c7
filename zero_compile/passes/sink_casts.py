"""Move casts to the cheap side of a transfer.

``cast(gather(p))`` to a narrower dtype becomes a gather in that dtype: each rank casts its own
shard and fewer bytes move. ``reduce(cast(g))`` to the stored dtype becomes ``reduce(g)``: packing
the gradient casts it on the way. Both give the same bits as before.
"""

from collections.abc import Mapping, Sequence

import torch
from torch.fx import GraphModule, Node

from zero_compile.analysis.casts import cast_dtype, narrow_dtype
from zero_compile.analysis.fx_graph import calls, parameter_number
from zero_runtime.ir import ops

_CASTS = {torch.ops.aten._to_copy.default, torch.ops.prims.convert_element_type.default}


def sink_casts(gm: GraphModule, *, bucket_of: Mapping[int, int]) -> GraphModule:
    """``bucket_of`` maps parameter numbers to buckets; a bucket is gathered in one dtype or not narrowed."""
    by_bucket: dict[int, list[Node]] = {}
    for gather in calls(gm.graph, ops.gather):
        by_bucket.setdefault(bucket_of[parameter_number(gather)], []).append(gather)
    for gathers in by_bucket.values():
        _narrow_gathers(gathers)
    for reduce in calls(gm.graph, ops.reduce):
        _narrow_gradient(reduce)
    return gm


def _narrow_gathers(gathers: Sequence[Node]) -> None:
    dtypes = {narrow_dtype(g) for g in gathers}
    if len(dtypes) != 1 or None in dtypes:
        return
    dtype = dtypes.pop()
    for gather in gathers:
        casts = list(gather.users)
        gather.args = (*gather.args[:2], dtype, *gather.args[3:])
        gather.meta["val"] = gather.meta["val"].to(dtype)
        for cast in casts:
            cast.replace_all_uses_with(gather)
            cast.graph.erase_node(cast)


def _narrow_gradient(reduce: Node) -> None:
    cast = reduce.args[0]
    assert isinstance(cast, Node)
    if cast_dtype(cast) is None or len(cast.users) > 1:
        return
    source = cast.args[0]
    assert isinstance(source, Node)
    if not _exact(source.meta["val"].dtype, cast.meta["val"].dtype):
        return
    reduce.replace_input_with(cast, source)
    cast.graph.erase_node(cast)


def _exact(narrow: torch.dtype, wide: torch.dtype) -> bool:
    return (
        narrow.is_floating_point
        and wide.is_floating_point
        and narrow.itemsize < wide.itemsize
        and torch.promote_types(narrow, wide) is wide
    )
