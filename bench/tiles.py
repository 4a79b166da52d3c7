"""`python -m bench.tiles`: what a step of one large linear holds, by the number of its tiles.

Two ranks on gloo train the linear for two steps with each number of tiles, each time in fresh
processes. Rank 0's peak of resident memory in the second step is reported above the shards of weight
and gradient: the input's and the result's few rows, and whatever else of the weight and its gradient
is there. Losses and whole gradients are compared bit for bit with those of one tile.
"""

import hashlib
import multiprocessing
import os
import tempfile
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.multiprocessing.spawn import spawn

import zero_compile
from bench.launch import common_environment, free_port, group_environment
from bench.memory import peak_bytes, reset_peak, resident_bytes
from zero_runtime.memory import native

WORLD = 2
MIB = 1 << 20
ROWS = 4


class Shape(NamedTuple):
    """Of the linear, and the number of its tiles."""

    inputs: int
    outputs: int
    tiles: int

    @property
    def bytes(self) -> int:
        """Of the whole weight in float32."""
        return 4 * self.inputs * self.outputs


class Measured(NamedTuple):
    """Of rank 0, in bytes; ``digest`` is of the losses and the whole gradient."""

    tiles: int
    gathered: int
    peak: int
    digest: str


def _train(rank: int, shape: Shape, port: int, found: Any) -> None:
    os.environ.update(group_environment(rank, WORLD, port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    with zero_compile.Init():
        linear = nn.Linear(shape.inputs, shape.outputs, bias=False)
    options: dict[str, Any] = {"tile_bytes": -(-shape.bytes // shape.tiles), "tile_over": "rows"}
    compiled = torch.compile(linear, backend="zero3", options=options)
    x = torch.randn(ROWS, shape.inputs, requires_grad=True)
    losses = []
    for _ in range(2):
        linear.zero_grad()
        native.trim()  # what an earlier step has returned
        before = resident_bytes() + shape.bytes // WORLD  # the gradient that is to come
        reset_peak()
        loss = compiled(x).square().mean()
        loss.backward()
        losses.append(loss.item())
        peak = peak_bytes() - before
    gathered = zero_compile.memory_report(linear).gathered_peak
    digest = _digest(losses, linear.weight.grad.full_tensor())  # type: ignore[union-attr]
    if rank == 0:
        found.put(Measured(shape.tiles, gathered, peak, digest))
    dist.barrier()
    dist.destroy_process_group()


def _digest(losses: list[float], gradient: torch.Tensor) -> str:
    return hashlib.sha256(repr(losses).encode() + gradient.numpy().tobytes()).hexdigest()


def measure(shape: Shape) -> Measured:
    """Two steps on two new processes."""
    found: Any = multiprocessing.get_context("spawn").SimpleQueue()
    spawn(_train, args=(shape, free_port(), found), nprocs=WORLD)
    measured: Measured = found.get()
    return measured


def _show(shape: Shape, rows: list[Measured]) -> None:
    table = Table(title=f"{shape.inputs} x {shape.outputs} float32, {shape.bytes // MIB} MiB")
    for heading in ("tiles", "gathered MiB", "of the whole", "peak MiB above shards", "same bits"):
        table.add_column(heading, justify="right")
    for row in rows:
        share = f"1/{shape.bytes / row.gathered:.1f}"
        same = "yes" if row.digest == rows[0].digest else "NO"
        cells = (row.tiles, row.gathered // MIB, share, row.peak // MIB, same)
        table.add_row(*map(str, cells))
    Console().print(table)


def _plot(rows: list[Measured], path: Path) -> None:
    import plotly.graph_objects as go  # type: ignore[import-not-found, import-untyped, unused-ignore]

    tiles = [row.tiles for row in rows]
    figure = go.Figure(layout={"xaxis_title": "tiles", "yaxis_title": "MiB"})
    for name, values in (
        ("peak above shards", [row.peak / MIB for row in rows]),
        ("gathered at once", [row.gathered / MIB for row in rows]),
        ("first peak / tiles", [rows[0].peak / MIB / n for n in tiles]),
    ):
        figure.add_scatter(x=tiles, y=values, name=name, mode="lines+markers")
    figure.update_xaxes(type="log").update_yaxes(type="log")
    figure.write_html(path)


def main(
    inputs: Annotated[int, typer.Option(min=1)] = 8192,
    outputs: Annotated[int, typer.Option(min=1)] = 32768,
    tiles: Annotated[list[int] | None, typer.Option(help="numbers of tiles")] = None,
    plot: Annotated[Path | None, typer.Option(help="an HTML file for the curve")] = None,
) -> None:
    """Train one linear with each number of tiles and print what its steps held."""
    shapes = [Shape(inputs, outputs, n) for n in tiles or (1, 2, 4, 8, 16)]
    with tempfile.TemporaryDirectory() as cache:
        os.environ.update(common_environment("low", Path(cache)))
        rows = [measure(shape) for shape in shapes]
    _show(shapes[0], rows)
    if plot is not None:
        _plot(rows, plot)


if __name__ == "__main__":
    typer.run(main)
