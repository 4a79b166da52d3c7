"""Train a small GPT from a DeepSpeed config, both ways in.

    torchrun --nproc-per-node 2 examples/deepspeed_offload.py examples/configs/zero3.json
    torchrun --nproc-per-node 2 examples/deepspeed_offload.py \
        examples/configs/zero3_offload_nvme.json --nvme-path /local_nvme

The first way is `torch.compile` with the config as an option: the loop, the optimizer and the loss
scale are stock PyTorch. The second is `zero_compile.initialize`, which a DeepSpeed script calls as it
called `deepspeed.initialize`. Ends with an error if a loss did not fall.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from train_gpt import GPT, Batches, rank_and_world, read_corpus, share_progress

import zero_compile

SEQ = 64


def load(path: Path, nvme_path: Path | None) -> dict[str, Any]:
    """The config; whatever it offloads to NVMe goes to `nvme_path`."""
    config: dict[str, Any] = json.loads(path.read_text())
    for section in ("offload_optimizer", "offload_param"):
        offload = config["zero_optimization"].get(section, {})
        if offload.get("device") == "nvme":
            if nvme_path is None:
                sys.exit(f"{path} offloads to NVMe: say where with --nvme-path")
            offload["nvme_path"] = str(nvme_path)
    return config


def build() -> GPT:
    torch.manual_seed(0)
    return GPT(dim=64, layers=2, heads=4, seq=SEQ)


def loss_of(model: Any, tokens: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).float().flatten(0, 1), targets.flatten())


def compiled_step(config: dict[str, Any]) -> Callable[[Tensor, Tensor], Tensor]:
    """One step of a stock loop around `torch.compile`."""
    model: Any = build().half()
    model = torch.compile(model, backend="zero3", options={"config": config})
    optimizer = torch.optim.AdamW(model.parameters(), **config["optimizer"]["params"])
    scaler = torch.amp.GradScaler("cpu")

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = loss_of(model, tokens, targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.detach()

    return step


def engine_step(config: dict[str, Any]) -> Callable[[Tensor, Tensor], Tensor]:
    """One step of a DeepSpeed loop."""
    model = build()
    engine, _, _, _ = zero_compile.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = loss_of(engine, tokens, targets)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def train(step: Callable[[Tensor, Tensor], Tensor], micro_batch: int, steps: int) -> list[float]:
    """Losses, averaged over ranks."""
    rank, world = rank_and_world()
    batches = Batches(read_corpus(), micro_batch * world, SEQ, seed=0)
    return [share_progress(step(*batches.part(i, rank, world)), 0.0)[0] for i in range(steps)]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("config", type=Path, help="a DeepSpeed config, stage 3 and fp16")
    parser.add_argument("--nvme-path", type=Path, help="a folder on the disk to offload to")
    parser.add_argument("--steps", type=int, default=30)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    config = load(arguments.config, arguments.nvme_path)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    for name, make in (("torch.compile", compiled_step), ("initialize", engine_step)):
        losses = train(make(config), config["train_micro_batch_size_per_gpu"], arguments.steps)
        if rank_and_world()[0] == 0:
            print(f"{name:>14}: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
        if losses[-1] > 0.9 * losses[0]:
            sys.exit(f"{name}: the loss did not fall")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
