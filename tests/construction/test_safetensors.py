"""Headers of safetensors files: whatever the format's own reader refuses is an error that says what is wrong."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from zero_compile.construction.safetensors import tensors_at
from zero_runtime.errors import OptionError


def written(folder: Path, header: Any, data: bytes = bytes(range(32)), length: int = -1) -> Path:
    """A file with this header (text, or what becomes it), which claims to have so many bytes."""
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    path = folder / "model.safetensors"
    claimed = len(text) if length < 0 else length
    path.write_bytes(claimed.to_bytes(8, "little") + text + data)
    return path


def entry(dtype: Any = "F32", shape: Any = (4,), offsets: Any = (0, 16)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


#: The other half of the data.
REST = entry(offsets=(16, 32))

WRONG = {
    "overlap": ({"a": entry(), "b": entry(offsets=(12, 28))}, "b overlaps with a"),
    "same place": ({"a": entry(), "b": entry()}, "overlaps with"),
    "gap": ({"a": entry(), "b": entry(shape=[3], offsets=(20, 32))}, "b leaves a gap behind a"),
    "gap at first": ({"a": REST}, "a leaves a gap behind the header"),
    "negative offset": ({"a": entry(offsets=(-4, 12)), "b": REST}, "-4 is no count"),
    "negative shape": ({"a": entry(shape=[-4]), "b": REST}, "a has shape .* -4 is no count"),
    "backwards": ({"a": entry(offsets=(16, 0)), "b": REST}, "a of shape .* takes 16 bytes"),
    "outside": (
        {"a": entry(), "b": entry(shape=[8], offsets=(16, 48))},
        "ends within the tensor b",
    ),
    "far outside": (
        {"a": entry(shape=[1 << 60], offsets=(0, 1 << 62))},
        "ends within the tensor a",
    ),
    "left over": ({"a": entry()}, r"16 bytes behind its last tensor \(a\)"),
    "shape too large": (
        {"a": entry(shape=[5]), "b": REST},
        "a of shape .* takes 20 bytes, .* hold 16",
    ),
    "wrong dtype": ({"a": entry("F64"), "b": REST}, "a of shape .* in F64 takes 32 bytes"),
    "unknown dtype": ({"a": entry("F31"), "b": REST}, "a has dtype 'F31', which is not known"),
    "dtype is no name": ({"a": entry(["F32"]), "b": REST}, "a lacks a dtype, a shape or"),
    "no dtype": ({"a": {"shape": [4], "data_offsets": [0, 16]}, "b": REST}, "a lacks a dtype"),
    "no offsets": ({"a": {"dtype": "F32", "shape": [4]}, "b": REST}, "a lacks a dtype"),
    "one offset": ({"a": entry(offsets=[0]), "b": REST}, "a lacks a dtype"),
    "no shape": ({"a": {"dtype": "F32", "data_offsets": [0, 16]}, "b": REST}, "a lacks a dtype"),
    "shape is a number": ({"a": entry(shape=4), "b": REST}, "a lacks a dtype"),
    "a fraction": ({"a": entry(shape=[4.0]), "b": REST}, "4.0 is no count"),
    "true": ({"a": entry(shape=[True, 4]), "b": REST}, "True is no count"),
    "no entry": ({"a": 1, "b": REST}, "a lacks a dtype"),
    "twice": (
        f'{{"a": {json.dumps(entry())}, "a": {json.dumps(REST)}}}',
        "the name 'a' stands there twice",
    ),
    "a list": ([], "is no safetensors file or index: list"),
    "cut short": ('{"a": {"dtype": "F3', "is no safetensors file or index"),
    "deep": ("[" * 100_000, "is no safetensors file or index"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_header_that_cannot_be_right_is_an_error_that_says_what(
    tmp_path: Path, case: str
) -> None:
    header, message = WRONG[case]
    path = written(tmp_path, header)
    with pytest.raises(OptionError, match=message) as caught:
        tensors_at(path)
    assert str(path) in str(caught.value)
    if case != "deep":
        with pytest.raises(Exception, match=r"header|Metadata|deserializing"):
            safe_open(path, "pt")


@pytest.mark.parametrize("length", [3, 1 << 20, 1 << 32, (1 << 64) - 1])
def test_a_header_of_another_length_than_it_claims_is_refused(tmp_path: Path, length: int) -> None:
    path = written(tmp_path, {"a": entry(), "b": REST}, length=length)
    with pytest.raises(OptionError, match="is no safetensors file"):
        tensors_at(path)


def test_a_header_beyond_the_limit_of_the_format_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write((1 << 30).to_bytes(8, "little"))
        file.truncate(2 << 30)  # of which the disk holds nothing
    with pytest.raises(OptionError, match="has no end, or is too long"):
        tensors_at(path)


def test_tensors_of_any_order_size_and_alignment_are_read(tmp_path: Path) -> None:
    header = {
        "__metadata__": {"format": "pt"},
        "last": entry("F32", [2, 3], [8, 32]),
        "odd": entry("U8", [3], [0, 3]),
        "unaligned": entry("BF16", [], [3, 5]),
        "none": entry("F32", [0, 7], [5, 5]),
        "three": entry("I8", [3, 1], [5, 8]),
    }
    path = written(tmp_path, header)
    wanted = load_file(path)
    found = tensors_at(path)
    assert found.keys() == wanted.keys()
    for name, stored in found.items():
        out = torch.empty(stored.numel, dtype=stored.dtype)
        stored.read_into(out)
        assert torch.equal(out.view(torch.uint8), wanted[name].flatten().view(torch.uint8))


@pytest.mark.parametrize(
    "index", [{}, {"weight_map": []}, {"weight_map": {"a": 1}}, {"weight_map": {"a": ["b"]}}]
)
def test_an_index_without_files_is_refused(tmp_path: Path, index: dict[str, Any]) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps(index))
    with pytest.raises(OptionError, match="is no index: it lacks a weight_map"):
        tensors_at(path)


def test_an_index_that_names_a_missing_file_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "part.safetensors")
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {"a": "part.safetensors", "b": "gone.safetensors"}}))
    with pytest.raises(OptionError, match=r"gone\.safetensors is no safetensors file"):
        tensors_at(path)
