"""Which stock optimizers have a host kernel, and what that needs of their groups and state.

A kernel updates float32 parameters ``[n]`` with their gradient and state in one pass over memory
(:mod:`zero_runtime.optim.cpu_optimizer`). Where the optimizer, its flags or the dtype have none, its own
``step`` runs on the host's shards.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from zero_runtime.optim import cpu_optimizer as host
from zero_runtime.optim.lion import Lion

Group = Mapping[str, Any]
States = Mapping[str, torch.Tensor]


class CpuKernel(NamedTuple):
    """One optimizer's kernel. ``states`` are the names of its state tensors of the parameter's size;
    ``counts`` is whether it keeps the number of steps in its state, under ``step``.
    """

    states: Callable[[Group], tuple[str, ...]]
    update: Callable[[host.Bucket, States, int, Group], object]
    counts: bool
    initial: Callable[[Group], float] = lambda group: 0.0


def cpu_kernel_for(optimizer: torch.optim.Optimizer) -> CpuKernel | None:
    """The optimizer's kernel; None where there is none.

    A subclass has its base's only if it steps as the base does.
    """
    step = inspect.unwrap(type(optimizer).step)
    for kind, recipe in _RECIPES.items():
        if isinstance(optimizer, kind) and inspect.unwrap(kind.step) is step:
            return recipe if all(map(_plain, optimizer.param_groups)) else None
    return None


def _plain(group: Group) -> bool:
    return not group.get("differentiable", False)


def _adam_states(group: Group) -> tuple[str, ...]:
    moments = ("exp_avg", "exp_avg_sq")
    return (*moments, "max_exp_avg_sq") if group["amsgrad"] else moments


def _adam(bucket: host.Bucket, states: States, step: int, group: Group) -> None:
    beta1, beta2 = map(float, group["betas"])
    options = host.AdamOptions(
        float(group["lr"]),
        (beta1, beta2),
        float(group["eps"]),
        float(group["weight_decay"]),
        group["amsgrad"],
        group["maximize"],
        group.get("decoupled_weight_decay", False),
    )
    most = states.get("max_exp_avg_sq")
    moments = states["exp_avg"], states["exp_avg_sq"]
    host.adam_step(bucket, *moments, step, options, max_exp_avg_sq=most)


def _sgd_states(group: Group) -> tuple[str, ...]:
    return ("momentum_buffer",) if group["momentum"] else ()


def _sgd(bucket: host.Bucket, states: States, step: int, group: Group) -> None:
    options = host.SgdOptions(
        float(group["lr"]),
        float(group["momentum"]),
        float(group["dampening"]),
        float(group["weight_decay"]),
        group["nesterov"],
        group["maximize"],
    )
    host.sgd_step(bucket, states.get("momentum_buffer"), step, options)


def _adagrad(bucket: host.Bucket, states: States, step: int, group: Group) -> None:
    options = host.AdagradOptions(
        float(group["lr"]),
        float(group["lr_decay"]),
        float(group["eps"]),
        float(group["weight_decay"]),
        group["maximize"],
    )
    host.adagrad_step(bucket, states["sum"], step, options)


def _adagrad_initial(group: Group) -> float:
    return float(group.get("initial_accumulator_value", 0.0))


def _lion(bucket: host.Bucket, states: States, step: int, group: Group) -> None:
    first, second = map(float, group["betas"])
    options = host.LionOptions(float(group["lr"]), (first, second), float(group["weight_decay"]))
    host.lion_step(bucket, states["exp_avg"], options)


_ADAM = CpuKernel(_adam_states, _adam, counts=True)

_RECIPES: dict[type[torch.optim.Optimizer], CpuKernel] = {
    torch.optim.AdamW: _ADAM,
    torch.optim.Adam: _ADAM,
    torch.optim.SGD: CpuKernel(_sgd_states, _sgd, counts=False),
    torch.optim.Adagrad: CpuKernel(lambda group: ("sum",), _adagrad, True, _adagrad_initial),
    Lion: CpuKernel(lambda group: ("exp_avg",), _lion, counts=False),
}
