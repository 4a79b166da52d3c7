"""Fine-tune a causal language model of transformers, of which no rank ever holds the whole.

    torchrun --nproc-per-node 2 examples/finetune_transformers.py --model folder/with/a/checkpoint

`zero_compile.Init` partitions each parameter as the model is built, and keeps this rank's part of what
`from_pretrained` loads into it. After that it is a stock loop. The result is
saved as transformers saves models, so `from_pretrained` reads it anywhere. Without `--model` a small
GPT-2 with random weights is made first, to have something to start from.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from train_gpt import BYTES, Batches, rank_and_world, read_corpus, share_progress
from transformers import AutoModelForCausalLM, GPT2Config

import zero_compile


def make_checkpoint(folder: Path) -> Path:
    """A small GPT-2 over bytes, with random weights."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=BYTES, n_positions=128, n_embd=96, n_layer=2, n_head=4)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def load(folder: Path) -> Any:
    """The checkpoint's model, partitioned over the ranks."""
    with zero_compile.Init():
        model = AutoModelForCausalLM.from_pretrained(folder)
    return model.train()


def train(model: Any, steps: int, batch: int, seq: int, lr: float) -> list[float]:
    """Losses, averaged over ranks."""
    rank, world = rank_and_world()
    compiled = torch.compile(model, backend="zero3")
    batches = Batches(read_corpus(), batch * world, seq, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    losses = []
    for step in range(steps):
        tokens, _ = batches.part(step, rank, world)
        loss = compiled(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(share_progress(loss.detach(), 0.0)[0])
    return losses


def save(model: Any, folder: Path) -> None:
    """Whole weights, by rank 0. Gathering them is collective."""
    weights = model.state_dict()
    if rank_and_world()[0] == 0:
        model.save_pretrained(folder, state_dict=weights)


def shared_folder() -> Path:
    """A new folder that all ranks know."""
    names: list[Any] = [tempfile.mkdtemp()]
    if dist.is_initialized():
        dist.broadcast_object_list(names)
    return Path(names[0])


def prepare(given: Path | None) -> Path:
    """The folder of the checkpoint to start from, which every rank can read."""
    if given is not None:
        return given
    folder = shared_folder()
    if rank_and_world()[0] == 0:
        make_checkpoint(folder)
    if dist.is_initialized():
        dist.barrier()
    return folder


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, help="a folder with a checkpoint of transformers")
    parser.add_argument("--output", type=Path, default=Path("runs/finetuned"))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=4, help="sequences per rank")
    parser.add_argument("--seq", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    model = load(prepare(arguments.model))
    losses = train(model, arguments.steps, arguments.batch, arguments.seq, arguments.lr)
    save(model, arguments.output)
    if rank_and_world()[0] == 0:
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, saved in {arguments.output}")
    if losses[-1] > losses[0]:
        sys.exit("the loss did not fall")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
