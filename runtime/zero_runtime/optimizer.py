"""Stock optimizers on partitioned parameters: during ``step()`` each parameter is its own flat shard."""

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from zero_runtime.errors import UnsupportedError
from zero_runtime.session import Session, session_of

Closure = Callable[[], Any]

#: Optimizers whose update of an element depends on that element alone.
ELEMENTWISE: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)


class StepHooks:
    """Makes partitioned parameters shards before any optimizer's step, and brings them back after."""

    def __init__(self) -> None:
        self._under_way: list[tuple[torch.optim.Optimizer, set[Session]]] = []
        self._handles: list[Any] = []

    def install(self) -> None:
        """Hook every optimizer of the process. Idempotent."""
        if not self._handles:
            self._handles.append(register_optimizer_step_pre_hook(self.before_step))
            self._handles.append(register_optimizer_step_post_hook(self.after_step))

    def before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Called by torch before ``step``; wraps a closure, which must meet whole parameters."""
        sessions = {session for session, _ in _partitioned(optimizer)}
        if not sessions:
            return None
        refuse_unless_elementwise(optimizer)
        self._under_way.append((optimizer, sessions))
        _begin(optimizer)
        closure = _closure_of(args, kwargs)
        return (
            None if closure is None else ((optimizer, _outside(optimizer, sessions, closure)), {})
        )

    def after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Called by torch after ``step``; steps that ended in an exception are dropped on the way."""
        while any(stepping is optimizer for stepping, _ in self._under_way):
            _, sessions = self._under_way.pop()
            _end(sessions)


HOOKS = StepHooks()


def _begin(optimizer: torch.optim.Optimizer) -> None:
    for session, parameter in list(_partitioned(optimizer)):
        _cut_state(optimizer, session, parameter)
        session.begin_step([parameter])


def _end(sessions: Iterable[Session]) -> None:
    for session in sessions:
        session.end_step()


def refuse_unless_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Raise unless the optimizer's update works on flat pieces of parameters.

    Raises:
        UnsupportedError: it does not, or nobody knows.
    """
    kind = type(optimizer)
    known = {_update_of(base) for base in ELEMENTWISE if isinstance(optimizer, base)}
    if _update_of(kind) in known:
        return
    allowed = ", ".join(k.__name__ for k in ELEMENTWISE)
    raise UnsupportedError(
        f"{kind.__name__} is not known to be elementwise: its update of one element may depend on "
        "others (a norm, a factored statistic, a matrix), which is wrong on the flat shards that "
        f"zero3 steps on. Elementwise and supported: {allowed}."
    )


def _update_of(kind: type[torch.optim.Optimizer]) -> Any:
    """The class's ``step`` without the wrapper that torch puts around it at the first instance."""
    return inspect.unwrap(kind.step)


def _partitioned(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Session, nn.Parameter]]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            session = session_of(parameter)
            if session is not None:
                yield session, parameter


def _cut_state(optimizer: torch.optim.Optimizer, session: Session, parameter: nn.Parameter) -> None:
    """State made before the parameter was partitioned (or loaded whole) is cut to this rank's part."""
    state = optimizer.state.get(parameter)
    if not state:
        return
    bucket, slot = session.entry(parameter).place
    cut = (len(bucket.plan.owned(slot, bucket.group.rank)),)

    def is_whole(value: object) -> bool:
        return (
            isinstance(value, torch.Tensor)
            and value.shape == slot.shape != cut
            and slot.shape != ()
        )

    for key, value in state.items():
        if key != "step" and is_whole(value):
            state[key] = bucket.part_of(slot, value).clone()


def _closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Closure | None:
    # args[0] is the optimizer itself
    closure = kwargs.get("closure") or (args[1] if len(args) > 1 else None)
    return closure if callable(closure) else None


def _outside(optimizer: torch.optim.Optimizer, sessions: set[Session], closure: Closure) -> Closure:
    """The closure runs the model, so it must meet partitioned parameters, not shards."""

    def run() -> Any:
        _end(sessions)
        try:
            return closure()
        finally:
            _begin(optimizer)

    return run
