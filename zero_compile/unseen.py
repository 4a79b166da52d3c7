"""Models that were given to torch.compile and of which Dynamo compiled nothing."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from zero_compile.root import parameter_names
from zero_runtime import compat
from zero_runtime.collectives import current_group
from zero_runtime.errors import UnsupportedError


def refuse_unseen(optimizer: torch.optim.Optimizer, backends: Iterable[Callable[..., Any]]) -> None:
    """Raise if the optimizer trains parameters of a compiled model that no graph has ever reached.

    Raises:
        UnsupportedError: they would be neither partitioned nor averaged over the ranks.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    plain = {id(p) for p in parameters if type(p) is nn.Parameter and p.grad is not None}
    if not plain or current_group().world_size == 1:
        return
    for module in compat.modules_compiled_with(list(backends)):
        names = [n for n, p in parameter_names(module).items() if id(p) in plain]
        if names:
            raise UnsupportedError(_explain(module, names))


def _explain(module: nn.Module, names: Sequence[str]) -> str:
    some = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return (
        f"Dynamo compiled no graph of {type(module).__name__}, so its parameters ({some}) are neither "
        "partitioned nor averaged over the ranks. It skips a function whose graph breaks inside a loop, "
        "and bare layers of torch.nn; TORCH_LOGS=graph_breaks shows where. Either mend that, or call "
        "zero_compile.partition(model) before training: code that is not compiled is then right, and slow."
    )
