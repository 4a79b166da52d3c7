"""Models that were given to torch.compile and of which Dynamo compiled nothing."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from zero_compile.capture.find_model import parameter_names
from zero_runtime import compat
from zero_runtime.comm.transports import current_group
from zero_runtime.errors import UnsupportedError
from zero_runtime.session import session_of


def refuse_unseen(optimizer: torch.optim.Optimizer, backends: Iterable[Callable[..., Any]]) -> None:
    """Raise if the optimizer trains parameters of a compiled model that no graph has ever reached.

    Raises:
        UnsupportedError: they would be neither partitioned nor averaged over the ranks.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    plain = {id(p) for p in parameters if type(p) is nn.Parameter and p.grad is not None}
    if not plain or current_group().world_size == 1:
        return
    if any(session_of(p) is not None for p in parameters):
        raise UnsupportedError(_MIXED.format(count=len(plain), total=len(parameters)))
    for module in compat.modules_compiled_with(list(backends)):
        names = [n for n, p in parameter_names(module).items() if id(p) in plain]
        if names:
            raise UnsupportedError(_explain(module, names))


_MIXED = (
    "{count} of the optimizer's {total} parameters with gradients are not part of the compiled model, so "
    "their gradients are not averaged over the ranks, and a norm over all would differ between them. "
    "Make them part of it (a head or a loss with parameters can be a submodule), or call "
    "zero_compile.partition(module) for the module that holds them. If they are synchronised in another "
    "way, give them an optimizer of their own."
)


def _explain(module: nn.Module, names: Sequence[str]) -> str:
    some = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    limit = compat.recompile_limit_passed()
    if limit is not None:
        return (
            f"Dynamo compiled no graph of {type(module).__name__}, so its parameters ({some}) are neither "
            f"partitioned nor averaged over the ranks. A function of this process has passed {limit}, after "
            "which Dynamo compiles no further version of it: raise that limit, or call torch._dynamo.reset() "
            "before the model's first forward, on every rank; TORCH_LOGS=recompiles shows which function, "
            "and why. zero_compile.partition(model) makes code that is not compiled right, and slow."
        )
    return (
        f"Dynamo compiled no graph of {type(module).__name__}, so its parameters ({some}) are neither "
        "partitioned nor averaged over the ranks. It skips a function whose graph breaks inside a loop, "
        "LSTMs and other RNNs (torch._dynamo.config.allow_rnn = True compiles them), and bare layers of "
        "torch.nn; TORCH_LOGS=graph_breaks shows where. Either mend that, or call "
        "zero_compile.partition(model) before training: code that is not compiled is then right, and slow."
    )
