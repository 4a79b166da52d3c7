"""``Init``'s arguments by DeepSpeed's names, as options of the backend or with a word on what they do."""

import warnings
from typing import Any

from zero_runtime.errors import OptionError, UnsupportedError


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
