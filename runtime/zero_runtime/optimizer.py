"""Stock optimizers on partitioned parameters: during ``step()`` each parameter is its own flat shard."""

import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from zero_runtime.collectives import Group
from zero_runtime.compat import outside_dynamo
from zero_runtime.errors import SwapError, UnsupportedError, ZeroError
from zero_runtime.lion import Lion
from zero_runtime.offload import ON_DEVICE
from zero_runtime.offloaded import OffloadedOptimizer
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


PartOf = Callable[[torch.optim.Optimizer, Sequence[Session]], OffloadedOptimizer | None]


class _Stepping:
    """One ``step()`` under way."""

    def __init__(self, optimizer: torch.optim.Optimizer, part: PartOf) -> None:
        self.optimizer = optimizer
        self._part_of = part
        self._sessions: list[Session] = []
        self._offloaded: OffloadedOptimizer | None = None
        self._rescue: Any = None

    def begin(self) -> None:
        """Parameters become shards. Should the step fail, the next module call brings them back.

        A closure may be what partitions them: its forward may be the model's first.

        Raises:
            SwapError: a shard cannot be read; then nothing has become one.
        """
        self._sessions = list(dict.fromkeys(session for session, _ in _partitioned(self.optimizer)))
        if not self._sessions:
            return
        refuse_unless_elementwise(self.optimizer)
        for session in self._sessions:
            session.settle()
        _check_stamps(self.optimizer, self._sessions[0].group)
        self._offloaded = self._part_of(self.optimizer, self._sessions)
        try:
            for session, parameter in list(_partitioned(self.optimizer)):
                self._take(session, parameter)
        except BaseException:
            with suppress(SwapError):  # the first failure is the one to tell
                self.end()
            raise
        self._rescue = register_module_forward_pre_hook(lambda module, args: self.end())

    def _take(self, session: Session, parameter: nn.Parameter) -> None:
        _cut_state(self.optimizer, session, parameter)
        bucket = session.entry(parameter).place.bucket
        if self._offloaded is not None and self._offloaded.takes(bucket):
            session.step_aside(parameter)
        else:
            session.begin_step([parameter])

    def update(self) -> None:
        """Our part, after the stock step."""
        if self._offloaded is not None:
            self._offloaded.update()

    def end(self) -> None:
        """Parameters become whole again, to the eye. Idempotent."""
        if self._rescue is not None:
            self._rescue.remove()
        self._rescue = None
        for session in self._sessions:
            session.end_step()

    def refresh(self) -> None:
        """Start sending what was updated to the ranks that hold whole parameters."""
        for session in self._sessions:
            session.start_refresh()

    def outside(self, closure: Closure) -> Closure:
        """The closure runs the model, so it must meet partitioned parameters, not shards."""

        def run() -> Any:
            self.end()
            try:
                return closure()
            finally:
                self.begin()

        return run


class StepHooks:
    """Makes partitioned parameters shards before any optimizer's step, and brings them back after."""

    def __init__(self) -> None:
        self._under_way: list[_Stepping] = []
        self._handles: list[Any] = []
        self._inspect: Callable[[torch.optim.Optimizer], None] | None = None
        self._inspected: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._seen: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._offloaded: weakref.WeakKeyDictionary[torch.optim.Optimizer, OffloadedOptimizer]
        self._offloaded = weakref.WeakKeyDictionary()

    def install(self, inspect: Callable[[torch.optim.Optimizer], None] | None = None) -> None:
        """Hook every optimizer of the process. Idempotent.

        ``inspect`` is called once for each optimizer, before its first step.
        """
        self._inspect = inspect or self._inspect
        if not self._handles:
            self._handles.append(register_optimizer_step_pre_hook(self.before_step))
            self._handles.append(register_optimizer_step_post_hook(self.after_step))

    @outside_dynamo
    def before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Called by torch before ``step``; wraps a closure, which must meet whole parameters."""
        if self._inspect is not None and optimizer not in self._inspected:
            self._inspect(optimizer)
            self._inspected.add(optimizer)
        closure = _closure_of(args, kwargs)
        if closure is None and not any(True for _ in _partitioned(optimizer)):
            return None
        self._seen.add(optimizer)
        stepping = _Stepping(optimizer, self.offloaded)
        stepping.begin()
        self._under_way.append(stepping)
        return None if closure is None else ((optimizer, stepping.outside(closure)), {})

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
            self._offloaded[optimizer] = OffloadedOptimizer(optimizer)
        return self._offloaded[optimizer]

    def optimizer_of(self, parameter: nn.Parameter) -> torch.optim.Optimizer | None:
        """An optimizer that has stepped on the parameter; None if none has."""
        for optimizer in self._seen:
            if any(p is parameter for group in optimizer.param_groups for p in group["params"]):
                return optimizer
        return None

    def offloaded_state(self, optimizer: torch.optim.Optimizer) -> OffloadedOptimizer | None:
        """The optimizer's part off the device; None if it has none yet."""
        return self._offloaded.get(optimizer)

    @outside_dynamo
    def after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Called by torch after ``step``; steps that ended in an exception are dropped on the way."""
        while any(stepping.optimizer is optimizer for stepping in self._under_way):
            stepping = self._under_way.pop()
            try:
                stepping.update()
            finally:
                stepping.end()
            stepping.refresh()


HOOKS = StepHooks()

#: The key in parameter groups under which an optimizer remembers whose part its state is.
_STAMP = "zero3_part"


def _check_stamps(optimizer: torch.optim.Optimizer, group: Group) -> None:
    """State travels in state_dict(), one part a rank; a part of another rank is silently wrong.

    Raises:
        ZeroError: the state was saved by another rank, or at another world size.
    """
    ours = {"rank": group.rank, "world_size": group.world_size}
    for parameters in optimizer.param_groups:
        theirs = parameters.setdefault(_STAMP, ours)
        if theirs != ours:
            raise ZeroError(
                f"this optimizer's state is the part of rank {theirs['rank']} of {theirs['world_size']}, "
                f"loaded on rank {ours['rank']} of {ours['world_size']}. Save one optimizer.state_dict() "
                "a rank and load on each rank its own, at the same world size."
            )


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
    part = (len(bucket.plan.owned(slot, bucket.group.rank)),)
    for key, value in state.items():
        whole = isinstance(value, torch.Tensor) and value.shape == slot.shape != part
        if whole and key not in SCALARS:
            state[key] = bucket.part_of(slot, value).clone()


#: State of stock optimizers that is one number a parameter, whatever the parameter's shape.
SCALARS = {"step", "mu_product", "eta", "mu"}


def _closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Closure | None:
    # args[0] is the optimizer itself
    closure = kwargs.get("closure") or (args[1] if len(args) > 1 else None)
    return closure if callable(closure) else None
