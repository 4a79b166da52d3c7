"""Sizes of a graph's values: as expressions, and as the numbers that the planner takes them for."""

from collections.abc import Iterable, Iterator
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch.fx import Graph

from zero_runtime import compat


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors among a node's results."""
    values: Iterable[Any] = value if isinstance(value, list | tuple) else (value,)
    return [v for v in values if isinstance(v, torch.Tensor)]


def expression(size: int | torch.SymInt) -> sympy.Expr:
    """A size as sympy has it: comparing those, unlike SymInts, adds no guards to the graph."""
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)


def traced_sizes(graph: Graph) -> dict[str, int]:
    """The sizes that the graph was traced with, by symbol.

    A size that only the data decides (of ``nonzero``, say) is taken for the largest of the graph's other
    sizes, or for the bound nearest to that. Ranks may have traced with different ones: what all must
    decide alike needs sizes they agree on.
    """
    sizes = [size for node in graph.nodes for size in _sizes(node.meta.get("val"))]
    unknown = max((size for size in sizes if not isinstance(size, torch.SymInt)), default=1)
    found: dict[str, int] = {}
    for size in sizes:
        if isinstance(size, torch.SymInt):
            for symbol in size.node.expr.free_symbols:
                if symbol.name not in found:
                    found[symbol.name] = compat.size_hint(size, symbol, unknown)
    return found


def traced_size(size: int | torch.SymInt) -> int:
    """One size of a tensor as :func:`traced_sizes` has it, but 1 where only the data decides."""
    return compat.size_hint(size, size.node.expr, 1) if isinstance(size, torch.SymInt) else size


def _sizes(value: Any) -> Iterator[int | torch.SymInt]:
    if isinstance(value, torch.SymInt):
        yield value
    for tensor in tensors_of(value):
        yield from tensor.shape
