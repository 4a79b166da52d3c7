"""How much memory one rank needs to build a model of any size: ``python -m bench.construct``.

The other ranks are imagined, so nothing is sent, and what would be gathered is undefined; memory and time
are those of a real rank but for the network.
"""

import math
import time
from typing import Annotated, Literal

import torch
import torch.distributed as dist
import typer
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import zero_compile
from bench.memory import peak_bytes

GB = 1e9
VOCABULARY = 32_000


class Block(nn.Module):
    """The matrices of one transformer layer, ``12 * width**2`` elements and some."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)


class Model(nn.Module):
    """About as many parameters as were asked for, initialised as GPT-2 is."""

    def __init__(self, parameters: float) -> None:
        super().__init__()
        width = _width(parameters)
        layers = max(1, round((parameters - VOCABULARY * width) / (12 * width**2)))
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.apply(_initialise)


def _width(parameters: float) -> int:
    """Of a model about 100 times as wide as it is deep, in steps of 128."""
    return max(128, 128 * round(math.cbrt(parameters * 100 / 12) / 128))


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        module.weight.data.normal_(mean=0.0, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        module.bias.data.zero_()


def main(
    parameters: Annotated[float, typer.Option(help="about how many")] = 3e8,
    world: Annotated[int, typer.Option(min=1, help="ranks, of which this is one")] = 8,
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option()] = "bfloat16",
    enabled: Annotated[bool, typer.Option(help="off: build it whole")] = True,
) -> None:
    """Build a model partitioned and print what it took."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    torch.set_default_dtype(getattr(torch, dtype))
    before, begin = peak_bytes(), time.perf_counter()
    with zero_compile.Init(enabled=enabled):
        model = Model(parameters)
    seconds = time.perf_counter() - begin
    sizes = [p.numel() * p.element_size() for p in model.parameters()]
    print(f"{sum(p.numel() for p in model.parameters()) / GB:.2f}e9 parameters in {dtype}")
    print(f"whole {sum(sizes) / GB:.2f} GB, largest {max(sizes) / GB:.2f} GB, of {world} ranks")
    print(f"part of one rank {sum(sizes) / world / GB:.2f} GB")
    print(f"peak of the process {peak_bytes() / GB:.2f} GB, of which {before / GB:.2f} GB before")
    print(f"{seconds:.1f} s")


if __name__ == "__main__":
    typer.run(main)
