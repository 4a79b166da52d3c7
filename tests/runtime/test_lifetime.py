"""A model that is dropped leaves nothing: no session, thread, descriptor, swap file or tensor."""

import gc
import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from storages import live_storages
from swaps import held_in, settled
from zero_runtime.session import session_of

ON_NVME = {"device": "nvme"}
PLACES: dict[str, dict[str, Any]] = {
    "device": {},
    "host": {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}},
    "nvme": {"offload_param": ON_NVME, "offload_optimizer": ON_NVME},
    "in backward": {"offload_optimizer": ON_NVME, "update_in_backward": True},
    "activations": {"offload_activations": {**ON_NVME, "min_bytes": 1}},
    "recorded": {"record": True},
}


def train(options: dict[str, Any], folder: Path) -> "weakref.ref[object]":
    """The session of a model that was trained for two steps and is gone."""
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))
    if "nvme" in str(options):
        options = {**options, "nvme_path": str(folder)}
    compiled = torch.compile(model, backend="zero3", options=options)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        compiled(torch.ones(4, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    session = session_of(model[0].weight)
    assert session is not None
    return weakref.ref(session)


def held() -> tuple[int, int, int]:
    """Threads, descriptors, and bytes of tensors."""
    storages = live_storages(lambda each: type(each) in (torch.Tensor, nn.Parameter))
    threads, descriptors = (len(os.listdir(f"/proc/self/{of}")) for of in ("task", "fd"))
    return threads, descriptors, sum(storages.values())


@pytest.mark.slow
@pytest.mark.parametrize("reset", [True, False], ids=["reset", "kept"])
@pytest.mark.parametrize("place", PLACES)
def test_a_model_that_is_dropped_leaves_nothing(tmp_path: Path, place: str, reset: bool) -> None:
    """Whether the script resets Dynamo or not, which by itself compiles only so many models of one class."""
    torch._dynamo.reset()
    sessions = [train(PLACES[place], tmp_path)]
    gc.collect()
    assert settled(lambda: sessions[0]() is None)  # a thread may be about to end
    before = held()
    for _ in range(50 if place == "nvme" and reset else 3):
        if reset:
            torch._dynamo.reset()
        sessions.append(train(PLACES[place], tmp_path))
        gc.collect()
    assert settled(lambda: not any(session() is not None for session in sessions))
    assert settled(lambda: all(now <= then for now, then in zip(held(), before, strict=True)))
    assert held_in(tmp_path) == []
