"""The DeepSpeed example: its four configs, both ways in, on two ranks, against a loop without zero_compile."""

import sys
from pathlib import Path

import pytest
import torch

import ranks

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import deepspeed_offload as example
from train_gpt import Batches, read_corpus

CONFIGS = sorted((Path(example.__file__).parent / "configs").glob("*.json"))
STEPS, WORLD = 8, 2


def _both_ways(path: Path, nvme: Path) -> tuple[list[float], list[float]]:
    found = []
    for make in (example.compiled_step, example.engine_step):
        torch._dynamo.reset()
        config = example.load(path, nvme)
        step = make(config)
        found.append(example.train(step, config["train_micro_batch_size_per_gpu"], STEPS))
    return found[0], found[1]


def reference(micro_batch: int, scale: float = 2.0**10) -> list[float]:
    """Weights and gradients in float16, masters and AdamW in float32; losses averaged over both halves.

    The scale is one at which eager code, which adds up in float16, does not overflow either.
    """
    model = example.build()
    masters = [p.detach().clone().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.AdamW(
        masters, lr=0.001, betas=(0.8, 0.999), eps=1e-8, weight_decay=3e-7
    )
    model.half()
    batches = Batches(read_corpus(), micro_batch * WORLD, example.SEQ, seed=0)
    losses = []
    for i in range(STEPS):
        total = 0.0
        for rank in range(WORLD):
            loss = example.loss_of(model, *batches.part(i, rank, WORLD))
            (loss * scale).backward()
            total += loss.item() / WORLD
        for master, parameter in zip(masters, model.parameters(), strict=True):
            assert parameter.grad is not None
            assert parameter.grad.isfinite().all()
            master.grad = parameter.grad.float() / (WORLD * scale)
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)
        model.zero_grad()
        losses.append(total)
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_trains_as_a_loop_without_us_both_ways_in(path: Path, tmp_path: Path) -> None:
    expected = reference(micro_batch=4)
    assert expected[-1] < 0.9 * expected[0]
    for compiled, engine in ranks.run(WORLD, _both_ways, path, tmp_path):
        assert compiled == pytest.approx(expected, rel=2e-3)
        assert engine == pytest.approx(expected, rel=2e-3)


def test_there_are_four_configs() -> None:
    assert len(CONFIGS) == 4
