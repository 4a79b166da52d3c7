"""What the checks on a GPU train: a small transformer, with and without partitioning, on fixed data."""

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

import zero_compile
from zero_compile.backend import zero3

HEADS = 4
TOLERANCE = 1e-4
"""Relative, of a loss: kernels that are fused differently round differently."""


class Size(NamedTuple):
    """Of the model and of a batch of it."""

    words: int = 2048
    width: int = 256
    blocks: int = 3
    rows: int = 8
    length: int = 128
    steps: int = 4

    @staticmethod
    def on(device: torch.device) -> "Size":
        """Enough for a GPU to have something to do; on the CPU, where checks are tried, less."""
        return Size() if device.type == "cuda" else Size(128, 32, 2, 4, 16)


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        wide: torch.Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + wide


class Gpt(nn.Module):
    """Blocks between an embedding and logits; returns the loss of predicting its own input."""

    def __init__(self, size: Size, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.words, size.width)
        self.blocks = nn.ModuleList(Block(size.width) for _ in range(size.blocks))
        self.head = nn.Linear(size.width, size.words, bias=False)
        self.dtype = dtype
        """What to compute in; None: the parameters' own."""

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        half = self.dtype is not None
        with torch.autocast(words.device.type, dtype=self.dtype, enabled=half):
            x = self.embedding(words)
            for block in self.blocks:
                x = block(x)
            logits = self.head(x)
        return F.cross_entropy(logits.float().flatten(0, 1), words.flatten())


def make(size: Size, device: torch.device, dtype: torch.dtype | None = None) -> Gpt:
    """The model with the same weights each time."""
    torch.manual_seed(0)
    with device:
        return Gpt(size, dtype)


def batches(size: Size, device: torch.device) -> list[torch.Tensor]:
    """``[rows, length]`` of words for each step, the same each time."""
    generator = torch.Generator().manual_seed(1)
    shape = (size.steps, size.rows, size.length)
    return list(torch.randint(0, size.words, shape, generator=generator).to(device))


def backend() -> str | Callable[..., Any]:
    """``"zero3"`` where the package is installed, else the backend itself."""
    names = {entry.name for entry in entry_points(group="torch_dynamo_backends")}
    return "zero3" if "zero3" in names else zero3


@dataclass(frozen=True)
class Trained:
    """What a training run left behind; sizes are bytes."""

    losses: list[float]
    held: int
    """On the GPU between two steps, gradients dropped, beyond what was held before the run."""
    peak: int
    """The most on the GPU during the last forward and backward, likewise."""
    parameters: int
    """How many elements."""
    report: zero_compile.MemoryReport | None


def train(
    size: Size,
    device: torch.device,
    *,
    partitioned: bool = True,
    options: Mapping[str, Any] | None = None,
    dtype: torch.dtype | None = None,
    part: Callable[[torch.Tensor], torch.Tensor] = lambda words: words,
) -> Trained:
    """Train compiled, on ``part`` of each batch, from the same weights each time."""
    torch.compiler.reset()
    meter = Meter(device)
    model = make(size, device, dtype)
    how = {"backend": backend(), "options": dict(options)} if options else {"backend": backend()}
    step: Any = torch.compile(model, **how) if partitioned else torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, peak = [], 0
    for words in batches(size, device):
        meter.start_peak()
        loss = step(part(words))
        loss.backward()
        peak = meter.peak()
        optimizer.step()
        report = zero_compile.memory_report(model, optimizer) if partitioned else None
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        del loss
    count = sum(p.numel() for p in model.parameters())
    return Trained(losses, meter.held(), peak, count, report)


class Meter:
    """The GPU's memory that tensors of this process take up, from now on; 0 on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._before = 0
        if self._cuda:
            # What libraries set aside at their first use is not the model's.
            torch.ones(64, 64, device=device) @ torch.ones(64, 64, device=device)
        self._before = self.held()

    def held(self) -> int:
        """Bytes more than at the beginning."""
        gc.collect()
        return torch.cuda.memory_allocated() - self._before if self._cuda else 0

    def start_peak(self) -> None:
        """Measure the peak from here on."""
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        """The most bytes at once, more than at the beginning."""
        return torch.cuda.max_memory_allocated() - self._before if self._cuda else 0


def difference(expected: list[float], found: list[float]) -> float:
    """The largest relative difference."""
    return max(abs(a - b) / abs(a) for a, b in zip(expected, found, strict=True))
