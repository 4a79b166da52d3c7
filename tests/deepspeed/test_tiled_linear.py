"""TiledLinear: what ``nn.Linear`` does, in tiles that are modules of their own."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

import ranks
import zero_compile
from zero_compile import TiledLinear, TiledLinearReturnBias
from zero_runtime.errors import OptionError

SPLITS = pytest.mark.parametrize(("in_splits", "out_splits"), list(product((1, 2, 5), (1, 3, 7))))


def pair(**options: Any) -> tuple[nn.Linear, TiledLinear]:
    torch.manual_seed(0)
    whole = nn.Linear(10, 7, bias=options.get("bias", True))
    return whole, TiledLinear(10, 7, init_linear=whole, **options)


def gradients(tiled: TiledLinear) -> torch.Tensor:
    rows = [torch.cat([tile.weight.grad for tile in row], 1) for row in tiled.linears]
    return torch.cat(rows)


@SPLITS
@pytest.mark.parametrize("bias", [True, False])
def test_results_and_gradients_are_those_of_a_linear(
    in_splits: int, out_splits: int, bias: bool
) -> None:
    whole, tiled = pair(in_splits=in_splits, out_splits=out_splits, bias=bias)
    x = torch.randn(2, 3, 10)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    result, expected = tiled(ours), whole(theirs)
    torch.testing.assert_close(result, expected)
    weights = torch.randn_like(expected)
    (result * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)
    torch.testing.assert_close(gradients(tiled), whole.weight.grad)
    if bias:
        found = torch.cat([row[-1].bias.grad for row in tiled.linears])
        torch.testing.assert_close(found, whole.bias.grad)


@SPLITS
def test_only_the_last_tile_of_a_row_has_a_bias(in_splits: int, out_splits: int) -> None:
    _, tiled = pair(in_splits=in_splits, out_splits=out_splits)
    for row in tiled.linears:
        assert [tile.bias is not None for tile in row] == [False] * (in_splits - 1) + [True]
    sizes = [tile.weight.numel() for row in tiled.linears for tile in row]
    assert sum(sizes) == 70
    assert len(sizes) == in_splits * out_splits


def test_outputs_can_be_left_in_parts_and_inputs_given_so() -> None:
    whole, tiled = pair(
        in_splits=3, out_splits=2, combine_out_splits=False, input_is_already_split=True
    )
    x = torch.randn(4, 10)
    parts = tiled(list(x.split([4, 3, 3], -1)))
    assert [part.shape[-1] for part in parts] == [4, 3]
    torch.testing.assert_close(torch.cat(parts, -1), whole(x))


class WithBias(nn.Linear):
    """As Megatron's: returns the bias instead of adding it."""

    def forward(self, x: torch.Tensor) -> Any:
        return nn.functional.linear(x, self.weight), self.bias


@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_that_returns_its_bias_is_tiled_too(bias: bool) -> None:
    torch.manual_seed(0)
    whole = nn.Linear(10, 7, bias=bias)
    options = {"in_splits": 2, "out_splits": 3, "linear_cls": WithBias, "init_linear": whole}
    tiled = TiledLinearReturnBias(10, 7, bias=bias, **options)
    x = torch.randn(4, 10)
    output, found = tiled(x)
    assert (found is not None) is bias
    torch.testing.assert_close(output + (found if bias else 0), whole(x))
    parts = TiledLinearReturnBias(10, 7, bias=bias, combine_out_splits=False, **options)
    outputs, biases = parts(x)
    torch.testing.assert_close(torch.cat(outputs, -1), output)
    assert len(outputs) == len(biases) == 3


def test_other_arguments_reach_the_tiles() -> None:
    tiled = TiledLinear(4, 4, in_splits=2, dtype=torch.float64)
    assert {p.dtype for p in tiled.parameters()} == {torch.float64}


@pytest.mark.parametrize("splits", [{"in_splits": 5}, {"out_splits": 0}, {"in_splits": -1}])
def test_impossible_splits_are_refused(splits: dict[str, int]) -> None:
    with pytest.raises(OptionError, match=f"{next(iter(splits))}={next(iter(splits.values()))}"):
        TiledLinear(4, 3, **splits)


def test_a_linear_of_another_size_is_refused() -> None:
    with pytest.raises(OptionError, match=r"TiledLinear of \(3, 4\) with a bias cannot"):
        TiledLinear(4, 3, init_linear=nn.Linear(3, 4))
    with pytest.raises(OptionError, match="without one"):
        TiledLinear(4, 3, init_linear=nn.Linear(4, 3, bias=False))


def test_inputs_that_are_split_otherwise_are_refused() -> None:
    with pytest.raises(OptionError, match="list of 2 tensors, got one tensor"):
        TiledLinear(4, 3, in_splits=2, input_is_already_split=True)(torch.randn(1, 4))
    with pytest.raises(OptionError, match="got a list of 2: say input_is_already_split"):
        TiledLinear(4, 3, in_splits=2)([torch.randn(1, 2), torch.randn(1, 2)])


def _partitioned() -> float:
    """Values come out of a partitioned linear, and go into partitioned tiles."""
    torch.manual_seed(0)
    whole, tiled = nn.Linear(10, 7), TiledLinear(10, 7, in_splits=2, out_splits=2)
    x, twin = torch.randn(3, 10), nn.Linear(10, 7)
    twin.load_state_dict(whole.state_dict())
    for module in (whole, tiled):
        torch.compile(module, backend="zero3", options={"bucket_bytes": 1})(x)
    tiled.copy_params_from(whole)
    with torch.no_grad():
        return float((tiled(x) - twin(x)).abs().max())


def test_parameters_can_be_copied_while_both_are_partitioned() -> None:
    assert max(ranks.run(2, _partitioned)) < 1e-6


def test_it_is_part_of_the_package() -> None:
    assert {"TiledLinear", "TiledLinearReturnBias"} <= set(zero_compile.__all__)
