"""Estimates of memory are DeepSpeed's, to the byte."""

from typing import Any

import pytest
from torch import nn

import zero_compile
from zero_compile import estimate_zero2_model_states_mem_needs as zero2
from zero_compile import estimate_zero3_model_states_mem_needs as zero3

BOTH, OPTIMIZER, NONE = (True, True), (True, False), (False, False)

#: (P, L, nodes, GPUs a node) to (host, GPU) for parameters and optimizer, optimizer, and nothing offloaded.
WITH_INIT: dict[tuple[int, int, int, int], Any] = {
    (2851 * 10**6, 32 * 10**6, 1, 8): (
        (76977000000, 128000000),
        (68424000000, 840750000),
        (1536000000, 6542750000),
    ),
    (6738415616, 131072000, 1, 8): (
        (181937221632, 524288000),
        (161721974784, 2208891904),
        (6291456000, 15685723136),
    ),
    (6738415616, 131072000, 2, 8): (
        (90968610816, 524288000),
        (80860987392, 1366589952),
        (6291456000, 8105005568),
    ),
    (10**6, 65536, 1, 2): ((27000000, 262144), (24000000, 1262144), (786432, 9262144)),
}


@pytest.mark.parametrize("case", WITH_INIT, ids=str)
def test_stage_3_with_init(case: tuple[int, int, int, int]) -> None:
    total, largest, nodes, gpus = case
    for offload, expected in zip((BOTH, OPTIMIZER, NONE), WITH_INIT[case], strict=True):
        assert zero3(total, largest, gpus, nodes, *offload) == (*expected, 4 * largest)


@pytest.mark.parametrize("offload", [BOTH, OPTIMIZER, NONE])
def test_stage_3_without_init_holds_the_model_on_every_rank(offload: tuple[bool, bool]) -> None:
    host, gpu, _ = zero3(2851e6, 32e6, 8, 1, *offload, zero_init=False)
    assert host == 136848000000
    assert gpu == zero3(2851e6, 32e6, 8, 1, *offload)[1]


@pytest.mark.parametrize(
    ("offload", "expected"),
    [(True, (136848000000, 5702000000)), (False, (136848000000, 12116750000))],
)
def test_stage_2(offload: bool, expected: tuple[int, int]) -> None:
    assert zero2(2851 * 10**6, 8, 1, offload) == expected


def test_the_buffer_factor_scales_the_host_only() -> None:
    host, gpu, layer = zero3(1e6, 65536, 2, additional_buffer_factor=3.0)
    assert (host, gpu, layer) == (54000000, 262144, 262144)


def test_the_table_of_stage_3(capsys: pytest.CaptureFixture[str]) -> None:
    zero_compile.estimate_zero3_model_states_mem_needs_all_cold(2851e6, 32e6, num_gpus_per_node=8)
    assert capsys.readouterr().out == (
        "Estimated memory needed for params, optim states and gradients for a:\n"
        "HW: Setup with 1 node, 8 GPUs per node.\n"
        "SW: Model with 2851M total params, 32M largest layer params.\n"
        "  per CPU  |  per GPU |   Options\n"
        "   71.69GB |   0.12GB | offload_param=cpu , offload_optimizer=cpu , zero_init=1\n"
        "  127.45GB |   0.12GB | offload_param=cpu , offload_optimizer=cpu , zero_init=0\n"
        "   63.72GB |   0.78GB | offload_param=none, offload_optimizer=cpu , zero_init=1\n"
        "  127.45GB |   0.78GB | offload_param=none, offload_optimizer=cpu , zero_init=0\n"
        "    1.43GB |   6.09GB | offload_param=none, offload_optimizer=none, zero_init=1\n"
        "  127.45GB |   6.09GB | offload_param=none, offload_optimizer=none, zero_init=0\n"
    )


def test_the_table_of_stage_2(capsys: pytest.CaptureFixture[str]) -> None:
    zero_compile.estimate_zero2_model_states_mem_needs_all_cold(2851e6, 8, 2)
    assert capsys.readouterr().out == (
        "Estimated memory needed for params, optim states and gradients for a:\n"
        "HW: Setup with 2 nodes, 8 GPUs per node.\n"
        "SW: Model with 2851M total params.\n"
        "  per CPU  |  per GPU |   Options\n"
        "  254.90GB |   5.31GB | offload_optimizer=cpu \n"
        "  127.45GB |   8.30GB | offload_optimizer=none\n"
    )


def test_a_live_model_is_counted_with_tied_parameters_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = nn.Sequential(nn.Embedding(20_000, 100), nn.Linear(100, 100), nn.Linear(100, 20_000))
    model[2].weight = model[0].weight
    for live, cold in (
        (
            zero_compile.estimate_zero3_model_states_mem_needs_all_live,
            lambda: zero_compile.estimate_zero3_model_states_mem_needs_all_cold(
                2_030_100, 2_020_000, 4, 2, 1.2
            ),
        ),
        (
            zero_compile.estimate_zero2_model_states_mem_needs_all_live,
            lambda: zero_compile.estimate_zero2_model_states_mem_needs_all_cold(
                2_030_100, 4, 2, 1.2
            ),
        ),
    ):
        live(model, num_gpus_per_node=4, num_nodes=2, additional_buffer_factor=1.2)
        printed = capsys.readouterr().out
        cold()
        assert printed == capsys.readouterr().out
