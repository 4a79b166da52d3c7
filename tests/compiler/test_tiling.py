"""tiling: which weights are cut, over what, and where."""

import pytest
import torch

from zero_compile.bucketing import Use
from zero_compile.config.options import parse
from zero_compile.tiling import MOST_TILES, TilePolicy, cut_of, most_bytes, plan_tiles
from zero_runtime.errors import OptionError
from zero_runtime.ir.plan import ALIGNMENT, TiledPlan, bounds_of


def weight(*shape: int, stride: tuple[int, ...] | None = None, trainable: bool = True) -> Use:
    meta = torch.empty(shape, device="meta")
    numel, dtype = meta.numel(), torch.float32
    stride = stride or meta.stride()
    return Use(0, "w", shape, stride, numel, dtype, dtype, torch.device("cpu"), trainable)


def test_rows_are_cut_by_default_into_tiles_of_the_size_asked_for() -> None:
    assert cut_of(weight(256, 64), 2, TilePolicy(4096)) == (0, (16,) * 16)


def test_columns_are_cut_where_rows_are_fewer_than_tiles() -> None:
    assert cut_of(weight(8, 4096), 2, TilePolicy(8192)) == (1, (256,) * 16)


@pytest.mark.parametrize(("over", "dim"), [("rows", 0), ("columns", 1)])
def test_the_dimension_can_be_chosen(over: str, dim: int) -> None:
    found = cut_of(weight(256, 64), 2, parse({"tile_over": over}) and TilePolicy(8192, over))
    assert found is not None
    assert found[0] == dim


@pytest.mark.parametrize(
    "use",
    [
        pytest.param(weight(64, 16), id="small"),
        pytest.param(weight(1 << 20), id="a vector"),
        pytest.param(weight(64, 64, 9), id="a kernel"),
        pytest.param(weight(256, 64, stride=(1, 256)), id="column after column"),
        pytest.param(weight(3, 4096)._replace(dtype=torch.int64), id="of integers"),
    ],
)
def test_other_parameters_stay_whole(use: Use) -> None:
    assert cut_of(use, 2, TilePolicy(4096)) is None


def test_nothing_is_cut_unless_it_is_asked_for() -> None:
    assert cut_of(weight(1 << 14, 1 << 10), 2, TilePolicy()) is None


@pytest.mark.parametrize("shape", [(50257, 96), (1000, 33), (256, 64), (100, 7), (31, 512)])
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("over", ["rows", "columns"])
def test_every_rank_owns_equal_aligned_parts_and_together_all(
    shape: tuple[int, int], world_size: int, over: str
) -> None:
    found = cut_of(weight(*shape), world_size, TilePolicy(weight(*shape).numel // 2, over))  # type: ignore[arg-type]
    if found is None:
        return
    plan = plan_tiles(weight(*shape), world_size, *found)
    (slot,) = plan.slots
    owned = 0
    for number, tile in enumerate(plan.tiles):
        (piece,) = tile.slots
        assert tile.chunk % ALIGNMENT == 0
        ours = [len(tile.owned(piece, rank)) for rank in range(world_size)]
        assert sum(ours) == piece.numel
        assert number == len(plan.tiles) - 1 or set(ours) == {tile.chunk}
        owned += piece.numel
    assert owned == slot.numel
    assert plan.chunk == sum(tile.chunk for tile in plan.tiles)
    lengths = [plan.owned(slot, rank) for rank in range(world_size)]
    assert all(r.start == 0 for r in lengths)
    assert sum(map(len, lengths)) == slot.numel


def test_tiles_are_named_by_what_they_are_of() -> None:
    rows, columns = (plan_tiles(weight(4, 6), 1, dim, (2, 2)) for dim in (0, 1))
    assert [tile.slots[0].name for tile in rows.tiles] == ["w[0:2]", "w[2:4]"]
    assert [tile.slots[0].name for tile in columns.tiles] == ["w[:, 0:2]", "w[:, 2:4]"]
    assert columns.tiles[1].slots[0].shape == (4, 2)
    assert isinstance(rows, TiledPlan)
    assert bounds_of(rows.sizes) == [(0, 2), (2, 4)]


def test_a_budget_cuts_what_does_not_fit_with_its_gradient() -> None:
    large, frozen = weight(256, 64), weight(256, 64, trainable=False)
    size = large.gathered_bytes
    assert most_bytes([large], 3 * size, world_size=2) is None
    assert most_bytes([large], 3 * size - 1, world_size=2) == (3 * size - 1) // 12
    assert most_bytes([frozen], size, world_size=2) is None
    assert most_bytes([large], size, world_size=1) is None
    assert most_bytes([], 0, world_size=2) is None
    least = 12 * (size // MOST_TILES)
    assert most_bytes([large], least, world_size=2) == size // MOST_TILES
    assert most_bytes([large], least - 1, world_size=2) is None  # more tiles would not help


def test_the_size_of_tiles_can_be_written_as_a_size() -> None:
    assert parse({"tile_bytes": "64MiB"}).tile_bytes == 64 << 20
    assert parse({}).tile_bytes is None
    for wrong in (0, -1, "much", 1.5):
        with pytest.raises(OptionError, match="tile_bytes"):
            parse({"tile_bytes": wrong})
    with pytest.raises(OptionError, match="tile_over"):
        parse({"tile_over": "both"})
