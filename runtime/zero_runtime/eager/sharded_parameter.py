"""What a partitioned ``nn.Parameter`` is to eager code: itself for metadata, gathered for everything else.

Partitioning changes a parameter's class, nothing more: identity, shape, dtype and place in the
model stay. The class carries the session, so no attribute is hung on the parameter.
"""

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, ClassVar, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from zero_runtime import compat
from zero_runtime.compat import pytree
from zero_runtime.eager.construction import construction_of
from zero_runtime.errors import UnsupportedError
from zero_runtime.memory.buffers import aliases, as_plain
from zero_runtime.memory.freed import advice
from zero_runtime.notices import warn_once
from zero_runtime.session import Partitioned, Session
from zero_runtime.sharding.gathered_views import version_of


class _EagerAccess:
    """``__torch_function__`` that is inert while a graph is compiled.

    Dynamo must see a plain parameter, also where it restarts its analysis after the class has
    changed. A descriptor in the class, because torch looks the hook up on the instance.
    """

    def __get__(self, instance: object, owner: type) -> Any:
        if compat.is_compiling():
            return torch._C._disabled_torch_function_impl
        return _for_one_operation


class ShardedParameter(Partitioned):
    """A parameter whose elements are spread over the ranks. Made by :func:`class_for`, never directly."""

    session: ClassVar[Session]

    __torch_function__: Any = _EagerAccess()

    def share_memory_(self) -> NoReturn:
        """Refused: there is no memory of the whole parameter to share.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            "a partitioned parameter has no memory to share between processes: share_memory_() it "
            "before the first forward, or share the whole values of model.state_dict()."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        session = self.session
        copied = nn.Parameter(session.gather_whole(self), self.requires_grad)
        memo[id(self)] = copied
        if construction_of(session).taking:
            construction_of(session).take(session.entry(self).name, copied)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        whole = nn.Parameter(self.session.gather_whole(self), self.requires_grad)
        return whole.__reduce_ex__(protocol)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        entry, ranks = self.session.entry(self), self.session.group.world_size
        how = "still whole" if entry.whole else f"partitioned over {ranks} ranks"
        return (
            f"Parameter({entry.name}, shape={tuple(self.shape)}, dtype={self.dtype}, {how}, "
            f"requires_grad={self.requires_grad})"
        )


def class_for(session: Session) -> type[ShardedParameter]:
    """The class of this session's partitioned parameters."""
    return type("ShardedParameter", (ShardedParameter,), {"session": session})


class _GatherOnce(torch.autograd.Function):
    """One parameter for eager code: gathered if it is partitioned; its gradient is averaged."""

    @staticmethod
    def forward(ctx: Any, parameter: ShardedParameter) -> torch.Tensor:
        ctx.session, ctx.entry = parameter.session, parameter.session.entry(parameter)
        if ctx.entry.whole:
            return as_plain(parameter).view_as(parameter)
        if construction_of(parameter.session).active:
            return construction_of(parameter.session).working_copy(parameter).detach()
        return parameter.session.gather_whole(parameter)

    @staticmethod
    @compat.outside_dynamo
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (gradient,) = gradients
        return ctx.session.average(ctx.entry, gradient)  # type: ignore[no-any-return]


@compat.outside_dynamo
def _for_one_operation(
    func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
) -> Any:
    kwargs = kwargs or {}
    if func in _METADATA:
        return _plain(func, args, kwargs)
    if func in (torch.Tensor.data_ptr, torch.Tensor.untyped_storage):
        return _memory(func, args[0])
    if func == torch.Tensor.detach and _caller(sys._getframe(1)) == "torch.nn.parameter":
        return _parameter_of(args[0])
    used = {p.session.entry(p): p for p in _parameters((args, kwargs))}
    for session in {p.session for p in used.values()}:
        session.gathered_views.settle(but=used)
    if all(entry.whole for entry in used):
        return _on_whole(func, args, kwargs)
    if func == _DATA_SET or _writes_first(func):
        return _write(func, args, kwargs)
    _warn_once_per_place(func, (args, kwargs))
    if func == _DATA_GET:
        return _data(args[0])
    return _on_copies(func, args, kwargs)


def _on_copies(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Any,
    written: Sequence["ShardedParameter"] = (),
) -> Any:
    """The operation on gathered copies. What it writes to one is kept: to those ``written``, and to those
    whose version counter shows it. One that it returns a view of is watched for later writes.
    """
    changed = {id(p) for p in written}
    copies = {p: _gathered(p) for p in _parameters((args, kwargs))}
    versions = {p: version_of(c) for p, c in copies.items()}
    hidden = func in _EXPORTS
    shown = {p: c.detach() if hidden and not c.requires_grad else c for p, c in copies.items()}
    replace = lambda x: shown[x] if isinstance(x, ShardedParameter) else x  # noqa: E731
    results = _plain(func, *pytree.tree_map(replace, (args, kwargs)))
    sent = getattr(func, "__module__", "") == _COLLECTIVES
    if sent and isinstance(results, dist.Work):
        results.wait()
    for parameter, whole in copies.items():
        session = parameter.session
        if sent or id(parameter) in changed or version_of(whole) != versions[parameter]:
            session.store_whole(parameter, whole.detach())
        if not construction_of(session).active and (hidden or aliases(whole, results)):
            session.gathered_views.lend(session.entry(parameter), whole)
    return results


def _memory(func: Callable[..., Any], parameter: ShardedParameter) -> Any:
    """The parameter's storage, an empty one where it is freed, or a pointer: 0 for torch itself, which only
    looks how it is aligned.
    """
    entry = parameter.session.entry(parameter)
    if entry.whole:
        return func(as_plain(parameter))
    if func == torch.Tensor.untyped_storage:
        return entry.no_memory
    if _caller(sys._getframe(1)).split(".")[0] == "torch":
        return 0
    raise UnsupportedError(advice(entry.name))


def _parameter_of(parameter: ShardedParameter) -> nn.Parameter:
    """``nn.Parameter(parameter)``: while the model is built another parameter of it, with the same value."""
    session = parameter.session
    entry = session.entry(parameter)
    if not construction_of(session).taking:
        raise UnsupportedError(
            f"nn.Parameter() of {entry.name}, which is partitioned, would be a whole copy that nothing "
            "partitions: write nn.Parameter(parameter.detach().clone()) for one, or make it before the first "
            "forward."
        )
    other = nn.Parameter(session.gather_whole(parameter), parameter.requires_grad)
    construction_of(session).take(entry.name, other)
    return other


def _caller(frame: FrameType | None) -> str:
    """The module whose code called one of our hooks."""
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name != "torch._dynamo.eval_frame" and name.split(".")[0] != "zero_runtime":
            return name
        frame = frame.f_back
    return ""


def _data(parameter: ShardedParameter) -> torch.Tensor:
    """``parameter.data``: a copy whose changes are put back."""
    session = parameter.session
    with torch.no_grad():
        if construction_of(session).active:
            return construction_of(session).working_copy(parameter).detach()
        whole = session.gather_whole(parameter)
        session.gathered_views.lend(session.entry(parameter), whole)
        return whole.detach()


def _on_whole(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
    """Parameters that every rank holds whole: as they are, but for the gradient."""
    for parameter in _parameters((args, kwargs)):
        parameter.session.finish_refresh()
    if func == _DATA_SET and args[0].session.entry(args[0]).placed:
        _refuse_conversion(args[0], args[1])
        func = torch.Tensor.copy_
        args = (as_plain(args[0]).detach(), args[1])
    reads = func not in (_DATA_GET, _DATA_SET) and not _writes_first(func)
    if torch.is_grad_enabled() and reads:
        args, kwargs = pytree.tree_map(_gathered, (args, kwargs))
    return _plain(func, args, kwargs)


def _parameters(operands: Any) -> list["ShardedParameter"]:
    return [x for x in pytree.tree_leaves(operands) if isinstance(x, ShardedParameter)]


def _gathered(value: Any) -> Any:
    gather: Callable[..., Any] = _GatherOnce.apply
    return gather(value) if isinstance(value, ShardedParameter) else value


def _write(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
    """An in-place operation: done on the whole parameter, of which each rank keeps its part."""
    target = args[0] if args else next(iter(kwargs.values()))
    if not isinstance(target, ShardedParameter):
        if any(p.requires_grad for p in _parameters(target)) and torch.is_grad_enabled():
            raise RuntimeError(_LEAF)
        return _on_copies(func, args, kwargs, written=_parameters(target))
    building = construction_of(target.session)
    if func == _DATA_SET:
        alike = _same_kind(target, args[1]) and target.stride() == args[1].stride()
        if building.active and not alike:
            return building.replace(target, _gathered(args[1]).detach())
        _refuse_conversion(target, args[1])
        func = torch.Tensor.copy_
        target.session.gathered_views.forget(target.session.entry(target))
    elif _needs_no_grad(func) and torch.is_grad_enabled() and target.requires_grad:
        raise RuntimeError(_LEAF)
    with torch.no_grad():
        others = lambda x: x if x is target else _gathered(x)  # noqa: E731
        operands = pytree.tree_map(others, (args, kwargs))

        def change(whole: torch.Tensor) -> None:
            replace = lambda x: whole if x is target else x  # noqa: E731
            _plain(func, *pytree.tree_map(replace, operands))

        if building.active and not target.session.entry(target).whole:
            once = sum(x is target for x in pytree.tree_leaves(operands)) == 1
            building.edit(target, change, anew=once and _overwrites(func))
            return target
        whole = target.session.gather_whole(target)
        change(whole)
        target.session.store_whole(target, whole)
    return target


def _plain(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _needs_no_grad(func: Callable[..., Any]) -> bool:
    """``torch.nn.init`` turns gradients off by itself, after it has asked us."""
    return getattr(func, "__module__", None) != "torch.nn.init"


def _same_kind(target: torch.Tensor, value: torch.Tensor) -> bool:
    kinds = [(t.dtype, t.device, t.shape) for t in (target, value)]
    return kinds[0] == kinds[1]


def _refuse_conversion(target: ShardedParameter, value: torch.Tensor) -> None:
    """``model.half()``, ``model.to(device)`` and the like end here, one parameter at a time."""
    if _same_kind(target, value):
        return
    name = target.session.entry(target).name
    raise UnsupportedError(
        f"{name} is partitioned as {target.dtype} {tuple(target.shape)} on {target.device} and cannot "
        f"become {value.dtype} {tuple(value.shape)} on {value.device}. Convert the model before the "
        "first call of the compiled model."
    )


def _writes_first(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    return name in ("__setitem__", "set_") or (name.endswith("_") and not name.endswith("__"))


def _overwrites(func: Callable[..., Any]) -> bool:
    """Whether an in-place operation writes every element and reads none."""
    return getattr(func, "__name__", "") in _OVERWRITING


#: In-place operations of tensors, and functions of ``torch.nn.init`` that ask for our leave.
_DRAWING = "normal_ uniform_ exponential_ log_normal_ cauchy_ geometric_ random_ bernoulli_ "
_OVERWRITING = frozenset(f"{_DRAWING} zero_ fill_ copy_ constant_ kaiming_uniform_".split())


def _warn_once_per_place(func: Callable[..., Any], operands: Any) -> None:
    """While a model is built there is no graph to move the operation to."""
    parameter = _parameters(operands)[0]
    if construction_of(parameter.session).active:
        return
    name = ".data" if func == _DATA_GET else getattr(func, "__name__", str(func))
    warn_once(
        parameter.session.warned,
        f"{name} uses a partitioned parameter outside the compiled graph: it is gathered for this "
        "one operation, on every rank. Move the operation under torch.compile to make it cheap.",
    )


_LEAF = (
    "a leaf Variable that requires grad is being used in an in-place operation. "
    "Put it under torch.no_grad()."
)

#: Functions of this module write to tensors that they are given, and say so in no version counter.
_COLLECTIVES = "torch.distributed.distributed_c10d"

_DATA_GET = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_DATA_SET = torch.Tensor.data.__set__  # type: ignore[attr-defined]
#: What they return shares memory with their operand and is no tensor.
_EXPORTS = {torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.__dlpack__}


def _metadata() -> set[Any]:
    """What is true of the parameter without its elements."""
    getters = "shape dtype device layout requires_grad grad grad_fn is_leaf ndim is_cuda is_cpu is_sparse "
    getters += "is_quantized is_meta is_nested names output_nr retains_grad _version _base itemsize nbytes "
    getters += (
        "is_mkldnn is_mps is_xpu is_complex _backward_hooks _post_accumulate_grad_hooks grad_dtype"
    )
    setters = "requires_grad grad _backward_hooks _post_accumulate_grad_hooks grad_dtype"
    methods = (
        "size stride numel dim ndimension nelement element_size is_contiguous is_floating_point "
    )
    methods += "is_complex is_signed get_device storage_offset type __hash__ __len__ "
    methods += "new requires_grad_ register_hook register_post_accumulate_grad_hook is_shared is_inference "
    methods += "_is_view is_pinned retain_grad is_conj is_neg _use_count has_names backward __dir__"
    tensor = torch.Tensor
    found: set[Any] = {torch.autograd.grad, torch.autograd.backward}
    found |= {torch.is_floating_point, torch.is_complex, torch.numel, torch.is_tensor}
    found |= {
        getattr(torch, f"{n}_like") for n in ["zeros", "ones", "full", "empty", "rand", "randn"]
    }
    found |= {getattr(tensor, f"new_{n}") for n in ["zeros", "ones", "full", "empty", "tensor"]}
    found |= {getattr(tensor, n).__get__ for n in getters.split() if _is_property(n)}
    found |= {getattr(tensor, n).__set__ for n in setters.split() if _is_property(n)}
    found |= {getattr(tensor, n).__delete__ for n in ("grad",)}
    return found | {getattr(tensor, n) for n in methods.split() if hasattr(tensor, n)}


def _is_property(name: str) -> bool:
    return hasattr(getattr(torch.Tensor, name, None), "__get__") and not callable(
        getattr(torch.Tensor, name)
    )


_METADATA = _metadata()
