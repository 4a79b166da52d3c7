"""estimate_memory: a planned step added up, against closed formulas and against what a run holds."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from zero_compile import estimate_memory
from zero_compile.preview import preview

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
