"""DeepSpeed's learning rate schedules, with its parameters and formulas, as torch's LRScheduler.

``i`` in the formulas is the number of completed steps less one, DeepSpeed's ``last_batch_iteration``: -1
before the first ``step()``. Rates count in optimizer steps. Where a rate may be a list it has an entry
for each parameter group.
"""

import math
import warnings
from collections.abc import Sequence

import torch
from torch.optim.lr_scheduler import LRScheduler

from zero_runtime.errors import OptionError

#: One value for all parameter groups, or one each.
Rates = float | Sequence[float]


class Schedule(LRScheduler):
    """What all have in common: a rate a group for the iteration ``i``."""

    def __init__(self, optimizer: torch.optim.Optimizer, last_batch_iteration: int = -1) -> None:
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
        super().__init__(optimizer, last_batch_iteration)

    @property
    def last_batch_iteration(self) -> int:
        """``i``."""
        return self.last_epoch - 1

    def rates(self, i: int) -> list[float]:
        """The rate of each group at iteration ``i``."""
        raise NotImplementedError

    def get_lr(self) -> list[float | torch.Tensor]:
        """As torch's schedulers have it: the rates at the current iteration."""
        return list(self.rates(self.last_batch_iteration))

    def _for_groups(self, name: str, value: Rates) -> list[float]:
        groups = len(self.optimizer.param_groups)
        values = list(value) if isinstance(value, Sequence) else [value] * groups
        if len(values) != groups:
            raise OptionError(f"{name}: {len(values)} values for {groups} parameter groups")
        return values


class LRRangeTest(Schedule):
    """Rates that grow without end, to find the largest that still trains (Smith, 2018).

    ``min_lr * (1 + step_rate * (i + 1) / step_size)``, the quotient rounded down with ``staircase``; the
    names carry the prefix ``lr_range_test_``.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        lr_range_test_min_lr: Rates = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        self.optimizer = optimizer
        self.min_lrs = self._for_groups("lr_range_test_min_lr", lr_range_test_min_lr)
        self.step_size = _positive("lr_range_test_step_size", lr_range_test_step_size)
        self.step_rate = lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        super().__init__(optimizer, last_batch_iteration)

    def rates(self, i: int) -> list[float]:
        """See the class."""
        interval = (i + 1) / self.step_size
        growth = 1 + self.step_rate * (math.floor(interval) if self.staircase else interval)
        return [rate * growth for rate in self.min_lrs]


class OneCycle(Schedule):
    """One rise and one fall of the rate, then decay; momentum runs the other way (Smith, 2018).

    With first and second the sizes of both halves (second None: as first) and k = i + 1 steps into the
    cycle, the cycle's height h is ``k / first`` up to the peak and ``(first + second - k) / second``
    after it, in ``stair_count`` equal stairs if that is not 0::

        lr       = cycle_min_lr  + h * (cycle_max_lr  - cycle_min_lr)
        momentum = cycle_max_mom - h * (cycle_max_mom - cycle_min_mom)

    From i = first + second on, with d = (i - first - second + 1) / decay_step_size (0 if that is 0)::

        lr       = cycle_min_lr  / (1 + decay_lr_rate * d)
        momentum = cycle_max_mom * (1 + decay_mom_rate * d)

    Momentum is the first of ``betas``; the second becomes 0.99, and before the first step momentum is
    ``cycle_min_mom``, both as in DeepSpeed. An optimizer without ``betas`` keeps its momentum.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        cycle_min_lr: float,
        cycle_max_lr: float,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: float = 0.8,
        cycle_max_mom: float = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        self.rate_range = (cycle_min_lr, cycle_max_lr)
        self.momentum_range = (cycle_min_mom, cycle_max_mom)
        self.decay_rates = (decay_lr_rate, decay_mom_rate)
        self.decay_step_size = decay_step_size
        first = _positive("cycle_first_step_size", cycle_first_step_size)
        second = first if cycle_second_step_size is None else cycle_second_step_size
        self.sizes = (first, _positive("cycle_second_step_size", second))
        stairs = cycle_first_stair_count
        self.stairs = (
            stairs,
            stairs if cycle_second_stair_count is None else cycle_second_stair_count,
        )
        self.cycle_momentum = cycle_momentum and "betas" in optimizer.defaults
        if cycle_momentum and not self.cycle_momentum:
            warnings.warn(
                f"OneCycle leaves momentum alone: {type(optimizer).__name__} has no betas",
                stacklevel=2,
            )
        super().__init__(optimizer, last_batch_iteration)

    def rates(self, i: int) -> list[float]:
        """See the class; the rate is that of all groups."""
        low, high = self.rate_range
        if i < sum(self.sizes):
            rate = low + self._height(i) * (high - low)
        else:
            rate = low / (1 + self.decay_rates[0] * self._decay(i))
        return [rate] * len(self.optimizer.param_groups)

    def momentum(self, i: int) -> float:
        """See the class."""
        low, high = self.momentum_range
        if i < 0:
            return low
        if i < sum(self.sizes):
            return high - self._height(i) * (high - low)
        return high * (1 + self.decay_rates[1] * self._decay(i))

    def get_lr(self) -> list[float | torch.Tensor]:
        """The rates; sets momentum on the way, as torch's own cyclic schedule does."""
        if self.cycle_momentum:
            for group in self.optimizer.param_groups:
                group["betas"] = (self.momentum(self.last_batch_iteration), 0.99)
        return super().get_lr()

    def _height(self, i: int) -> float:
        first, second = self.sizes
        k = (i + 1) % (first + second)
        rising = k <= first
        done, size, stairs = (
            (k, first, self.stairs[0]) if rising else (first + second - k, second, self.stairs[1])
        )
        return (done * stairs // size) / stairs if stairs > 0 else done / size

    def _decay(self, i: int) -> float:
        done = i - sum(self.sizes) + 1
        return done / self.decay_step_size if self.decay_step_size else 0.0


class WarmupLR(Schedule):
    """Rise from ``warmup_min_lr`` to ``warmup_max_lr`` and stay there.

    ``min + (max - min) * g(i)``; ``g`` is ``log(i + 1) / log(n)`` for ``warmup_type`` log, ``i / n`` for
    linear, with ``n = max(2, warmup_num_steps)``, and 1 from ``i = n`` on; before the first step the
    rate is ``min``. ``warmup_max_lr`` None: the rate of the optimizer's first group.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.optimizer = optimizer
        if warmup_max_lr is None:
            warmup_max_lr = float(optimizer.param_groups[0]["lr"])
        self.min_lrs = self._for_groups("warmup_min_lr", warmup_min_lr)
        self.max_lrs = self._for_groups("warmup_max_lr", warmup_max_lr)
        self.warmup_num_steps = max(2, _positive("warmup_num_steps", warmup_num_steps))
        self.warmup_type = _warmup_type(warmup_type)
        super().__init__(optimizer, last_batch_iteration)

    def rates(self, i: int) -> list[float]:
        """See the class."""
        gamma = 0.0 if i < 0 else self.gamma(i)
        pairs = zip(self.min_lrs, self.max_lrs, strict=True)
        return [low + (high - low) * gamma for low, high in pairs]

    def gamma(self, i: int) -> float:
        """How far between both rates: ``g``."""
        if i < self.warmup_num_steps:
            return _warmed_up(i, self.warmup_num_steps, self.warmup_type)
        return 1.0


class WarmupDecayLR(WarmupLR):
    """As :class:`WarmupLR`, then fall to the minimum at ``i = total_num_steps``.

    From ``i = n`` on, ``g = max(0, (total_num_steps - i) / max(1, total_num_steps - n))``.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = _positive("total_num_steps", total_num_steps)
        super().__init__(
            optimizer,
            warmup_min_lr,
            warmup_max_lr,
            warmup_num_steps,
            warmup_type,
            last_batch_iteration,
        )
        _warn_if_short(self.total_num_steps, self.warmup_num_steps)

    def gamma(self, i: int) -> float:
        """See the class."""
        if i < self.warmup_num_steps:
            return super().gamma(i)
        left, all_after = self.total_num_steps - i, self.total_num_steps - self.warmup_num_steps
        return max(0.0, left / max(1, all_after))


class WarmupCosineLR(Schedule):
    """Rise to the optimizer's own rates, then fall along a cosine to ``cos_min_ratio`` of them.

    ``lr * r(i)`` with, for ``i < n = max(2, warmup_num_steps)`` and ``g`` as in :class:`WarmupLR`,
    ``r = warmup_min_ratio + (1 - warmup_min_ratio) * g(i)``, and afterwards, with
    ``x = min(1, (i - n + 1) / max(1, total_num_steps - n))``,
    ``r = cos_min_ratio + (1 - cos_min_ratio) * (1 + cos(pi * x)) / 2``. Before the first step r is 0.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = _positive("total_num_steps", total_num_steps)
        self.warmup_num_steps = max(2, _positive("warmup_num_steps", warmup_num_steps))
        self.warmup_min_ratio = warmup_min_ratio
        self.cos_min_ratio = cos_min_ratio
        self.warmup_type = _warmup_type(warmup_type)
        _warn_if_short(self.total_num_steps, self.warmup_num_steps)
        super().__init__(optimizer, last_batch_iteration)

    def rates(self, i: int) -> list[float]:
        """See the class."""
        ratio = self.ratio(i)
        return [float(rate) * ratio for rate in self.base_lrs]

    def ratio(self, i: int) -> float:
        """The part of the optimizer's own rates: ``r``."""
        if i < 0:
            return 0.0
        if i < self.warmup_num_steps:
            gamma = _warmed_up(i, self.warmup_num_steps, self.warmup_type)
            return self.warmup_min_ratio + (1 - self.warmup_min_ratio) * gamma
        steps = max(1, self.total_num_steps - self.warmup_num_steps)
        progress = min(1.0, (i - self.warmup_num_steps + 1) / steps)
        cosine = (1 + math.cos(math.pi * progress)) / 2
        return max(0.0, self.cos_min_ratio + (1 - self.cos_min_ratio) * cosine)


def _warmed_up(i: int, steps: int, kind: str) -> float:
    return math.log(i + 1) / math.log(steps) if kind == "log" else i / steps


def _warmup_type(kind: str) -> str:
    if kind not in ("log", "linear"):
        raise OptionError(f"warmup_type: 'log' or 'linear', got {kind!r}")
    return kind


def _positive(name: str, value: float) -> int:
    if isinstance(value, bool) or int(value) != value or value <= 0:
        raise OptionError(f"{name}: a positive number of steps, got {value!r}")
    return int(value)


def _warn_if_short(total: int, warmup: int) -> None:
    if total < warmup:
        warnings.warn(
            f"total_num_steps {total} is less than warmup_num_steps {warmup}", stacklevel=3
        )
