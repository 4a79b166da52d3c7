"""DeepSpeed's ``bf16`` and ``fp16`` sections."""

import difflib
import warnings
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError


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
