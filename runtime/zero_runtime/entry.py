"""One parameter of a session, and the states it goes through."""

import weakref
from enum import Enum, auto

import torch
from torch import nn

from zero_runtime.buffers import husk, sum_of_bits
from zero_runtime.errors import ZeroError
from zero_runtime.gradient import Place, ShardedGradient, SpentGradient
from zero_runtime.plan import Stage


class ParameterState(Enum):
    """A parameter's life in a session."""

    CLAIMED = auto()
    """Known to the session; whole, in its own memory, an ordinary parameter."""
    GUARDED = auto()
    """Still whole, since no graph has used it yet; eager code has its gradient averaged."""
    SHARDED = auto()
    """In a bucket. At stage 3 the user's object holds no memory; before, it is a view of the bucket."""
    STEPPING = auto()
    """Inside ``optimizer.step()``: the user's object is this rank's flat shard."""
    ASIDE = auto()
    """Inside ``optimizer.step()``: the stock update does not see it, ours follows."""


class Entry:
    """One parameter: the user's object (weakly held), its place, and its state."""

    def __init__(self, name: str, parameter: nn.Parameter) -> None:
        self.name = name
        self.state = ParameterState.CLAIMED
        self._parameter = weakref.ref(parameter)
        self._place: Place | None = None
        self.initial_bits = 0
        """Sum of the value's bits when it was partitioned: equal on ranks that built the same model."""
        self._home: torch.Tensor | None = None
        self._gradient: torch.Tensor | None = None

    @property
    def parameter(self) -> nn.Parameter | None:
        """The user's object; None once the user's model is gone."""
        return self._parameter()

    @property
    def placed(self) -> bool:
        """Whether a bucket holds the parameter."""
        return self._place is not None

    @property
    def place(self) -> Place:
        """Where the elements are.

        Raises:
            ZeroError: no bucket holds the parameter yet.
        """
        if self._place is None:
            raise ZeroError(f"parameter {self.name} is not partitioned yet")
        return self._place

    @place.setter
    def place(self, place: Place) -> None:
        self._place = place

    @property
    def whole(self) -> bool:
        """Whether the user's object holds every element."""
        if self.state is ParameterState.SHARDED:
            return self.place.bucket.stays_whole
        return self.state not in (ParameterState.STEPPING, ParameterState.ASIDE)

    def guard(self, kind: type[nn.Parameter]) -> None:
        """Make the object a ``kind`` that keeps its memory."""
        if self.parameter is not None and self.state is ParameterState.CLAIMED:
            self.parameter.__class__ = kind
            self.state = ParameterState.GUARDED

    def shard(self, kind: type[nn.Parameter]) -> None:
        """Keep this rank's part in the bucket, free the rest, and make the object a ``kind``."""
        parameter = self.parameter
        if parameter is None or self.state not in (ParameterState.CLAIMED, ParameterState.GUARDED):
            return
        parameter.__class__ = nn.Parameter
        gradient, parameter.grad = parameter.grad, None
        self.initial_bits = sum_of_bits(parameter.detach())
        self._home = self._moved_into_bucket(parameter)
        parameter.data = self._home
        parameter.__class__ = kind
        self.state = ParameterState.SHARDED
        self._widen_gradient(parameter)
        if gradient is not None:
            parameter.grad = self._as_kept(gradient)

    def _widen_gradient(self, parameter: nn.Parameter) -> None:
        """Have autograd accept gradients of another dtype, where the bucket's differ from its elements."""
        dtype = self.place.bucket.gradient_dtype
        if parameter.requires_grad and dtype is not parameter.dtype:
            parameter.grad_dtype = dtype

    def _moved_into_bucket(self, parameter: nn.Parameter) -> torch.Tensor:
        bucket, slot = self.place
        if not bucket.stays_whole:
            bucket.store(slot, parameter.detach())
            return husk(parameter)
        home = bucket.whole(slot, bucket.flat)
        home.copy_(parameter.detach())
        return home

    def _as_kept(self, gradient: torch.Tensor) -> torch.Tensor:
        """A whole gradient in the form in which the stage keeps gradients."""
        bucket, slot = self.place
        if isinstance(gradient, ShardedGradient | SpentGradient) or bucket.stage is Stage.OPTIMIZER:
            return gradient
        return ShardedGradient(bucket.part_of(slot, gradient).clone(), self.place)

    def begin_step(self) -> None:
        """Make the user's object its own flat shard, so that optimizer state is born partitioned.

        A rank that owns nothing of the parameter hides the gradient: optimizers then skip it.
        """
        self.step_aside()
        self.step_now()

    def step_now(self) -> None:
        """A parameter set aside becomes its flat shard, with its gradient."""
        parameter = self.parameter
        assert parameter is not None
        bucket, slot = self.place
        parameter.data = bucket.local(slot, bucket.open_step())
        self.state = ParameterState.STEPPING
        if self._gradient is not None and parameter.numel():
            parameter.grad = self.own_gradient.to(parameter.data)

    def stepped(self) -> None:
        """The inverse of :meth:`step_now`: the shard's memory is free."""
        parameter = self.parameter
        assert parameter is not None
        assert self._home is not None
        parameter.grad = None
        parameter.data = self._home
        self.state = ParameterState.ASIDE

    def step_aside(self) -> None:
        """Hide the gradient from the optimizer, which then skips the parameter."""
        parameter = self.parameter
        assert parameter is not None
        self._gradient = parameter.grad
        parameter.__class__ = nn.Parameter
        parameter.grad = None
        if self._gradient is not None:
            self._gradient = self._as_kept(self._gradient)  # a script may have set a whole one
        self.state = ParameterState.ASIDE

    @property
    def set_aside(self) -> bool:
        """Whether a gradient waits for an update of ours."""
        gradient = self._gradient
        waits = gradient is not None and not isinstance(gradient, SpentGradient)
        return self.state is ParameterState.ASIDE and waits

    @property
    def own_gradient(self) -> torch.Tensor:
        """Inside a step: this rank's elements ``[n]`` of the gradient."""
        assert self._gradient is not None
        if isinstance(self._gradient, ShardedGradient):
            return self._gradient.local
        return self.place.bucket.part_of(self.place.slot, self._gradient)

    def end_step(self, kind: type[nn.Parameter]) -> None:
        """The inverse of :meth:`begin_step`."""
        parameter = self.parameter
        if parameter is None or self.state not in (ParameterState.STEPPING, ParameterState.ASIDE):
            return
        assert self._home is not None
        if self.state is ParameterState.STEPPING and parameter.numel() and parameter.grad is None:
            self._gradient = None  # cleared while it was a shard
        parameter.grad = None
        parameter.data = self._home
        parameter.__class__ = kind
        parameter.grad, self._gradient = self._gradient, None
        self.state = ParameterState.SHARDED
