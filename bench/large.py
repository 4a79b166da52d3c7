"""A model many times larger than memory allows, trained by one process with its state on NVMe.

``python -m bench.large --folder /path/on/a/local/disk`` builds a chain of residual layers in bfloat16 whose
parameters, gradients and AdamW state (float32 masters and moments: 16 bytes a parameter) take
``--gigabytes``, trains it, and prints loss, time, bytes moved a parameter, and peak resident memory.
"""

import tempfile
import time
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import nn

import zero_compile
from bench.memory import peak_bytes, reset_peak
from zero_compile.api.report import sessions
from zero_runtime.memory import native

#: Bytes of state a parameter: 16-bit parameter and gradient, float32 master and two moments.
STATE_BYTES = 16


class Residual(nn.Module):
    """``x + tanh(W x)``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False, dtype=torch.bfloat16)
        nn.init.normal_(self.linear.weight, std=width**-0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


class Step(NamedTuple):
    """What one step did. Bytes are of this step alone, a parameter."""

    loss: float
    seconds: float
    read: float
    written: float
    peak: int


class Moved(NamedTuple):
    """Bytes since the swap files were opened."""

    read: int
    written: int


class Run(NamedTuple):
    """A training: peak resident memory while the model was built and partitioned, and its steps."""

    construction: int
    steps: list[Step]


def train(width: int, layers: int, rows: int, steps: int, folder: Path) -> Run:
    """Train ``layers`` layers on one batch of ``rows``."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Residual(width) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    nvme = {"device": "nvme", "nvme_path": str(folder)}
    options: dict[str, Any] = {
        "bf16": True,
        "offload_param": {**nvme, "buffer_count": 3},
        "offload_optimizer": {**nvme, "buffer_count": 3},
        "update_in_backward": optimizer,
    }
    zero_compile.partition(model, options)
    native.trim()
    construction = peak_bytes()
    compiled = torch.compile(model, backend="zero3", options=options)
    x, y = torch.randn(2, rows, width, dtype=torch.bfloat16)
    parameters = sum(p.numel() for p in model.parameters())
    taken = []
    for _ in range(steps):
        reset_peak()
        before, began = moved(model), time.perf_counter()
        loss = nn.functional.mse_loss(compiled(x).float(), y.float())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        after = moved(model)
        seconds = time.perf_counter() - began
        read = (after.read - before.read) / parameters
        written = (after.written - before.written) / parameters
        taken.append(Step(float(loss.detach()), seconds, read, written, peak_bytes()))
    return Run(construction, taken)


def moved(model: nn.Module) -> Moved:
    """What the engine's counters say, once nothing is in flight."""
    swaps = [session.memory_tiers.swap for session in sessions(model)]
    for swap in swaps:
        swap.drain()
    stats = [swap.stats() for swap in swaps]
    return Moved(sum(s.bytes_read for s in stats), sum(s.bytes_written for s in stats))


def show(run: Run) -> Table:
    """One row a step."""
    table = Table(
        "step", "loss", "s", "B read / parameter", "B written / parameter", "peak RSS, MB"
    )
    table.add_row("construction", "", "", "", "", f"{run.construction / 1e6:,.0f}")
    for number, step in enumerate(run.steps):
        moves = (f"{step.read:.1f}", f"{step.written:.1f}")
        table.add_row(
            str(number),
            f"{step.loss:.4f}",
            f"{step.seconds:.1f}",
            *moves,
            f"{step.peak / 1e6:,.0f}",
        )
    return table


def main(
    gigabytes: Annotated[float, typer.Option(help="of parameters, gradients and state")] = 16.0,
    width: Annotated[int, typer.Option(help="of a layer")] = 4096,
    rows: Annotated[int, typer.Option(help="in the batch")] = 16,
    steps: Annotated[int, typer.Option(help="to train")] = 4,
    folder: Annotated[Path | None, typer.Option(help="on a local disk")] = None,
) -> None:
    """Train it, and print what that took."""
    layers = max(1, round(gigabytes * 1e9 / STATE_BYTES / width**2))
    reset_peak()
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        taken = train(width, layers, rows, steps, Path(scratch))
    parameters = layers * width**2
    console = Console()
    console.print(
        f"{parameters / 1e9:.2f} thousand million parameters, {parameters * STATE_BYTES / 1e9:.1f} GB of state, "
        f"{torch.get_num_threads()} threads"
    )
    console.print(show(taken))


if __name__ == "__main__":
    typer.run(main)
