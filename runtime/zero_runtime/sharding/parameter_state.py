"""One parameter of a session, and the states it goes through."""

import weakref
from collections.abc import Callable
from enum import Enum, auto
from functools import partial

import torch
from torch import nn

from zero_runtime import compat
from zero_runtime.errors import ZeroError
from zero_runtime.ir.plan import Stage
from zero_runtime.memory.buffers import fingerprint, without_storage
from zero_runtime.memory.freed import refuse_reads
from zero_runtime.sharding.sharded_gradient import Place, ShardedGradient, SpentGradient


class ParameterState(Enum):
    """A parameter's life in a session."""

    CLAIMED = auto()
    """Known to the session; whole, in its own memory, an ordinary parameter."""
    GUARDED = auto()
    """Still whole, since no graph has used it yet; eager code has its gradient averaged."""
    SHARDED = auto()
    """In a bucket. At stage 3 the user's object holds no memory; before, it is a view of the bucket."""
    HELD = auto()
    """In a bucket, and the user's object holds every element: code may change them all."""
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
        self.destination: Place | None = None
        """Where the elements go once the graph under compilation is there; None: they stay."""
        self.initial_bits = 0
        """Digest of what the value was when it was partitioned: equal on ranks that built the same model."""
        self._noted: int | None = None
        self._marked = 0
        self._watched = False
        self.pinned = False
        """Whether the object stays held, for an autograd graph made before the parameter was partitioned."""
        self.no_memory = torch.UntypedStorage(0)
        """What the parameter shows as its storage while its memory is freed."""
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
    def future_place(self) -> Place:
        """Where a graph that is being compiled will find the elements."""
        return self.place if self.destination is None else self.destination

    @property
    def whole(self) -> bool:
        """Whether the user's object holds every element."""
        if self.state is ParameterState.SHARDED:
            return self.place.bucket.stays_whole
        return self.state not in (ParameterState.STEPPING, ParameterState.ASIDE)

    def watch(self, arrives: Callable[["Entry", torch.Tensor | None], torch.Tensor | None]) -> None:
        """Have ``arrives`` see, and replace, what autograd is about to add to the gradient. Idempotent.

        Before hooks of the user's, which see the gradient that the parameter has with one rank.
        """
        parameter = self.parameter
        if parameter is None or self._watched:
            return
        if parameter.is_floating_point() or parameter.is_complex():
            compat.hook_first(parameter, partial(arrives, self))
            self._watched = True

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
        pinned = not self.place.bucket.stays_whole and compat.autograd_holds(parameter)
        parameter.__class__ = nn.Parameter
        gradient, parameter.grad = parameter.grad, None
        self.initial_bits = fingerprint(parameter.detach())
        self._home = self._moved_into_bucket(parameter)
        if not pinned:
            parameter.data = self._home
        parameter.__class__ = kind
        self.state = ParameterState.HELD if pinned else ParameterState.SHARDED
        self.pinned = pinned
        self.mark()
        self._widen_gradient(parameter)
        if gradient is not None:
            parameter.grad = self._as_kept(gradient)

    def free_storage(self, kind: type[nn.Parameter]) -> torch.Tensor:
        """Make a placed parameter a ``kind`` without memory. Returns its value, for the caller to store."""
        parameter = self.parameter
        assert parameter is not None
        parameter.__class__ = nn.Parameter
        gradient, parameter.grad = parameter.grad, None
        whole: torch.Tensor = parameter.data
        self._home = refuse_reads(without_storage(parameter), self.name)
        parameter.data = self._home
        parameter.__class__ = kind
        self.state = ParameterState.SHARDED
        self._widen_gradient(parameter)
        if gradient is not None:
            parameter.grad = self._as_kept(gradient)
        return whole

    def restore(self, whole: torch.Tensor) -> None:
        """Make a partitioned parameter an ordinary one with the value ``whole``, in no bucket."""
        parameter = self.parameter
        assert parameter is not None
        parameter.__class__ = nn.Parameter
        parameter.grad = None
        parameter.data = whole
        self._place, self._home = None, None
        self.state = ParameterState.CLAIMED

    def arrive(self) -> None:
        """The elements are where they were to go."""
        assert self.destination is not None
        self.place, self.destination = self.destination, None

    def hold(self, whole: torch.Tensor) -> None:
        """Give the user's object ``whole``, the value that the bucket has."""
        self._swap(whole)
        self.state = ParameterState.HELD
        self.mark()

    def mark(self) -> None:
        """The bucket has the value that the user's object holds."""
        self._marked = self._version

    @property
    def ahead(self) -> bool:
        """Whether a parameter that is held was changed since, as far as its version counter shows."""
        return self.state is ParameterState.HELD and self._version != self._marked

    @property
    def _version(self) -> int:
        parameter = self.parameter
        return 0 if parameter is None else parameter._version

    def reshard(self) -> None:
        """The inverse of :meth:`hold`; the bucket's value counts. Nothing while the parameter is pinned."""
        if self.pinned:
            return
        if self.parameter is not None:
            assert self._home is not None
            self._swap(self._home)
        self.state = ParameterState.SHARDED

    def unpin(self, *, at_once: bool) -> bool:
        """Have :meth:`reshard` free the memory, ``at_once`` or if no autograd graph needs it. Whether it will."""
        parameter = self.parameter
        if not at_once and parameter is not None and compat.autograd_holds(parameter):
            return False
        self.pinned = False
        return True

    def _swap(self, memory: torch.Tensor) -> None:
        parameter = self.parameter
        assert parameter is not None
        kind = type(parameter)
        parameter.__class__ = nn.Parameter
        parameter.data = memory
        parameter.__class__ = kind

    def begin_values(self) -> None:
        """What the value was does not matter any more: all of it is about to be written."""
        self.initial_bits, self._noted = 0, None

    def note_value(self, whole: torch.Tensor) -> None:
        """The value is ``whole`` now, by way of what it was: both go into :attr:`initial_bits`."""
        self.note_digest(fingerprint(whole))

    def note_digest(self, digest: int) -> None:
        """As :meth:`note_value`, given a digest of the value that all ranks can have."""
        if digest != self._noted:
            self.initial_bits = (31 * self.initial_bits + digest) % (1 << 64)
            self._noted = digest

    @property
    def noted(self) -> bool:
        """Whether any value was noted."""
        return self._noted is not None

    def _widen_gradient(self, parameter: nn.Parameter) -> None:
        """Have autograd accept gradients of another dtype, where the bucket's differ from its elements."""
        dtype = self.place.bucket.gradient_dtype
        if dtype is not parameter.dtype:  # a frozen one may begin to train
            parameter.grad_dtype = dtype

    def _moved_into_bucket(self, parameter: nn.Parameter) -> torch.Tensor:
        bucket, slot = self.place
        if not bucket.stays_whole:
            bucket.store(slot, parameter.detach())
            return refuse_reads(without_storage(parameter), self.name)
        home = bucket.whole(slot, bucket.flat)
        home.copy_(parameter.detach())
        return home

    def set_gradient(self, part: torch.Tensor) -> None:
        """The gradient becomes one whose elements ``[n]`` on this rank are ``part``."""
        parameter, (bucket, _) = self.parameter, self.place
        assert parameter is not None
        parameter.grad = self._in_parts(part.to(bucket.plan.torch_dtype))

    def _as_kept(self, gradient: torch.Tensor) -> torch.Tensor:
        """A whole gradient in the form in which the stage keeps gradients."""
        bucket, slot = self.place
        if isinstance(gradient, ShardedGradient | SpentGradient):
            return gradient
        if bucket.stage is Stage.OPTIMIZER:
            return gradient.to(bucket.gradient_dtype)
        return self._in_parts(bucket.part_of(slot, gradient))

    def _in_parts(self, part: torch.Tensor) -> ShardedGradient:
        """The gradient whose elements ``[n]`` on this rank are a copy of ``part``, where graphs leave theirs."""
        bucket, own = self.place.bucket, part.clone()
        own = bucket.evict(own).land() if bucket.evicts else own.to(bucket.device)
        as_stored = own.dtype is bucket.plan.torch_dtype
        return ShardedGradient(own, self.place, bucket.gradient_dtype if as_stored else None)

    def begin_step(self) -> None:
        """Make the user's object its own flat shard, maybe of no elements: optimizer state is born partitioned."""
        self.step_aside()
        self.step_now()

    def step_now(self) -> None:
        """A parameter set aside becomes its flat shard, with its gradient."""
        parameter = self.parameter
        assert parameter is not None
        bucket, slot = self.place
        parameter.data = bucket.local(slot, bucket.open_step())
        self.state = ParameterState.STEPPING
        if self._gradient is not None:
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

    @property
    def changing(self) -> bool:
        """Whether the step that is under way changes the value, on any rank."""
        stepping = self.state in (ParameterState.STEPPING, ParameterState.ASIDE)
        return stepping and self._gradient is not None

    def end_step(self, kind: type[nn.Parameter]) -> None:
        """The inverse of :meth:`begin_step`."""
        parameter = self.parameter
        if parameter is None or self.state not in (ParameterState.STEPPING, ParameterState.ASIDE):
            return
        assert self._home is not None
        if self.changing:
            # Not every rank's update has shown in the counter by which autograd refuses a backward
            # through values that have changed: the whole of it may lie elsewhere, or be offloaded.
            torch.autograd.graph.increment_version(parameter)
        parameter.grad = None
        parameter.data = self._home
        parameter.__class__ = kind
        parameter.grad, self._gradient = self._gradient, None
        self.state = ParameterState.SHARDED
