"""Train the small GPT under ZeRO-3 and show what each rank held.

    torchrun --nproc-per-node 2 examples/demo.py

Ends with an error if the loss did not fall clearly.
"""

import json
import os
import sys
from pathlib import Path
from statistics import mean
from typing import NamedTuple, NoReturn

import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.table import Table
from train_gpt import TrainingResult, parse_arguments, rank_and_world, train, write_losses

import zero_compile

ENOUGH = 0.8  # of the first loss
TAIL = 10  # steps whose mean is the last loss: single batches vary


class Unsharded(NamedTuple):
    """Bytes on this rank, and what an unpartitioned run would hold."""

    what: str
    here: int
    whole: int


def unsharded(report: zero_compile.MemoryReport) -> list[Unsharded]:
    whole = report.whole_parameters
    return [
        Unsharded("parameters", report.parameters, whole),
        Unsharded("gradients", report.gradients, whole),
        # AdamW keeps two moments of each parameter.
        Unsharded("optimizer state", report.optimizer, 2 * whole),
    ]


def megabytes(count: int) -> str:
    return f"{count / 1e6:.2f}"


def memory_table(report: zero_compile.MemoryReport, world: int) -> Table:
    table = Table(title=f"MB on one of {world} ranks", box=box.SIMPLE, pad_edge=False)
    for heading in ("", "on this rank", "unsharded", "share"):
        table.add_column(heading, justify="right" if heading else "left")
    for what, here, whole in unsharded(report):
        table.add_row(what, megabytes(here), megabytes(whole), f"{here / whole:.1%}")
    peak, planned = report.gathered_peak, report.gathered_planned
    table.add_row("gathered at once, peak", megabytes(peak), "", "")
    table.add_row("gathered at once, planned", megabytes(planned), "", "")
    return table


def last_loss(losses: list[float]) -> float:
    return mean(losses[-TAIL:])


def complaint(losses: list[float]) -> str | None:
    """Why the run is not convincing, or None."""
    first, last = losses[0], last_loss(losses)
    if last < ENOUGH * first:
        return None
    return (
        f"The loss did not fall clearly: {first:.3f} at the first of {len(losses)} steps, "
        f"{last:.3f} over the last {TAIL}; expected below {ENOUGH * first:.3f}."
    )


def write_files(result: TrainingResult, folder: Path) -> None:
    write_losses(result.losses, folder)
    (folder / "losses.json").write_text(json.dumps(result.losses) + "\n")
    for plan in zero_compile.plans(result.model):
        (folder / f"plan-{plan.name}.json").write_text(plan.to_json() + "\n")


def show(console: Console, result: TrainingResult, report: zero_compile.MemoryReport) -> None:
    first, last = result.losses[0], last_loss(result.losses)
    console.print(memory_table(report, rank_and_world()[1]))
    console.print(f"loss {first:.3f} at the first step, {last:.3f} over the last {TAIL}")
    console.print(
        f"{result.tokens_per_second:,.0f} tokens/s over {len(result.losses)} steps in the time given"
    )


def leave(code: int) -> NoReturn:
    """End without interpreter shutdown, in which PyTorch with gloo sometimes aborts."""
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> NoReturn:
    config = parse_arguments(time_budget=90.0, steps=300, output=Path("runs/demo"))
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    result = train(config)
    report = zero_compile.memory_report(result.model, result.optimizer)
    problem = complaint(result.losses)
    if rank_and_world()[0] == 0:
        console = Console()
        show(console, result, report)
        write_files(result, config.output)
        console.print(problem or f"losses and plans are in {config.output}")
    leave(1 if problem else 0)


if __name__ == "__main__":
    main()
