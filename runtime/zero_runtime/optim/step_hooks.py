"""Stock optimizers on partitioned parameters: during ``step()`` each parameter is its own flat shard."""

import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from zero_runtime.compat import outside_dynamo
from zero_runtime.errors import SwapError, UnsupportedError
from zero_runtime.ir.placement import ON_DEVICE
from zero_runtime.module_hook import ModuleHook
from zero_runtime.optim.lion import Lion
from zero_runtime.optim.offloaded_optimizer import OffloadedOptimizer
from zero_runtime.optim.resume import Resume, cut
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
    Lion,
)


class _Stepping:
    """One ``step()`` under way."""

    def __init__(self, optimizer: torch.optim.Optimizer, hooks: "StepHooks") -> None:
        self.optimizer = optimizer
        self._hooks = hooks
        self._sessions: list[Session] = []
        self._offloaded: OffloadedOptimizer | None = None

    def run(self, closure: Closure | None) -> Any:
        """The stock step on shards, and ours. Returns what the closure does.

        However this ends, parameters and gradients are as they were to the eye.

        Raises:
            SwapError: something could not be read or written.
        """
        step: Any = type(self.optimizer).step
        outside = None if closure is None else self._outside(closure)
        try:
            self._begin()
            loss = step.__wrapped__(self.optimizer, outside)  # what torch calls between its hooks
            if self._offloaded is not None:
                self._offloaded.update()
        except BaseException:
            with suppress(SwapError):  # the first failure is the one to tell
                self._end()
            raise
        self._end()
        for session in self._sessions:
            session.start_refresh()
        return loss

    def _begin(self) -> None:
        """Parameters become shards. A closure may be what partitions them: its forward may be the first."""
        self._sessions = list(dict.fromkeys(session for session, _ in _partitioned(self.optimizer)))
        if not self._sessions:
            return
        refuse_unless_elementwise(self.optimizer)
        for session in self._sessions:
            session.settle()
        self._hooks.settle(self.optimizer)
        self._offloaded = self._hooks.offloaded(self.optimizer, self._sessions)
        for session, parameter in list(_partitioned(self.optimizer)):
            self._take(session, parameter)

    def _take(self, session: Session, parameter: nn.Parameter) -> None:
        entry = session.entry(parameter)
        cut(self.optimizer.state.get(parameter, {}), entry)
        bucket = entry.place.bucket
        if self._offloaded is not None and self._offloaded.takes(bucket):
            session.step_aside(parameter)
        else:
            session.begin_step([parameter])

    def _end(self) -> None:
        """Parameters become whole again, to the eye. Idempotent."""
        for session in self._sessions:
            session.end_step()

    def _outside(self, closure: Closure) -> Closure:
        """The closure runs the model, so it must meet partitioned parameters, not shards."""

        def run() -> Any:
            self._end()
            loss = closure()
            self._begin()
            return loss

        return run


class StepHooks:
    """Does the step of every optimizer with partitioned parameters, in a hook before torch's own."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._last: weakref.WeakKeyDictionary[torch.optim.Optimizer, Any]
        self._last = weakref.WeakKeyDictionary()
        self._inspect: Callable[[torch.optim.Optimizer], None] | None = None
        self._inspected: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._seen: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._offloaded: weakref.WeakKeyDictionary[torch.optim.Optimizer, OffloadedOptimizer]
        self._offloaded = weakref.WeakKeyDictionary()
        self._resumes: weakref.WeakKeyDictionary[torch.optim.Optimizer, Resume]
        self._resumes = weakref.WeakKeyDictionary()

    def install(self, inspect: Callable[[torch.optim.Optimizer], None] | None = None) -> None:
        """Hook every optimizer of the process. Idempotent.

        ``inspect`` is called once for each optimizer, before its first step.
        """
        self._inspect = inspect or self._inspect
        if self._handle is None:
            self._handle = register_optimizer_step_pre_hook(self.before_step)

    @outside_dynamo
    def before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Called by torch before the optimizer's own hooks: puts :meth:`step` behind them.

        So they meet partitioned parameters and gradients, as does all code around ``step()``.
        """
        if self._inspect is not None and optimizer not in self._inspected:
            self._inspect(optimizer)
            self._inspected.add(optimizer)
        earlier = self._last.pop(optimizer, None)
        if earlier is not None:
            earlier.remove()
        if _closure_of(args, kwargs) is not None or any(True for _ in _partitioned(optimizer)):
            self._last[optimizer] = optimizer.register_step_pre_hook(ModuleHook(self.step))

    def step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The last hook before the stock step: does all there is to do, and leaves that one nothing.

        No hook of torch's is told when a step fails. This one is done with it before it returns.
        """
        closure = _closure_of(args, kwargs)
        if not _is_elementwise(optimizer) and not any(True for _ in _partitioned(optimizer)):
            assert closure is not None
            return (optimizer, _refusing(optimizer, closure)), {}
        self._seen.add(optimizer)
        loss = _Stepping(optimizer, self).run(closure)
        return (_idle(optimizer), None if closure is None else lambda: loss), {}

    def offloaded(
        self, optimizer: torch.optim.Optimizer, sessions: Sequence[Session]
    ) -> OffloadedOptimizer | None:
        """What updates the optimizer's buckets off the device; None if it has none."""
        if not any(session.offload.optimizer != ON_DEVICE for session in sessions):
            return None
        part = self.offloaded_part(optimizer)
        return part if part.meet() else None

    def offloaded_part(self, optimizer: torch.optim.Optimizer) -> OffloadedOptimizer:
        """The optimizer's part off the device, whatever is in it yet."""
        if optimizer not in self._offloaded:
            self._offloaded[optimizer] = OffloadedOptimizer(optimizer, self._resume(optimizer))
        return self._offloaded[optimizer]

    def settle(self, optimizer: torch.optim.Optimizer) -> None:
        """Take in state that was loaded, or made before the step. Collective where its layout is another.

        Raises:
            ZeroError: as :meth:`Resume.settle`.
        """
        part, settled = self._offloaded.get(optimizer), self._resume(optimizer).settle()
        if settled and part is not None:
            part.adopt(settled)

    def _resume(self, optimizer: torch.optim.Optimizer) -> Resume:
        if optimizer not in self._resumes:
            self._resumes[optimizer] = Resume(optimizer)
        return self._resumes[optimizer]

    def optimizer_of(self, parameter: nn.Parameter) -> torch.optim.Optimizer | None:
        """An optimizer that has stepped on the parameter; None if none has."""
        for optimizer in self._seen:
            if any(p is parameter for group in optimizer.param_groups for p in group["params"]):
                return optimizer
        return None

    def offloaded_state(self, optimizer: torch.optim.Optimizer) -> OffloadedOptimizer | None:
        """The optimizer's part off the device; None if it has none yet."""
        return self._offloaded.get(optimizer)


def _refusing(optimizer: torch.optim.Optimizer, closure: Closure) -> Closure:
    """A closure after which nothing of the optimizer's may be partitioned."""

    def run() -> Any:
        loss = closure()
        if any(True for _ in _partitioned(optimizer)):
            refuse_unless_elementwise(optimizer)
        return loss

    return run


def _idle(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """An optimizer of the same kind without parameters."""
    idle: torch.optim.Optimizer = object.__new__(type(optimizer))
    idle.__dict__ = {**optimizer.__dict__, "param_groups": []}
    return idle


HOOKS = StepHooks()


def refuse_unless_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Raise unless the optimizer's update works on flat pieces of parameters.

    Raises:
        UnsupportedError: it does not, or nobody knows.
    """
    if _is_elementwise(optimizer):
        return
    allowed = ", ".join(k.__name__ for k in ELEMENTWISE)
    raise UnsupportedError(
        f"{type(optimizer).__name__} is not known to be elementwise: its update of one element may depend on "
        "others (a norm, a factored statistic, a matrix), which is wrong on the flat shards that "
        f"zero3 steps on. Elementwise and supported: {allowed}."
    )


def _is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    known = {_update_of(base) for base in ELEMENTWISE if isinstance(optimizer, base)}
    return _update_of(type(optimizer)) in known


def _update_of(kind: type[torch.optim.Optimizer]) -> Any:
    """The class's ``step`` without the wrapper that torch puts around it at the first instance."""
    return inspect.unwrap(kind.step)


def _partitioned(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Session, nn.Parameter]]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            session = session_of(parameter)
            if session is not None:
                yield session, parameter


def _closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Closure | None:
    # args[0] is the optimizer itself
    closure = kwargs.get("closure") or (args[1] if len(args) > 1 else None)
    return closure if callable(closure) else None
