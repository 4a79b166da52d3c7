"""Train a small byte-level GPT on the sources of the Python standard library.

    torchrun --nproc-per-node 2 examples/train_gpt.py

An ordinary PyTorch training script: `torch.compile(model, backend="zero3")` is the one line that
partitions parameters, gradients and optimizer state over the ranks. With `--backend inductor` and
one process the same script trains the whole model.
"""

import argparse
import os
import resource
import sysconfig
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor

BYTES = 256
CORPUS_LIMIT = 4_000_000


@dataclass(frozen=True)
class TrainingConfig:
    """One training run; every field is a command-line flag of the same name."""

    backend: str = "zero3"
    steps: int = 250
    layers: int = 6
    dim: int = 256
    heads: int = 8
    batch: int = 4  # sequences per rank
    seq: int = 128
    lr: float = 1e-3
    seed: int = 0
    time_budget: float = 0.0  # seconds; 0 runs all steps
    output: Path = Path("runs/gpt")


@dataclass(frozen=True)
class TrainingResult:
    model: nn.Module
    optimizer: torch.optim.Optimizer
    losses: list[float]  # averaged over the ranks, one a step
    tokens_per_second: float  # over all ranks, without the first step, which compiles


# ---- data


def read_corpus(limit: int = CORPUS_LIMIT) -> Tensor:
    """The first `limit` bytes of the standard library's top-level modules, in name order."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit:
            break
    return torch.frombuffer(text[:limit], dtype=torch.uint8)


class Batches(NamedTuple):
    """Global batches of windows that do not overlap within an epoch, shuffled by (seed, epoch)."""

    text: Tensor
    size: int  # sequences in a global batch
    seq: int
    seed: int

    def windows(self, step: int) -> Tensor:
        """Which windows make up the global batch of one step."""
        # The byte after a window is the target of its last position, so one byte is kept back.
        count = (len(self.text) - 1) // self.seq
        per_epoch = count // self.size
        epoch, position = divmod(step, per_epoch)
        shuffle = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        return torch.randperm(count, generator=shuffle)[position * self.size :][: self.size]

    def part(self, step: int, rank: int, world: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of one rank: its own consecutive rows of the global batch."""
        starts = self.windows(step).chunk(world)[rank] * self.seq
        rows = self.text[starts[:, None] + torch.arange(self.seq + 1)].long()
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


# ---- model


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind()
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.proj(y.transpose(1, 2).flatten(2))
        return out

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """Bytes in, logits over the next byte out; the logits reuse the embedding's weight."""

    def __init__(self, dim: int, layers: int, heads: int, seq: int) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(BYTES, dim), nn.Embedding(seq, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        # PyTorch's unit normal would start the tied logits, and the loss, far too large.
        nn.init.normal_(self.embed.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.embed.weight)


# ---- ranks


def rank_and_world() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def share_progress(loss: Tensor, elapsed: float) -> tuple[float, float]:
    """The loss averaged over ranks, and rank 0's clock: ranks must agree on when to stop."""
    rank, world = rank_and_world()
    shared = torch.tensor([loss.item() / world, elapsed if rank == 0 else 0.0])
    if world > 1:
        dist.all_reduce(shared)
    return shared[0].item(), shared[1].item()


def held_bytes() -> int:
    """The memory this process occupies, interpreter and libraries included (Linux; elsewhere the peak)."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# ---- training


def progress_bar(show: bool) -> Progress:
    return Progress(
        BarColumn(12),
        MofNCompleteColumn(),
        TextColumn("{task.fields[status]}"),
        TimeElapsedColumn(),
        disable=not show,
    )


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    # Gradients are dropped here, not after the step, so that they are still there at the end.
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


def run_steps(
    config: TrainingConfig, step: Callable[[int], Tensor], held: Callable[[], int]
) -> tuple[list[float], float]:
    """Run the steps within the time budget; returns the losses and tokens per second."""
    rank, world = rank_and_world()
    losses: list[float] = []
    times = [0.0]
    start = time.perf_counter()
    with progress_bar(rank == 0) as progress:
        bar = progress.add_task("train", total=config.steps, status="compiling")
        while len(losses) < config.steps:
            loss, elapsed = share_progress(step(len(losses)), time.perf_counter() - start)
            losses.append(loss)
            times.append(elapsed)
            speed = config.batch * config.seq * world * mean_rate(times)
            status = f"loss {loss:.3f}  {speed:,.0f} tokens/s  {held() / 1e6:.1f} MB process"
            progress.update(bar, advance=1, status=status)
            if config.time_budget and elapsed >= config.time_budget:
                break
    return losses, config.batch * config.seq * world * mean_rate(times)


def mean_rate(times: list[float]) -> float:
    """Steps per second since the end of the first step, which compiles (or including it)."""
    base = times[1:] if len(times) > 2 else times
    return (len(base) - 1) / (base[-1] - base[0])


def train(config: TrainingConfig) -> TrainingResult:
    torch.manual_seed(config.seed)
    rank, world = rank_and_world()
    batches = Batches(read_corpus(), config.batch * world, config.seq, config.seed)
    model: Any = GPT(config.dim, config.layers, config.heads, config.seq)
    model = torch.compile(model, backend=config.backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr)

    def step(index: int) -> Tensor:
        return train_step(model, optimizer, *batches.part(index, rank, world))

    losses, speed = run_steps(config, step, held_bytes)
    return TrainingResult(model, optimizer, losses, speed)


# ---- command line


def parse_arguments(argv: list[str] | None = None, **defaults: object) -> TrainingConfig:
    """Flags from the fields of TrainingConfig; `defaults` replaces those of the class."""
    usual = asdict(TrainingConfig()) | defaults
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for field in fields(TrainingConfig):
        default = usual[field.name]
        flag = "--" + field.name.replace("_", "-")
        parser.add_argument(flag, type=type(default), default=default, help=" ")
    return TrainingConfig(**vars(parser.parse_args(argv)))


def write_losses(losses: list[float], folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    rows = ["step,loss", *(f"{step},{loss:.6f}" for step, loss in enumerate(losses))]
    path = folder / "losses.csv"
    path.write_text("\n".join(rows) + "\n")
    return path


def main() -> None:
    config = parse_arguments()
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    result = train(config)
    if rank_and_world()[0] == 0:
        path = write_losses(result.losses, config.output)
        print(f"loss {result.losses[0]:.3f} -> {result.losses[-1]:.3f}, losses in {path}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
