"""Sections that options share with DeepSpeed's configs: ``offload_param`` and its like, ``bf16``, ``fp16``."""

import difflib
import warnings
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from zero_runtime.ir.plan import Tier

_TIERS = {"none": Tier.DEVICE, "cpu": Tier.HOST, "nvme": Tier.NVME}
_COUNTS = ("buffer_size", "max_in_cpu")


class Section(BaseModel):
    """What all sections have in common."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    device: Literal["none", "cpu", "nvme"] = "none"
    """Where the section's subject is between its uses."""

    nvme_path: str | tuple[str, ...] | list[str] | None = None
    """A folder, or several that share every tensor, for ``"nvme"``; each rank needs one on a local disk."""

    pin_memory: bool = True
    """Whether host memory is pinned, where there is a GPU."""

    @field_validator("nvme_path")
    @classmethod
    def _named(cls, value: Any) -> Any:
        return refuse_empty(value)

    @property
    def tier(self) -> Tier:
        """``device``, as the runtime calls it."""
        return _TIERS[self.device]

    @property
    def folders(self) -> tuple[str, ...]:
        """``nvme_path``, however it was written."""
        return folders_of(self.nvme_path)


class OffloadParam(Section):
    """Where parameter shards live: at stage 3 only."""

    buffer_count: int = Field(default=5, ge=1)
    """The most shards in host memory on their way from NVMe."""

    buffer_size: int | None = Field(default=None, ge=1)
    """Taken for compatibility: buffers have exactly the size of what they hold."""

    max_in_cpu: int = Field(default=0, ge=0)
    """Of parameters on NVMe, the elements a rank that stay in host memory all the same."""

    @field_validator(*_COUNTS, mode="before")
    @classmethod
    def _whole(cls, value: Any) -> Any:
        return int(value) if isinstance(value, float) and value.is_integer() else value


class OffloadOptimizer(Section):
    """Where optimizer state, and reduced gradients, live; the optimizer then works on the host."""

    buffer_count: int = Field(default=4, ge=1)
    """The most buckets of optimizer state in host memory on their way from NVMe and back; two at least."""

    pipeline_read: bool = False
    """Taken for compatibility: reads always overlap updates."""

    pipeline_write: bool = False
    """Taken for compatibility: writes always overlap updates."""

    fast_init: bool = False
    """Taken for compatibility: optimizer state is born where it lives."""

    ratio: float = Field(default=1.0, ge=0.0, le=1.0)
    """The share that is offloaded; the rest stays on the device."""

    super_offload: bool = False
    """Refused where it is on: a mode for one kind of machine."""

    cpuadam_cores_perc: float = Field(default=0.8, gt=0.0, le=1.0)
    """Taken for compatibility: updates use ``torch.get_num_threads()`` threads."""

    @field_validator("ratio", "cpuadam_cores_perc", mode="before")
    @classmethod
    def _float(cls, value: Any) -> Any:
        return float(value) if type(value) is int else value

    @field_validator("super_offload")
    @classmethod
    def _refuse(cls, value: bool) -> bool:
        if value:
            raise ValueError(
                "super_offload is not supported; update_in_backward overlaps updates with backward"
            )
        return value


class OffloadActivations(Section):
    """Where tensors that forward saves for backward are in between."""

    min_bytes: int = Field(default=1 << 20, ge=0)
    """Smaller ones stay."""

    @field_validator("min_bytes", mode="before")
    @classmethod
    def _whole(cls, value: Any) -> Any:
        return int(value) if isinstance(value, float) and value.is_integer() else value


def folders_of(path: Any) -> tuple[str, ...]:
    """``nvme_path`` as a tuple of folders."""
    return (path,) if isinstance(path, str) else tuple(path or ())


def refuse_empty(path: Any) -> Any:
    """``nvme_path``, where every folder in it has a name: none would be the working directory.

    Raises:
        ValueError: one has not.
    """
    if path is not None and not all(folders_of(path) or ("",)):
        raise ValueError(f"expected a folder, or a list of folders, got {path!r}")
    return path


# ------------------------------------------------------------------------------ precision


class _Bf16(BaseModel):
    """Names and defaults as DeepSpeed documents them."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    enabled: bool = False


class _Fp16(_Bf16):
    auto_cast: bool = False
    loss_scale: float = Field(default=0.0, ge=0)
    initial_scale_power: int = Field(default=16, ge=0)
    loss_scale_window: int = Field(default=1000, gt=0)
    hysteresis: int = Field(default=2, gt=0)
    consecutive_hysteresis: bool = False
    min_loss_scale: float = Field(default=1.0, gt=0)


def precision_section(name: str, section: Mapping[str, Any]) -> bool:
    """Whether a ``bf16`` or ``fp16`` section turns master weights on.

    Raises:
        ValueError: a key that the section does not have, or a value of the wrong kind.
    """
    kind = _Fp16 if name == "fp16" else _Bf16
    try:
        parsed = kind.model_validate(dict(section))
    except ValidationError as error:
        raise ValueError(_complaint(name, kind, error)) from None
    if isinstance(parsed, _Fp16) and parsed.enabled:
        _advise(parsed, section)
    return parsed.enabled


def _advise(section: _Fp16, given: Mapping[str, Any]) -> None:
    if section.auto_cast:
        raise ValueError(
            "fp16.auto_cast: cast the inputs yourself, or train a float32 model under torch.autocast"
        )
    if set(given) <= {"enabled"}:
        return
    scaler = f"init_scale=2.0**{section.initial_scale_power}, growth_interval={section.loss_scale_window}"
    if section.loss_scale:  # a fixed scale: one that never grows
        scaler = f"init_scale={section.loss_scale}, growth_interval=2**31 - 1"
    warnings.warn(
        "zero_compile leaves the loss scale of option 'fp16' to your loop. The same as this section: "
        f"scaler = torch.amp.GradScaler(device, {scaler}), then scaler.scale(loss).backward(), "
        "scaler.step(optimizer) and scaler.update().",
        UserWarning,
        stacklevel=2,
    )


def _complaint(name: str, kind: type[_Bf16], error: ValidationError) -> str:
    first = error.errors()[0]
    key = str(first["loc"][0])
    if key in kind.model_fields:
        return f"{name}.{key}: {first['msg']} (got {first['input']!r})"
    near = difflib.get_close_matches(key, kind.model_fields, n=1, cutoff=0.4)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"unknown key {name}.{key}.{hint} Valid keys: {', '.join(sorted(kind.model_fields))}."
