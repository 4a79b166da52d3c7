"""Which parameters are moved in tiles, and where they are cut.

Memory-centric tiling (Rajbhandari et al., ZeRO-Infinity, 2021, section 5.1.3): a parameter whose gather,
or whole gradient, would take too much memory is cut along its rows or columns, and each tile is
gathered, used and released alone. Ranks must agree, so all follows from parameters and options.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import gcd
from typing import Literal, NamedTuple

from zero_compile.bucketing import Use
from zero_runtime.ir.plan import (
    ALIGNMENT,
    Slot,
    TiledPlan,
    bounds_of,
    chunk_for,
    dtype_name,
)
from zero_runtime.ir.plan import tile_slot as slot_of_tile

Over = Literal["rows", "columns", "planner"]

#: Tiles that a budget alone may cut a weight into. More would be latency for the sake of a few bytes.
MOST_TILES = 64


class Cut(NamedTuple):
    """A parameter in a graph's tiles: of ``sizes`` along ``dim``, numbered as parameters are."""

    dim: int
    sizes: tuple[int, ...]
    numbers: tuple[int, ...]

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """Where each tile begins (included) and ends (excluded)."""
        return bounds_of(self.sizes)


@dataclass(frozen=True)
class TilePolicy:
    """``most``: the gathered bytes from which a parameter is cut, and of a tile; None: nothing is cut."""

    most: int | None = None
    over: Over = "planner"


class _Grain(NamedTuple):
    """Rows, or columns, in the fewest of which every rank's part of a tile is aligned."""

    extent: int
    step: int

    @property
    def steps(self) -> int:
        return -(-self.extent // self.step)


def cut_of(use: Use, world_size: int, policy: TilePolicy) -> tuple[int, tuple[int, ...]] | None:
    """The dimension and sizes of a parameter's tiles; None where it stays whole.

    Tiles are of at most ``policy.most`` bytes, as far as their least size allows: that in which each of
    ``world_size`` ranks owns equal, aligned parts. Over which dimension the planner decides so: rows,
    unless there are too few for so many tiles and more columns.
    """
    if policy.most is None or not can_be_cut(use) or use.gathered_bytes <= policy.most:
        return None
    tiles = -(-use.gathered_bytes // policy.most)
    rows, columns = (_grain(use, dim, world_size) for dim in (0, 1))
    dim = {"rows": 0, "columns": 1}.get(policy.over)
    if dim is None:
        dim = int(rows.steps < tiles and columns.steps > rows.steps)
    sizes = _sizes((rows, columns)[dim], tiles)
    return (dim, sizes) if len(sizes) > 1 else None


def can_be_cut(use: Use) -> bool:
    """Whether the parameter is a matrix that lies row after row."""
    return len(use.shape) == 2 and use.stride == (use.shape[1], 1) and use.dtype.is_floating_point


def _grain(use: Use, dim: int, world_size: int) -> _Grain:
    across, aligned = use.shape[1 - dim], world_size * ALIGNMENT
    return _Grain(use.shape[dim], aligned // gcd(across, aligned))


def _sizes(grain: _Grain, tiles: int) -> tuple[int, ...]:
    """As many tiles as were asked for, or more, all of one size but the last."""
    size = max(1, grain.extent // tiles // grain.step) * grain.step
    full, rest = divmod(grain.extent, size)
    return (size,) * full + ((rest,) if rest else ())


def plan_tiles(use: Use, world_size: int, dim: int, sizes: Iterable[int]) -> TiledPlan:
    """The bucket of one parameter that is moved in tiles."""
    slot = Slot(use.name, use.shape, use.stride, use.trainable, 0, use.numel)
    sizes = tuple(sizes)
    pieces = (slot_of_tile(slot, dim, *bounds) for bounds in bounds_of(sizes))
    chunk = sum(chunk_for(piece.numel, world_size) for piece in pieces)
    dtype, device = dtype_name(use.dtype), str(use.device)
    return TiledPlan(dtype, device, world_size, chunk, (slot,), dim=dim, sizes=sizes)


def most_bytes(uses: Iterable[Use], room: int, world_size: int) -> int | None:
    """The size of tiles without which ``room`` bytes do not hold the largest of ``uses``; None: they do,
    or so little room is left that tiles would not help: what is missing is then said of whole weights.

    A weight that trains is there three times over: gradients wait whole, are packed and received. What is
    left beside a tile's share, a quarter, is for activations and the next tile.
    """
    copies = 1 if world_size == 1 else 3
    uses = list(uses)
    needed = (use.gathered_bytes * (copies if use.trainable else 1) for use in uses)
    if max(needed, default=0) <= room:
        return None
    tile = room // (4 * copies)
    return tile if tile * MOST_TILES >= max(use.gathered_bytes for use in uses) else None
