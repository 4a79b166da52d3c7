"""What cannot be right on partitioned parameters, refused before anything is partitioned."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn
from torch.fx import GraphModule, Node

from zero_compile.options import Options
from zero_runtime import compat
from zero_runtime.errors import UnsupportedError


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
            "model.to_empty(device=...), then initialise or load its weights."
        )
    if parameter.layout is not torch.strided:
        raise UnsupportedError(f"{name} has layout {parameter.layout}; only strided parameters.")


def refuse_in_graph(gm: GraphModule, names: Mapping[Node, str]) -> None:
    """Raise for code in the graph that is wrong on gathered copies. ``names``: placeholders of parameters.

    Raises:
        UnsupportedError: a parameter is written to, or an embedding asks for sparse gradients.
    """
    for placeholder, name in names.items():
        for alias in _aliases(placeholder):
            for user in alias.users:
                _refuse_write(user, alias, name)
                _refuse_sparse(user, alias, name)


def _refuse_write(user: Node, alias: Node, name: str) -> None:
    writes = user.args[:1] == (alias,) and _is_in_place(user)
    if writes or user.kwargs.get("out") is alias:
        raise UnsupportedError(
            f"the compiled code writes to parameter {name} ({_target_name(user)}). A graph works on "
            "gathered copies, so the write would be lost. Do it outside the compiled model, under "
            "torch.no_grad(), or make the tensor a buffer."
        )


def _refuse_sparse(user: Node, alias: Node, name: str) -> None:
    if user.target is torch.nn.functional.embedding and alias in user.args[1:2]:
        sparse = user.kwargs.get("sparse", user.args[6] if len(user.args) > 6 else False)
        if sparse:
            raise UnsupportedError(
                f"embedding {name} asks for sparse gradients, which cannot be partitioned by elements. "
                "Set sparse=False: a partitioned dense gradient costs 1/ranks of its size."
            )


def _aliases(node: Node) -> Sequence[Node]:
    """The node, and what views of it Dynamo's graph makes."""
    views = [u for u in node.users if u.args[:1] == (node,) and _target_name(u) in _VIEWS]
    return [node, *(alias for view in views for alias in _aliases(view))]


_VIEWS = {
    "detach",
    "view",
    "reshape",
    "t",
    "transpose",
    "permute",
    "flatten",
    "unsqueeze",
    "squeeze",
    "narrow",
    "getitem",
    "data",
}
_HARMLESS = {"requires_grad_", "retain_grad", "detach_"}


def _is_in_place(node: Node) -> bool:
    name = _target_name(node)
    if name in _HARMLESS or name.endswith("__"):
        return False
    return name in ("setitem", "setattr") or name.endswith("_")


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
