"""What cannot be right on partitioned parameters, refused before anything is partitioned."""

import inspect
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from inspect import isfunction
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from zero_compile.config.options import Options
from zero_runtime import compat
from zero_runtime.errors import UnsupportedError
from zero_runtime.sharding.bucket import sparse_advice


def refuse_torch_version() -> None:
    """Raise outside the supported range of torch.

    Raises:
        UnsupportedError: names the version found and the range.
    """
    lowest, highest = compat.SUPPORTED
    if not lowest <= compat.torch_version <= highest:
        raise UnsupportedError(
            f"torch {torch.__version__} is not supported: this version of zero_compile works with torch "
            f"{_dotted(lowest)} to {_dotted(highest)}."
        )


def refuse_parameter(name: str, parameter: nn.Parameter) -> None:
    """Raise for a parameter that has no elements of its own to partition.

    Raises:
        UnsupportedError: the parameter is on the meta device, a DTensor, or not strided.
    """
    if compat.is_dtensor(parameter):
        raise UnsupportedError(
            f"{name} is a DTensor: FSDP2 or tensor parallelism partitions it already. Use zero3 on "
            "plain parameters, or leave this model to the other."
        )
    if parameter.is_meta:
        raise UnsupportedError(
            f"{name} is on the meta device and has no values to train. Materialise the model first: "
            "zero_compile.materialize(model), or model.to_empty(device=...) and then its weights."
        )
    if parameter.layout is not torch.strided:
        raise UnsupportedError(f"{name} has layout {parameter.layout}; only strided parameters.")


def refuse_in_graph(gm: GraphModule, names: Mapping[Node, str]) -> None:
    """Raise for code in the graph that is wrong on gathered copies. ``names``: placeholders of parameters.

    Dynamo ran the graph on tensors without data while it traced. Those say which values share memory
    with a parameter, through whatever views, and their version counters say whether one was written
    to, by whatever operation. Names of operations only tell which one it was, and find writes that the
    counters miss: through ``.data`` and by ``torch._foreach_*_``. Writes to buffers and activations
    share no memory with a parameter and pass.

    Raises:
        UnsupportedError: a parameter is written to, or an embedding asks for sparse gradients.
    """
    memory = {compat.memory_of_traced(node): name for node, name in names.items()}
    memory.pop(0, None)

    def parameter(node: Node) -> str:
        """Whose memory the node's value lies in; empty for other values."""
        return names.get(node) or memory.get(compat.memory_of_traced(node), "")

    for node in _nodes(gm):
        for written in _written(node):
            if parameter(written):
                raise UnsupportedError(_lost_write(parameter(written), node))
        for table in _sparse_tables(node):
            if parameter(table):
                raise UnsupportedError(sparse_advice(parameter(table)))
    for placeholder, name in names.items():
        if compat.was_written(placeholder):
            raise UnsupportedError(_lost_write(name, None))


def _lost_write(name: str, by: Node | None) -> str:
    return (
        f"the compiled code writes to parameter {name} ({_target_name(by) if by else 'in place'}). A "
        "graph works on gathered copies, so the write would be lost. Do it outside the compiled model, "
        "under torch.no_grad(), or make the tensor a buffer."
    )


def _nodes(gm: GraphModule) -> Iterator[Node]:
    """Every operation, those inside checkpointed regions and other nested graphs too."""
    for module in gm.modules():
        if isinstance(module, GraphModule):
            yield from (n for n in module.graph.nodes if n.op in ("call_function", "call_method"))


def _written(node: Node) -> Iterator[Node]:
    """Operands that the operation writes to, as far as its name and arguments tell."""
    yield from _members(node.kwargs.get("out"))
    if isinstance(node.target, OpOverload):
        for number, argument in enumerate(node.target._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                yield from _members(_argument(node, number, argument.name))
    elif _is_in_place(node):
        yield from _members(_argument(node, 0, "input"))
    elif _named(node, "max_norm") is not None:  # embeddings renormalise the rows they use
        yield from _members(_argument(node, 1, "weight"))


_HARMLESS = {"requires_grad_", "retain_grad", "detach_"}
_OPERATORS = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift"
_IN_PLACE = {"setitem", "setattr", "setattr_", *(f"i{name}" for name in _OPERATORS.split())}


def _is_in_place(node: Node) -> bool:
    name = _target_name(node)
    if name.startswith("__"):
        return name.strip("_") in _IN_PLACE
    in_place = name in _IN_PLACE or (name.endswith("_") and name not in _HARMLESS)
    return in_place or bool(_named(node, "inplace"))


def _sparse_tables(node: Node) -> Iterator[Node]:
    """The weight of an embedding that asks for sparse gradients."""
    name = _target_name(node).split(".")[0].removeprefix("_")
    if name not in _SPARSE_AT:
        return
    functional = "sparse" in _signature(node.target)
    sparse = _named(node, "sparse") if functional else _argument(node, _SPARSE_AT[name], "sparse")
    if sparse:
        yield from _members(_argument(node, 1 if functional else 0, "weight"))


#: Where torch's own operators take ``sparse``; those of ``torch.nn.functional`` have a signature.
_SPARSE_AT = {"embedding": 4, "embedding_bag": 5}


def _argument(node: Node, position: int, name: str) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name)


def _named(node: Node, name: str) -> Any:
    """The argument of this name of a Python function; None where it takes none."""
    names = _signature(node.target)
    return _argument(node, names.index(name), name) if name in names else None


@cache
def _signature(function: object) -> tuple[str, ...]:
    """Names of the parameters of a Python function, in order; nothing for others."""
    return tuple(inspect.signature(function).parameters) if isfunction(function) else ()


def _members(operand: Any) -> Iterator[Node]:
    operands = operand if isinstance(operand, list | tuple) else (operand,)
    yield from (x for x in operands if isinstance(x, Node))


def _target_name(node: Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def refuse_wide(parameters: Iterable[nn.Parameter], options: Options) -> None:
    """Raise where master weights are asked for and the model is not of the 16-bit dtype.

    Raises:
        UnsupportedError: says how to convert the model.
    """
    parameters = list(parameters)
    for wanted, dtype, call in (
        (options.bf16, torch.bfloat16, "model.bfloat16()"),
        (options.fp16, torch.float16, "model.half()"),
    ):
        if wanted and not any(p.dtype is dtype for p in parameters):
            raise UnsupportedError(
                f"float32 master weights for {dtype} were asked for, and no parameter of the model is "
                f"{dtype}. Call {call} before the first forward; for a float32 model under "
                "torch.autocast nothing need be asked for: its shards are float32 already."
            )
