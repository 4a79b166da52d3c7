"""Which memory a graph holds when: storages, how long each lives, and the bytes held at every node.

One structure answers it for every decision: :class:`Liveness`. A *storage* is memory that several
values of the graph share (views, parts of a split, parameters inside a gathered bucket). It lives
from the node that defines it to the node that touches it last; an output lives to the end. Which
values have a storage at all, and at which node a fused kernel runs, is Inductor's choice:
:mod:`zero_compile.analysis.fusion` predicts it.

Positions are places in the graph's execution order. Bytes are integers, or sympy expressions where
sizes are symbolic: :meth:`Liveness.evaluate` replaces symbols by numbers.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import accumulate
from typing import NamedTuple, TypeAlias

import networkx as nx  # type: ignore[import-untyped]
import numpy as np
import sympy  # type: ignore[import-untyped]
import torch
from torch.fx import Graph

from zero_compile.analysis.convolutions import copied_inputs, temporaries
from zero_compile.analysis.fusion import Fusion, Index, Kind, nbytes
from zero_compile.analysis.fx_graph import bucket_number, positions, reloads
from zero_compile.analysis.tiers import gathered_in_place, is_evicted, shard_bytes
from zero_runtime.ir import ops
from zero_runtime.ir.plan import (
    BucketPlan,
    StatePolicy,
    reduced_numel,
    reducing_bytes,
)
from zero_runtime.ir.timeline import Category

Bytes: TypeAlias = int | sympy.Expr


class Origin(StrEnum):
    """Who made a storage, which says when its memory is free."""

    VALUE = "value"
    """The graph itself: free after the last touch, or at the end if it is an output."""
    SAVED = "saved"
    """Handed to backward and to nobody else: AOTAutograd's boxed call drops it at its last touch."""
    ARGUMENT = "argument"
    """The caller's, who keeps it: resident throughout, and in no curve."""


@dataclass(frozen=True)
class Storage:
    """Memory of ``bytes``, taken at the position ``defined`` and touched at ``last`` for the last time.

    It is held up to ``freed``, excluded. That is ``last`` where the kernel there writes a result over
    it, a later position where Inductor keeps it for a result of the same size, else right after
    ``last``. ``values`` are the names of the nodes whose results lie in it, the first of them its own.
    """

    values: tuple[str, ...]
    bytes: Bytes
    category: Category
    defined: int
    last: int
    freed: int
    origin: Origin = Origin.VALUE
    output: bool = False

    @property
    def name(self) -> str:
        """The node that the storage is named after."""
        return self.values[0]


class Peak(NamedTuple):
    """The most bytes held at once, and the first position and node where they are."""

    bytes: int
    position: int
    node: str


class CriticalPath(NamedTuple):
    """The longest chain of nodes that wait for each other, in seconds."""

    seconds: float
    nodes: tuple[str, ...]


class Seam(NamedTuple):
    """What forward hands to backward: (forward's output, backward's input), by node names."""

    saved: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Liveness:
    """One graph's storages in the order of their definition; ``names`` are its nodes in execution order.

    ``dependencies`` has a node for each name and an edge from each value to its readers.
    """

    names: tuple[str, ...]
    storages: tuple[Storage, ...]
    dependencies: nx.DiGraph = field(compare=False, repr=False)
    sizes: Mapping[str, int] = field(default_factory=dict)
    """The symbols that the graph was traced with, by name."""

    @staticmethod
    def of(
        graph: Graph,
        buckets: Sequence[BucketPlan] = (),
        policy: StatePolicy | None = None,
        kept: Set[int] = frozenset(),
    ) -> "Liveness":
        """The liveness of a forward, backward or inference graph, before or after the lowering passes.

        ``kept`` are buckets that stay gathered for the graph that follows.

        Without ``buckets`` sizes that only the bucket plans know are taken from the graph: a gather
        always has a buffer, and a reduction holds twice its whole gradients (what is sent, and room
        for the others' parts).
        """
        index = Index.of(graph)
        builder = _Builder(index, Fusion.of(index), buckets, policy or StatePolicy(), kept)
        found = sorted(builder.storages(), key=lambda s: (s.defined, s.last))
        names = tuple(node.name for node in index.nodes)
        reused = keep_for_reuse(found, builder.takers(), builder.executed(), index.sizes)
        return Liveness(names, tuple(reused), _dependencies(index, names), index.sizes)

    @staticmethod
    def step(forward: "Liveness", backward: "Liveness") -> "Liveness":
        """Forward, then backward: names are prefixed with ``forward/`` and ``backward/``.

        A saved activation lives from its definition in forward to its last touch in backward, once,
        however many views of it are saved. What forward returns to the user lives to the end.
        """
        return _step(forward, backward, seam(forward, backward))

    def evaluate(self, sizes: Mapping[str, int] | None = None) -> "Liveness":
        """The same with every symbolic size computed.

        ``sizes`` maps symbols' names to numbers; others are as they were when the graph was traced.

        Raises:
            ValueError: a symbol had no value then and has none now; the message names the storage.
        """
        known = {**self.sizes, **(sizes or {})}
        return replace(self, storages=tuple(_evaluated(s, known) for s in self.storages))

    def live(self, categories: Iterable[Category] = tuple(Category)) -> list[int]:
        """Bytes of ``categories`` held at each position. The caller's arguments do not count.

        Raises:
            ValueError: a size is symbolic; call :meth:`evaluate` first.
        """
        wanted = frozenset(categories)
        change = [0] * (len(self.names) + 1)
        for storage in self.storages:
            if storage.category in wanted and storage.origin is not Origin.ARGUMENT:
                size = _number(storage)
                change[storage.defined] += size
                change[storage.freed] -= size
        return list(accumulate(change[:-1]))

    def by_category(self) -> dict[Category, list[int]]:
        """:meth:`live` for each category that the graph has storages of."""
        present = dict.fromkeys(storage.category for storage in self.storages)
        return {category: self.live([category]) for category in present}

    def peak(self, categories: Iterable[Category] = tuple(Category)) -> Peak:
        """The most bytes of ``categories`` held at once, and where.

        Raises:
            ValueError: a size is symbolic; call :meth:`evaluate` first.
        """
        curve = self.live(categories)
        position = max(range(len(curve)), key=curve.__getitem__, default=0)
        return Peak(curve[position], position, self.names[position]) if curve else Peak(0, 0, "")

    def critical_path(self, weights: Mapping[str, float]) -> CriticalPath:
        """The longest path over data dependencies; ``weights`` are seconds by node name, else 0."""
        weighted = nx.DiGraph()
        weighted.add_weighted_edges_from(("", n, weights.get(n, 0.0)) for n in self.dependencies)
        weighted.add_weighted_edges_from(
            (a, b, weights.get(b, 0.0)) for a, b in self.dependencies.edges
        )
        path = nx.dag_longest_path(weighted)[1:]
        return CriticalPath(sum(weights.get(n, 0.0) for n in path), tuple(path))


def seam(forward: Liveness, backward: Liveness) -> Seam:
    """Which values that forward has computed are backward's inputs: AOTAutograd gives both one name.

    Saved arguments are not among them: they take no memory but the caller's.
    """
    computed = (s for s in forward.storages if s.output and s.origin is Origin.VALUE)
    outputs = {value for storage in computed for value in storage.values}
    inputs = [s.name for s in backward.storages if s.origin is not Origin.VALUE]
    return Seam(tuple((name, name) for name in inputs if name in outputs))


# ------------------------------------------------------------------------------ a graph's storages


class _Builder:
    """Storages of one graph."""

    def __init__(
        self,
        index: Index,
        fusion: Fusion,
        buckets: Sequence[BucketPlan],
        policy: StatePolicy,
        kept: Set[int],
    ) -> None:
        self._index = index
        self._kept = kept
        self._fusion = fusion
        self._buckets = buckets
        self._policy = policy
        self._end = len(index.nodes) - 1
        self._values = _by_storage(index, fusion)
        self._copied = copied_inputs(index, fusion.base)
        self._set_out = _set_out(index.nodes[0].graph)

    def storages(self) -> Iterator[Storage]:
        """All of them, in no particular order."""
        yield from self._early()
        yield from self._fetched()
        for place in self._values:
            kind = self._index.kinds[place]
            if kind is Kind.GATHER:
                yield self._gathered(place)
            elif kind is Kind.REDUCE:
                yield from self._reduction(place)
            elif kind is Kind.INPUT:
                yield from self._input(place)
            elif self._fusion.materialized[place] and self._has_memory(place):
                yield self._value(place)
        for name, place, size in temporaries(self._index):
            yield Storage((name,), size, Category.ACTIVATIONS, place, place, place + 1)

    def _has_memory(self, place: int) -> bool:
        value = self._index.nodes[place].meta.get("val")
        return self._index.kinds[place] is not Kind.SCHEDULE and isinstance(value, torch.Tensor)

    def _value(self, place: int) -> Storage:
        output = self._fusion.is_output(place)
        last = self._end if output else self._fusion.last_touch[place]
        return Storage(
            self._names(place),
            nbytes(self._index.nodes[place]),
            self._category(place),
            self._set_out.get(place, self._fusion.ran_at[place]),
            last,
            self._freed(place, last),
            output=output,
        )

    def _freed(self, place: int, last: int) -> int:
        return last + (place not in self._fusion.overwritten)

    def _input(self, place: int) -> Iterator[Storage]:
        """A parameter that is only gathered is a husk without memory, and has no storage; nor has what
        is off the device and only brought back.
        """
        node, users = self._index.nodes[place], self._index.users[place]
        elsewhere = all(self._index.nodes[u].target in _TAKE_NO_MEMORY for u in users)
        if elsewhere or not isinstance(node.meta.get("val"), torch.Tensor):
            return
        output = self._fusion.is_output(place)
        last = self._end if output else self._fusion.last_touch[place]
        yield Storage(
            self._names(place),
            nbytes(node),
            self._category(place),
            0,
            last,
            self._freed(place, last),
            self._origin(place),
            output,
        )

    def _origin(self, place: int) -> Origin:
        if place in self._copied:
            return Origin.VALUE  # the caller's own is read once, into a copy that replaces it
        name = self._index.nodes[place].name
        return Origin.ARGUMENT if self._callers(name) else Origin.SAVED

    def _callers(self, name: str) -> bool:
        """Backward's inputs are forward's values, except those AOTAutograd calls ``primals``."""
        return not self._index.is_backward or name.startswith("primals_")

    def _gathered(self, place: int) -> Storage:
        """From the start of the transfer: its destination is allocated there."""
        node = self._index.nodes[place]
        if node.target is ops.gather:
            size = nbytes(node)
            first = min((self._fusion.ran_at[u] for u in self._index.users[place]), default=place)
        else:
            size = self._gathered_bytes(place)
            first = self._index.inputs[place][0]
        last = max(first, self._fusion.last_touch[place])
        if node.target is ops.all_gather_wait and node.args[2] in self._kept:
            last = self._end
        return Storage(self._names(place), size, Category.GATHERED, first, last, last + 1)

    def _early(self) -> Iterator[Storage]:
        """Gathers that only start here: the graph that follows waits for them."""
        for place, node in enumerate(self._index.nodes):
            if node.target is ops.all_gather_start and not self._index.users[place]:
                bucket = self._buckets[node.args[1]] if self._buckets else None  # type: ignore[index]
                size = bucket.gathered_bytes(node.args[2]) if bucket is not None else 0  # type: ignore[arg-type]
                category = Category.GATHERED
                yield Storage((node.name,), size, category, place, self._end, self._end + 1)

    def _fetched(self) -> Iterator[Storage]:
        """Shards on the device, until their gather has started; in place the bucket takes them over."""
        on_device: dict[int, int] = {}
        for place, node in enumerate(self._index.nodes if self._buckets else ()):
            if node.target is ops.fetch_start:
                on_device[bucket_number(node)] = place
            elif node.target is ops.all_gather_start and bucket_number(node) in on_device:
                number, dtype = bucket_number(node), node.args[2]
                in_place = gathered_in_place(self._buckets[number], dtype)  # type: ignore[arg-type]
                yield self._shard(on_device.pop(number), place, place + (not in_place))
        for fetch in on_device.values():
            yield self._shard(fetch, self._end, self._end + 1)

    def _shard(self, fetch: int, last: int, freed: int) -> Storage:
        node = self._index.nodes[fetch]
        size = shard_bytes(self._buckets[bucket_number(node)])
        return Storage((node.name,), size, Category.STAGING, fetch, last, freed)

    def _gathered_bytes(self, place: int) -> Bytes:
        node = self._index.nodes[place]
        if not self._buckets:
            return nbytes(node)
        return self._buckets[node.args[2]].gathered_bytes(node.args[4])  # type: ignore[index,arg-type]

    def _reduction(self, place: int) -> Iterator[Storage]:
        """What is packed and received, until the wait; the reduced part of it, which is an output."""
        node, name = self._index.nodes[place], self._index.nodes[place].name
        waits = [u for u in self._index.users[place] if _is_wait(self._index, u)]
        last = max(waits, default=place)
        size = self._reducing_bytes(place)
        bucket = self._buckets[node.args[2]] if self._buckets else None  # type: ignore[index]
        if bucket is not None and is_evicted(bucket, self._policy.stage):
            size += shard_bytes(bucket)  # on the device up to the wait
            waits = []
        yield Storage((name,), size, Category.REDUCING, place, last, last + 1)
        for wait in waits:
            size = nbytes(self._index.nodes[wait])
            if bucket is not None:
                size = reduced_numel(bucket, self._policy.stage) * bucket.torch_dtype.itemsize
            output = self._fusion.is_output(wait) or self._is_first_of_tile(wait)
            end = self._end if output else wait
            names = (self._index.nodes[wait].name,)
            yield Storage(names, size, Category.GRADIENTS, place, end, end + 1, output=output)

    def _is_first_of_tile(self, wait: int) -> bool:
        """Whether what arrives is a tile of a gradient that the graph returns; later ones are added to it."""
        nodes, tile = self._index.nodes, bucket_number(self._index.nodes[wait])
        for user in self._index.users[wait]:
            if nodes[user].target is ops.assemble:
                parts = [p for p in self._index.inputs[user] if _is_wait(self._index, p)]
                return wait == min(p for p in parts if bucket_number(nodes[p]) == tile)
        return False

    def _reducing_bytes(self, place: int) -> Bytes:
        node = self._index.nodes[place]
        if not self._buckets:
            return 2 * sum(nbytes(self._index.nodes[g]) for g in self._index.gradients(place))
        bucket = self._buckets[node.args[2]]  # type: ignore[index]
        return reducing_bytes(bucket, self._policy)

    def _category(self, place: int) -> Category:
        reduced = place in self._fusion.reduced
        return Category.GRADIENTS if reduced else Category.ACTIVATIONS

    def _names(self, place: int) -> tuple[str, ...]:
        return tuple(self._index.nodes[p].name for p in self._values[place])

    def takers(self) -> frozenset[str]:
        """Storages that may be given the memory of one that is dead."""
        base = (p for p in self._values if self._fusion.allocates(self._index, p))
        return frozenset(self._index.nodes[p].name for p in base)

    def executed(self) -> list[int]:
        """Positions at which something runs, ascending."""
        kinds = self._index.kinds
        runs = (p for p, kind in enumerate(kinds) if kind not in _NEVER_RUN)
        return sorted({self._fusion.ran_at[p] for p in runs if self._fusion.base[p] == p})


#: What reads inputs that lie elsewhere, or nowhere.
_TAKE_NO_MEMORY = {ops.gather, ops.recall_start, ops.reload_start}

#: Nodes that stand for no work of their own.
_NEVER_RUN = {Kind.INPUT, Kind.VIEW, Kind.ABSORBED, Kind.OUTPUT}


def _set_out(graph: Graph) -> dict[int, int]:
    """Where tensors that come back to the device get their memory, by where they are waited for."""
    order = positions(graph)
    return {order[wait]: order[start] for start, wait in reloads(graph).values()}


def _by_storage(index: Index, fusion: Fusion) -> dict[int, list[int]]:
    """The values in each storage, by the storage's own node."""
    found: dict[int, list[int]] = {}
    for place, base in enumerate(fusion.base):
        found.setdefault(base, []).append(place)
    return {base: sorted(places, key=lambda p: (p != base, p)) for base, places in found.items()}


def _is_wait(index: Index, place: int) -> bool:
    return index.nodes[place].target is ops.reduce_scatter_wait


def _dependencies(index: Index, names: Sequence[str]) -> nx.DiGraph:
    graph = nx.DiGraph()
    graph.add_nodes_from(names)
    graph.add_edges_from(
        (names[source], names[place])
        for place, sources in enumerate(index.inputs)
        for source in sources
    )
    return graph


# ------------------------------------------------------------------------------ reuse


def keep_for_reuse(
    storages: Sequence[Storage],
    takers: frozenset[str],
    executed: Sequence[int],
    sizes: Mapping[str, int],
) -> list[Storage]:
    """Keep dead storages until a later result of the same size takes their memory, as Inductor does.

    It does so where its own estimate of the peak does not rise (``should_reuse_buffer`` in
    ``torch/_inductor/codegen/wrapper.py``), which may well raise the real one. Expects ``storages``
    in the order of definition.
    """
    pool = _Pool(storages, executed, sizes)
    dying: dict[int, list[int]] = {}
    for i, storage in enumerate(storages):
        if _can_be_taken(storage):
            dying.setdefault(storage.last, []).append(i)
    born: dict[int, list[int]] = {}
    for i, storage in enumerate(storages):
        if storage.name in takers:
            born.setdefault(storage.defined, []).append(i)
    for position in executed:
        for i in born.get(position, ()):
            pool.allocate(i)
        for i in dying.get(position, ()):
            pool.free(i)
    return [replace(s, freed=pool.freed.get(i, s.freed)) for i, s in enumerate(storages)]


def _can_be_taken(storage: Storage) -> bool:
    dead = storage.freed > storage.last and not storage.output
    mine = storage.origin is Origin.VALUE
    return dead and mine and storage.category in (Category.ACTIVATIONS, Category.GRADIENTS)


#: Memory that Inductor knows nothing of.
_UNSEEN = {Category.REDUCING, Category.STAGING}


class _Pool:
    """Dead storages by size, last in first out, and Inductor's estimate of the peak."""

    def __init__(
        self, storages: Sequence[Storage], executed: Sequence[int], sizes: Mapping[str, int]
    ) -> None:
        self._storages = storages
        self._kernel = {position: k for k, position in enumerate(executed)}
        self._dead: dict[Bytes, list[int]] = {}
        self.freed: dict[int, int] = {}
        """Those that were taken, and where."""
        self._sizes = [_size_or_zero(s, sizes) for s in storages]
        change = np.zeros(len(executed) + 1, dtype=np.int64)
        for storage, size in zip(storages, self._sizes, strict=True):
            if storage.category not in _UNSEEN and storage.origin is not Origin.ARGUMENT:
                change[bisect_left(executed, storage.defined)] += size
                change[bisect_right(executed, storage.last)] -= size
        self._held = np.cumsum(change[:-1])
        self._peak = int(self._held.max(initial=0))

    def allocate(self, i: int) -> None:
        """Let storage ``i`` take the memory of the last of its size to die, if that is cheap."""
        candidates = self._dead.get(self._storages[i].bytes)
        if not candidates or not self._sizes[i]:
            return
        dead, size = candidates[-1], self._sizes[i]
        first = self._kernel[self._storages[dead].last] + 1
        last = self._kernel[self._storages[i].defined]
        between = self._held[first:last]
        if last > first and int(between.max()) + size > self._peak:
            return
        between += size
        candidates.pop()
        self.freed[dead] = self._storages[i].defined

    def free(self, i: int) -> None:
        """Storage ``i`` has been touched for the last time."""
        self._dead.setdefault(self._storages[i].bytes, []).append(i)


def _size_or_zero(storage: Storage, sizes: Mapping[str, int]) -> int:
    try:
        return _number(_evaluated(storage, sizes))
    except ValueError:
        return 0


# ------------------------------------------------------------------------------ a step


def _step(forward: Liveness, backward: Liveness, joint: Seam) -> Liveness:
    offset = len(forward.names)
    end = offset + len(backward.names) - 1
    saved = {name for name, _ in joint.saved}
    taken = {s.name: s for s in backward.storages}
    storages = [
        _gather_cache(s, [taken[v] for v in s.values if v in saved], offset, end)
        for s in forward.storages
    ]
    backward_inputs = {name for _, name in joint.saved}
    storages += [
        _moved(s, offset, "backward/") for s in backward.storages if s.name not in backward_inputs
    ]
    before, after = _prefixed("forward/"), _prefixed("backward/")
    dependencies = nx.compose(
        nx.relabel_nodes(forward.dependencies, before),
        nx.relabel_nodes(backward.dependencies, after),
    )
    dependencies.add_edges_from((before(a), after(b)) for a, b in joint.saved)
    names = (*map(before, forward.names), *map(after, backward.names))
    return Liveness(names, tuple(storages), dependencies, {**forward.sizes, **backward.sizes})


def _gather_cache(storage: Storage, taken: Sequence[Storage], offset: int, end: int) -> Storage:
    """Forward's storage in a step, given those of backward's inputs that lie in it."""
    values = tuple(f"forward/{v}" for v in storage.values)
    if storage.origin is Origin.ARGUMENT or (storage.output and not taken):
        return replace(storage, values=values, last=end, freed=end + 1)
    if not taken:
        return replace(storage, values=values)
    last = max(taken, key=lambda s: s.freed)
    values += tuple(f"backward/{v}" for s in taken for v in s.values)
    freed = last.freed if len(taken) == 1 else last.last + 1  # several views: none is written over
    return replace(
        storage,
        values=values,
        category=last.category,
        last=offset + last.last,
        freed=offset + freed,
    )


def _moved(storage: Storage, offset: int, prefix: str) -> Storage:
    return replace(
        storage,
        values=tuple(prefix + v for v in storage.values),
        defined=storage.defined + offset,
        last=storage.last + offset,
        freed=storage.freed + offset,
    )


def _prefixed(prefix: str) -> Callable[[str], str]:
    return lambda name: prefix + name


# ------------------------------------------------------------------------------ sizes


def _evaluated(storage: Storage, sizes: Mapping[str, int]) -> Storage:
    if isinstance(storage.bytes, int):
        return storage
    known = {s: sizes[str(s)] for s in storage.bytes.free_symbols if str(s) in sizes}
    value = storage.bytes.subs(known)
    if value.free_symbols:
        missing = ", ".join(sorted(map(str, value.free_symbols)))
        raise ValueError(f"the size of {storage.name} is {storage.bytes}; no value for {missing}")
    return replace(storage, bytes=int(value))


def _number(storage: Storage) -> int:
    if not isinstance(storage.bytes, int):
        raise ValueError(f"the size of {storage.name} is {storage.bytes}: evaluate() it first")
    return storage.bytes
