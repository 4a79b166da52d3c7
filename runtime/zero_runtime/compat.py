"""Every name of torch that is private, or that differs between the versions supported (2.11 to 2.14)."""

import contextlib
import gc
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch._dynamo.eval_frame import OptimizedModule, innermost_backend
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import (
    min_cut_rematerialization_partition as min_cut_rematerialization_partition,
)
from torch._guards import CompileContext, TracingContext
from torch._inductor import compile_fx as inductor
from torch._inductor import lowering
from torch._inductor.custom_graph_pass import CustomPartitionerFn as CustomPartitionerFn
from torch._inductor.utils import BoxedBool, get_donated_idxs
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.weak import WeakIdKeyDictionary as WeakIdKeyDictionary

__all__ = [
    "CustomPartitionerFn",
    "WeakIdKeyDictionary",
    "min_cut_rematerialization_partition",
    "pytree",
]

F = TypeVar("F", bound=Callable[..., Any])

#: First and last supported minor version of torch.
SUPPORTED = ((2, 11), (2, 14))

MUST_RECOMPUTE = CheckpointPolicy.MUST_RECOMPUTE

#: What keeps a node of a joint graph in backward though nothing it reads is of backward.
MUST_BE_IN_BACKWARD = {"partitioner_tag": "must_be_in_backward"}

_aten = torch.ops.aten
_LIBRARY_CALLS = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten.convolution.default,
    _aten.convolution_backward.default,
}


def outside_dynamo(function: F) -> F:
    """Never traced: Dynamo compiles what a frame that it skipped calls, also where that is ours."""
    untraced: F = torch.compiler.disable(function)
    return untraced


def called_from(package: str) -> bool:
    """Whether a function of ``package`` is under way, further up the call stack."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name == package or name.startswith(f"{package}."):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def recompile_limit_passed() -> str | None:
    """The limit of Dynamo's that a function of this process has passed, after which it runs uncompiled."""
    for message in counters["unimplemented"]:
        found = re.search(
            r"exceeding the (\w+) cache size limit \(currently set to (\d+)\)", message
        )
        if found is not None:
            return f"torch._dynamo.config.{found[1]} = {found[2]}"
    return None


def is_compiling() -> bool:
    """Whether this thread is inside Dynamo, AOTAutograd or Inductor."""
    return CompileContext.try_get() is not None or TracingContext.try_get() is not None


def backend_name(process_group: dist.ProcessGroup, device: torch.device) -> str:
    """The backend that carries tensors of ``device`` in this group: ``gloo``, ``nccl``, ``fake``."""
    return str(process_group._get_backend(device).name()).lower()


def default_store() -> Any:
    """The key-value store behind the default process group."""
    return dist.distributed_c10d._get_default_store()


_collectives: Any = dist
all_gather_single: Callable[..., Any] = getattr(
    _collectives, "all_gather_single", _collectives.all_gather_into_tensor
)
reduce_scatter_single: Callable[..., Any] = getattr(
    _collectives, "reduce_scatter_single", _collectives.reduce_scatter_tensor
)

torch_version: tuple[int, ...] = tuple(int(x) for x in torch.__version__.split(".")[:2])


def launched_world_size() -> int:
    """How many ranks a launcher such as torchrun says there are; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1") or 1)


def fake_mode_of(graph: torch.fx.Graph) -> Any:
    """The fake tensor mode of the graph's values; a fresh one for a graph without any."""
    values = (v for node in graph.nodes for v in _flat(node.meta.get("val")))
    return (
        next((v.fake_mode for v in values if isinstance(v, FakeTensor)), None) or FakeTensorMode()
    )


def _flat(value: Any) -> Iterable[Any]:
    return value if isinstance(value, list | tuple) else (value,)


def size_hint(size: torch.SymInt, of: Any, unknown: int) -> int:
    """The number that ``of``, a symbol or an expression of a traced size, stood for.

    Where only the data decides it is ``unknown``, or the nearest bound that is known of it.
    """
    sizes = size.node.shape_env
    if hasattr(sizes, "optimization_hint"):
        return int(sizes.optimization_hint(of, fallback=unknown))
    hint = sizes.size_hint(of, allow_none=True)
    return unknown if hint is None else int(hint)


def realizes_inputs(target: object) -> bool:
    """Whether Inductor puts the inputs of this operator into memory before it runs."""
    return target in lowering.needs_realized_inputs or is_kernel(target)


def is_kernel(target: object) -> bool:
    """Whether Inductor runs this operator as a kernel of its own, unfused: matmuls, fallbacks."""
    return (
        target in lowering.fallbacks or target in _LIBRARY_CALLS or target not in lowering.lowerings
    )


def unfolds(image: torch.Tensor, weight: torch.Tensor, settings: Sequence[Any]) -> bool:
    """Whether torch's own kernel, which unfolds the image into columns, runs a convolution in two dimensions.

    ``settings`` are the operator's arguments from the strides on. Only sizes and dtypes are looked at.
    """
    chosen = torch._C._select_conv_backend(image, weight, None, *settings)
    return bool(chosen.name == "Slow2d")


def compile_fx(gm: torch.fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
    """Inductor, without AOTAutograd's cache: a hit there would skip the passes and the partition."""
    with functorch_config.patch(enable_autograd_cache=False):
        return inductor.compile_fx(gm, inputs, **kwargs)


def compile_fx_inner(gm: torch.fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
    """Inductor's compilation of one forward, backward or inference graph."""
    return inductor.compile_fx_inner(gm, inputs, **kwargs)


def without_cudagraphs(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Collectives on a schedule cannot be replayed from a CUDA graph."""
    return {**kwargs, "cudagraphs": BoxedBool(False)}


def mode_patches(mode: str | None) -> dict[str, Any]:
    """Inductor's config for ``torch.compile(mode=...)``."""
    return dict(torch._inductor.list_mode_options(mode)) if mode and mode != "default" else {}


@contextlib.contextmanager
def backend_errors() -> Iterator[None]:
    """What a backend raises, without the wrapping that Dynamo gives it."""
    try:
        yield
    except BackendCompilerFailed as failure:
        raise failure.inner_exception from None


@contextlib.contextmanager
def compiling_apart() -> Iterator[None]:
    """Inside it Dynamo begins anew, and so it does afterwards: it counts compilations, and notes sizes."""
    torch._dynamo.reset()
    try:
        yield
    finally:
        torch._dynamo.reset()


#: Has Inductor execute kernels in the order that was planned, instead of one that it thinks saves memory:
#: it knows nothing of the buffers that transfers hold meanwhile.
PLANNED_ORDER = {"reorder_for_peak_memory": False}


def fake_tensors() -> Any:
    """Inside it, tensors have shapes and no memory."""
    return FakeTensorMode(allow_non_fake_inputs=True)


class FakeConversions(TorchFunctionMode):
    """Among fake tensors: lets modules be converted (``model.bfloat16()``), which swaps parameters.

    torch refuses to swap a tensor that something refers to weakly, as the mode's memo does to most.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self._memo = mode.fake_tensor_converter.meta_converter.tensor_memo

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the function, then forget what it made."""
        result = func(*args, **(kwargs or {}))
        self._memo.clear()
        return result


def boxed(function: F) -> F:
    """Marks a function as one that takes its arguments in a list, which it may empty."""
    function._boxed_call = True  # type: ignore[attr-defined]
    return function


def source_of(placeholder: torch.fx.Node) -> Any:
    """Where Dynamo found an input of its graph; None for graphs that Dynamo did not make."""
    argument = placeholder.meta.get("grapharg")
    return getattr(argument, "source", None) or getattr(placeholder, "_dynamo_source", None)


def memory_of_traced(node: torch.fx.Node) -> int:
    """What tells one piece of memory from another, of a node's value as Dynamo traced it; 0 for none."""
    value = node.meta.get("example_value")
    return storage_of(value) if isinstance(value, torch.Tensor) else 0


def was_written(placeholder: torch.fx.Node) -> bool:
    """Whether Dynamo's graph writes to this input."""
    value = placeholder.meta.get("example_value")
    if not isinstance(value, torch.Tensor) or value.is_inference() or not value._version:
        return False
    return value._version > _first_version(value)


def _first_version(stand_in: torch.Tensor) -> int:
    """The version at which Dynamo made a stand-in: 1 where it was put into memory that was there before.

    It was, by ``set_``, if another input lies in the same storage, or if it does not begin where its
    storage does.
    """
    memo = stand_in.fake_mode.fake_tensor_converter.meta_converter.tensor_memo  # type: ignore[attr-defined]
    there = (other for other in memo.values() if storage_of(other) == storage_of(stand_in))
    return int(next(there, stand_in) is not stand_in or stand_in.storage_offset() != 0)


def forget_mutation_regions(graph: torch.fx.Graph) -> None:
    """Have Inductor find anew between which nodes of a graph it may move others.

    It numbers the regions between mutations once, in the joint graph, where a release does not yet
    stand. By those numbers it would move a computation behind the release of what it reads.
    """
    for node in graph.nodes:
        node.meta.pop("mutation_region_id", None)


def guard_identity(placeholder: torch.fx.Node) -> None:
    """Have Dynamo run this graph for this very input object only.

    Without it, modules of equal structure share one graph, which takes parameters as inputs. The
    guard on the module they hang on keeps such recompilations out of Dynamo's recompile limit.
    """
    source = source_of(placeholder)
    if source is None or TracingContext.try_get() is None:
        return
    install_guard(source.make_guard(GuardBuilder.ID_MATCH))
    while getattr(source, "base", None) is not None:
        source = source.base
    if source.name == "L['self']" or getattr(source, "local_name", "") == "self":
        install_guard(source.make_guard(GuardBuilder.ID_MATCH))


def hook_first(
    leaf: torch.Tensor, function: Callable[[torch.Tensor | None], torch.Tensor | None]
) -> None:
    """Register a hook on a leaf's gradient, before all that are there; also on one that is frozen."""
    with torch._C.DisableTorchFunctionSubclass():
        trained = leaf.requires_grad
        leaf.requires_grad_(True)
        handle = leaf.register_hook(function)
        leaf._backward_hooks.move_to_end(handle.id, last=False)  # type: ignore[union-attr]
        leaf.requires_grad_(trained)


def in_backward() -> bool:
    """Whether autograd runs a backward in this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


def will_accumulate(parameter: torch.Tensor) -> bool:
    """Whether the backward under way adds to ``parameter.grad``; ``torch.autograd.grad`` does not."""
    with torch._C.DisableTorchFunctionSubclass():
        node = torch.autograd.graph.get_gradient_edge(parameter).node
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # it has no answer for the inputs of torch.autograd.grad
        return False


def after_backward(function: Callable[[], None]) -> None:
    """Call ``function`` once the backward under way is complete, or now if there is none."""
    if in_backward():
        torch.autograd.Variable._execution_engine.queue_callback(function)
    else:
        function()


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Whether another library partitions this tensor already."""
    return dist.is_available() and isinstance(tensor, DTensor)


def is_fsdp(module: torch.nn.Module) -> bool:
    """Whether FSDP, of either generation, manages this module."""
    return isinstance(module, FSDPModule | FullyShardedDataParallel)


def autograd_holds(parameter: Any) -> bool:
    """Whether a live autograd graph, made outside our graphs, refers to the parameter.

    One reference more than the user's own is the accumulator of its gradient; two are a saved value.
    Without gradients only a saved value matters.
    """
    return bool(parameter._use_count() > (1 if torch.is_grad_enabled() else 2))


def shares_storage(tensor: torch.Tensor) -> bool:
    """Whether anything but ``tensor`` itself refers to its memory."""
    storage = tensor.untyped_storage()
    return bool(torch._C._storage_Use_Count(storage._cdata) > 2)  # the tensor, and this handle


def packs_saved_tensors() -> bool:
    """Whether code of the user's packs what autograd saves now (``saved_tensors_hooks``)."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def storage_of(tensor: torch.Tensor) -> int:
    """What tells one piece of memory from another; 0 where a tensor has none of its own."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return 0


def devices_of(process_group: dist.ProcessGroup) -> list[torch.device]:
    """Device types that the group has a backend for."""
    return list(process_group._device_types)


def modules_compiled_with(compilers: Iterable[Any]) -> Iterator[torch.nn.Module]:
    """Modules, among all that are alive, that ``torch.compile`` was given with one of these backends."""
    for thing in gc.get_objects():
        if not issubclass(type(thing), torch.nn.Module):  # isinstance would ask dead weak proxies
            continue
        way = compiled_with(thing)
        if way is not None and way.compiler in compilers:
            yield compiled_module(thing) or thing


class CompiledWith(NamedTuple):
    """The backend and the options that ``torch.compile`` was given with a module."""

    compiler: Any
    options: Mapping[str, Any]


def compiled_with(module: torch.nn.Module) -> CompiledWith | None:
    """How ``torch.compile`` was told to compile this very module; None where it was not."""
    if isinstance(module, OptimizedModule):
        callback = getattr(module.dynamo_ctx, "callback", None)
    else:
        callback = _callback_of(module.__dict__.get("_compiled_call_impl"))
    backend = None if callback is None else innermost_backend(callback)
    compiler = getattr(backend, "compiler_fn", None)
    return None if compiler is None else CompiledWith(compiler, getattr(backend, "kwargs", {}))


def compiled_module(module: torch.nn.Module) -> torch.nn.Module | None:
    """The user's module behind what ``torch.compile`` returned; None for any other module."""
    return module._orig_mod if isinstance(module, OptimizedModule) else None


def _callback_of(function: Any) -> Any:
    """What ``module.compile()`` left in its closure."""
    code = getattr(function, "__code__", None)
    if code is None or "callback" not in code.co_freevars:
        return None
    return function.__closure__[code.co_freevars.index("callback")].cell_contents


def donated_inputs() -> tuple[int, ...]:
    """Which inputs of the backward graph that is being compiled its code may overwrite.

    Saved tensors, unless the backward that compiles it keeps them (``retain_graph``).
    """
    return tuple(get_donated_idxs() or ())
