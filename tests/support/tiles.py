"""Models with weights in tiles, trained on ranks that tests start: what they do, and what untiled ones do."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from training import Batch


class Mlp(nn.Module):
    """A wide linear between two small ones."""

    def __init__(self, wide: int = 256) -> None:
        super().__init__()
        self.up = nn.Linear(32, wide)
        self.down = nn.Linear(wide, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Gpt(nn.Module):
    """An embedding and logits that share a table; returns the loss, or with it the logits."""

    def __init__(self, vocabulary: int = 256, width: int = 32, with_logits: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        self.with_logits = with_logits

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> Any:
        x = self.embedding(tokens)
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        logits = self.head(x)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return (loss, logits) if self.with_logits else loss


def of_vectors(count: int = 3) -> list[Batch]:
    torch.manual_seed(1)
    return [(torch.randn(12, 32), torch.randn(12, 8)) for _ in range(count)]


def of_tokens(count: int = 3, vocabulary: int = 256) -> list[Batch]:
    torch.manual_seed(2)
    return [
        (torch.randint(vocabulary, (4, 6)), torch.randint(vocabulary, (4, 6))) for _ in range(count)
    ]


def distance(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(x), y)


def loss_of(model: Any, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    result = model(tokens, targets)
    return result[0] if isinstance(result, tuple) else result


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)
