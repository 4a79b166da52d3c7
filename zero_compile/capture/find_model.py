"""Find the model behind a graph: Dynamo hands over parameters, not the module that owns them."""

import sys
from collections.abc import Iterator, Sequence

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from zero_runtime import compat
from zero_runtime.errors import UnsupportedError


def find_root(parameters: Sequence[nn.Parameter]) -> nn.Module | None:
    """The outermost module on the call stack that owns one of ``parameters``; None for bare functions.

    A graph without parameters belongs to the module that was given to ``torch.compile``.

    Raises:
        UnsupportedError: a wrapper on the stack partitions or synchronises the same parameters.
    """
    wanted = {id(p) for p in parameters}
    owner = compiled = None
    for module in _modules_on_stack():
        refuse_wrapper(module)
        given = compat.compiled_module(module)
        compiled = compiled if given is None else given
        if any(id(p) in wanted for p in module.parameters()):
            owner = module
    return compiled if owner is None else owner


def compiled_otherwise(root: nn.Module) -> set[int]:
    """Ids of parameters inside modules that are compiled by a zero backend with options of their own.

    They differ from those of the compiled module that runs now: such parameters are that module's to
    partition, in its way.
    """
    running = next((way for m in _modules_on_stack() if (way := _our_way(m)) is not None), None)
    others = [m for m in root.modules() if (way := _our_way(m)) is not None and way != running]
    return {id(p) for module in others for p in module.parameters()}


def _our_way(module: nn.Module) -> compat.CompiledWith | None:
    way = compat.compiled_with(module)
    ours = way is not None and getattr(way.compiler, "__module__", "") == "zero_compile.backend"
    return way if ours else None


def parameter_names(root: nn.Module) -> dict[str, nn.Parameter]:
    """Names as ``root.named_parameters()`` gives them, without what torch.compile adds."""
    return {n.replace("_orig_mod.", ""): p for n, p in root.named_parameters()}


def _modules_on_stack() -> Iterator[nn.Module]:
    frame = sys._getframe(1)
    seen: set[int] = set()
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and id(module) not in seen:
            seen.add(id(module))
            yield module
        frame = frame.f_back  # type: ignore[assignment]


def refuse_wrapper(module: nn.Module) -> None:
    """Raise for a module that does part of our work itself.

    Raises:
        UnsupportedError: it partitions or synchronises the parameters it holds.
    """
    if isinstance(module, DistributedDataParallel):
        raise UnsupportedError(
            "the compiled model is wrapped in DistributedDataParallel, which would average gradients "
            "that zero3 has averaged and partitioned already. Remove the DDP wrapper: zero3 replaces it."
        )
    if compat.is_fsdp(module):
        raise UnsupportedError(
            f"{type(module).__name__} is managed by FSDP, which partitions the parameters itself. Use "
            "either FSDP or zero3: remove fully_shard / FullyShardedDataParallel."
        )
