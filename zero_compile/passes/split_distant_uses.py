"""A bucket whose uses lie far apart is released in between, and gathered again.

Far is measured as DeepSpeed does (``stage3_max_reuse_distance``): by the elements of other buckets
that are gathered between two uses.
"""

from collections.abc import Iterator, Sequence, Set
from itertools import pairwise

from torch.fx import Graph, GraphModule, Node

from zero_compile.analysis.fx_graph import bucket_number, calls, is_view, last_touches, positions
from zero_runtime.ir import ops
from zero_runtime.ir.plan import BucketPlan


def split_distant_uses(
    gm: GraphModule,
    *,
    buckets: Sequence[BucketPlan],
    distance: int,
    tiles: Set[int] = frozenset(),
) -> GraphModule:
    """``distance`` is in elements; for buckets that are ``tiles`` it is 0: each use has them alone.

    Afterwards a bucket may be gathered several times.
    """
    graph = gm.graph
    touches, order = last_touches(graph), positions(graph)
    waits = calls(graph, ops.all_gather_wait)
    places = [(order[w], buckets[bucket_number(w)].padded) for w in waits]
    for wait in waits:
        most = 0 if bucket_number(wait) in tiles else distance
        uses = sorted(_uses(wait), key=lambda u: order[u[-1]])
        ends = [order[touches[use[-1]]] for use in uses]
        cuts = [
            i + 1
            for i, (one, two) in enumerate(pairwise(uses))
            if _between(places, max(ends[: i + 1]), order[two[-1]]) > most
        ]
        for low, high in pairwise([*cuts, len(uses)]):
            _gather_again(graph, wait, uses[low:high])
    graph.lint()
    return gm


def _uses(wait: Node) -> Iterator[tuple[Node, ...]]:
    """Chains of views from the gathered bucket to what reads them, the reader last."""
    pending: list[tuple[Node, ...]] = [(wait,)]
    while pending:
        chain = pending.pop()
        for user in chain[-1].users:
            if user.op == "output" or not is_view(user):
                yield (*chain[1:], user)
            else:
                pending.append((*chain, user))


def _between(places: Sequence[tuple[int, int]], low: int, high: int) -> int:
    """Elements gathered at places between two positions."""
    return sum(elements for place, elements in places if low < place < high)


def _gather_again(graph: Graph, wait: Node, uses: Sequence[tuple[Node, ...]]) -> None:
    """Give these uses a gather of their own, in front of the first of them."""
    start = wait.all_input_nodes[0]
    with graph.inserting_before(uses[0][-1]):
        copies = {start: graph.node_copy(start)}
        copies[wait] = graph.node_copy(wait, lambda n: copies.get(n, n))
        for *views, reader in uses:
            for view in views:
                if view not in copies:
                    copies[view] = graph.node_copy(view, lambda n: copies.get(n, n))
            reader.replace_input_with(views[-1], copies[views[-1]])
            for view in reversed(views):  # one that nobody reads would keep the first gather alive
                if not view.users:
                    graph.erase_node(view)
