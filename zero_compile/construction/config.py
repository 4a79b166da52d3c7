"""What ``Init`` is told, by our names or DeepSpeed's, as options of the backend."""

import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zero_runtime.errors import OptionError, UnsupportedError

Config = Mapping[str, Any] | str | os.PathLike[str]

#: Sections of a DeepSpeed config that say how parameters are kept; the first two stand in zero_optimization.
_SECTIONS = ("offload_param", "offload_optimizer", "aio", "bf16", "fp16")


def options_of_config(config: Config) -> dict[str, Any]:
    """The part of a DeepSpeed config, given as a mapping or a path to its JSON, that concerns parameters.

    Values ``"auto"`` are left to whoever resolves them.

    Raises:
        OptionError: the file cannot be read, or is no config.
        UnsupportedError: a stage that keeps parameters whole.
    """
    read = _read(config)
    zero = read.get("zero_optimization", {})
    stage = zero.get("stage", 3)
    if stage not in (3, "auto"):
        raise UnsupportedError(
            f"Init partitions parameters, and the config's zero_optimization says stage {stage}, which keeps "
            "them whole. Set stage 3, or leave Init out (enabled=False)."
        )
    found = {name: zero.get(name, read.get(name)) for name in _SECTIONS}
    return {name: _resolved(value) for name, value in found.items() if value not in (None, "auto")}


def with_remote_device(
    options: dict[str, Any], device: str | None, pin_memory: bool | None
) -> dict[str, Any]:
    """``options`` with DeepSpeed's ``remote_device`` and ``pin_memory`` as a section ``offload_param``.

    Raises:
        OptionError: an unknown device, or another one than the section's.
    """
    section = dict(options.get("offload_param") or {})
    if device not in (None, "none", "cpu", "nvme"):
        raise OptionError(f"remote_device {device!r}: expected 'cpu', 'nvme' or None")
    if device is not None and section.get("device", device) != device:
        raise OptionError(
            f"remote_device {device!r}, and offload_param says {section['device']!r}: give one of them"
        )
    if device is not None:
        section["device"] = device
    if pin_memory is not None and section.get("device", "none") != "none":
        section.setdefault("pin_memory", pin_memory)
    return {**options, "offload_param": section} if section else options


def one_of(what: str, **given: Any) -> dict[str, Any]:
    """The single argument among ``given`` that is not None, by name; empty where all are.

    Raises:
        OptionError: several are given that mean the same: ``what``.
    """
    said = {name: value for name, value in given.items() if value is not None}
    if len(said) > 1:
        raise OptionError(f"Init: {' and '.join(said)} each say {what}: give one of them")
    return said


def notice_ignored(**given: Any) -> None:
    """Say which arguments of DeepSpeed's have nothing to do here."""
    for name, value in given.items():
        if value is not None:
            warnings.warn(
                f"Init: {name} is taken for compatibility and ignored: {_IGNORED[name]}",
                stacklevel=3,
            )


_IGNORED = {
    "mem_efficient_linear": "compiled graphs save no gathered weights for backward",
    "param_swapper": "the session swaps parameters itself",
    "tensor_overrides": "no function of torch is replaced while the model is built",
}


def refuse_unsupported(**given: Any) -> None:
    """Raise for an argument that asks for something that is not there.

    Raises:
        UnsupportedError: names the nearest thing that is.
    """
    for name, value in given.items():
        if value:
            raise UnsupportedError(f"Init: {name} is not supported. {_INSTEAD[name]}")


_INSTEAD = {
    "zero_param_parallel_group": "Shard over fewer ranks, and replicate, with a mesh of two dimensions.",
    "zero_quantized_weights": "Weights are gathered in their own dtype, or in autocast's.",
    "zero_quantized_nontrainable_weights": "Weights are gathered in their own dtype, or in autocast's.",
}


def _read(config: Config) -> Mapping[str, Any]:
    if isinstance(config, Mapping):
        return config
    try:
        read = json.loads(Path(config).read_text())
    except (OSError, TypeError, ValueError) as error:
        raise OptionError(
            f"config {config!r}: expected a mapping or a JSON file: {error}"
        ) from error
    if not isinstance(read, Mapping):
        raise OptionError(f"config {config!r}: expected an object, found {type(read).__name__}")
    return read


def _resolved(section: Any) -> Any:
    if not isinstance(section, Mapping):
        return section
    return {name: value for name, value in section.items() if value != "auto"}
