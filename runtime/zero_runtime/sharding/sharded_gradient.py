"""A gradient that is partitioned like its parameter, and looks whole to stock PyTorch.

``p.grad`` after backward is a :class:`ShardedGradient`: logical shape, this rank's elements.
Elementwise operations work on those elements alone; norms and sums are completed over the ranks.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch

from zero_runtime import compat
from zero_runtime.comm.transports import Group
from zero_runtime.compat import pytree
from zero_runtime.errors import UnsupportedError
from zero_runtime.ir.plan import Slot
from zero_runtime.notices import warn_once
from zero_runtime.sharding.bucket import Bucket
from zero_runtime.sharding.pending_norm import PendingNorm, changes, powers_of
from zero_runtime.sharding.whole_gradient import WholeGradient, on_copies, read_only, written

aten = torch.ops.aten


class Place(NamedTuple):
    """Which elements of which bucket a sharded tensor stands for."""

    bucket: Bucket
    slot: Slot

    @property
    def group(self) -> Group:
        """The ranks the elements are spread over."""
        return self.bucket.group


class ShardedGradient(torch.Tensor):
    """This rank's part of a gradient. ``shape`` is the whole parameter's; ``local`` ``[n]`` is flat.

    ``dtype`` may be wider than that of ``local``: a float16 gradient that awaits its loss scale to be
    taken out presents itself as the float32 gradient it is about to become.
    """

    local: torch.Tensor
    place: Place

    @staticmethod
    def __new__(
        cls, local: torch.Tensor, place: Place, dtype: torch.dtype | None = None
    ) -> "ShardedGradient":
        wrapper: ShardedGradient = torch.Tensor._make_wrapper_subclass(
            cls,
            place.slot.shape,
            strides=place.slot.stride,
            dtype=dtype or local.dtype,
            device=local.device,
        )
        wrapper.local = local
        wrapper.place = place
        return wrapper

    @property
    def presented(self) -> torch.dtype | None:
        """The dtype shown in place of ``local``'s; None where they are the same."""
        return None if self.dtype is self.local.dtype else self.dtype

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    def __repr__(self) -> str:  # type: ignore[override]
        slot = self.place.slot
        return (
            f"ShardedGradient({slot.name}, shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"{self.local.numel()} of {slot.numel} elements on rank {self.place.group.rank})"
        )

    def full_tensor(self) -> torch.Tensor:
        """The whole gradient, a plain tensor of the logical shape. Collective: call it on every rank."""
        return self.gathered("full_tensor()")

    def gathered(self, why: str) -> torch.Tensor:
        """As :meth:`full_tensor`; ``why`` is for messages."""
        bucket, slot = self.place
        padded = bucket.spread(slot, self.local.to(self.dtype))
        what = f"a gather of the gradient of {slot.name} for {why}"
        return bucket.whole(slot, bucket.group.sum(padded, what)).clone()

    def numpy(self, *, force: bool = False) -> Any:
        """The whole gradient as an array that cannot be written to. Collective."""
        return _whole_of(self, "numpy()").numpy(force=force)

    def tolist(self) -> Any:
        """The whole gradient as nested lists. Collective."""
        return _whole_of(self, "tolist()").tolist()

    def share_memory_(self) -> NoReturn:
        """Refused: there is no memory of the whole gradient to share.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(f"a partitioned gradient has no memory to share. {_ADVICE}")

    def __dlpack__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused, as :meth:`share_memory_`."""
        self.share_memory_()

    def __deepcopy__(self, memo: dict[int, Any]) -> "ShardedGradient":
        return ShardedGradient(self.local.clone(), self.place, self.presented)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled whole: another process has another part, or none."""
        return self.gathered("pickling").__reduce_ex__(protocol)

    @classmethod
    @compat.outside_dynamo
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not all(
            issubclass(kind, ShardedGradient | SpentGradient | PendingNorm) for kind in types
        ):
            return NotImplemented  # a gradient that is put off, say, knows what to do
        kwargs = kwargs or {}
        handler = _HANDLERS.get(func) or _handler_by_kind(func)
        try:
            return handler(func, args, kwargs)
        except _NeedsWholeError as error:
            if any(isinstance(x, ShardedGradient) for x in written(func, args, kwargs)):
                raise UnsupportedError(str(error)) from None
        return on_copies(func, args, kwargs, lambda g: _whole_of(g, str(func)).plain, cls)


class _NeedsWholeError(UnsupportedError):
    """This rank's elements are not enough. Right on gathered copies, unless a gradient is written to."""


def _whole_of(gradient: ShardedGradient, why: str) -> WholeGradient:
    """A gathered copy, to be read. Collective."""
    bucket, slot = gradient.place
    warn_once(
        bucket.warned,
        f"{why} needs the whole gradient of {slot.name}: it is gathered for it, on every rank. "
        "p.grad.full_tensor() does so without a warning; p.grad.local holds this rank's elements.",
    )
    return read_only(gradient.gathered(why))


class SpentGradient(torch.Tensor):
    """Stands in ``p.grad`` for a gradient that an update inside backward has consumed.

    It can be dropped, and nothing else: what would use it is refused.
    """

    place: Place

    @staticmethod
    def __new__(cls, place: Place) -> "SpentGradient":
        bucket, slot = place
        wrapper: SpentGradient = torch.Tensor._make_wrapper_subclass(
            cls, slot.shape, strides=slot.stride, dtype=bucket.gradient_dtype, device=bucket.device
        )
        wrapper.place = place
        return wrapper

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    def __repr__(self) -> str:  # type: ignore[override]
        return f"SpentGradient({self.place.slot.name}, shape={tuple(self.shape)})"

    @classmethod
    @compat.outside_dynamo
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        spent = next(x for x in _leaves([args, kwargs]) if isinstance(x, SpentGradient))
        if func in (aten.detach.default, aten.alias.default):
            return SpentGradient(spent.place)
        raise UnsupportedError(
            f"{func} reads the gradient of {spent.place.slot.name}, which was consumed by its update inside "
            "backward. Clipping, loss scaling and gradient accumulation (two backwards before a step) need "
            "the option 'update_in_backward' off; zero_grad() must set gradients to None, its default."
        )


# ------------------------------------------------------------------------------ elementwise


def _elementwise(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The same operation on this rank's elements; whole tensors among the operands are cut to them."""
    targets = written(func, args, kwargs)
    _refuse_plain_targets(func, targets)
    place = _place_of(func, [args, kwargs])
    if func in _ACCUMULATING and compat.in_backward():
        args = [_averaged(x, place) for x in args]
    cut = lambda x: _cut(func, x, place)  # noqa: E731
    result = func(*pytree.tree_map(cut, args), **pytree.tree_map(cut, kwargs))
    if targets:
        return targets[0] if len(targets) == 1 else tuple(targets)
    shown = {x.presented for x in _leaves([args, kwargs]) if isinstance(x, ShardedGradient)} - {
        None
    }
    wrap = lambda x: _wrapped(x, place, shown)  # noqa: E731
    return pytree.tree_map(wrap, result)


def _refuse_plain_targets(func: Any, targets: Sequence[torch.Tensor]) -> None:
    """A whole tensor would get the elements of one rank, and keep its own elsewhere."""
    if not all(isinstance(x, ShardedGradient) for x in targets):
        raise _NeedsWholeError(
            f"{func} writes a partitioned gradient into a plain tensor, which would get this rank's "
            "elements only. Call .full_tensor() on the gradient first, on every rank."
        )


def _wrapped(result: Any, place: Place, shown: set[torch.dtype | None]) -> Any:
    """A result of float16 elements goes on presenting itself as its operands did."""
    if not isinstance(result, torch.Tensor):
        return result
    dtype = next(iter(shown)) if shown and result.dtype is torch.float16 else None
    return ShardedGradient(result, place, dtype)


def _foreach(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A ``_foreach_*`` operation: elementwise over lists, each member with its own place."""
    gradients = next(a for a in args if _is_list(a))
    targets = written(func, args, kwargs)
    _refuse_plain_targets(func, targets)
    _refuse_mixed(func, gradients)
    lists = [a for a in (*args, *kwargs.values()) if _is_list(a)]
    places = [_place_of(func, members) for members in zip(*lists, strict=True)]

    def cut(operand: Any) -> Any:
        if isinstance(operand, ShardedGradient):  # one for all members of the lists
            raise _NeedsWholeError(_explain(func))
        if _is_list(operand):
            return [_cut(func, x, place) for x, place in zip(operand, places, strict=True)]
        return operand

    result = func(*map(cut, args), **{name: cut(operand) for name, operand in kwargs.items()})
    if result is None or targets:
        return None
    return [
        _wrapped(r, g.place, {g.presented} - {None}) for r, g in zip(result, gradients, strict=True)
    ]


def _is_list(operand: Any) -> bool:
    return isinstance(operand, list | tuple)


def _refuse_mixed(func: Any, gradients: Sequence[Any]) -> None:
    if not all(isinstance(g, ShardedGradient) for g in gradients):
        raise UnsupportedError(
            f"{func} mixes partitioned gradients with plain tensors in one list. Work on each kind by "
            "itself, or call .full_tensor() on the partitioned ones, on every rank."
        )


def _place_of(func: Any, operands: Any) -> Place:
    places = [x.place for x in _leaves(operands) if isinstance(x, ShardedGradient)]
    if any(p.slot is not places[0].slot for p in places):
        names = sorted({p.slot.name for p in places})
        raise _NeedsWholeError(
            f"{func} combines gradients of different parameters ({', '.join(names)}), which are "
            "partitioned differently. Call .full_tensor() on each first, on every rank."
        )
    return places[0]


def _cut(func: Any, operand: Any, place: Place) -> Any:
    if isinstance(operand, ShardedGradient):
        return operand.local
    if not isinstance(operand, torch.Tensor) or operand.numel() == 1:
        return operand
    if tuple(operand.shape) != place.slot.shape:
        if _broadcasts(operand.shape, place.slot.shape):
            return place.bucket.part_of(place.slot, operand.expand(place.slot.shape))
        raise _NeedsWholeError(
            f"{func} broadcasts a tensor of shape {tuple(operand.shape)} against the partitioned "
            f"gradient of {place.slot.name} {place.slot.shape}. {_ADVICE}"
        )
    return place.bucket.part_of(place.slot, operand)


def _averaged(operand: Any, place: Place) -> Any:
    """A whole gradient that autograd adds to ours, from code that does not know of ranks: their mean.

    What is equal on all ranks, because a hook computed it from parameters, stays what it is. Collective.
    """
    if isinstance(operand, ShardedGradient) or not isinstance(operand, torch.Tensor):
        return operand
    if tuple(operand.shape) != place.slot.shape:
        return operand
    what = f"an average of a gradient of {place.slot.name} that reached autograd outside the graphs"
    return place.group.average(operand.clone(), what)


def _broadcasts(shape: Sequence[int], to: Sequence[int]) -> bool:
    if len(shape) > len(to):
        return False
    trailing = to[len(to) - len(shape) :]
    return all(a in (1, b) for a, b in zip(shape, trailing, strict=True))


def _leaves(tree: Any) -> list[Any]:
    return pytree.tree_leaves(tree)


# ------------------------------------------------------------------------------ reductions


def _vector_norm(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    gradient: ShardedGradient = args[0]
    order = float(args[1]) if len(args) > 1 else 2.0
    _whole_only(func, args[2:3])
    local = gradient.local if kwargs.get("dtype") is None else gradient.local.to(kwargs["dtype"])
    return _pending(gradient, powers_of(local, order), order)


def _norm(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    gradient: ShardedGradient = args[0]
    order = 2.0 if len(args) < 2 or args[1] is None else float(args[1])
    _whole_only(func, args[2:3])
    return _pending(gradient, powers_of(gradient.local, order), order).complete()


def _pending(gradient: ShardedGradient, powers: torch.Tensor, order: float) -> PendingNorm:
    return PendingNorm(powers, order, gradient.place.group, (gradient.place.slot.name,))


def _foreach_norm(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    _refuse_mixed(func, args[0])
    order = float(args[1]) if len(args) > 1 else 2.0
    return [_vector_norm(aten.linalg_vector_norm.default, (g, order), kwargs) for g in args[0]]


def _sum(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    _whole_only(func, args[1:2])
    gradient: ShardedGradient = args[0]
    return gradient.place.group.sum(func(gradient.local, **kwargs), _what(func, gradient.place))


def _mean(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    _whole_only(func, args[1:2])
    return _sum(aten.sum.default, args[:1], kwargs).div(args[0].numel())


def _extreme(
    complete: Callable[[Group, torch.Tensor, str], torch.Tensor], empty: float
) -> Callable[[Any, Sequence[Any], dict[str, Any]], torch.Tensor]:
    def reduce(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
        local = args[0].local
        value = func(local, **kwargs) if local.numel() else local.new_full((), empty)
        return complete(args[0].place.group, value, _what(func, args[0].place))

    return reduce


def _dot(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    place = _place_of(func, args)
    a, b = (_cut(func, x, place) for x in args)
    return place.group.sum((a * b).sum(), _what(func, place))


def _any(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    gradient: ShardedGradient = args[0]
    found = gradient.local.any().to(torch.int32)
    return gradient.place.group.max(found, _what(func, gradient.place)).bool()


def _all(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    gradient: ShardedGradient = args[0]
    found = gradient.local.all().to(torch.int32)
    return gradient.place.group.min(found, _what(func, gradient.place)).bool()


def _unscale(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """GradScaler's check: what one rank finds infinite, all must skip."""
    gradients, found, scale = args
    _refuse_mixed(func, gradients)
    for gradient in gradients:  # what a division by the scale would round to zero in float16
        gradient.local = gradient.local.to(gradient.dtype)
    func([g.local for g in gradients], found, scale)
    for group in dict.fromkeys(g.place.group for g in gradients):
        group.max(found, f"a search for infinities in {len(gradients)} gradients")


def _same_tensor(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> "ShardedGradient":
    return ShardedGradient(args[0].local, args[0].place, args[0].presented)


def _new_empty(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> "ShardedGradient":
    """Room for a copy: autograd accumulates one where somebody else holds the gradient, such as a hook."""
    gradient, size = args[0], args[1]
    if tuple(size) != tuple(gradient.shape) or changes(gradient, kwargs):
        raise _NeedsWholeError(_explain(func))
    return ShardedGradient(torch.empty_like(gradient.local), gradient.place, gradient.presented)


def _new_plain(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    """A fresh tensor of any size, whole on every rank."""
    return func(args[0].local, *args[1:], **{"dtype": args[0].dtype, **kwargs})  # type: ignore[no-any-return]


def _reshaped(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> "ShardedGradient":
    """A view of the gradient's own shape is the gradient."""
    if tuple(args[1]) != tuple(args[0].shape):
        raise _NeedsWholeError(_explain(func))
    return _same_tensor(func, args, kwargs)


def _index_put(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """``gradient[mask] = number``: an elementwise write."""
    gradient, indices, value, *accumulate = args
    mask = indices[0] if len(indices) == 1 else None
    whole_mask = mask is not None and mask.dtype is torch.bool and mask.shape == gradient.shape
    if not whole_mask or value.numel() != 1 or any(accumulate) or kwargs:
        raise _NeedsWholeError(_explain(func))
    return _elementwise(aten.masked_fill_.Tensor, (gradient, mask, value.reshape(())), {})


def _drawn(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> "ShardedGradient":
    """Random elements, as for the whole gradient: every rank draws all of them, and keeps its own."""
    gradient: ShardedGradient = args[0]
    bucket, slot = gradient.place
    room = torch.empty_strided(
        slot.shape, slot.stride, dtype=gradient.dtype, device=gradient.local.device
    )
    own = bucket.part_of(slot, func(room, *args[1:], **kwargs))
    if not written(func, args, kwargs):
        return ShardedGradient(own.clone(), gradient.place)
    gradient.local.copy_(own)
    return gradient


def _equal(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    if args[0].shape != args[1].shape:
        return False
    place = _place_of(func, args)
    a, b = (_cut(func, x, place) for x in args)
    same = torch.tensor(int(torch.equal(a, b)), dtype=torch.int32, device=a.device)
    return bool(place.group.min(same, _what(func, place)))


def _what(func: Any, place: Place) -> str:
    return f"{func} of the gradient of {place.slot.name}"


def _whole_only(func: Any, dims: Sequence[Any]) -> None:
    if any(d not in (None, [], ()) for d in dims):
        raise _NeedsWholeError(f"{func} over some dimensions of a partitioned gradient. {_ADVICE}")


# ------------------------------------------------------------------------------ the table

_ADVICE = (
    "Call p.grad.full_tensor() on every rank for the whole gradient, or work on p.grad.local, "
    "this rank's elements."
)

_HANDLERS: dict[Any, Callable[[Any, Sequence[Any], dict[str, Any]], Any]] = {
    aten.detach.default: _same_tensor,
    aten.alias.default: _same_tensor,
    aten.new_empty_strided.default: _new_empty,
    aten.new_empty.default: _new_plain,
    aten.new_zeros.default: _new_plain,
    aten.new_ones.default: _new_plain,
    aten.new_full.default: _new_plain,
    aten.view.default: _reshaped,
    aten._unsafe_view.default: _reshaped,
    aten.expand.default: _reshaped,
    aten.index_put_.default: _index_put,
    aten.linalg_vector_norm.default: _vector_norm,
    aten.norm.Scalar: _norm,
    aten.norm.ScalarOpt_dtype: _norm,
    aten._foreach_norm.Scalar: _foreach_norm,
    aten.sum.default: _sum,
    aten.mean.default: _mean,
    aten.max.default: _extreme(Group.max, -math.inf),
    aten.amax.default: _extreme(Group.max, -math.inf),
    aten.min.default: _extreme(Group.min, math.inf),
    aten.amin.default: _extreme(Group.min, math.inf),
    aten.dot.default: _dot,
    aten.any.default: _any,
    aten.all.default: _all,
    aten.equal.default: _equal,
    aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
}

_ELEMENTWISE = {
    aten.clone.default,
    aten.copy_.default,
    aten._to_copy.default,
    aten.zero_.default,
    aten.fill_.Scalar,
    aten.fill_.Tensor,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.empty_like.default,
    aten.full_like.default,
    aten.nan_to_num_.default,
    aten.masked_fill.Scalar,
    aten.masked_fill.Tensor,
    aten.masked_fill_.Scalar,
    aten.masked_fill_.Tensor,
}


#: How autograd adds up what reaches one parameter in several ways.
_ACCUMULATING = {aten.add.Tensor, aten.add_.Tensor}
#: Operations that fill a tensor, or one like it, with random elements, whatever it held.
_DRAWING = {f"aten::{name}_like" for name in ("rand", "randn", "randint")}
_DRAWING |= {"aten::normal_", "aten::uniform_", "aten::exponential_", "aten::log_normal_"}
_DRAWING |= {"aten::cauchy_", "aten::geometric_", "aten::random_", "aten::bernoulli_"}

#: Of the operations on lists those that do not work element by element.
_REDUCING = {
    "aten::_foreach_norm",
    "aten::_foreach_max",
    "aten::_foreach_powsum",
    "aten::_foreach_mm",
}


def _handler_by_kind(func: Any) -> Callable[[Any, Sequence[Any], dict[str, Any]], Any]:
    name = func._schema.name
    if func in _ELEMENTWISE or torch.Tag.pointwise in func.tags:
        return _elementwise
    if name in _DRAWING:
        return _drawn
    return _foreach if name.startswith("aten::_foreach_") and name not in _REDUCING else _whole


def _whole(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> NoReturn:
    raise _NeedsWholeError(_explain(func))


def _explain(func: Any) -> str:
    return f"{func} is not supported on a partitioned gradient. {_ADVICE}"
