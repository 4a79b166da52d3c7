"""What one measurement runs under, the same for every contender."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Settings:
    size: str = "30m"
    dtype: str = "fp32"  # bf16: computation in bfloat16, parameters in float32
    world: int = 2
    batch: int = 4  # sequences per rank
    seq: int = 128
    steps: int = 8  # timed
    warmup: int = 2  # not timed; the first of them compiles
    fused: bool = True  # AdamW(fused=True) for every contender, or the default for every one
    malloc: str = "default"
    backend: str = "zero3"  # what the contender named zero3 compiles with

    @property
    def global_batch(self) -> int:
        return self.world * self.batch

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch * self.seq

    def adamw(self, parameters: Iterable[Tensor]) -> torch.optim.AdamW:
        # None, not False: False would also forbid the foreach form, which is the default.
        fused = True if self.fused else None
        return torch.optim.AdamW(
            parameters, lr=3e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=fused
        )

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> "Settings":
        return Settings(**json.loads(text))
