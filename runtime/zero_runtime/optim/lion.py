"""Lion, which torch.optim does not have: sign momentum, whose update is elementwise."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from zero_runtime.errors import OptionError


class Lion(torch.optim.Optimizer):
    """Evolved sign momentum (Chen et al., Symbolic Discovery of Optimization Algorithms, 2023, alg. 2).

    With gradient g, momentum m, rate lr and decay w::

        p <- p - lr * (sign(b1 * m + (1 - b1) * g) + w * p)
        m <- b2 * m + (1 - b2) * g

    State is one tensor a parameter, ``exp_avg``, of the parameter's shape and dtype.

    Raises:
        OptionError: a rate or a decay below 0, or a beta outside [0, 1).
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        if lr < 0 or weight_decay < 0:
            raise OptionError(f"Lion: lr {lr} and weight_decay {weight_decay} must not be negative")
        if not all(0 <= beta < 1 for beta in betas):
            raise OptionError(f"Lion: betas {tuple(betas)} must lie in [0, 1)")
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update; the closure's loss, if there is a closure.

        Raises:
            RuntimeError: a gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        gradient = parameter.grad
        assert gradient is not None
        if gradient.is_sparse:
            raise RuntimeError("Lion does not support sparse gradients")
        state = self.state[parameter]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        momentum, (first, second) = state["exp_avg"], group["betas"]
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(momentum.lerp(gradient, 1 - first).sign_(), alpha=-group["lr"])
        momentum.lerp_(gradient, 1 - second)
