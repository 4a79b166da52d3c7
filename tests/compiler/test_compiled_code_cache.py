"""Inductor's cache of compiled code: what a session holds must not enter its keys."""

import copy
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from zero_compile.backend import JointPartitioner
from zero_runtime.ir.plan import StatePolicy


def train_once(options: dict[str, object]) -> float:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    compiled = torch.compile(model, backend="zero3", options=options)
    loss = 0.0
    for _ in range(2):
        output = compiled(torch.ones(3, 6)).square().mean()
        output.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = float(output.detach())
    return loss


@pytest.mark.parametrize("place", ["none", "cpu", "nvme"])
def test_an_equal_model_of_another_session_finds_its_code(tmp_path, place):
    options: dict[str, object] = {"inductor": {"fx_graph_cache": True}}
    if place != "none":
        options["offload_optimizer"] = {"device": place}
    if place == "nvme":
        options["nvme_path"] = str(Path(tmp_path))
    first = train_once(options)
    counters.clear()
    assert train_once(options) == first
    assert counters["inductor"]["fxgraph_cache_hit"] == 2
    assert counters["inductor"]["fxgraph_cache_miss"] == 0


def gradients(retained: bool) -> list[torch.Tensor]:
    """Of one backward, or of two on one forward."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))
    options = {"inductor": {"fx_graph_cache": True}}
    loss = torch.compile(model, backend="zero3", options=options)(torch.ones(3, 6)).square().mean()
    if retained:
        loss.backward(retain_graph=True)
    loss.backward()
    return [p.grad.full_tensor() for p in model.parameters()]  # type: ignore[union-attr]


@pytest.mark.generated_kernels
def test_code_that_overwrites_saved_tensors_is_not_used_where_they_are_kept():
    once = gradients(retained=False)
    for one, two in zip(once, gradients(retained=True), strict=True):
        torch.testing.assert_close(two, 2 * one)


def test_the_partitioner_stands_in_keys_by_its_name():
    class Held:
        policy = StatePolicy()
        donated = (0, 2)

        def __reduce__(self) -> str:
            raise TypeError("what a session holds is live")

    held = Held()
    one, other = (JointPartitioner(held) for _ in range(2))  # type: ignore[arg-type]
    assert pickle.dumps(one) == pickle.dumps(other)
    assert copy.deepcopy(one) is one
