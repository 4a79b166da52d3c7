"""Logits in tiles whose only use is a cross-entropy: no more than one tile of them exists at a time.

    logits = cat([mm(x, w0), mm(x, w1)], 1)         state = logits(None, x, w0, targets, 0)
    log_softmax = logits - max - log(sum(exp))      state = logits(state, x, w1, targets, n)
    loss = -log_softmax[targets]                    loss = lse(state) - picked(state)

``state`` holds each row's maximum, sum of exponentials and target logit so far. Backward computes each
tile of the logits again, turns it into its gradient, and uses that up before the next one:

    d0 = logits_backward(x, w0, ...);  dx = mm(d0, w0.T);  reduce(mm(d0.T, x))
    d1 = logits_backward(x, w1, ...);  dx = addmm(dx, d1, w1.T);  reduce(mm(d1.T, x))

The pattern is that of ``torch.nn.functional.cross_entropy`` without weights or label smoothing, as
Inductor's decompositions write it. Any other keeps its logits whole.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from zero_compile.analysis.casts import cast_dtype
from zero_compile.analysis.fx_graph import calls, positions
from zero_compile.passes.insert import erase_unread, insert_part, replace_node
from zero_runtime.ir import ops, tile_ops

aten = torch.ops.aten


def tile_cross_entropy(gm: GraphModule) -> GraphModule:
    """Expects products that ``tile_linears`` has cut by rows of the weight. Afterwards logits of which
    only a cross-entropy was made, and their gradient, are in no node whole.
    """
    for cat in calls(gm.graph, aten.cat.default):
        found = _find(cat)
        if found is not None:
            _replace(found)
    gm.graph.lint()
    return gm


class _Backward(NamedTuple):
    """The gradient of the logits: ``(softmax - one hot of targets) * scale``, and its parts for each tile."""

    gradient: Node
    targets: Node
    scale: Node
    dtype: torch.dtype
    parts: Sequence[Sequence[Node]]
    """Slices of the gradient, and of its transpose, by tile."""


class _Entropy(NamedTuple):
    """A cross-entropy of logits ``x @ weights`` side by side; ``dtype`` is what it is computed in."""

    x: Node
    weights: Sequence[Node]
    bounds: Sequence[tuple[int, int]]
    dtype: torch.dtype
    picked: Node
    """What takes the targets' log-probabilities ``[n, 1]``."""
    backward: _Backward | None


# ------------------------------------------------------------------------------ what is looked for


def _find(cat: Node) -> _Entropy | None:
    products: Sequence[Any] = cat.args[0]  # type: ignore[assignment]
    if len(cat.args) < 2 or cat.args[1] != 1 or not all(_is_product(p) for p in products):
        return None
    x = products[0].args[0]
    logits = _cast_of(cat) or cat
    softmax = _log_softmax(logits)
    if softmax is None or any(p.args[0] is not x for p in products):
        return None
    sizes = [int(p.meta["val"].shape[1]) for p in products]
    bounds = [(sum(sizes[:n]), sum(sizes[: n + 1])) for n in range(len(sizes))]
    picks = [u for u in softmax.users if u.target is aten.gather.default]
    picked = [u for u in picks if u.args[1] in (1, -1)]
    others = [u for u in softmax.users if u not in picked]
    if len(picked) != 1 or len(others) > 1:
        return None
    backward = _gradient(others[0], bounds) if others else None
    if others and backward is None:
        return None
    dtype = logits.meta["val"].dtype
    return _Entropy(x, [p.args[1] for p in products], bounds, dtype, picked[0], backward)


def _is_product(node: Any) -> bool:
    return isinstance(node, Node) and node.target is aten.mm.default and len(node.users) == 1


def _cast_of(node: Node) -> Node | None:
    """The cast that is all that becomes of a node."""
    (user, *others) = node.users or (None,)
    return user if user is not None and not others and cast_dtype(user) is not None else None


def _log_softmax(logits: Node) -> Node | None:
    """``logits - max - log(sum(exp(logits - max)))``, where the logits are of no other use."""
    most = _user(logits, aten.amax.default, [1], True)
    shifted = _user(logits, aten.sub.Tensor, most)
    if most is None or shifted is None or len(logits.users) != 2 or len(most.users) != 1:
        return None
    total = _user(_user(shifted, aten.exp.default), aten.sum.dim_IntList, [1], True)
    log = _user(total, aten.log.default)
    alone = len(shifted.users) == 2 and all(
        n is not None and len(n.users) == 1 for n in (total, log)
    )
    return _user(shifted, aten.sub.Tensor, log) if alone else None


def _user(node: Node | None, target: Any, *others: Any) -> Node | None:
    """What reads ``node`` first of its arguments and ``others`` after it; the last of two dimensions is 1."""
    if node is None or None in others:
        return None
    wanted = [node, *others]
    return next((u for u in node.users if u.target is target and _arguments(u) == wanted), None)


def _arguments(node: Node) -> list[Any]:
    return [[1] if argument == [-1] else argument for argument in node.args]


def _gradient(softmax: Node, bounds: Sequence[tuple[int, int]]) -> _Backward | None:
    """``onehot * -scale - exp(log_softmax) * sum(onehot * -scale)``, from its ``exp`` on."""
    scaled = next(iter(softmax.users), None)
    if softmax.target is not aten.exp.default or scaled is None or len(softmax.users) != 1:
        return None
    total = (
        scaled.args[1] if scaled.target is aten.mul.Tensor and scaled.args[0] is softmax else None
    )
    if not isinstance(total, Node) or total.target is not aten.sum.dim_IntList:
        return None
    chosen: Any = total.args[0]
    if _user(chosen, aten.sum.dim_IntList, [1], True) is not total:
        return None
    gradient = _user(chosen, aten.sub.Tensor, scaled)
    if gradient is None or len(scaled.users) != 1 or chosen.target is not aten.mul.Tensor:
        return None
    targets, scale = _one_hot(chosen.args[0]), chosen.args[1]
    if targets is None or set(chosen.users) != {total, gradient} or len(total.users) != 1:
        return None
    if not _is_column(scale, targets):
        return None
    read = _cast_of(gradient) or gradient
    parts = _parts(read, bounds)
    dtype = read.meta["val"].dtype
    return None if parts is None else _Backward(gradient, targets, scale, dtype, parts)


def _is_column(node: Any, like: Node) -> bool:
    return isinstance(node, Node) and node.meta["val"].shape == like.meta["val"].shape


def _one_hot(node: Any) -> Node | None:
    """The targets ``[n, 1]`` of which ``node`` is ``where(targets == column, -1, 0)``."""
    if node.target is not aten.where.self or len(node.users) != 1:
        return None
    equal, chosen, other = node.args
    if equal.target is not aten.eq.Tensor or (_number(chosen), _number(other)) != (-1, 0):
        return None
    targets, columns = map(_source, equal.args)
    counts = columns.target is torch.ops.prims.iota.default
    counted = counts and (columns.kwargs["start"], columns.kwargs["step"]) == (0, 1)
    whole = counted and columns.args[0] == node.meta["val"].shape[1]
    return targets if whole and tuple(targets.meta["val"].shape[1:]) == (1,) else None


def _source(node: Node) -> Node:
    while node.target in (aten.expand.default, aten.view.default, aten.unsqueeze.default):
        if tuple(node.meta["val"].shape[1:]) == (1,):
            break
        node = node.all_input_nodes[0]
    return node


def _number(node: Any) -> float | None:
    known = node.target in (aten.scalar_tensor.default, aten.full.default)
    return node.args[-1] if known else None


def _parts(gradient: Node, bounds: Sequence[tuple[int, int]]) -> list[list[Node]] | None:
    """What reads the gradient, by tile; None where something reads more of it."""
    parts: dict[tuple[int, int], list[Node]] = {each: [] for each in bounds}
    for node, dim in _with_transposes(gradient):
        for user in node.users:
            if user.target is aten.permute.default and dim == 1:
                continue
            if user.target is not aten.slice.Tensor or user.args[1] != dim:
                return None
            if user.args[2:] not in parts:
                return None
            parts[user.args[2:]].append(user)  # type: ignore[index]
    return list(parts.values())


def _with_transposes(gradient: Node) -> Iterator[tuple[Node, int]]:
    yield gradient, 1
    for user in gradient.users:
        if user.target is aten.permute.default and list(user.args[1]) == [1, 0]:  # type: ignore[arg-type]
            yield user, 0


# ------------------------------------------------------------------------------ what takes its place


def _replace(found: _Entropy) -> None:
    at = found.picked
    with at.graph.inserting_before(at):
        lse, picked = _state(found)
        loss = insert_part(at, aten.sub.Tensor, picked, lse)
    if found.backward is not None:
        _replace_gradient(found, found.backward, lse)
    softmax = at.all_input_nodes[0]
    replace_node(at, loss)
    erase_unread(softmax)


def _state(found: _Entropy) -> tuple[Node, Node]:
    """The logarithm of the sum of exponentials, and the targets' logits: ``[n, 1]`` each."""
    at, index = found.picked, found.picked.args[2]
    targets = insert_part(at, aten.squeeze.dim, index, 1)
    state: Node | None = None
    for weight, (start, _) in zip(found.weights, found.bounds, strict=True):
        tile = _again(at, weight)
        args = (state, found.x, tile, targets, start, found.dtype)
        state = insert_part(at, tile_ops.logits, *args)
    most, total, picked = (insert_part(at, aten.select.int, state, 0, n) for n in range(3))
    lse = insert_part(at, aten.add.Tensor, insert_part(at, aten.log.default, total), most)
    return (
        insert_part(at, aten.unsqueeze.default, lse, 1),
        insert_part(at, aten.unsqueeze.default, picked, 1),
    )


def _again(origin: Node, weight: Node) -> Node:
    """The same cast or view of the same tile, at the insertion point: before it the tile is not needed."""
    if weight.target is ops.gather or weight.op != "call_function":
        return weight
    source = _again(origin, weight.all_input_nodes[0])
    return insert_part(origin, weight.target, source, *weight.args[1:], **weight.kwargs)


def _replace_gradient(found: _Entropy, backward: _Backward, lse: Node) -> None:
    at = backward.gradient
    read = {part.all_input_nodes[0] for parts in backward.parts for part in parts}
    with at.graph.inserting_before(at):
        targets = insert_part(at, aten.squeeze.dim, backward.targets, 1)
    for weight, (start, _), parts in zip(found.weights, found.bounds, backward.parts, strict=True):
        with at.graph.inserting_before(at):
            args = (found.x, _again(at, weight), targets, lse, backward.scale, start)
            tile = insert_part(at, tile_ops.logits_backward, *args, backward.dtype)
        for part in parts:
            _use(tile, part, at)
    for node in (*read, at):
        erase_unread(node)


def _use(tile: Node, part: Node, before: Node) -> None:
    """What read a slice of the whole gradient, or of its transpose, reads the tile, as soon as it is there."""
    by = tile
    if part.args[1] == 0:
        with tile.graph.inserting_before(before):
            by = insert_part(before, aten.permute.default, tile, [1, 0])
    users = list(part.users)
    part.replace_all_uses_with(by)
    part.graph.erase_node(part)
    for user in users:
        _use_at_once(user, before)


def _use_at_once(node: Node, before: Node) -> None:
    """Move what uses a tile of the gradient up to where that is made, as far as its other inputs allow."""
    order = positions(node.graph)
    late = [source for source in node.all_input_nodes if order[source] > order[before]]
    if not all(_is_gathered(source) for source in late):
        return
    for source in late:
        _bring(source, before)
    before.prepend(node)
    _reduce_at_once(node, before)


def _reduce_at_once(node: Node, before: Node) -> None:
    for user in list(node.users):
        if user.target is ops.reduce or cast_dtype(user) is not None:
            before.prepend(user)
            _reduce_at_once(user, before)


def _is_gathered(node: Node) -> bool:
    """A tile, or a cast or view of one: it can be made anywhere."""
    while node.op == "call_function" and node.target is not ops.gather:
        if len(node.all_input_nodes) != 1:
            return False
        node = node.all_input_nodes[0]
    return node.target is ops.gather


def _bring(node: Node, before: Node) -> None:
    if node.target is not ops.gather:
        _bring(node.all_input_nodes[0], before)
        before.prepend(node)
