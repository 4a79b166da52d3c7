"""Synthetic token batches, the same in every process; a rank takes its rows."""

from dataclasses import dataclass

import torch
from torch import Tensor

POOL = 4


@dataclass(frozen=True)
class Pool:
    """A few global batches that are cycled through, so that the loss falls within few steps."""

    batches: tuple[Tensor, ...]

    def rows(self, step: int, rank: int, world: int) -> tuple[Tensor, Tensor]:
        mine = self.batches[step % len(self.batches)].chunk(world)[rank]
        return mine[:, :-1].contiguous(), mine[:, 1:].contiguous()


def make_batch(vocabulary: int, rows: int, seq: int, generator: torch.Generator) -> Tensor:
    """Arithmetic progressions with a little noise: easy to learn, not to learn by heart."""
    start = torch.randint(vocabulary, (rows, 1), generator=generator)
    stride = torch.randint(1, 17, (rows, 1), generator=generator)
    tokens = (start + stride * torch.arange(seq + 1)) % vocabulary
    noise = torch.randint(vocabulary, tokens.shape, generator=generator)
    return torch.where(torch.rand(tokens.shape, generator=generator) < 0.05, noise, tokens)


def make_pool(vocabulary: int, rows: int, seq: int, seed: int = 1234) -> Pool:
    generator = torch.Generator().manual_seed(seed)
    return Pool(tuple(make_batch(vocabulary, rows, seq, generator) for _ in range(POOL)))
