"""What convolutions on the CPU hold besides their operands and results.

Inductor lays images and weights out channels-last, and copies those that lie otherwise. Where oneDNN
does not take a convolution, torch's own kernel runs it, and unfolds the image into columns first.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from zero_compile.analysis.fusion import Index, Kind, expression_of, nbytes
from zero_compile.analysis.sizes import traced_size
from zero_runtime import compat


class Temporary(NamedTuple):
    """Memory of ``bytes``, an integer or an expression, that is held while the node at ``place`` runs."""

    name: str
    place: int
    bytes: Any


def copied_inputs(index: Index, base: Sequence[int]) -> frozenset[int]:
    """Images that Inductor copies to channels-last, which convolutions on the CPU prefer.

    What it saves for backward is then the copy. Only a graph with a forward convolution is laid out.
    """
    images = (
        base[index.inputs[place][0]]
        for place, node in enumerate(index.nodes)
        if node.target is torch.ops.aten.convolution.default and _prefers_channels_last(node)
    )
    return frozenset(i for i in images if index.kinds[i] is Kind.INPUT and _is_wide(index.nodes[i]))


def temporaries(index: Index) -> Iterator[Temporary]:
    """The channels-last copies of weights that convolutions read, and the columns of unfolded images."""
    for place, node in enumerate(index.nodes):
        if node.target not in _IMAGE or not _prefers_channels_last(node):
            continue
        convolution = _Convolution.of(node)
        if convolution.reads_weight and _is_wide(convolution.weight):
            name = f"{convolution.weight.name} channels last"
            yield Temporary(name, place, nbytes(convolution.weight))
        if convolution.is_unfolded():
            yield Temporary(f"{node.name} columns", place, convolution.column_bytes())


#: Where each operator takes its image; the weight is next.
_IMAGE: dict[Any, int] = {
    torch.ops.aten.convolution.default: 0,
    torch.ops.aten.convolution_backward.default: 1,
}


class _Convolution(NamedTuple):
    """A convolution, or its backward; ``result`` is of the size of what it computes forward."""

    image: Node
    weight: Node
    result: Node
    settings: tuple[Any, ...]
    """Strides, paddings, dilations, whether transposed, output paddings and groups."""
    reads_weight: bool

    @staticmethod
    def of(node: Node) -> "_Convolution":
        """Read a node's arguments."""
        at = _IMAGE[node.target]
        image, weight = node.args[at : at + 2]
        is_forward = node.target is torch.ops.aten.convolution.default
        result = node if is_forward else node.args[0]
        needed = is_forward or node.args[-1][0]  # type: ignore[index]
        return _Convolution(image, weight, result, node.args[at + 3 : at + 9], bool(needed))  # type: ignore[arg-type]

    def is_unfolded(self) -> bool:
        """Whether torch's own kernel runs it, as for one small image: a decision by sizes and dtype.

        A kernel of 1x1 that takes every pixel reads the image as it lies.
        """
        strides, paddings = self.settings[0], self.settings[1]
        kernel = self.weight.meta["val"].shape[2:]
        if {*map(traced_size, kernel), *strides} == {1} and not any(paddings):
            return False
        return compat.unfolds(_like(self.image), _like(self.weight), self.settings)

    def column_bytes(self) -> Any:
        """A value of the image, per weight of an output channel and pixel of the result."""
        weight, result = self.weight.meta["val"], self.result.meta["val"]
        batch, _, *pixels = result.shape
        size = result.dtype.itemsize
        for factor in (*weight.shape[1:], batch, *pixels):
            size *= expression_of(factor)
        return size


def _like(node: Node) -> torch.Tensor:
    """A tensor of the node's sizes, as the graph was traced, in memory of one element."""
    value = node.meta["val"]
    return torch.empty((), dtype=value.dtype).expand([traced_size(s) for s in value.shape])


def _prefers_channels_last(node: Node) -> bool:
    image = node.all_input_nodes[0].meta["val"]
    return image.device.type == "cpu" and bool(torch.backends.mkldnn.is_available())


def _is_wide(node: Node) -> bool:
    """Whether channels-last is another order than that in which the value lies."""
    value = node.meta["val"]
    return value.dim() == 4 and 1 not in (
        expression_of(value.shape[1]),
        expression_of(value.stride()[1]),
    )
