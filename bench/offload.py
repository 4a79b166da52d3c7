"""`python -m bench.offload`: a training step by where its state lives, and how much of the transfers it hides.

One process, one model for each place, their steps taken in turn. What the swap files moved in a step is
then moved again with nothing beside it; the share of that time which the step did not take longer is
hidden.
"""

import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import nn

from bench.swap import MIB
from zero_compile.api.report import sessions
from zero_runtime.memory import native
from zero_runtime.offload.swap_file import SwapFile

#: Parameters, optimizer state, and whether buckets are updated in backward.
PLACES: tuple[tuple[str, str, bool], ...] = (
    ("none", "none", False),
    ("none", "cpu", False),
    ("cpu", "cpu", False),
    ("none", "nvme", False),
    ("nvme", "nvme", False),
    ("nvme", "nvme", True),
)


class Contender:
    """One model whose state lives somewhere."""

    def __init__(self, place: tuple[str, str, bool], width: int, layers: int, folder: Path) -> None:
        torch.manual_seed(0)
        torch._dynamo.reset()
        parts = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.GELU())]
        self.model = nn.Sequential(*parts)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.place = place
        options = _options(place, folder, self.optimizer)
        self._compiled = torch.compile(self.model, backend="zero3", options=options)
        self.seconds: list[float] = []
        self.moved = 0

    @property
    def name(self) -> str:
        """Where what lives."""
        parameters, optimizer, early = self.place
        late = ", updated in backward" if early else ""
        return f"parameters: {parameters}, optimizer: {optimizer}{late}"

    def step(self, x: torch.Tensor) -> float:
        """One step; returns its loss."""
        before, began = self._bytes(), time.perf_counter()
        loss = self._compiled(x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seconds.append(time.perf_counter() - began)
        self.moved = self._bytes() - before
        return float(loss.detach())

    def _bytes(self) -> int:
        if self.place[:2] == ("none", "none") or not self.seconds:
            return 0
        swaps = [s.memory_tiers.swap for s in sessions(self.model) if s.offload.folders]
        return sum(sum(swap.stats()[:2]) for swap in swaps)


def _options(place: tuple[str, str, bool], folder: Path, optimizer: Any) -> dict[str, Any]:
    parameters, state, early = place
    options: dict[str, Any] = {}
    if "nvme" in place:
        options["nvme_path"] = str(folder)
    if parameters != "none":
        options["offload_param"] = {"device": parameters}
    if state != "none":
        options["offload_optimizer"] = {"device": state}
    return {**options, "update_in_backward": optimizer} if early else options


def alone(nbytes: int, folder: Path) -> float:
    """Seconds to move ``nbytes``, half of them read and half written, with nothing beside it."""
    size, count = 16 * MIB, max(1, nbytes // (32 * MIB))
    with SwapFile(folder, size * count, name="alone") as file:
        buffers = [native.take(size) for _ in range(2)]
        for number in range(count):
            file.allocate(str(number), size)
            file.write(str(number), buffers[0]).wait()
        began = time.perf_counter()
        tickets: list[Any] = []
        for number in range(count):
            tickets.append(file.read(str(number), buffers[0]))
            tickets.append(file.write(str((number + count // 2) % count), buffers[1]))
            while len(tickets) > 4:
                tickets.pop(0).wait()
        file.drain()
        return (time.perf_counter() - began) * nbytes / (2 * size * count)


class Row(NamedTuple):
    """Median seconds of a step, against the model on the device; transfers alone, and the share hidden."""

    name: str
    seconds: float
    ratio: float
    moved: int
    alone: float
    hidden: float | None


def rows(contenders: Sequence[Contender], folder: Path) -> list[Row]:
    """What was measured, the model on the device first."""
    plain = statistics.median(contenders[0].seconds[1:])
    found = []
    for contender in contenders:
        seconds = statistics.median(contender.seconds[1:])
        transfers = alone(contender.moved, folder) if contender.moved else 0.0
        hidden = None
        if transfers:
            hidden = min(1.0, max(0.0, 1.0 - (seconds - plain) / transfers))
        ratio = statistics.median(
            ours / theirs
            for ours, theirs in zip(contender.seconds[1:], contenders[0].seconds[1:], strict=True)
        )
        found.append(Row(contender.name, seconds, ratio, contender.moved, transfers, hidden))
    return found


def show(found: Sequence[Row]) -> Table:
    """One row a place."""
    table = Table("state", "step, s", "against none", "moved, MB", "that alone, s", "hidden")
    for row in found:
        hidden = "" if row.hidden is None else f"{row.hidden:.0%}"
        moved = f"{row.moved / 1e6:,.0f}" if row.moved else ""
        transfers = f"{row.alone:.2f}" if row.moved else ""
        table.add_row(row.name, f"{row.seconds:.2f}", f"{row.ratio:.2f}", moved, transfers, hidden)
    return table


def main(
    width: Annotated[int, typer.Option(help="of a layer")] = 2048,
    layers: Annotated[int, typer.Option(help="of the model")] = 12,
    tokens: Annotated[
        int, typer.Option(help="rows of a batch: compute to hide transfers behind")
    ] = 2048,
    rounds: Annotated[int, typer.Option(help="steps of each, beside the first")] = 4,
    folder: Annotated[Path | None, typer.Option(help="on a local disk")] = None,
) -> None:
    """Train in turn, and print a table."""
    x = torch.randn(tokens, width)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        contenders = [Contender(place, width, layers, Path(scratch)) for place in PLACES]
        losses = [[contender.step(x) for contender in contenders] for _ in range(rounds + 1)]
        assert all(max(row) - min(row) < 1e-4 for row in losses), losses
        Console().print(show(rows(contenders, Path(scratch))))


if __name__ == "__main__":
    typer.run(main)
