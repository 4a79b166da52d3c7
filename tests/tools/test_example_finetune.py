"""The fine-tuning example on two ranks: the losses of a plain loop, and a checkpoint that others can read."""

import sys
from pathlib import Path

import pytest
import torch

import ranks

pytest.importorskip("transformers")
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import finetune_transformers as example
from train_gpt import Batches, read_corpus

STEPS, BATCH, SEQ = 4, 2, 32


def _finetuned(folder: Path) -> tuple[list[float], int, int]:
    model = example.load(folder / "before")
    held = sum(p.untyped_storage().nbytes() for p in model.parameters())
    losses = example.train(model, STEPS, BATCH, SEQ, lr=1e-3)
    example.save(model, folder / "after")
    return losses, held, sum(p.numel() for p in model.parameters())


def _plainly(folder: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = AutoModelForCausalLM.from_pretrained(folder / "before")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = Batches(read_corpus(), 2 * BATCH, SEQ, seed=0)
    losses = []
    for step in range(STEPS):
        tokens, _ = batches.part(step, 0, 1)
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict()


@pytest.mark.slow
def test_a_checkpoint_is_loaded_into_shards_trained_and_saved(tmp_path: Path) -> None:
    example.make_checkpoint(tmp_path / "before")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "before").eval()
    model.config.attn_pdrop = model.config.embd_pdrop = model.config.resid_pdrop = 0.0
    model.save_pretrained(tmp_path / "before")  # without what is random
    expected, weights = _plainly(tmp_path)
    for losses, held, parameters in ranks.run(2, _finetuned, tmp_path):
        assert losses == pytest.approx(expected, rel=1e-4)
        assert held < 4 * parameters / 2 * 1.1
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "after").state_dict()
    assert found.keys() == weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=1e-3)
