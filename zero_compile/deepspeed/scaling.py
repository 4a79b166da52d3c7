"""float16's loss scale: torch's GradScaler, with DeepSpeed's hysteresis and lower limit."""

import torch

from zero_compile.config.deepspeed.sections import Fp16
from zero_runtime.errors import ZeroError

#: A scale that GradScaler never raises.
_NEVER = 2**31 - 1


class LossScale:
    """Multiplies losses, divides gradients, and skips steps whose gradients overflowed.

    An overflow on one rank skips the step on all. Of a dynamic scale the ``hysteresis``-th overflow and
    each later one halve it, until it has doubled again after ``loss_scale_window`` steps without overflow
    in a row (with ``consecutive_hysteresis``: until the next step without one). A fixed scale stays.
    """

    def __init__(self, section: Fp16, device_type: str) -> None:
        self._section = section
        self._fixed = section.loss_scale > 0
        self._patience = section.hysteresis
        self._scaler = torch.amp.GradScaler(
            device_type,
            init_scale=section.loss_scale or 2.0**section.initial_scale_power,
            growth_interval=_NEVER if self._fixed else section.loss_scale_window,
        )

    @property
    def value(self) -> float:
        """The current scale."""
        return self._scaler.get_scale()

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss to run backward from."""
        scaled: torch.Tensor = self._scaler.scale(loss)
        return scaled

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients, once between two steps."""
        self._scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Step unless a gradient is infinite or NaN, then adapt the scale; whether it stepped.

        Raises:
            ZeroError: an overflow at ``min_loss_scale``.
        """
        before = self.value
        self._scaler.step(optimizer)
        self._scaler.update()
        after = self.value
        if after < before:
            self._scaler.update(self._after_overflow(before, after))
            return False
        if after > before or self._section.consecutive_hysteresis:
            self._patience = self._section.hysteresis
        return True

    def _after_overflow(self, before: float, halved: float) -> float:
        if self._fixed:
            return before
        if self._patience > 1:
            self._patience -= 1
            return before
        lowest = self._section.min_loss_scale
        if before <= lowest:
            raise ZeroError(
                f"gradients overflow float16 at the smallest loss scale, fp16.min_loss_scale = {lowest:g}. "
                "Look for infinite or NaN losses, train in bf16, or lower min_loss_scale."
            )
        return max(halved, lowest)
