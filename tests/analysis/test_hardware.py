"""Hardware profiles: what is shipped, and what is said about what is not a profile."""

import json
from pathlib import Path

import pytest
import torch

from zero_compile.analysis import hardware
from zero_compile.analysis.hardware import Hardware, load, save
from zero_runtime.errors import OptionError

NAMES = ["a100", "cpu", "h100", "h200", "l40s", "rtx4090"]
GPUS = [name for name in NAMES if name != "cpu"]


def changed(**fields: object) -> str:
    return json.dumps(load("h100").model_dump() | fields)


def test_the_shipped_profiles():
    assert hardware.names() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_profile_is_called_like_its_file_and_says_where_its_figures_come_from(name: str):
    profile = load(name)
    assert profile.name == name
    assert len(profile.source) > 40


@pytest.mark.parametrize("name", NAMES)
def test_a_saved_profile_loads_as_the_same(name: str, tmp_path: Path):
    path = tmp_path / "profile.json"
    save(load(name), path)
    assert load(path) == load(str(path)) == load(name)


@pytest.mark.parametrize("name", NAMES)
def test_figures_are_plausible(name: str):
    h = load(name)
    assert 1e9 < h.memory_bytes < 1e12
    assert h.memory_bytes * h.ranks_per_node <= h.host_memory_bytes * 1.01
    assert h.memory_bandwidth > h.host_to_device.bandwidth >= h.nvme_read.bandwidth
    assert h.memory_bandwidth > h.intra_node.bandwidth >= h.inter_node.bandwidth
    assert 1e-7 < h.launch_seconds < 1e-4
    assert h.intra_node.latency <= h.inter_node.latency < 1e-3


@pytest.mark.parametrize("name", GPUS)
def test_tensor_cores_take_16_bit_twice_as_fast_as_tf32(name: str):
    peaks = load(name).peaks
    assert peaks.bfloat16 == peaks.float16
    assert peaks.bfloat16 == pytest.approx(2 * peaks.float32, rel=0.02)


def test_known_ratios_between_gpus():
    h200, h100, a100 = load("h200"), load("h100"), load("a100")
    assert h200.peaks == h100.peaks  # one chip, another memory
    assert h200.memory_bandwidth / h100.memory_bandwidth == pytest.approx(1.43, abs=0.01)
    assert h100.peaks.bfloat16 / a100.peaks.bfloat16 == pytest.approx(3.17, abs=0.01)


def test_rates_are_sustained_ones_and_unknown_dtypes_count_as_float32():
    h = load("h100")
    assert h.flops_per_second(torch.bfloat16) == h.peaks.bfloat16 * 0.7
    assert h.flops_per_second(torch.int64) == h.flops_per_second(torch.float32)
    assert h.memory_bytes_per_second == h.memory_bandwidth * 0.9
    assert h.seconds_over(h.nvme_read, 0) == 0.0
    assert h.seconds_over(h.nvme_read, 1) > h.nvme_read.latency


def test_profiles_are_frozen_and_hashable():
    with pytest.raises(ValueError, match="frozen"):
        load("cpu").memory_bytes = 1
    assert hash(load("cpu")) == hash(load("cpu"))


# ------------------------------------------------------------------------------ errors


@pytest.mark.parametrize(("name", "near"), [("H20O", "h200"), ("a10", "a100"), ("4090", "rtx4090")])
def test_an_unknown_name_is_met_with_the_nearest_and_all(name: str, near: str):
    with pytest.raises(OptionError, match=f"Did you mean '{near}'") as caught:
        load(name)
    assert all(known in str(caught.value) for known in [*NAMES, "calibrate"])


def test_a_name_like_no_other_gets_no_suggestion():
    with pytest.raises(OptionError, match="unknown hardware profile 'xyzzy'") as caught:
        load("xyzzy")
    assert "Did you mean" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path):
    for path in (tmp_path / "none", str(tmp_path / "none.json")):
        with pytest.raises(OptionError, match=r"none.*No such file"):
            load(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("not json", "bad.json: Invalid JSON"),
        (changed(memory_bytes=-1), "field 'memory_bytes': Input should be greater than 0"),
        (changed(launch_seconds="fast"), "field 'launch_seconds'"),
        (changed(wings=2), "field 'wings': Extra inputs"),
        (changed(intra_node={"bandwidth": 1.0}), r"field 'intra_node\.latency': Field required"),
        (changed(sustained={"matmul": 1.2, "memory": 1, "links": 1}), r"'sustained\.matmul'"),
        (changed(memory_bandwidth=float("inf")), "field 'memory_bandwidth'"),
    ],
)
def test_a_bad_file_is_told_by_field(text: str, message: str, tmp_path: Path):
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(OptionError, match=message):
        load(path)


def test_what_cannot_be_written_is_an_error(tmp_path: Path):
    with pytest.raises(OptionError, match="cannot write hardware profile"):
        save(load("cpu"), tmp_path / "no" / "such" / "folder.json")


def test_a_profile_is_a_value():
    a = load("cpu")
    assert Hardware.model_validate_json(a.model_dump_json()) == a
