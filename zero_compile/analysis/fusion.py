"""Which values of a graph Inductor puts into memory, and at which node it has computed them.

Inductor executes matmuls, convolutions, attention and our operators where they stand. Everything
else it fuses: elementwise results are computed inside whatever reads them, unless something needs
them in memory. The rules here are those of ``torch/_inductor/graph.py`` (what is realized: inputs
of library calls, outputs, reductions, expensive results with several readers, results of many
reads) and of its scheduler (what is fused: realized results whose readers can share a kernel with
them never get memory). They are a model: Inductor counts operations of its own intermediate
representation, this counts nodes of the graph.
"""

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NamedTuple

import sympy  # type: ignore[import-untyped]
import torch
from torch.fx import Graph, Node

from zero_compile.analysis.fx_graph import is_view
from zero_compile.analysis.sizes import traced_sizes
from zero_runtime import compat
from zero_runtime.ir import ops

#: Above so many reads Inductor stops inlining (``realize_cpu_acc_reads_threshold``), or with
#: several readers (``realize_reads_threshold``).
_MOST_READS, _MOST_SHARED_READS = 12, 4
#: ... or so many operations (``realize_opcount_threshold``, 30): a node of the graph is about two.
_MOST_OPERATIONS = 15

_HEAVY = {"exp", "log", "log10", "log1p", "log2", "sigmoid", "tanh"}
_REDUCTIONS = {
    *("sum", "mean", "amax", "amin", "max", "min", "prod", "any", "all", "argmax", "argmin"),
    *("var", "var_mean", "std", "logsumexp", "linalg_vector_norm", "norm"),
    *("_softmax", "_log_softmax", "prepare_softmax_online", "native_layer_norm"),
}
#: Written in place, so that they are put into memory at once.
_SCATTERS = {
    *("scatter", "scatter_add", "scatter_reduce", "index_put", "_unsafe_index_put"),
    *("index_add", "slice_scatter", "select_scatter", "inductor_random", "inductor_seeds"),
}
_VIEWS = {torch.ops.aten._unsafe_view.default, torch.ops.aten.reshape.default}


class Kind(Enum):
    """What becomes of a node."""

    INPUT = auto()
    OUTPUT = auto()
    VIEW = auto()
    """Shares memory with its first input."""
    KERNEL = auto()
    """Runs where it stands, and its result gets memory."""
    REDUCTION = auto()
    """Fusable; its result is put into memory unless everything that reads it is fused with it."""
    POINTWISE = auto()
    """Fusable; computed inside whatever reads it, unless something needs it in memory."""
    ABSORBED = auto()
    """A matmul that becomes part of the addition that reads it."""
    GATHER = auto()
    REDUCE = auto()
    SCHEDULE = auto()
    """Other nodes of the schedule: their results are of no size."""


class Index(NamedTuple):
    """A graph by position: what its nodes are, what they read and who reads them."""

    nodes: list[Node]
    inputs: list[list[int]]
    users: list[list[int]]
    kinds: list[Kind]
    is_backward: bool
    sizes: dict[str, int]
    """Symbols among the sizes of values, and the numbers they are taken for."""

    @staticmethod
    def of(graph: Graph) -> "Index":
        """Everything that is asked of nodes often, looked up once."""
        nodes = list(graph.nodes)
        place = {node: i for i, node in enumerate(nodes)}
        inputs = [[place[n] for n in node.all_input_nodes] for node in nodes]
        users: list[list[int]] = [[] for _ in nodes]
        for reader, sources in enumerate(inputs):
            for source in sources:
                users[source].append(reader)
        kinds: list[Kind] = []
        for node, sources in zip(nodes, inputs, strict=True):
            kinds.append(_kind(node, kinds[sources[0]] if sources else None))
        for addition in range(len(nodes)):
            product = _product_added(nodes, inputs[addition], users, addition)
            if product is not None:
                kinds[product], kinds[addition] = Kind.ABSORBED, Kind.KERNEL
        backward = any(n.op == "placeholder" and n.name.startswith("tangents_") for n in nodes)
        return Index(nodes, inputs, users, kinds, backward, traced_sizes(graph))

    def gradients(self, place: int) -> list[int]:
        """The whole gradients that a reduction consumes."""
        node = self.nodes[place]
        if node.target is ops.reduce:
            return self.inputs[place][:1]
        return [i for i in self.inputs[place] if self.kinds[i] is not Kind.SCHEDULE]


def nbytes(node: Node) -> Any:
    """Bytes of a node's value, an integer or a sympy expression; 0 where it is not a tensor."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return 0
    return _numel(value) * value.dtype.itemsize


def _numel(value: torch.Tensor) -> Any:
    return expression_of(value.numel())


def expression_of(size: Any) -> Any:
    """A size as an integer or an expression: comparing those, unlike SymInts, adds no guards."""
    return size if isinstance(size, int) else sympy.sympify(size.node.expr)


def _kind(node: Node, source: Kind | None) -> Kind:
    if node.op == "placeholder":
        return Kind.INPUT
    if node.op == "output":
        return Kind.OUTPUT
    target = node.target
    if target in _OF_THE_SCHEDULE:
        return _OF_THE_SCHEDULE[target]
    if target is operator.getitem and source is not None:
        return source
    if not isinstance(target, torch._ops.OpOverload):
        return Kind.KERNEL
    if source is not None and _shares_memory(node):
        return Kind.VIEW
    return _fused_kind(target)


_OF_THE_SCHEDULE: dict[Any, Kind] = {
    ops.gather: Kind.GATHER,
    ops.all_gather_wait: Kind.GATHER,
    ops.reduce: Kind.REDUCE,
    ops.reduce_scatter_start: Kind.REDUCE,
    ops.reduce_scatter_wait: Kind.SCHEDULE,
    ops.all_gather_start: Kind.SCHEDULE,
    ops.release: Kind.SCHEDULE,
    ops.read_start: Kind.SCHEDULE,
    ops.fetch_start: Kind.SCHEDULE,
    ops.evict: Kind.SCHEDULE,
    ops.offload_start: Kind.SCHEDULE,
    ops.offload_wait: Kind.SCHEDULE,
    ops.recall_start: Kind.SCHEDULE,
    ops.reload_start: Kind.SCHEDULE,
    ops.assemble: Kind.SCHEDULE,
    ops.token: Kind.SCHEDULE,
}


def _shares_memory(node: Node) -> bool:
    """As :func:`is_view`; also in-place operators, and without copies, which may be needed."""
    if node.target in _VIEWS:
        return True
    schema = node.target._schema  # type: ignore[union-attr]
    if any(r.alias_info is not None for r in schema.returns):
        return True
    return is_view(node) and node.target not in _COPIES


_COPIES = {torch.ops.aten.clone.default, torch.ops.aten.contiguous.default}


def _fused_kind(target: Any) -> Kind:
    name = target.__name__.partition(".")[0]
    if target.namespace not in ("aten", "prims") or compat.is_kernel(target):
        return Kind.KERNEL
    return Kind.REDUCTION if name in _REDUCTIONS or name in _SCATTERS else Kind.POINTWISE


def _product_added(
    nodes: Sequence[Node], inputs: Sequence[int], users: Sequence[Sequence[int]], place: int
) -> int | None:
    """The matmul that Inductor computes together with this addition, as ``addmm``, where it stands.

    As ``torch/_inductor/fx_passes/post_grad.py`` has it (``is_valid_addmm_fusion``).
    """
    node = nodes[place]
    if node.target is not torch.ops.aten.add.Tensor or node.kwargs or len(inputs) != 2:
        return None
    for product, other in (inputs, inputs[::-1]):
        alone = nodes[product].target is torch.ops.aten.mm.default and len(users[product]) == 1
        if (
            alone
            and _broadcasts(nodes[other], nodes[product])
            and _library_adds(nodes, place, users[place])
        ):
            return product
    return None


def _broadcasts(node: Node, to: Node) -> bool:
    value, target = node.meta.get("val"), to.meta["val"]
    if not isinstance(value, torch.Tensor) or value.dtype is not target.dtype:
        return False
    sizes = zip(reversed(value.shape), reversed(target.shape), strict=False)
    fits = all(expression_of(a) in (1, expression_of(b)) for a, b in sizes)
    return value.dim() <= target.dim() and fits


def _library_adds(nodes: Sequence[Node], place: int, users: Sequence[int]) -> bool:
    """On accelerators an addition that is followed by elementwise work alone is fused with that."""
    on_cpu = nodes[place].meta["val"].device.type == "cpu"
    return on_cpu or not all(_is_elementwise(nodes[u]) for u in users)


def _is_elementwise(node: Node) -> bool:
    return (
        isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags
    )


# ------------------------------------------------------------------------------ what gets memory


@dataclass(frozen=True)
class Fusion:
    """The prediction, by position.

    ``base`` is the node whose memory a value lies in. ``ran_at`` is where a node has been executed,
    ``last_touch`` where its storage has been read last. ``overwritten`` maps storages that the kernel that
    reads them last writes a result over to that result; ``reduced`` ones are whole gradients.
    """

    base: list[int]
    materialized: list[bool]
    ran_at: list[int]
    last_touch: list[int]
    overwritten: dict[int, int]
    reduced: frozenset[int]
    written_over: frozenset[int]
    outputs: frozenset[int]

    @staticmethod
    def of(index: Index) -> "Fusion":
        """Predict for a graph."""
        base = _bases(index)
        model = _Model(index, base)
        groups = _Groups(index, model)
        outputs = frozenset(base[i] for i in index.inputs[-1])
        reduced = frozenset(
            base[g]
            for place, kind in enumerate(index.kinds)
            if kind is Kind.REDUCE
            for g in index.gradients(place)
        )
        ran_at = groups.positions()
        last = _last_touches(index, model, ran_at)
        kept = groups.materialized(outputs)
        overwritten = _overwritten(index, model, kept, ran_at, last, outputs)
        over = frozenset(overwritten.values())
        return Fusion(base, kept, ran_at, last, overwritten, reduced, over, outputs)

    def allocates(self, index: Index, place: int) -> bool:
        """Whether generated code allocates the storage, so that it may take one that is dead."""
        if index.kinds[place] in (Kind.POINTWISE, Kind.REDUCTION):
            return place not in self.written_over
        return index.nodes[place].target in _WRITES_INTO

    def is_output(self, place: int) -> bool:
        """Whether the graph returns the storage, or a view of it."""
        return place in self.outputs


def _bases(index: Index) -> list[int]:
    base: list[int] = []
    for place, kind in enumerate(index.kinds):
        base.append(base[index.inputs[place][0]] if kind is Kind.VIEW else place)
    return base


class _Model:
    """What Inductor realizes, and what each realized node reads once unrealized ones are inlined."""

    def __init__(self, index: Index, base: Sequence[int]) -> None:
        self.index = index
        self.base = base
        self.readers = _readers(index, base)
        self.sources: list[tuple[int, ...]] = []
        """The storages that computing the node reads, in the order of first mention."""
        self.realized: list[bool] = []
        self._operations: list[int] = []
        self._heavy: list[bool] = []
        for place in range(len(index.nodes)):
            self._add(place)

    def _add(self, place: int) -> None:
        kind, inputs = self.index.kinds[place], self.index.inputs[place]
        inlined = [i for i in {self.base[i]: None for i in inputs} if not self.realized[i]]
        sources = dict.fromkeys(s for i in inputs for s in self._read(self.base[i]))
        self.sources.append(tuple(sources) if kind is not Kind.VIEW else ())
        self._operations.append(1 + sum(self._operations[i] for i in inlined))
        heavy = _name(self.index.nodes[place]) in _HEAVY
        self._heavy.append(heavy or any(self._heavy[i] for i in inlined))
        self.realized.append(self._is_realized(place, kind))

    def _is_realized(self, place: int, kind: Kind) -> bool:
        if kind is Kind.POINTWISE:
            return self._needs_memory(place)
        return kind is not Kind.ABSORBED

    def _read(self, base: int) -> Iterable[int]:
        return (base,) if self.realized[base] else self.sources[base]

    def _needs_memory(self, place: int) -> bool:
        if self.base[place] != place:
            return True
        users = self.readers[place]
        if any(self._wants_memory(u) for u in users):
            return True
        reads = len(self.sources[place])
        if reads > _MOST_READS:
            return True
        shared = len(self.index.users[place]) > 1
        return shared and (
            self._heavy[place]
            or reads > _MOST_SHARED_READS
            or self._operations[place] > _MOST_OPERATIONS
        )

    def _wants_memory(self, place: int) -> bool:
        kind, target = self.index.kinds[place], self.index.nodes[place].target
        return kind in _EXECUTED or compat.realizes_inputs(target)


#: Nodes that read their inputs from memory.
_EXECUTED = {Kind.KERNEL, Kind.OUTPUT, Kind.REDUCE, Kind.SCHEDULE}


def _readers(index: Index, base: Sequence[int]) -> list[list[int]]:
    """Who reads each storage, through views of it."""
    found: list[list[int]] = [[] for _ in index.nodes]
    for reader, sources in enumerate(index.inputs):
        if index.kinds[reader] is not Kind.VIEW:
            for source in {base[s] for s in sources}:
                found[source].append(reader)
    return found


def _name(node: Node) -> str:
    target = node.target
    return target.__name__.partition(".")[0] if isinstance(target, torch._ops.OpOverload) else ""


# ------------------------------------------------------------------------------ kernels


class _Groups:
    """Fused kernels: connected fusable nodes with the same kernels before them."""

    def __init__(self, index: Index, model: _Model) -> None:
        self._index = index
        self._model = model
        self._parent = list(range(len(index.nodes)))
        self._ready, self._due = self._bounds()
        self.level = self._levels()
        for place in self._fused():
            for source in model.sources[place]:
                if self._is_fused(source) and self.level[source] == self.level[place]:
                    self._join(place, source)

    def positions(self) -> list[int]:
        """Where each node has been executed: a kernel runs when all it reads is there."""
        ran_at = list(range(len(self._index.nodes)))
        members: dict[int, list[int]] = {}
        for place in self._fused():
            members.setdefault(self._root(place), []).append(place)
        order = sorted(members, key=lambda root: (self.level[root], members[root][0]))
        for root in order:
            group = members[root]
            outside = (s for m in group for s in self._model.sources[m] if self._root(s) != root)
            when = max([group[0], *(ran_at[s] for s in outside)])
            when = max(min(when, self._due[root] - 1), group[0])
            for member in group:
                ran_at[member] = when
        return self._with_parts(ran_at)

    def _with_parts(self, ran_at: list[int]) -> list[int]:
        """A part of a kernel's results is there when the kernel has run."""
        for place, node in enumerate(self._index.nodes):
            if node.target is operator.getitem and self._index.kinds[place] is Kind.KERNEL:
                ran_at[place] = ran_at[self._index.inputs[place][0]]
        return ran_at

    def materialized(self, outputs: frozenset[int]) -> list[bool]:
        """Which storages exist: realized, and not merely passed on inside one kernel."""
        readers = self._effective_readers()
        return [
            self._model.realized[place]
            and self._model.base[place] == place
            and (place in outputs or not self._is_fused(place) or self._leaves(place, readers))
            for place in range(len(self._index.nodes))
        ]

    def _leaves(self, place: int, readers: Sequence[Sequence[int]]) -> bool:
        size = self._iterations(place)
        numel = _size(self._index.nodes[place])
        return any(
            self._root(r) != self._root(place) or self._iterations(r) != numel or size != numel
            for r in readers[place]
        )

    def _iterations(self, place: int) -> Any:
        """Elements that a kernel for the node runs over: those it reads, for a reduction."""
        if self._index.kinds[place] is not Kind.REDUCTION:
            return _size(self._index.nodes[place])
        sizes = [_size(self._index.nodes[i]) for i in self._index.inputs[place]]
        return max(sizes, key=_rank, default=0)

    def _effective_readers(self) -> list[list[int]]:
        readers: list[list[int]] = [[] for _ in self._index.nodes]
        for place, sources in enumerate(self._model.sources):
            if self._model.realized[place]:
                for source in sources:
                    readers[source].append(place)
        return readers

    def _fused(self) -> Iterator[int]:
        return (p for p in range(len(self._index.nodes)) if self._is_fused(p))

    def _is_fused(self, place: int) -> bool:
        kind = self._index.kinds[place]
        return kind is Kind.REDUCTION or (kind is Kind.POINTWISE and self._model.realized[place])

    def _levels(self) -> list[int]:
        """How many kernels in a row stand before each node: no kernel lies between equals."""
        level = [0] * len(self._index.nodes)
        for place, sources in enumerate(self._model.sources):
            above = max((level[s] for s in sources), default=0)
            level[place] = above + (not self._is_fused(place))
        return level

    def _bounds(self) -> tuple[list[int], list[int]]:
        """When the last source of each node is there, and when its first unfused reader runs."""
        end = len(self._index.nodes)
        ready, due = [0] * end, [end] * end
        for place, sources in enumerate(self._model.sources):
            ready[place] = max(sources, default=0)
            if not self._is_fused(place) and self._model.realized[place]:
                for source in sources:
                    due[source] = min(due[source], place)
        return ready, due

    def _join(self, a: int, b: int) -> None:
        a, b = self._root(a), self._root(b)
        ready, due = max(self._ready[a], self._ready[b]), min(self._due[a], self._due[b])
        if a == b or max(a, ready) >= due:  # a reader would run before what it reads
            return
        self._parent[a] = b
        self._ready[b], self._due[b] = ready, due

    def _root(self, place: int) -> int:
        while self._parent[place] != place:
            self._parent[place] = self._parent[self._parent[place]]
            place = self._parent[place]
        return place


def _size(node: Node) -> Any:
    value = node.meta.get("val")
    return _numel(value) if isinstance(value, torch.Tensor) else 0


def _rank(size: Any) -> Any:
    return size if isinstance(size, int) else float("inf")


def _last_touches(index: Index, model: _Model, ran_at: Sequence[int]) -> list[int]:
    last = list(ran_at)
    for place, sources in enumerate(model.sources):
        if model.realized[place] and index.kinds[place] is not Kind.OUTPUT:
            for source in sources:
                last[source] = max(last[source], ran_at[place])
    return last


def _overwritten(
    index: Index,
    model: _Model,
    kept: Sequence[bool],
    ran_at: Sequence[int],
    last: Sequence[int],
    outputs: frozenset[int],
) -> dict[int, int]:
    """Storages that a fused kernel, their last reader, writes a result of the same size over."""
    taken: dict[int, int] = {}
    for place, kind in enumerate(index.kinds):
        if not kept[place] or kind not in (Kind.POINTWISE, Kind.REDUCTION):
            continue
        size = nbytes(index.nodes[place])
        dying = (
            s
            for s in model.sources[place]
            if last[s] == ran_at[place]
            and ran_at[s] < ran_at[place]
            and s not in outputs
            and s not in taken
            and index.kinds[s] in _REUSABLE
            and nbytes(index.nodes[s]) == size
        )
        chosen = next(dying, None)
        if chosen is not None:
            taken[chosen] = place
    return taken


#: Library calls that are given the memory for their result.
_WRITES_INTO = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.baddbmm.default,
    torch.ops.aten.add.Tensor,
}
_REUSABLE = {Kind.KERNEL, Kind.REDUCTION, Kind.POINTWISE, Kind.INPUT}
