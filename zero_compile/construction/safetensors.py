"""Reading parts of tensors from safetensors files, without reading the rest.

A file is a header's length (8 bytes, little-endian), the header (JSON: name to dtype, shape and
``data_offsets``, bytes ``[begin, end)`` counted from the header's end) and the data, each tensor row-major:
https://huggingface.co/docs/safetensors.
"""

import hashlib
import json
import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from zero_runtime.errors import OptionError, ZeroError

#: Bytes that are in memory at once beside what they are read into.
PIECE = 16 << 20

#: Bytes; the limit of the format.
_LONGEST_HEADER = 100_000_000

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class Stored:
    """One tensor in a file: ``offset`` is its first byte's place in it."""

    path: Path
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        """Elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.numel * self.dtype.itemsize

    def read_into(self, target: torch.Tensor, start: int = 0) -> None:
        """Fill a flat tensor with elements from ``start`` on, cast to its dtype. Not collective.

        Raises:
            ZeroError: the file ends before.
        """
        step = max(1, PIECE // self.dtype.itemsize)
        with self.path.open("rb", buffering=0) as file:
            for first in range(0, target.numel(), step):
                piece = target[first : first + step]
                piece.copy_(self._read(file.fileno(), start + first, piece.numel()))

    def digest(self, *, ends: int = 1024) -> int:
        """64 bits that tell this tensor from another, without reading all of it.

        Of its dtype and shape, and of so many elements at its beginning and at its end.
        """
        found = hashlib.blake2b(f"{self.dtype} {self.shape}".encode(), digest_size=8)
        count = min(ends, self.numel)
        with self.path.open("rb", buffering=0) as file:
            for start in (0, self.numel - count):
                found.update(self._bytes(file.fileno(), start, count))
        return int.from_bytes(found.digest())

    def _read(self, descriptor: int, start: int, count: int) -> torch.Tensor:
        data = self._bytes(descriptor, start, count)
        return torch.frombuffer(data, dtype=self.dtype) if count else torch.empty(0)

    def _bytes(self, descriptor: int, start: int, count: int) -> bytearray:
        """Elements ``start`` to ``start + count`` as they are stored."""
        data = bytearray(count * self.dtype.itemsize)
        view, done = memoryview(data), 0
        while done < len(data):
            at = self.offset + start * self.dtype.itemsize + done
            got = os.preadv(descriptor, [view[done:]], at)
            if not got:
                raise ZeroError(f"{self.path} ends within the tensor {self.name}: it is cut short")
            done += got
        return data


def tensors_at(checkpoint: str | os.PathLike[str]) -> dict[str, Stored]:
    """The tensors of a checkpoint, by name: a file, an index of several, or a folder with either.

    Raises:
        OptionError: there is no checkpoint in that place, or a file of it is missing, is none, or has a header
            that cannot be right.
    """
    found: dict[str, Stored] = {}
    for path, wanted in _files(Path(checkpoint)):
        stored = {tensor.name: tensor for tensor in _header(path)}
        missing = set(wanted) - stored.keys()
        if missing:
            raise OptionError(
                f"{path} lacks {', '.join(sorted(missing))}, which its index says it has"
            )
        found |= {name: stored[name] for name in wanted} if wanted else stored
    return found


def _files(checkpoint: Path) -> Iterator[tuple[Path, list[str]]]:
    """Files, and the names to take from each; no names: all."""
    if checkpoint.is_dir():
        checkpoint = _in_folder(checkpoint)
    if not checkpoint.is_file():
        raise OptionError(f"{checkpoint}: no such checkpoint")
    if checkpoint.suffix != ".json":
        yield checkpoint, []
        return
    names: dict[str, list[str]] = {}
    for name, file in _weight_map(checkpoint).items():
        names.setdefault(file, []).append(name)
    for file, wanted in names.items():
        yield checkpoint.parent / file, wanted


def _in_folder(folder: Path) -> Path:
    """The one index, or else the one file."""
    for pattern in ("*.safetensors.index.json", "*.safetensors"):
        found = sorted(folder.glob(pattern))
        if len(found) > 1:
            some = ", ".join(path.name for path in found[:4])
            raise OptionError(f"{folder} holds several checkpoints ({some}): name one")
        if found:
            return found[0]
    raise OptionError(f"{folder} holds no *.safetensors.index.json and no *.safetensors file")


def _header(path: Path) -> list[Stored]:
    if not path.is_file():
        raise OptionError(f"{path} is no safetensors file: there is no such file")
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(size - 8, _LONGEST_HEADER):
                raise OptionError(
                    f"{path} is no safetensors file: its header of {length} bytes has no end, or is too long"
                )
            text = file.read(length)
    except (OSError, struct.error) as error:
        raise OptionError(f"{path} is no safetensors file: {error}") from error
    data = 8 + length
    entries = _json(text, path).items()
    found = [_stored(path, *entry, data) for entry in entries if entry[0] != "__metadata__"]
    _refuse_gaps(path, found, data, size)
    return found


def _stored(path: Path, name: str, entry: Any, data: int) -> Stored:
    """What the header says of one tensor; the data begins at byte ``data`` of the file."""
    match entry:
        case {"dtype": str(kind), "shape": [*shape], "data_offsets": [begin, end]}:
            pass
        case _:
            raise OptionError(f"{path}: {name} lacks a dtype, a shape or its two data_offsets")
    if kind not in _DTYPES:
        raise OptionError(f"{path}: {name} has dtype {kind!r}, which is not known")
    for number in (*shape, begin, end):
        if type(number) is not int or number < 0:
            raise OptionError(
                f"{path}: {name} has shape {shape} and data_offsets {[begin, end]}: {number!r} is no count"
            )
    stored = Stored(path, name, _DTYPES[kind], tuple(shape), data + begin)
    if stored.nbytes != end - begin:
        raise OptionError(
            f"{path}: {name} of shape {shape} in {kind} takes {stored.nbytes} bytes, and its data_offsets "
            f"{[begin, end]} hold {end - begin}"
        )
    return stored


def _refuse_gaps(path: Path, tensors: Iterable[Stored], data: int, size: int) -> None:
    """By the format the tensors follow one another without gaps, from the header to the file's end."""
    end, before = data, "the header"
    for tensor in sorted(tensors, key=lambda tensor: (tensor.offset, tensor.nbytes)):
        if tensor.offset != end:
            what = "overlaps with" if tensor.offset < end else "leaves a gap behind"
            raise OptionError(
                f"{path}: {tensor.name} {what} {before}: it begins at byte {tensor.offset - data} of the "
                f"data, where {end - data} was expected"
            )
        end, before = end + tensor.nbytes, tensor.name
        if end > size:
            raise OptionError(f"{path} ends within the tensor {tensor.name}: it is cut short")
    if end < size:
        raise OptionError(f"{path} has {size - end} bytes behind its last tensor ({before})")


def _weight_map(path: Path) -> dict[str, str]:
    """Which file has which tensor, of an index."""
    found = _json(path.read_bytes(), path).get("weight_map")
    if not isinstance(found, dict) or not all(isinstance(file, str) for file in found.values()):
        raise OptionError(f"{path} is no index: it lacks a weight_map of names to files")
    return found


def _json(text: bytes, path: Path) -> dict[str, Any]:
    try:
        read = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise OptionError(f"{path} is no safetensors file or index: {error}") from error
    if not isinstance(read, dict):
        raise OptionError(f"{path} is no safetensors file or index: {type(read).__name__}")
    return read


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, of whose equal names the last one would otherwise win."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the name {max(names, key=names.count)!r} stands there twice")
    return found
