"""What a machine can do, as data: the profiles shipped in ``zero_compile/profiles`` and a user's own.

A profile describes one rank's device, its links and its share of a node. Rates are per rank and per
direction. Planning reads a profile and never a clock, so ranks that name the same one plan alike.
"""

import difflib
from collections.abc import Sequence
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from zero_runtime.errors import OptionError

_FROZEN = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Link(BaseModel):
    """A way for bytes, in one direction: ``bandwidth`` bytes/s, and ``latency`` seconds a message."""

    model_config = _FROZEN

    bandwidth: float = Field(gt=0)
    latency: float = Field(ge=0)


class Peaks(BaseModel):
    """Dense matrix multiplication, FLOP/s, by the dtype of its inputs; sums are float32.

    ``float32`` is what TF32 tensor cores reach where there are any, which needs
    ``torch.set_float32_matmul_precision("high")``; a profile's source says so.
    """

    model_config = _FROZEN

    float32: float = Field(gt=0)
    bfloat16: float = Field(gt=0)
    float16: float = Field(gt=0)


class Sustained(BaseModel):
    """Fractions of the stated figures that well-written code reaches; 1 where they were measured."""

    model_config = _FROZEN

    matmul: float = Field(gt=0, le=1)
    memory: float = Field(gt=0, le=1)
    links: float = Field(gt=0, le=1)


class Hardware(BaseModel):
    """One rank's device and what connects it. Bytes, seconds, bytes/s and FLOP/s throughout."""

    model_config = _FROZEN

    name: str = Field(min_length=1)
    source: str
    """Where the figures come from."""

    peaks: Peaks
    sustained: Sustained
    memory_bandwidth: float = Field(gt=0)
    """Bytes/s between the device and its own memory, reads and writes together."""

    memory_bytes: int = Field(gt=0)
    """The device's own memory, of one rank."""

    launch_seconds: float = Field(ge=0)
    """What starting one kernel costs."""

    ranks_per_node: int = Field(gt=0)
    intra_node: Link
    """Between two ranks of a node."""

    inter_node: Link
    """Between nodes: one rank's share of what leaves its node."""

    host_to_device: Link
    device_to_host: Link
    host_memory_bytes: int = Field(gt=0)
    """Memory of one node, which its ranks share."""

    nvme_read: Link
    nvme_write: Link

    def flops_per_second(self, dtype: torch.dtype) -> float:
        """Sustained matmul FLOP/s for inputs of ``dtype``; dtypes without a figure count as float32."""
        name = str(dtype).removeprefix("torch.")
        peak: float = getattr(self.peaks, name, self.peaks.float32)
        return peak * self.sustained.matmul

    @property
    def memory_bytes_per_second(self) -> float:
        """Sustained bytes/s of the device's memory."""
        return self.memory_bandwidth * self.sustained.memory

    def seconds_over(self, link: Link, nbytes: float) -> float:
        """Time of one message of ``nbytes`` over one of this machine's links; nothing takes no time."""
        if nbytes <= 0:
            return 0.0
        return link.latency + nbytes / (link.bandwidth * self.sustained.links)


#: Parts of device names, as CUDA reports them, and their profiles.
_DEVICES = {"H200": "h200", "H100": "h100", "A100": "a100", "L40S": "l40s", "4090": "rtx4090"}


def default_for(devices: Sequence[str]) -> str:
    """The profile for parameters on ``devices`` (as torch names them); an unknown GPU counts as an A100."""
    if not any(device.startswith("cuda") for device in devices):
        return "cpu"
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return next((profile for part, profile in _DEVICES.items() if part in name), "a100")


def names() -> list[str]:
    """The profiles that are shipped."""
    return sorted(
        entry.name.removesuffix(".json")
        for entry in _folder().iterdir()
        if entry.name.endswith(".json")
    )


def load(name_or_path: str | Path) -> Hardware:
    """A shipped profile by name, or a profile file: anything with a folder or ``.json`` in it.

    Raises:
        OptionError: no profile is called so (the nearest name is suggested), the file cannot be read,
            or it is not a profile (the message names the field).
    """
    if _is_path(name_or_path):
        return parse(_read(Path(name_or_path)), str(name_or_path))
    if name_or_path not in names():
        raise OptionError(_unknown(str(name_or_path)))
    return parse((_folder() / f"{name_or_path}.json").read_text(), str(name_or_path))


def parse(text: str, origin: str = "text") -> Hardware:
    """A profile from JSON; ``origin`` is what an error calls it.

    Raises:
        OptionError: not JSON, or a field is missing, unknown or out of range.
    """
    try:
        return Hardware.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        where = f"field {field!r}: " if field else ""
        raise OptionError(f"hardware profile {origin}: {where}{first['msg']}") from None


def save(hardware: Hardware, path: str | Path) -> None:
    """Write a profile as JSON that :func:`load` reads.

    Raises:
        OptionError: the file cannot be written.
    """
    try:
        Path(path).write_text(hardware.model_dump_json(indent=2) + "\n")
    except OSError as error:
        reason = error.strerror or error
        raise OptionError(f"cannot write hardware profile {path}: {reason}") from None


def _folder() -> Traversable:
    return files("zero_compile") / "profiles"


def _is_path(given: str | Path) -> bool:
    return isinstance(given, Path) or given.endswith(".json") or len(Path(given).parts) != 1


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OptionError(f"cannot read hardware profile {path}: {reason}") from None


def _unknown(name: str) -> str:
    known = names()
    near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.4)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return (
        f"unknown hardware profile {name!r}.{hint} Valid names: {', '.join(known)}; "
        "or give the path of a .json file, which tools/calibrate.py writes."
    )
