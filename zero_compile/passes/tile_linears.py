"""Weights of linears and embeddings that are moved in tiles: what reads one becomes a sequence of tiles.

    y = mm(x, gather(w).T)          y = cat([mm(x, gather(w0).T), mm(x, gather(w1).T)], 1)
    dx = mm(dy, gather(w))          dx = addmm(mm(dy[:, :n], gather(w0)), dy[:, n:], gather(w1))
    reduce(mm(dy.T, x))             join([reduce(mm(dy.T[:n], x)), reduce(mm(dy.T[n:], x))])

where ``w0`` and ``w1`` are rows of ``w``; with columns the first two change places. An embedding looks
each index up in the tile that has it. Nothing whole is gathered, and no gradient is whole: of a
weight that is used twice, each use has its own gradient reduced.

What else reads such a weight, because an earlier graph has cut it, puts its tiles together.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from zero_compile.analysis.casts import cast_dtype
from zero_compile.analysis.fx_graph import calls, parameter_number
from zero_compile.passes.insert import erase_unread, insert_part, replace_node
from zero_compile.tiling import Cut
from zero_runtime.ir import ops, tile_ops

aten = torch.ops.aten

_PRODUCTS = {aten.mm.default, aten.addmm.default}
#: Where gradients of lookups take their indices, and what they add up.
_LOOKUP_GRADIENTS = {
    aten._unsafe_masked_index_put_accumulate.default,
    aten.index_put.default,
    aten.embedding_dense_backward.default,
}


def tile_linears(gm: GraphModule, *, cuts: Mapping[int, Cut]) -> GraphModule:
    """``cuts`` maps parameter numbers to tiles. Afterwards none of these is gathered or reduced whole.

    Results over rows are those of each row's products; over columns, and for gradients of inputs over
    rows, sums are added up in another order. A gradient's tiles are joined by ``zero3.join``.
    """
    graph = gm.graph
    for gather in calls(graph, ops.gather):
        if parameter_number(gather) in cuts:
            _tile_uses(_gathered(gather, cuts[parameter_number(gather)]))
    for reduce in calls(graph, ops.reduce):
        if parameter_number(reduce) in cuts:
            _tile_gradient(reduce, cuts[parameter_number(reduce)])
    graph.lint()
    return gm


def tileable(gather: Node) -> bool:
    """Whether all that the graph does with a parameter can be done tile by tile, its gradient included."""
    number = parameter_number(gather)
    reduces = (r for r in calls(gather.graph, ops.reduce) if parameter_number(r) == number)
    terms = [term for reduce in reduces for term in _terms(reduce.all_input_nodes[0])]
    return bool(gather.users) and _readable(gather) and all(map(_divides, terms))


def _readable(weight: Node) -> bool:
    return all(
        _readable(user) if _derives(user) else _is_product(user) or _looks_up(user, weight)
        for user in weight.users
    )


# ------------------------------------------------------------------------------ what reads the weight


class _Weight(NamedTuple):
    """A parameter, or what casts and transpositions (``steps``) make of it, and its gathered tiles.

    ``node`` is cut along ``dim``.
    """

    node: Node
    tiles: tuple[Node, ...]
    cut: Cut
    dim: int
    steps: tuple[Node, ...] = ()

    def parts(self) -> Iterator[tuple[Node, int, int]]:
        """The same of each tile, and where it begins and ends in ``node``.

        Each is inserted when it is asked for: what stands before its use would have it gathered there.
        """
        for tile, (start, stop) in zip(self.tiles, self.cut.bounds, strict=True):
            for step in self.steps:
                tile = _same(step, tile)
            yield tile, start, stop


def _gathered(gather: Node, cut: Cut) -> _Weight:
    rows, columns = gather.meta["val"].shape
    dtype = gather.args[2] if len(gather.args) > 2 else None
    parameter, tiles = gather.args[0], []
    with gather.graph.inserting_before(gather):
        for number, size in zip(cut.numbers, cut.sizes, strict=True):
            shape = [size, columns] if cut.dim == 0 else [rows, size]
            tiles.append(insert_part(gather, ops.gather, parameter, number, dtype, shape))
    return _Weight(gather, tuple(tiles), cut, cut.dim)


def _tile_uses(weight: _Weight) -> None:
    for user in list(weight.node.users):
        if _derives(user) and user.users:
            _tile_uses(_derived(weight, user))
            continue
        with user.graph.inserting_before(user):
            if _is_product(user):
                replace_node(user, _product(user, weight))
            elif _looks_up(user, weight.node):
                replace_node(user, _lookup(user, weight))
            else:
                _put_together(user, weight)


def _put_together(user: Node, weight: _Weight) -> None:
    """For a reader that needs the whole weight."""
    tiles = [tile for tile, _, _ in weight.parts()]
    whole = insert_part(user, aten.cat.default, tiles, weight.dim)
    user.replace_input_with(weight.node, whole)
    erase_unread(weight.node)


def _derives(node: Node) -> bool:
    """Whether the node is its input's elements, cast or transposed."""
    return node.op == "call_function" and (cast_dtype(node) is not None or _order(node) is not None)


def _order(node: Node) -> tuple[int, ...] | None:
    """How a node permutes a matrix; None if it does not."""
    if node.target is aten.t.default and node.meta["val"].dim() == 2:
        return (1, 0)
    if node.target is aten.permute.default and node.meta["val"].dim() == 2:
        order: Any = node.args[1]
        return order[0] % 2, order[1] % 2
    return None


def _derived(weight: _Weight, node: Node) -> _Weight:
    order = _order(node)
    dim = order.index(weight.dim) if order else weight.dim
    return weight._replace(node=node, dim=dim, steps=(*weight.steps, node))


def _same(node: Node, source: Node) -> Node:
    """What ``node`` does to its input, done to ``source``."""
    return insert_part(node, node.target, source, *node.args[1:], **node.kwargs)


def _is_product(node: Node) -> bool:
    return node.target in _PRODUCTS and not node.kwargs


def _product(node: Node, weight: _Weight) -> Node:
    """A product with the weight on either side: its columns or rows side by side, or terms added up."""
    on_left = weight.node is node.args[-2]
    other: Any = node.args[-1] if on_left else node.args[-2]
    bias: Any = node.args[0] if node.target is aten.addmm.default else None
    dim = 0 if on_left else 1
    outputs: list[Node] = []
    for tile, start, stop in weight.parts():
        if weight.dim == dim:
            factors = (tile, other) if on_left else (other, tile)
            outputs.append(_multiply(node, _part_of_bias(bias, dim, start, stop), *factors))
        else:
            piece = _view(node, other, 1 - weight.dim, start, stop)
            factors = (tile, piece) if on_left else (piece, tile)
            bias = _multiply(node, bias, *factors)
    return insert_part(node, aten.cat.default, outputs, dim) if outputs else bias


def _multiply(origin: Node, bias: Any, left: Any, right: Any) -> Node:
    if bias is None:
        return insert_part(origin, aten.mm.default, left, right)
    return insert_part(origin, aten.addmm.default, bias, left, right)


def _part_of_bias(bias: Any, dim: int, start: int, stop: int) -> Any:
    """The part of what broadcasts to a product that belongs to some of its rows (``dim`` 0) or columns."""
    if bias is None:
        return None
    shape = bias.meta["val"].shape
    dim -= 2 - len(shape)
    if dim < 0 or shape[dim] == 1:
        return bias
    return _view(bias, bias, dim, start, stop)


def _looks_up(node: Node, weight: Node) -> bool:
    picks = node.target is aten.embedding.default and node.args[0] is weight
    return picks and not any(node.args[3:])  # scaled by frequency, or sparse


def _lookup(node: Node, weight: _Weight) -> Node:
    indices, total = node.args[1], weight.node.meta["val"].shape[0]
    result: Node | None = None
    found = []
    for tile, start, _ in weight.parts():
        before, first = (result, start) if weight.dim == 0 else (None, 0)
        result = insert_part(node, tile_ops.lookup, before, tile, indices, first, total)
        found.append(result)
    if weight.dim == 0:
        return found[-1]
    return insert_part(node, aten.cat.default, found, -1)


# ------------------------------------------------------------------------------ its gradient


def _tile_gradient(reduce: Node, cut: Cut) -> None:
    graph, gradient = reduce.graph, reduce.all_input_nodes[0]
    reduced = []
    for term in _terms(gradient):
        with _behind(term):  # what it is made of need not wait for the other terms
            for number, (start, stop) in zip(cut.numbers, cut.bounds, strict=True):
                tile = _part(term, term, cut.dim, start, stop)
                reduced.append(insert_part(reduce, ops.reduce, tile, number))
    with graph.inserting_before(reduce):
        size = list(gradient.meta["val"].shape)
        joined = insert_part(reduce, ops.join, reduced, parameter_number(reduce), size)
    replace_node(reduce, joined)


def _behind(node: Node) -> AbstractContextManager[Any]:
    """Insert right behind a node; behind all inputs where it is one."""
    place = node
    while place.op == "placeholder" and place.next.op == "placeholder":
        place = place.next
    return node.graph.inserting_before(place.next)


def _terms(gradient: Node) -> list[Node]:
    """What is added up, where the sum is of no other use: one gradient for each use of a weight."""
    if gradient.target is aten.add.Tensor and not gradient.kwargs and len(gradient.users) == 1:
        operands = [n for n in gradient.args if isinstance(n, Node)]
        shape = gradient.meta["val"].shape
        if len(operands) == 2 and all(n.meta["val"].shape == shape for n in operands):
            return [term for operand in operands for term in _terms(operand)]
    return [gradient]


def _divides(node: Node) -> bool:
    """Whether a part of the gradient can be computed without the whole."""
    if _derives(node):
        return _divides(node.all_input_nodes[0])
    return node.target is aten.mm.default or _lookup_gradient(node) is not None


class _LookupGradient(NamedTuple):
    """Gradients of looked-up rows, added up by index; where ``mask`` is given, as far as it is set."""

    gradient: Node
    indices: Node
    mask: Node | None
    padding: int | None = None


def _lookup_gradient(node: Node) -> _LookupGradient | None:
    """What a gradient of an embedding's table is made of, in each of the forms that AOTAutograd gives it."""
    args: Any = node.args
    if node.target is aten.embedding_dense_backward.default:
        gradient, indices, _, padding, scaled = args
        return None if scaled else _LookupGradient(gradient, indices, None, padding)
    if node.target not in _LOOKUP_GRADIENTS or not _is_zeros(args[0]):
        return None
    if node.target is aten.index_put.default:
        base, indices, gradient, accumulate = (*args, False)[:4]
        mask = None
    else:
        (base, mask, indices, gradient), accumulate = args, True
    rows = gradient.meta["val"].dim() == indices[0].meta["val"].dim() + 1 if indices else False
    if not accumulate or len(indices) != 1 or not rows or base.meta["val"].dim() != 2:
        return None
    return _LookupGradient(gradient, indices[0], mask)


def _is_zeros(node: Any) -> bool:
    if not isinstance(node, Node):
        return False
    filled = node.target is aten.full.default and bool(node.args[1] == 0)
    return filled or node.target in (aten.zeros.default, aten.new_zeros.default)


def _part(origin: Node, node: Node, dim: int, start: int, stop: int) -> Node:
    """``node[start:stop]`` along ``dim``, at the insertion point: computed alone where that can be."""
    if _derives(node):
        order, source = _order(node), node.all_input_nodes[0]
        return _same(node, _part(origin, source, order[dim] if order else dim, start, stop))
    if node.target is aten.mm.default:
        factors = list(node.args)
        factors[dim] = _view(origin, factors[dim], dim, start, stop)
        return insert_part(node, aten.mm.default, *factors)
    found = _lookup_gradient(node)
    if found is not None:
        return _part_of_lookups(node, found, dim, start, stop)
    return _view(origin, node, dim, start, stop)


def _view(origin: Node, node: Any, dim: int, start: int, stop: int) -> Node:
    return insert_part(origin, aten.slice.Tensor, node, dim, start, stop)


def _part_of_lookups(node: Node, found: _LookupGradient, dim: int, start: int, stop: int) -> Node:
    gradient, indices, mask, padding = found
    if padding is not None and padding >= 0:
        mask = insert_part(node, aten.ne.Scalar, indices, padding)
        mask = insert_part(node, aten.unsqueeze.default, mask, -1)
    if dim == 1:
        last = gradient.meta["val"].dim() - 1
        gradient = _view(node, gradient, last, start, stop)
        start, stop = 0, node.meta["val"].shape[0]
    rows = stop - start
    return insert_part(node, tile_ops.lookup_backward, gradient, indices, mask, start, rows)
