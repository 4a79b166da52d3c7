"""The example's data: the same in every run, and shared out over the ranks without overlap."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_gpt.py"
WORLD, PER_RANK, SEQ = 4, 3, 32


def load_example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_gpt_under_test", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


example = load_example()


def batches(seed: int = 0) -> Any:
    # Every position's byte differs from its neighbours': a wrong offset cannot go unseen.
    text = (torch.arange(4096) * 7 % 256).to(torch.uint8)
    return example.Batches(text, WORLD * PER_RANK, SEQ, seed)


def test_corpus_is_the_same_every_time_and_of_the_size_asked_for() -> None:
    first, second = example.read_corpus(100_000), example.read_corpus(100_000)
    assert first.dtype == torch.uint8
    assert len(first) == 100_000
    assert torch.equal(first, second)


def test_a_shorter_corpus_is_the_beginning_of_a_longer_one() -> None:
    assert torch.equal(example.read_corpus(50_000), example.read_corpus(100_000)[:50_000])


def test_targets_are_the_inputs_one_byte_on() -> None:
    x, y = batches().part(0, 0, WORLD)
    assert x.shape == y.shape == (PER_RANK, SEQ)
    assert torch.equal(x[:, 1:], y[:, :-1])


@pytest.mark.parametrize("step", [0, 1, 25])
def test_ranks_together_have_the_single_process_batch(step: int) -> None:
    parts = [batches().part(step, rank, WORLD) for rank in range(WORLD)]
    x, y = batches().part(step, 0, 1)
    assert torch.equal(torch.cat([part[0] for part in parts]), x)
    assert torch.equal(torch.cat([part[1] for part in parts]), y)


def test_windows_of_an_epoch_do_not_repeat() -> None:
    data = batches()
    steps = (len(data.text) - 1) // SEQ // data.size
    seen = torch.cat([data.windows(step) for step in range(steps)]).tolist()
    assert len(set(seen)) == len(seen) == steps * data.size


def test_a_new_epoch_is_shuffled_anew() -> None:
    data = batches()
    steps = (len(data.text) - 1) // SEQ // data.size
    assert not torch.equal(data.windows(0), data.windows(steps))
    assert len(data.windows(steps)) == data.size


def test_batches_depend_on_seed_and_step_alone() -> None:
    assert torch.equal(batches().windows(3), batches().windows(3))
    assert not torch.equal(batches().windows(3), batches().windows(4))
    assert not torch.equal(batches().windows(3), batches(seed=1).windows(3))


def test_flags_and_defaults() -> None:
    config = example.parse_arguments(["--time-budget", "5", "--lr", "0.5"], steps=7)
    assert (config.backend, config.steps) == ("zero3", 7)
    assert (config.time_budget, config.lr) == (5.0, 0.5)
