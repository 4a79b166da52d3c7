"""One parameter's float32 value, gradient and optimizer state: this rank's elements of them, or all."""

from typing import Any

import torch
from torch import nn

from zero_runtime.errors import UnsupportedError, ZeroError
from zero_runtime.ir.plan import Stage
from zero_runtime.memory.buffers import as_plain
from zero_runtime.optim.resume import SCALARS
from zero_runtime.optim.step_hooks import HOOKS
from zero_runtime.session import Session, session_of
from zero_runtime.sharding.parameter_state import Entry, ParameterState
from zero_runtime.sharding.sharded_gradient import ShardedGradient, SpentGradient


def at_rest(parameter: nn.Parameter) -> tuple[Session, Entry] | None:
    """The session and entry of a parameter in a bucket; None where every rank has its own, whole.

    Raises:
        ZeroError: the parameter is held whole by a block of ``GatheredParameters``.
    """
    session = session_of(parameter)
    if session is None:
        return None
    session.finish_refresh()
    session.gathered_views.settle()
    entry = session.entry(parameter)
    if entry.state is ParameterState.HELD and not entry.pinned:
        raise ZeroError(
            f"{entry.name} is held whole by a block of GatheredParameters: leave it first"
        )
    return (session, entry) if entry.placed else None


# ------------------------------------------------------------------------------ values


def local_value(parameter: nn.Parameter) -> torch.Tensor:
    """This rank's elements ``[n]`` in float32 (float64 of a float64 parameter), a copy."""
    found = at_rest(parameter)
    if found is None:
        return _wide(as_plain(parameter).detach().clone()).reshape(-1)
    bucket, slot = found[1].place
    return _wide(bucket.exact(slot))


def full_value(parameter: nn.Parameter) -> torch.Tensor:
    """As :func:`local_value`, all elements. Collective."""
    found = at_rest(parameter)
    if found is None:
        return _wide(as_plain(parameter).detach().clone())
    return _gathered(*found, local_value(parameter), "value")


def store_value(parameter: nn.Parameter, part: torch.Tensor) -> None:
    """Replace this rank's elements.

    Raises:
        UnsupportedError: every rank holds the parameter whole, and would not see it.
    """
    found = at_rest(parameter)
    if found is None:
        as_plain(parameter).detach().copy_(part.view(parameter.shape))
        return
    session, entry = found
    if session.stage is not Stage.PARAMETERS:
        raise UnsupportedError(
            f"{entry.name} stays whole on every rank at stage {int(session.stage)}: replace all of it, with "
            "safe_set_full_fp32_param"
        )
    _replace(session, entry, part)


def store_full_value(parameter: nn.Parameter, whole: torch.Tensor) -> None:
    """Replace all elements, of which each rank keeps its part."""
    found = at_rest(parameter)
    if found is None or found[1].place.bucket.stays_whole:
        as_plain(parameter).detach().copy_(whole)
    if found is not None:
        _replace(*found, part_of(found[1], whole))


def _replace(session: Session, entry: Entry, part: torch.Tensor) -> None:
    bucket, slot = entry.place
    session.gather_cache.drop()
    session.gathered_views.outdate([entry])
    bucket.store_exact(slot, part)


# ------------------------------------------------------------------------------ gradients


def local_gradient(parameter: nn.Parameter) -> torch.Tensor | None:
    """This rank's elements ``[n]`` of the gradient in float32 (or float64), a copy; None without one.

    Raises:
        UnsupportedError: the gradient was consumed inside backward.
    """
    found, gradient = at_rest(parameter), parameter.grad
    if isinstance(gradient, SpentGradient):
        raise UnsupportedError(
            f"the gradient of {gradient.place.slot.name} was consumed by its update inside backward: turn "
            "the option 'update_in_backward' off"
        )
    if gradient is None or found is None:
        return None if gradient is None else _wide(gradient.detach().clone()).reshape(-1)
    if isinstance(gradient, ShardedGradient):
        return _wide(gradient.local.clone())
    return _wide(part_of(found[1], gradient.detach()).clone())


def full_gradient(parameter: nn.Parameter) -> torch.Tensor | None:
    """As :func:`local_gradient`, all elements. Collective."""
    found, own = at_rest(parameter), local_gradient(parameter)
    if own is None or found is None:
        return None if own is None else own.view(parameter.shape)
    return _gathered(*found, own, "gradient")


def store_gradient(parameter: nn.Parameter, part: torch.Tensor) -> None:
    """Replace this rank's elements of the gradient; there need not be one.

    Raises:
        UnsupportedError: every rank keeps the gradient whole, and would not see it.
    """
    found = at_rest(parameter)
    if found is None or found[0].stage is Stage.OPTIMIZER:
        raise UnsupportedError(
            "every rank keeps this gradient whole: replace all of it, with safe_set_full_grad"
        )
    found[1].set_gradient(part)


def store_full_gradient(parameter: nn.Parameter, whole: torch.Tensor) -> None:
    """Replace the whole gradient, of which each rank keeps its part."""
    found = at_rest(parameter)
    if found is None or found[0].stage is Stage.OPTIMIZER:
        parameter.grad = whole.to(parameter.device, parameter.dtype, copy=True)
    else:
        found[1].set_gradient(part_of(found[1], whole))


# ------------------------------------------------------------------------------ optimizer state


class States:
    """The optimizer state of one parameter, wherever it lives."""

    def __init__(self, parameter: nn.Parameter, optimizer: torch.optim.Optimizer | None) -> None:
        """Find the parameter's optimizer. Collective if its state was loaded, and saved in another layout.

        Raises:
            ZeroError: no optimizer has stepped on it yet, and none was given.
        """
        known = optimizer or HOOKS.optimizer_of(parameter)
        if known is None:
            raise ZeroError(
                "no optimizer has stepped on this parameter since it was partitioned: step once, or pass "
                "optimizer="
            )
        self._parameter = parameter
        self._found = at_rest(parameter)
        HOOKS.settle(known)
        self._offloaded = HOOKS.offloaded_state(known)
        self._state: dict[str, Any] = known.state.get(parameter, {})

    def local(self, name: str) -> torch.Tensor | None:
        """This rank's elements ``[n]`` of the state, or its single number; a copy. None without it."""
        if self._offloaded is not None and self._found is not None:
            kept = self._offloaded.read_state(self._found[1], name)
            if kept is not None:
                return kept
        value = self._state.get(name)
        if value is None:
            return None
        copy = torch.as_tensor(value).detach().clone()
        if name in SCALARS:
            return copy
        whole = self._found is not None and self._is_whole(copy)
        return part_of(self._entry, copy).clone() if whole else copy.reshape(-1)

    def full(self, name: str) -> torch.Tensor | None:
        """As :meth:`local`, all elements. Collective."""
        own = self.local(name)
        if own is None or name in SCALARS:
            return own
        if self._found is None:
            return own.view(self._parameter.shape)
        return _gathered(*self._found, own, f"state {name}")

    def store(self, name: str, part: torch.Tensor) -> None:
        """Replace this rank's elements, or its single number.

        Raises:
            ZeroError: there is no such state.
        """
        there = self._offloaded if self._found is not None else None
        if there is not None and there.write_state(self._entry, name, part):
            return
        value = self._state.get(name)
        if value is None:
            known = ", ".join(map(str, self._state)) or "none yet"
            raise ZeroError(f"the optimizer keeps no state {name!r} for this parameter: {known}")
        if not isinstance(value, torch.Tensor):
            self._state[name] = type(value)(part.item())
        elif name not in SCALARS and self._found is not None and self._is_whole(value):
            self._state[name] = part.to(value.dtype).clone()
        else:
            value.copy_(part.view(value.shape))

    def store_full(self, name: str, whole: torch.Tensor) -> None:
        """As :meth:`store`, given all elements."""
        cut = self._found is not None and name not in SCALARS
        self.store(name, part_of(self._entry, whole) if cut else whole)

    @property
    def _entry(self) -> Entry:
        assert self._found is not None
        return self._found[1]

    def _is_whole(self, value: torch.Tensor) -> bool:
        """State that was loaded whole, and is cut at the next step."""
        return tuple(value.shape) == self._entry.place.slot.shape != (own_numel(self._entry),)


def part_of(entry: Entry, whole: torch.Tensor) -> torch.Tensor:
    """This rank's elements ``[n]`` of a tensor of the parameter's shape."""
    bucket, slot = entry.place
    return bucket.part_of(slot, whole)


def own_numel(entry: Entry) -> int:
    """How many elements of the parameter this rank has."""
    bucket, slot = entry.place
    return len(bucket.plan.owned(slot, bucket.group.rank))


def _gathered(session: Session, entry: Entry, own: torch.Tensor, what: str) -> torch.Tensor:
    session.agree(f"a gather of the {what} of {entry.name}")
    bucket, slot = entry.place
    return bucket.gather_beside(slot, own)


def _wide(value: torch.Tensor) -> torch.Tensor:
    wide = value.is_floating_point() and value.dtype is not torch.float64
    return value.float() if wide else value
