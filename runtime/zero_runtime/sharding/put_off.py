"""Gradients whose reduction ``no_sync`` put off: this rank's own and whole, until somebody looks at one.

Such a gradient lies in ``p.grad`` like any other, so whoever drops, zeroes, clips or unscales gradients
deals with it too. Further ones are added to it here. The next reduction of the parameter takes it along;
what none has taken is reduced at the end of the first backward outside ``no_sync``, or on the first look.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from zero_runtime import compat
from zero_runtime.compat import pytree
from zero_runtime.ir.plan import Slot
from zero_runtime.memory.buffers import flat_buffer
from zero_runtime.sharding.bucket import Bucket
from zero_runtime.sharding.parameter_state import Entry
from zero_runtime.sharding.sharded_gradient import Place, ShardedGradient, SpentGradient

aten = torch.ops.aten


class Owner(Protocol):
    """What the session is to its late reductions."""

    synchronise: bool
    entries: list[Entry]

    def agree(self, what: str) -> None:
        """Compare with the other ranks that ``what`` is what comes next."""

    def reduced_gradient(self, place: Place, reduced: torch.Tensor) -> torch.Tensor:
        """A parameter's gradient out of its reduced bucket, in the form the stage keeps."""


@dataclass(eq=False)
class PutOff:
    """A gradient in two parts: the ranks' ``mean``, as their stage keeps it, and this rank's ``own`` share
    of more, whole, which a reduction makes part of the mean. Either may be missing.
    """

    place: Place
    late: "LateReductions"
    own: torch.Tensor | None = None
    mean: torch.Tensor | None = None

    def add(self, gradient: torch.Tensor) -> None:
        """Add another gradient of the parameter: put off itself, reduced, or whole and this rank's own."""
        if isinstance(gradient, PutOffGradient):
            other = gradient.parts
            self._add_own(other.own)
            self.receive(other.mean)
        elif isinstance(gradient, ShardedGradient) or self.late.synchronise:
            self.receive(gradient)
        else:
            self._add_own(gradient)

    def _add_own(self, own: torch.Tensor | None) -> None:
        if own is not None:
            self.own = whole_like(self.place).copy_(own) if self.own is None else self.own.add_(own)

    def receive(self, mean: torch.Tensor | None) -> None:
        """Add what is reduced already."""
        if mean is not None:
            self.mean = mean if self.mean is None else self.mean.add_(mean)

    def take(self) -> torch.Tensor | None:
        """This rank's own share, for the caller to reduce together with another gradient."""
        own, self.own = self.own, None
        return own

    def complete(self) -> torch.Tensor:
        """The gradient as its stage keeps it. Collective while there is an own share."""
        own = self.take()
        if own is None and self.mean is None:
            own = whole_like(self.place).zero_()
        if own is not None:
            self.receive(self.late.reduce_one(self.place, own))
        assert self.mean is not None
        return self.mean

    def copy(self) -> "PutOff":
        """The same gradient in memory of its own."""
        mean = None if self.mean is None else self.mean.clone()
        fresh = PutOff(self.place, self.late, mean=mean)
        fresh._add_own(self.own)
        return fresh


class PutOffGradient(torch.Tensor):
    """``p.grad`` while a reduction is put off: looks whole, and is reduced by whatever reads or changes it."""

    parts: PutOff

    @staticmethod
    def __new__(cls, parts: PutOff) -> "PutOffGradient":
        bucket, slot = parts.place
        wrapper: PutOffGradient = torch.Tensor._make_wrapper_subclass(
            cls, slot.shape, strides=slot.stride, dtype=bucket.gradient_dtype, device=bucket.device
        )
        wrapper.parts = parts
        return wrapper

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PutOffGradient({self.parts.place.slot.name}, shape={tuple(self.shape)})"

    @property
    def local(self) -> torch.Tensor:
        """This rank's elements ``[n]`` of the reduced gradient. Collective."""
        found: torch.Tensor = self.parts.complete().local  # type: ignore[attr-defined]
        return found

    def full_tensor(self) -> torch.Tensor:
        """The whole gradient, a plain tensor. Collective."""
        mean = self.parts.complete()
        full: torch.Tensor = mean.full_tensor() if hasattr(mean, "full_tensor") else mean.clone()
        return full

    @classmethod
    @compat.outside_dynamo
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0]
        if func in (aten.detach.default, aten.alias.default):
            return PutOffGradient(first.parts)
        if func is aten.clone.default:
            return PutOffGradient(first.parts.copy())
        if compat.in_backward() and _accumulates(func, args, kwargs):
            return _accumulated(func, first, args[1])
        return _on_reduced(func, args, kwargs)


def _accumulates(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether autograd adds two gradients of one parameter up."""
    adds = func in (aten.add.Tensor, aten.add_.Tensor) and not kwargs
    return adds and all(isinstance(x, torch.Tensor) and x.shape == args[0].shape for x in args)


def _accumulated(func: Any, first: Any, second: Any) -> Any:
    if func is aten.add.Tensor:
        kept, other = (first, second) if isinstance(first, PutOffGradient) else (second, first)
        kept = PutOffGradient(kept.parts.copy())
    elif isinstance(first, PutOffGradient):
        kept, other = first, second
    else:
        return _on_reduced(func, (first, second), {})
    kept.parts.add(other)
    return kept


def _on_reduced(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The operation on reduced gradients; what it writes to stays the object that it was."""
    operands = [x for x in pytree.tree_leaves([args, kwargs]) if isinstance(x, PutOffGradient)]
    reduced = {id(x): x.parts.complete() for x in operands}
    back = {id(mean): x for x, mean in zip(operands, reduced.values(), strict=True)}
    replace = lambda x: reduced.get(id(x), x)  # noqa: E731
    result = func(*pytree.tree_map(replace, args), **pytree.tree_map(replace, kwargs))
    return pytree.tree_map(lambda x: back.get(id(x), x), result)


class LateReductions:
    """The gradients of one session that are put off, and when they are reduced."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._any = False

    @property
    def synchronise(self) -> bool:
        """Whether backward reduces now."""
        return self._owner.synchronise

    def keep(self, place: Place, own: torch.Tensor) -> PutOffGradient:
        """What stands for ``own``, this rank's whole gradient, until it is reduced; its memory is taken over."""
        self._any = True
        return PutOffGradient(PutOff(place, self, own))

    def make_room(self, entry: Entry) -> None:
        """Before a gradient that is put off is added to one that is reduced: neither is reduced for that."""
        parameter = entry.parameter
        mean = None if parameter is None else parameter.grad
        if parameter is None or mean is None or isinstance(mean, PutOffGradient | SpentGradient):
            return
        parameter.grad = PutOffGradient(PutOff(entry.place, self, mean=mean))

    def take_along(self, places: Iterable[Place]) -> dict[Slot, torch.Tensor]:
        """Put-off gradients, whole, of those parameters that the backward under way goes on accumulating."""
        if not self._any:
            return {}
        wanted, found = set(places), {}
        for entry, parts in self._found():
            parameter = entry.parameter
            if parts.own is None or entry.place not in wanted or parameter is None:
                continue
            if compat.will_accumulate(parameter):
                own = parts.take()
                assert own is not None
                found[entry.place.slot] = own
        return found

    def reduce_one(self, place: Place, own: torch.Tensor) -> torch.Tensor:
        """The mean of the ranks' ``own`` gradients of one parameter, in the form the stage keeps. Collective."""
        bucket, slot = place
        self._owner.agree(
            f"a reduction of {slot.name} that no_sync put off, bucket {bucket.serial}"
        )
        return self._owner.reduced_gradient(place, bucket.reduce([slot], [own]))

    def reduce_after_backward(self) -> None:
        """Once the backward under way is complete, reduce what it has not taken along."""
        if self._any and self.synchronise:
            compat.after_backward(self.reduce)

    @torch.no_grad()
    def reduce(self) -> None:
        """Reduce all that is put off, bucket by bucket. Collective unless there is nothing."""
        if not self._any:
            return
        self._any = False
        found = list(self._found())
        waiting: dict[Bucket, list[PutOff]] = {}
        for _, parts in found:
            if parts.own is not None:
                waiting.setdefault(parts.place.bucket, []).append(parts)
        for bucket, members in waiting.items():
            self._reduce(bucket, members)
        for entry, parts in found:
            if entry.parameter is not None:
                entry.parameter.grad = parts.complete()

    def _reduce(self, bucket: Bucket, members: Sequence[PutOff]) -> None:
        self._owner.agree(f"a reduction that no_sync put off, bucket {bucket.serial}")
        owns = {m.place.slot: own for m in members if (own := m.take()) is not None}
        reduced = bucket.reduce(list(owns), list(owns.values()))
        for member in members:
            member.receive(self._owner.reduced_gradient(member.place, reduced))

    def _found(self) -> Iterator[tuple[Entry, PutOff]]:
        for entry in self._owner.entries:
            gradient = None if entry.parameter is None else entry.parameter.grad
            if isinstance(gradient, PutOffGradient):
                yield entry, gradient.parts


def whole_like(place: Place) -> torch.Tensor:
    """Uninitialised memory for a whole gradient, in what gradients are reduced in."""
    bucket, slot = place
    flat = flat_buffer(slot.numel, bucket.reduce_dtype, bucket.device)
    return flat.as_strided(slot.shape, slot.stride, flat.storage_offset())


_models: ContextVar[tuple[nn.Module, ...]] = ContextVar("zero_puts_off", default=())


@contextmanager
def putting_off(model: nn.Module) -> Iterator[None]:
    """Inside, :func:`puts_off` knows the model, which no session may know yet."""
    token = _models.set((*_models.get(), model))
    try:
        yield
    finally:
        _models.reset(token)


def puts_off(parameters: Sequence[nn.Parameter]) -> bool:
    """Whether a model that has one of ``parameters`` is inside :func:`putting_off`."""
    wanted = {id(p) for p in parameters}
    return any(id(p) in wanted for model in _models.get() for p in model.parameters())
