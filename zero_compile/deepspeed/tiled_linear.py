"""``TiledLinear``: DeepSpeed's module of that name, for scripts that use it.

It cuts one linear into several small ones, each with parameters of its own, so that a bucket holds
less than the whole weight. A model compiled here does not need it: the option ``tile_bytes`` does the
same to any linear, and leaves the model and its ``state_dict`` as they are.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from zero_runtime.errors import OptionError

Linear = Callable[..., nn.Module]


class TiledLinear(nn.Module):
    """A linear in ``out_splits * in_splits`` tiles: ``linears[out][in]``, of about equal sizes.

    Tiles of one row are added up and the last of them alone has the ``bias``. ``input_is_already_split``:
    the input is a list, one tensor for each of ``in_splits``. Without ``combine_out_splits`` the result is
    a list, one tensor for each of ``out_splits``. ``linear_cls`` makes each tile from
    ``(in_features, out_features, bias=..., **kwargs)``; ``init_linear``, a whole linear, gives the tiles
    their values.

    Raises:
        OptionError: more splits than features, fewer than one, or an ``init_linear`` of other sizes.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: Linear = nn.Linear,
        init_linear: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.use_bias = bias
        self.in_splits = in_splits
        self.out_splits = out_splits
        self.input_is_already_split = input_is_already_split
        self.combine_out_splits = combine_out_splits
        self.in_parts = _bounds("in_splits", in_features, in_splits)
        self.out_parts = _bounds("out_splits", out_features, out_splits)
        self.linears = nn.ModuleList(
            nn.ModuleList(
                linear_cls(columns, rows, bias=bias and last, **kwargs)
                for columns, last in _with_last(_sizes(self.in_parts))
            )
            for rows in _sizes(self.out_parts)
        )
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(self, input_: torch.Tensor | Sequence[torch.Tensor]) -> Any:
        """``[..., in_features]`` (or that in parts) to ``[..., out_features]`` (or that in parts).

        Raises:
            OptionError: the input is not split as the module was told.
        """
        inputs = self._split(input_)
        outputs = [self._row(row, inputs) for row in self.linears]  # type: ignore[arg-type]
        return self._combine(outputs) if self.combine_out_splits else outputs

    def _split(self, input_: torch.Tensor | Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        if self.input_is_already_split:
            if isinstance(input_, torch.Tensor) or len(input_) != self.in_splits:
                raise OptionError(
                    f"TiledLinear with input_is_already_split takes a list of {self.in_splits} tensors, "
                    f"got {_described(input_)}"
                )
            return input_
        if not isinstance(input_, torch.Tensor):
            raise OptionError(
                f"TiledLinear takes one tensor, got {_described(input_)}: say input_is_already_split=True"
            )
        parts: Sequence[torch.Tensor] = torch.split(input_, _sizes(self.in_parts), dim=-1)
        return parts

    def _row(self, tiles: nn.ModuleList, inputs: Sequence[torch.Tensor]) -> Any:
        """One part of the output: the sum over its tiles."""
        total: Any = None
        for tile, part in zip(tiles, inputs, strict=True):
            result = tile(part)
            total = result if total is None else self._add(total, result)
        return total

    def _add(self, total: Any, result: Any) -> Any:
        return total + result

    def _combine(self, outputs: Sequence[Any]) -> Any:
        return torch.cat(list(outputs), dim=-1)

    @torch.no_grad()
    def copy_params_from(self, other: nn.Module) -> None:
        """Take over the ``weight`` ``[out_features, in_features]`` and ``bias`` of a whole linear.

        Collective where either is partitioned: call it on every rank.

        Raises:
            OptionError: they have other sizes, or only one of the two has a bias.
        """
        source: Any = other
        weight, bias = source.weight.detach(), source.bias
        wanted = (self.out_features, self.in_features)
        if tuple(weight.shape) != wanted or (bias is not None) != self.use_bias:
            raise OptionError(
                f"TiledLinear of {wanted} with{'' if self.use_bias else 'out'} a bias cannot take over a "
                f"linear of {tuple(weight.shape)} with{'' if bias is not None else 'out'} one"
            )
        tiles: Any = self.linears
        for row, (top, bottom) in zip(tiles, self.out_parts, strict=True):
            for tile, (left, right) in zip(row, self.in_parts, strict=True):
                tile.weight.copy_(weight[top:bottom, left:right])
            if bias is not None:
                row[-1].bias.copy_(bias.detach()[top:bottom])

    def extra_repr(self) -> str:
        """The sizes, for ``repr``."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.use_bias}, "
            f"in_splits={self.in_splits}, out_splits={self.out_splits}"
        )


class TiledLinearReturnBias(TiledLinear):
    """For a ``linear_cls`` that returns ``(output, bias)`` and leaves the addition to its caller, as
    Megatron's do: so does this, with the outputs and biases of all tiles.
    """

    def _add(self, total: Any, result: Any) -> Any:
        (output, bias), (more, other) = _pair(total), _pair(result)
        if bias is None or other is None:
            return output + more, bias if other is None else other
        return output + more, bias + other

    def _row(self, tiles: nn.ModuleList, inputs: Sequence[torch.Tensor]) -> Any:
        return _pair(super()._row(tiles, inputs))

    def _combine(self, outputs: Sequence[Any]) -> Any:
        whole = torch.cat([output for output, _ in outputs], dim=-1)
        biases = [bias for _, bias in outputs if bias is not None]
        return whole, torch.cat(biases, dim=-1) if biases else None

    def forward(self, input_: torch.Tensor | Sequence[torch.Tensor]) -> Any:
        """``(output, bias)``; without ``combine_out_splits`` a list of outputs and one of biases."""
        result = super().forward(input_)
        if self.combine_out_splits:
            return result
        return [output for output, _ in result], [bias for _, bias in result]


def _pair(result: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    return result if isinstance(result, tuple) else (result, None)


def _bounds(name: str, features: int, splits: int) -> list[tuple[int, int]]:
    """Parts that differ by at most one, the larger first."""
    if not 1 <= splits <= features:
        raise OptionError(f"{name}={splits}: {features} features have from 1 to {features} parts")
    size, larger = divmod(features, splits)
    ends = [size * n + min(n, larger) for n in range(splits + 1)]
    return list(pairwise(ends))


def _sizes(bounds: Sequence[tuple[int, int]]) -> list[int]:
    return [stop - start for start, stop in bounds]


def _with_last(sizes: Sequence[int]) -> list[tuple[int, bool]]:
    return [(size, number == len(sizes) - 1) for number, size in enumerate(sizes)]


def _described(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return "one tensor"
    return (
        f"a {type(value).__name__} of {len(value)}" if isinstance(value, Sequence) else repr(value)
    )
