"""estimate_memory: a planned step added up, against closed formulas and against what a run holds."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

import ranks
from training import world
from zero_compile import estimate_memory
from zero_compile.api.preview import preview

WIDTH, LAYERS = 64, 4
WEIGHTS = LAYERS * WIDTH * WIDTH


def make() -> tuple[nn.Module, tuple[torch.Tensor], Mapping[str, Any]]:
    layers = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
    return nn.Sequential(*layers), (torch.randn(8, WIDTH),), {}


@pytest.mark.parametrize("world_size", [1, 4])
def test_model_states_are_sixteen_bytes_a_parameter_over_the_ranks(world_size: int) -> None:
    found = estimate_memory(make, world_size=world_size, options={"bucket_bytes": 1})
    share = WEIGHTS // world_size
    assert (found.parameters, found.optimizer) == (4 * share, 8 * share)
    assert found.gradients <= 4 * WEIGHTS
    assert (found.host, found.nvme) == (0, 0)
    assert found.activations > 0
    assert found.device == sum(found[:6])
    if world_size > 1:
        assert found.gathered % (4 * WIDTH * WIDTH) == 0
        assert found.gathered > 0


def test_padding_counts() -> None:
    odd = lambda: (nn.Linear(7, 3, bias=False), (torch.randn(2, 7),), {})  # noqa: E731
    found = estimate_memory(odd, world_size=4)
    assert found.parameters % 4 == 0
    assert found.parameters > 21  # 21 elements are 5.25 a rank
    assert found.optimizer == 2 * found.parameters


def test_what_is_off_the_device_is_counted_where_it_lives() -> None:
    options: dict[str, Any] = {"bucket_bytes": 1, "offload_optimizer": {"device": "cpu"}}
    on_host = estimate_memory(make, world_size=2, options=options)
    share = WEIGHTS // 2
    assert (on_host.parameters, on_host.optimizer) == (4 * share, 0)
    assert on_host.host == (4 + 8) * share


def test_state_on_nvme_needs_buffers_in_host_memory(tmp_path: Any) -> None:
    section = {"device": "nvme", "nvme_path": str(tmp_path), "buffer_count": 2}
    options: dict[str, Any] = {"bucket_bytes": 1, "offload_optimizer": section}
    found = estimate_memory(make, world_size=2, options=options)
    share, bucket = WEIGHTS // 2, WIDTH * WIDTH // 2
    assert found.nvme == 8 * share
    assert found.host == 4 * share + 2 * 8 * bucket


def test_it_is_the_planners_peak() -> None:
    options = {"bucket_bytes": 1}
    found = estimate_memory(make, world_size=2, options=options)
    assert found.device == preview(make, world_size=2, options=options).peak  # nothing is padded


def test_a_stage_that_keeps_parameters_whole_says_so() -> None:
    whole = estimate_memory(make, world_size=4, stage=2)
    assert (whole.parameters, whole.gathered) == (4 * WEIGHTS, 0)
    assert whole.optimizer == 8 * WEIGHTS // 4


CONVERSIONS = [nn.Module.bfloat16, nn.Module.half, lambda model: model.to(torch.bfloat16)]


@pytest.mark.parametrize("convert", CONVERSIONS, ids=["bfloat16", "half", "to"])
def test_the_model_may_be_converted_when_it_is_made(convert: Any) -> None:
    def narrow() -> Any:
        model, (x,), kwargs = make()
        assert len(torch.optim.AdamW(model.parameters()).param_groups) == 1
        converted = convert(model)
        return converted, (x.to(converted[0].weight.dtype),), kwargs

    options = {"bucket_bytes": 1}
    wide, found = (estimate_memory(m, world_size=2, options=options) for m in (make, narrow))
    assert found.parameters == wide.parameters // 2
    assert found.gathered == wide.gathered // 2


def _estimates_in_passing() -> list[float]:
    """Rank 0 alone asks, before it trains and between steps, for batches of other sizes."""
    model, (x,), _ = make()
    step = torch.compile(model, backend="zero3")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for rows in (3, 5):
        if world()[0] == 0:
            made = lambda: (make()[0], (torch.randn(rows, WIDTH),), {})  # noqa: B023, E731
            estimate_memory(made, world_size=2)
        step(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [float(p.detach().double().sum()) for p in model.parameters()]


def test_one_rank_alone_may_ask_before_and_while_all_train() -> None:
    first, second = ranks.run(2, _estimates_in_passing)
    assert first == second
