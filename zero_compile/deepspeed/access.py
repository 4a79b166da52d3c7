"""Values, gradients and optimizer state of partitioned parameters, wherever they are kept.

The ``full`` functions speak of the whole parameter; those that read are collective: call them on every
rank. Those that write are given the same value on every rank, which keeps its part. The ``local`` ones
speak of this rank's elements ``[n]``, flat, in the order in which they lie in memory; none of them is
collective, but for the first look at optimizer state that was loaded and had been saved in another layout.
All take ordinary parameters too. Names and arguments are DeepSpeed's.
"""

import torch
from torch import nn

from zero_runtime.eager import state_access
from zero_runtime.errors import OptionError
from zero_runtime.optim.resume import SCALARS


def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor:
    """The parameter's value in float32: of its master weights where it has them. Collective."""
    with torch.no_grad():
        return state_access.full_value(_checked(param))


def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """The gradient in float32, averaged over the ranks; None if there is none. Collective.

    Raises:
        UnsupportedError: it was consumed inside backward (option ``update_in_backward``).
    """
    with torch.no_grad():
        return state_access.full_gradient(_checked(param))


def safe_get_full_optimizer_state(
    param: nn.Parameter, optim_state_key: str, *, optimizer: torch.optim.Optimizer | None = None
) -> torch.Tensor | None:
    """One state of the optimizer, such as ``"exp_avg"``, in its dtype; None without it. Collective.

    States that are one number a parameter (``"step"``) are that number. ``optimizer`` need be given
    only before its first step.

    Raises:
        ZeroError: no optimizer is known.
    """
    with torch.no_grad():
        return state_access.States(_checked(param), optimizer).full(optim_state_key)


def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace the parameter's value, and its float32 master weights.

    Raises:
        OptionError: ``value`` has another shape.
    """
    with torch.no_grad():
        state_access.store_full_value(_checked(param), _whole(param, value))


def safe_set_full_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace the gradient.

    Raises:
        OptionError: ``value`` has another shape.
    """
    with torch.no_grad():
        state_access.store_full_gradient(_checked(param), _whole(param, value))


def safe_set_full_optimizer_state(
    param: nn.Parameter,
    value: torch.Tensor,
    optim_state_key: str,
    *,
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Replace one state of the optimizer.

    Raises:
        OptionError: ``value`` has another shape.
        ZeroError: no optimizer is known, or it keeps no such state.
    """
    if optim_state_key not in SCALARS:
        _whole(param, value)
    with torch.no_grad():
        state_access.States(_checked(param), optimizer).store_full(
            optim_state_key, torch.as_tensor(value)
        )


def safe_get_local_fp32_param(param: nn.Parameter) -> torch.Tensor:
    """This rank's elements ``[n]`` of the parameter in float32, a copy."""
    with torch.no_grad():
        return state_access.local_value(_checked(param))


def safe_get_local_grad(param: nn.Parameter) -> torch.Tensor | None:
    """This rank's elements ``[n]`` of the gradient in float32, a copy; None if there is none.

    Raises:
        UnsupportedError: it was consumed inside backward (option ``update_in_backward``).
    """
    with torch.no_grad():
        return state_access.local_gradient(_checked(param))


def safe_get_local_optimizer_state(
    param: nn.Parameter, optim_state_key: str, *, optimizer: torch.optim.Optimizer | None = None
) -> torch.Tensor | None:
    """This rank's elements ``[n]`` of one state of the optimizer, a copy; None without it.

    Raises:
        ZeroError: no optimizer is known.
    """
    with torch.no_grad():
        return state_access.States(_checked(param), optimizer).local(optim_state_key)


def safe_set_local_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace this rank's elements ``[n]`` of the parameter, and of its float32 master weights.

    Raises:
        OptionError: ``value`` has another length.
        UnsupportedError: the parameter stays whole on every rank (stages 1 and 2).
    """
    with torch.no_grad():
        state_access.store_value(_checked(param), _part(param, value))


def safe_set_local_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace this rank's elements ``[n]`` of the gradient.

    Raises:
        OptionError: ``value`` has another length.
        UnsupportedError: every rank keeps the gradient whole.
    """
    with torch.no_grad():
        state_access.store_gradient(_checked(param), _part(param, value))


def safe_set_local_optimizer_state(
    param: nn.Parameter,
    value: torch.Tensor,
    optim_state_key: str,
    *,
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Replace this rank's elements ``[n]`` of one state of the optimizer.

    Raises:
        OptionError: ``value`` has another length.
        ZeroError: no optimizer is known, or it keeps no such state.
    """
    part = torch.as_tensor(value) if optim_state_key in SCALARS else _part(param, value)
    with torch.no_grad():
        state_access.States(_checked(param), optimizer).store(optim_state_key, part)


def _checked(param: nn.Parameter) -> nn.Parameter:
    if not isinstance(param, nn.Parameter):
        raise OptionError(f"expected a parameter, got {type(param).__name__}")
    return param


def _whole(param: nn.Parameter, value: torch.Tensor) -> torch.Tensor:
    found = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
    if found != tuple(_checked(param).shape):
        raise OptionError(
            f"expected a tensor of the parameter's shape {tuple(param.shape)}, got {found}"
        )
    return value


def _part(param: nn.Parameter, value: torch.Tensor) -> torch.Tensor:
    there = state_access.at_rest(_checked(param))
    count = param.numel() if there is None else state_access.own_numel(there[1])
    if not isinstance(value, torch.Tensor) or value.numel() != count:
        found = value.numel() if isinstance(value, torch.Tensor) else type(value).__name__
        raise OptionError(f"this rank has {count} elements of the parameter, got {found}")
    return value.detach().reshape(-1)
