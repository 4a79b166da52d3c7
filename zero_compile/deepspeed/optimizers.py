"""Optimizers and schedules from the sections of DeepSpeed's config that name them."""

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from zero_compile.config.deepspeed.sections import Optimizer, Scheduler
from zero_compile.deepspeed import schedules
from zero_runtime.errors import OptionError, UnsupportedError
from zero_runtime.optim.step_hooks import ELEMENTWISE

_COMPRESSED = (
    "it averages compressed gradients itself; here gradients are reduced in the compiled graph, before "
    'the optimizer. Use AdamW, and communication_data_type "bf16" to move fewer bytes'
)
_MUP = "it scales each parameter's rate by its width: make it with the mup package and pass it as optimizer="

#: Why optimizers that DeepSpeed has are not here, by their names in lower case.
REFUSED: Mapping[str, str] = {
    "onebitadam": _COMPRESSED,
    "onebitlamb": _COMPRESSED,
    "zerooneadam": _COMPRESSED,
    "lamb": "it needs the norm of each whole parameter, and ranks hold flat pieces of them. Use AdamW",
    "muon": "it orthogonalises whole matrices, and ranks hold flat pieces of them. Use AdamW",
    "muadam": _MUP,
    "muadamw": _MUP,
    "musgd": _MUP,
}

#: Arguments of DeepSpeed's own implementations that change nothing here.
_IMPLEMENTATION = frozenset({"torch_adam", "adam_w_mode", "set_grad_none", "fp32_optimizer_states"})

SCHEDULES: Mapping[str, type[schedules.Schedule]] = {
    kind.__name__: kind
    for kind in (
        schedules.LRRangeTest,
        schedules.OneCycle,
        schedules.WarmupLR,
        schedules.WarmupDecayLR,
        schedules.WarmupCosineLR,
    )
}


def make_optimizer(section: Optimizer, parameters: Iterable[Any]) -> torch.optim.Optimizer:
    """The optimizer that ``section`` describes, for parameters or parameter groups.

    ``Adam`` is AdamW unless ``adam_w_mode`` is false, and weight decay is 0 unless given, as in DeepSpeed.

    Raises:
        OptionError: an unknown type or argument, or a value that the optimizer refuses.
        UnsupportedError: an optimizer whose update is not elementwise, or that communicates itself.
    """
    name = str(section.type)
    kind = _optimizer_type(name, section.params)
    params = dict(section.params)
    if params.pop("bias_correction", True) is not True:
        raise UnsupportedError("optimizer.params.bias_correction: torch's Adam always corrects")
    if "max_grad_norm" in params:
        raise OptionError("optimizer.params.max_grad_norm: give gradient_clipping instead")
    by_torch = params.get("torch_adam", False)
    if kind is torch.optim.AdamW and not by_torch:
        params.setdefault("weight_decay", 0.0)
    if "betas" in params:
        params["betas"] = tuple(params["betas"])
    params = {key: value for key, value in params.items() if key not in _IMPLEMENTATION}
    made: torch.optim.Optimizer = _made(f"optimizer.params of {name}", kind, parameters, params)
    return made


def _optimizer_type(name: str, params: Mapping[str, Any]) -> type[torch.optim.Optimizer]:
    lower = name.lower()
    if lower in REFUSED:
        raise UnsupportedError(f"DeepSpeed config: optimizer.type {name!r}: {REFUSED[lower]}.")
    if lower == "adam" and params.get("adam_w_mode", True):
        return torch.optim.AdamW
    known = {kind.__name__.lower(): kind for kind in ELEMENTWISE}
    if lower in known:
        return known[lower]
    names = ", ".join(sorted(kind.__name__ for kind in ELEMENTWISE))
    raise OptionError(
        f"DeepSpeed config: optimizer.type {name!r} is none of {names}. Another one whose update is "
        "elementwise can be passed as optimizer=."
    )


def make_scheduler(section: Scheduler, optimizer: torch.optim.Optimizer) -> LRScheduler:
    """The schedule that ``section`` describes: one of DeepSpeed's, or of ``torch.optim.lr_scheduler``.

    Raises:
        OptionError: an unknown type or argument, a missing one, or a value that the schedule refuses.
    """
    name = str(section.type)
    kind: Any = SCHEDULES.get(name) or getattr(torch.optim.lr_scheduler, name, None)
    if not (isinstance(kind, type) and issubclass(kind, LRScheduler)):
        near = difflib.get_close_matches(name, SCHEDULES, n=1, cutoff=0.4)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise OptionError(
            f"DeepSpeed config: unknown scheduler.type {name!r}.{hint} DeepSpeed's schedules: "
            f"{', '.join(SCHEDULES)}."
        )
    made: LRScheduler = _made(f"scheduler.params of {name}", kind, optimizer, section.params)
    return made


def _made(where: str, kind: Callable[..., Any], first: Any, params: Mapping[str, Any]) -> Any:
    accepted = list(inspect.signature(kind).parameters.values())[1:]
    names = [parameter.name for parameter in accepted]
    for name in params:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise OptionError(
                f"DeepSpeed config: unknown key {name!r} in {where}.{hint} Valid keys: {', '.join(names)}."
            )
    missing = [p.name for p in accepted if p.default is p.empty and p.name not in params]
    if missing:
        raise OptionError(
            f'DeepSpeed config: {where}: {", ".join(missing)} must be given; "auto" counts as not given'
        )
    try:
        return kind(first, **params)
    except (TypeError, ValueError) as error:
        raise OptionError(f"DeepSpeed config: {where}: {error}") from None
