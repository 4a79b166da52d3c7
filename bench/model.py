"""The model every contender trains: a plain GPT with an output head of its own."""

from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor


class Size(NamedTuple):
    dim: int
    layers: int
    heads: int
    vocabulary: int


SIZES = {
    "tiny": Size(128, 2, 4, 512),
    "30m": Size(512, 8, 8, 4096),
    "120m": Size(768, 16, 12, 4096),
}


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attention = Attention(dim, heads)
        self.norm2 = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        hidden = F.gelu(self.up(self.norm2(x)), approximate="tanh")
        return x + self.down(hidden)  # type: ignore[no-any-return]


class GPT(nn.Module):
    """Returns the loss, so that the contenders that compile the whole model compile it too."""

    def __init__(self, size: Size, seq: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(size.vocabulary, size.dim)
        self.position = nn.Embedding(seq, size.dim)
        self.blocks = nn.ModuleList(Block(size.dim, size.heads) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.dim)
        self.head = nn.Linear(size.dim, size.vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def initialize(model: nn.Module, seed: int = 7) -> None:
    """The same weights in every process, whatever ran before: one generator, parameter order."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02, generator=generator)


def build(size: str, seq: int) -> GPT:
    model = GPT(SIZES[size], seq)
    initialize(model)
    # Linear biases start random in PyTorch, from the global generator.
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    return model


def parameter_count(size: str, seq: int) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in GPT(SIZES[size], seq).parameters())
