"""Shards that lie on the host or on NVMe are brought to the device before their bucket is gathered.

    zero3.read_start(token, bucket)      NVMe to the host
    zero3.fetch_start(token, bucket)     the host to the device
    all_gather_start(token, bucket, ...)

All three only start something. A planner says where; without one, a shard is fetched one bucket
further ahead than it is gathered, and read two further ahead. A read waits for a staging slot: the
gather that a shard was read for gives its slot back. The order among reads, fetches and gathers of
one place is that of :mod:`zero_compile.scheduler.issue`.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, GraphModule, Node

from zero_compile.analysis.fx_graph import bucket_number, calls, is_view, output_node
from zero_compile.analysis.tiers import is_fetched, is_read
from zero_compile.passes.insert import insert_call, token_of
from zero_compile.scheduler.decide_schedule import Departure, GraphSchedule
from zero_compile.scheduler.problem import STAGING_SLOTS
from zero_runtime.ir import ops
from zero_runtime.ir.plan import BucketPlan


@dataclass(eq=False)
class _Shard:
    """A shard that goes some of its way in this graph.

    ``start`` is its gather; None: in the next graph. ``read`` and ``fetch`` are the nodes from which on
    it may set out; None: it has, or need not. ``before`` is the shard of the same bucket before it.
    """

    bucket: int
    start: Node | None
    read: Node | None
    fetch: Node | None
    before: "_Shard | None" = None
    gathered: bool = False

    @property
    def may_leave(self) -> bool:
        """A bucket is on its way once at a time."""
        return self.before is None or self.before.gathered


def insert_fetches(
    gm: GraphModule,
    *,
    buckets: Sequence[BucketPlan],
    schedule: GraphSchedule | None = None,
    depth: int = 0,
    slots: int = STAGING_SLOTS,
) -> GraphModule:
    """Insert ``zero3.fetch_start`` before each gather of a bucket that lies off the device, and
    ``zero3.read_start`` before that where it lies on NVMe.

    ``buckets`` by number; those left out lie on the device. ``schedule`` says where, and which shards
    are under way already; what it does not mention is placed right before its gather. None: gathers
    start ``depth`` buckets ahead. Afterwards at most ``slots`` shards have been read and not gathered.
    """
    graph = gm.graph
    on_nvme = {n: is_read(bucket) for n, bucket in enumerate(buckets) if is_fetched(bucket)}
    if schedule is None:
        schedule = _ahead(graph, on_nvme, depth)
    shards = _shards(graph, on_nvme, schedule)
    if shards:
        arrived = sum(s.read is None and on_nvme[s.bucket] for s in shards)
        _Inserter(graph, shards, on_nvme, slots - arrived).run()
    graph.lint()
    return gm


# ------------------------------------------------------------------------------ where


def _ahead(graph: Graph, on_nvme: Mapping[int, bool], depth: int) -> GraphSchedule:
    """One and two buckets further ahead than gathers, which stand ``depth`` buckets ahead of their use."""
    waits = calls(graph, ops.all_gather_wait)
    names = [wait.name for wait in waits]
    away = [(n, bucket_number(w)) for n, w in enumerate(waits) if bucket_number(w) in on_nvme]
    fetches = (Departure(bucket, names[max(0, n - depth - 1)]) for n, bucket in away)
    reads = (Departure(b, names[max(0, n - depth - 2)]) for n, b in away if on_nvme[b])
    return GraphSchedule(fetches=tuple(fetches), reads=tuple(reads))


def _shards(graph: Graph, on_nvme: Mapping[int, bool], schedule: GraphSchedule) -> list[_Shard]:
    """Those of this graph's gathers in order, then those of the next graph's."""
    places = {node.name: node for node in graph.nodes}
    reads = _by_bucket(schedule.reads, graph, places)
    reads = {bucket: deque(map(_first_gather, found)) for bucket, found in reads.items()}
    fetches = _by_bucket(schedule.fetches, graph, places)
    shards = _gathered_here(graph, on_nvme, schedule, reads, fetches)
    for bucket in schedule.sent:
        shards.append(_Shard(bucket, None, _next(reads, bucket), _next(fetches, bucket)))
    last: dict[int, _Shard] = {}
    for shard in shards:
        shard.before = last.get(shard.bucket)
        last[shard.bucket] = shard
    return shards


def _gathered_here(
    graph: Graph,
    on_nvme: Mapping[int, bool],
    schedule: GraphSchedule,
    reads: Mapping[int, deque[Node]],
    fetches: Mapping[int, deque[Node]],
) -> list[_Shard]:
    """Takes the places of its shards out of ``reads`` and ``fetches``."""
    numbers = {w.all_input_nodes[0]: n for n, w in enumerate(calls(graph, ops.all_gather_wait))}
    shards = []
    for start in calls(graph, ops.all_gather_start):
        bucket, number = bucket_number(start), numbers.get(start, -1)
        if bucket not in on_nvme or number in schedule.carried_in:
            continue
        read = fetch = None
        if number not in schedule.fetched:
            fetch = _next(fetches, bucket) or start
            if on_nvme[bucket] and number not in schedule.read:
                read = _next(reads, bucket) or start
        shards.append(_Shard(bucket, start, read, fetch))
    return shards


def _by_bucket(
    departures: Sequence[Departure], graph: Graph, places: Mapping[str, Node]
) -> dict[int, deque[Node]]:
    found: dict[int, deque[Node]] = {}
    for one in departures:
        found.setdefault(one.bucket, deque()).append(_place(graph, one.before, places))
    return found


def _place(graph: Graph, name: str | None, places: Mapping[str, Node]) -> Node:
    """The node that ``name`` means; for the beginning, the one behind the gathers that start there."""
    if name is None:
        return output_node(graph)
    if name:
        return places[name]
    node = token_of(graph).next
    while node.target is ops.all_gather_start:
        node = node.next
    return node


def _first_gather(place: Node) -> Node:
    """The first of the gathers that start, or are waited for, right before ``place``; else ``place``."""
    while place.prev.target in (ops.all_gather_start, ops.all_gather_wait) or is_view(place.prev):
        place = place.prev
    return place


def _next(places: Mapping[int, deque[Node]], bucket: int) -> Node | None:
    return places[bucket].popleft() if places.get(bucket) else None


# ------------------------------------------------------------------------------ in which order


class _Inserter:
    """Walks over a graph and inserts what is due, as soon as it is possible."""

    def __init__(
        self, graph: Graph, shards: Sequence[_Shard], on_nvme: Mapping[int, bool], slots: int
    ) -> None:
        self._graph = graph
        self._on_nvme = on_nvme
        self._slots = slots
        self._own = {shard.start: shard for shard in shards}
        self._to_read = deque(shard for shard in shards if shard.read is not None)
        self._to_fetch = deque(shard for shard in shards if shard.fetch is not None)
        self._passed: set[Node] = set()

    def run(self) -> None:
        """To the end of the graph."""
        for node in list(self._graph.nodes):
            self._passed.add(node)
            while self._to_read and self._may_read(self._to_read[0]):
                self._read(self._to_read[0], node)
            while self._to_fetch and self._may_fetch(self._to_fetch[0]):
                self._fetch(self._to_fetch[0], node)
            if node in self._own:
                self._gather(self._own[node], node)

    def _may_read(self, shard: _Shard) -> bool:
        return shard.read in self._passed and self._slots > 0 and shard.may_leave

    def _may_fetch(self, shard: _Shard) -> bool:
        return shard.fetch in self._passed and shard.read is None and shard.may_leave

    def _read(self, shard: _Shard, node: Node) -> None:
        self._to_read.remove(shard)
        self._insert(ops.read_start, shard, node)
        shard.read = None
        self._slots -= 1

    def _fetch(self, shard: _Shard, node: Node) -> None:
        self._to_fetch.remove(shard)
        self._insert(ops.fetch_start, shard, node)
        shard.fetch = None

    def _gather(self, shard: _Shard, node: Node) -> None:
        """What has not set out yet does so now."""
        if shard.read is not None:
            self._read(shard, node)
        if shard.fetch is not None:
            self._fetch(shard, node)
        shard.gathered = True
        self._slots += self._on_nvme[shard.bucket]

    def _insert(self, target: Any, shard: _Shard, node: Node) -> None:
        with self._graph.inserting_before(node):
            insert_call(self._graph, target, token_of(self._graph), shard.bucket)
