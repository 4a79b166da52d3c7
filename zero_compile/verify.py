"""What a legal graph is after each stage. A violation is a bug of ours, caught before it runs."""

from collections import Counter
from collections.abc import Mapping, Sequence, Set

from torch.fx import GraphModule, Node

from zero_compile.analysis.fx_graph import (
    bucket_number,
    calls,
    is_view,
    output_node,
    parameter_number,
    positions,
    readers,
    reloads,
    saved_number,
)
from zero_compile.tiling import Cut
from zero_runtime.errors import PlanError
from zero_runtime.ir import ops
from zero_runtime.ir.plan import BucketPlan


def verify_captured(gm: GraphModule, *, parameters: Mapping[int, int]) -> None:
    """Each partitioned parameter is read by exactly one gather, and by nothing else."""
    placeholders = list(gm.graph.find_nodes(op="placeholder"))
    for position, number in parameters.items():
        users = list(placeholders[position].users)
        _require(
            len(users) == 1 and users[0].target is ops.gather and users[0].args[1] == number,
            f"parameter {number} is read by {[u.name for u in users]} instead of one gather",
        )


def verify_tiled(gm: GraphModule, *, cuts: Mapping[int, Cut]) -> None:
    """Of a parameter in tiles nothing whole is gathered or reduced; each joined gradient has every tile."""
    for node in (*calls(gm.graph, ops.gather), *calls(gm.graph, ops.reduce)):
        number = parameter_number(node)
        _require(number not in cuts, f"{node.name} moves parameter {number} whole, which is tiled")
    for join in calls(gm.graph, ops.join):
        parts: list[Node] = join.args[0]  # type: ignore[assignment]
        cut, found = cuts[parameter_number(join)], {parameter_number(part) for part in parts}
        _require(found == set(cut.numbers), f"{join.name} joins tiles {found} of {cut.numbers}")


def verify_bucketed(
    gm: GraphModule, *, buckets: Sequence[BucketPlan], tiles: Set[int] = frozenset()
) -> None:
    """No logical gather or reduction is left; each bucket is gathered and reduced at most once.

    Buckets that are ``tiles`` may be reduced several times.
    """
    for target in (ops.gather, ops.reduce, ops.join):
        left = calls(gm.graph, target)
        _require(not left, f"{[n.name for n in left]} reached no bucket")
    for target in (ops.all_gather_start, ops.reduce_scatter_start):
        counts = Counter(bucket_number(n) for n in calls(gm.graph, target))
        _require(
            all(
                c == 1 or (b in tiles and target is ops.reduce_scatter_start)
                for b, c in counts.items()
            )
            and all(b < len(buckets) for b in counts),
            f"{target} runs {dict(counts)} times a bucket",
        )
    for start in calls(gm.graph, ops.reduce_scatter_start):
        slots: list[int] = start.args[3]  # type: ignore[assignment]
        _require(len(set(slots)) == len(slots), f"{start.name} reduces a parameter twice: {slots}")


def verify_scheduled(
    gm: GraphModule, *, gather_cache: Set[int] = frozenset(), sent: Set[int] = frozenset()
) -> None:
    """Every transfer is started, waited for, used, released, in this order and once each.

    Gathers of ``gather_cache`` buckets may be waited for by the next graph instead. A shard is read and
    fetched at most once for each gather, before it; those of ``sent`` buckets for the next graph's. A
    reduced gradient that is evicted is evicted right after its wait, and nothing else reads it.
    """
    order = positions(gm.graph)
    for start in calls(gm.graph, ops.all_gather_start):
        if bucket_number(start) in gather_cache and not start.users:
            continue
        wait = _only_wait(start, ops.all_gather_wait)
        releases = [u for u in wait.users if u.target is ops.release]
        _require(len(releases) == 1, f"{wait.name} is released {len(releases)} times")
        _require(order[start] < order[wait], f"{wait.name} stands before {start.name}")
        output = output_node(gm.graph)
        _require(
            output not in wait.users
            and not any(output in r.users for r in readers(wait) if is_view(r)),
            f"{wait.name} leaves the graph without being copied",
        )
        late = [r.name for r in readers(wait) if order[r] > order[releases[0]]]
        _require(not late, f"{late} read {wait.name} after its release")
    for start in calls(gm.graph, ops.reduce_scatter_start):
        wait = _only_wait(start, ops.reduce_scatter_wait)
        _require(order[start] < order[wait], f"{wait.name} stands before {start.name}")
    _shards_arrive(gm, sent)
    for evict in calls(gm.graph, ops.evict):
        wait = evict.all_input_nodes[0]
        _require(
            evict.prev is wait and wait.target is ops.reduce_scatter_wait,
            f"{evict.name} does not directly follow the wait for what it evicts",
        )
        others = [user.name for user in wait.users if user is not evict]
        _require(not others, f"{others} read {wait.name}, which is evicted")
    _one_token(gm)


def verify_moved(gm: GraphModule) -> None:
    """Saved tensors leave after they are made, and once each; nothing reads one once its memory is free.

    Those that come back are waited for once, and read from nowhere else.
    """
    order, output = positions(gm.graph), output_node(gm.graph)
    for start in calls(gm.graph, ops.offload_start):
        saved = start.all_input_nodes[0]
        waits = [u for u in saved.users if u.target is ops.offload_wait]
        _require(len(waits) == 1, f"{saved.name} is waited for {len(waits)} times on its way out")
        _require(order[start] < order[waits[0]], f"{waits[0].name} stands before {start.name}")
        base = saved
        while is_view(base):
            base = base.all_input_nodes[0]
        late = [r.name for r in readers(base) if order[r] > order[waits[0]]]
        _require(not late, f"{late} read {saved.name} after its memory is free")
        _require(output in start.users, f"backward does not get what {start.name} returns")
    pairs = reloads(gm.graph)
    for target in (ops.reload_start, ops.reload_wait):
        numbers = [saved_number(node) for node in calls(gm.graph, target)]
        _require(sorted(numbers) == sorted(pairs), f"{target} moves {numbers}, not {sorted(pairs)}")
    for start, wait in pairs.values():
        away = start.all_input_nodes[0]
        _require(order[start] < order[wait], f"{wait.name} stands before {start.name}")
        others = [
            u.name for u in away.users if u.target not in (ops.reload_start, ops.recall_start)
        ]
        _require(not others, f"{others} read {away.name}, which is off the device")
    _one_token(gm)


def _shards_arrive(gm: GraphModule, sent: Set[int]) -> None:
    """Reads before fetches before gathers, each bucket for itself."""
    out: dict[int, dict[object, Node]] = {}
    for node in gm.graph.nodes:
        if node.target is ops.all_gather_start:
            out.pop(bucket_number(node), None)
        if node.target not in (ops.read_start, ops.fetch_start):
            continue
        before = out.setdefault(bucket_number(node), {})
        _require(
            node.target not in before,
            f"{node.name} stands behind {[n.name for n in before.values()]} with no gather between",
        )
        _require(
            ops.fetch_start not in before,
            f"{node.name} stands behind {[n.name for n in before.values()]}, which needs it",
        )
        before[node.target] = node
    lost = [n.name for b, nodes in out.items() if b not in sent for n in nodes.values()]
    _require(not lost, f"{lost} bring shards that no gather needs")


def _only_wait(start: Node, target: object) -> Node:
    users = list(start.users)
    _require(
        len(users) == 1 and users[0].target is target,
        f"{start.name} is waited for by {[u.name for u in users]} instead of once",
    )
    return users[0]


def _one_token(gm: GraphModule) -> None:
    tokens = calls(gm.graph, ops.token)
    _require(len(tokens) <= 1, f"{len(tokens)} tokens: collectives have no single order")
    for node in gm.graph.nodes:
        if node.target in ops.SCHEDULED:
            _require(tokens[0] in node.all_input_nodes, f"{node.name} is not ordered by the token")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise PlanError(f"zero_compile produced an illegal graph: {message}. Please report it.")
