"""Memory as a formula of batch and ranks, and the largest batch that fits a budget."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import sympy  # type: ignore[import-untyped]

from zero_compile.api.preview import Preview, preview
from zero_compile.config.sizes import parse_bytes
from zero_runtime.errors import OptionError, PlanError

from .models import Shape, model_maker
from .render.tables import si_bytes


@dataclass(frozen=True)
class Wanted:
    """What to plan: a model by name, its input, the ranks, the stage and the compiler's options."""

    target: str
    shape: Shape
    world_size: int
    stage: int
    settings: Mapping[str, Any]

    def plan(self, *, train: bool = True, checked: bool = False) -> Preview:
        """Plan it.

        Raises:
            OptionError, PlanError, ZeroError: as :func:`zero_compile.api.preview.preview`.
        """
        return preview(
            model_maker(self.target, self.shape),
            world_size=self.world_size,
            stage=self.stage,
            options=self.settings,
            train=train,
            checked=checked,
        )

    def of(self, batch: int, **settings: Any) -> "Wanted":
        """The same with another batch, and some settings replaced (None: left out)."""
        merged = {k: v for k, v in {**self.settings, **settings}.items() if v is not None}
        return replace(self, shape=replace(self.shape, batch=batch), settings=merged)


def formula(wanted: Wanted, planned: Preview) -> str:
    """Peak bytes of one rank as an expression in the batch ``B`` a rank and the ranks ``N``.

    Activations grow in proportion to the batch, so two plans without a budget give the line.
    """
    size = wanted.shape.batch
    one, two = (wanted.of(n, device_memory=None).plan() for n in (size, 2 * size))
    batch, ranks = sympy.symbols("B N", positive=True)
    kept = planned.resident
    slope = (two.peak - one.peak) // size
    divided = kept.optimizer + (kept.shards if wanted.stage == 3 else 0)
    fixed = one.peak - divided - slope * size
    spread = divided * wanted.world_size
    what = "shards and optimizer state" if wanted.stage == 3 else "optimizer state"
    rest = "buckets and gradients" if wanted.stage == 3 else "parameters and gradients"
    return (
        f"peak bytes a rank, stage {wanted.stage}: {sympy.sstr(spread / ranks + slope * batch + fixed)}\n"
        f"  {what} {si_bytes(spread)} over N, {si_bytes(slope)} a sequence, "
        f"{si_bytes(max(fixed, 0))} of {rest} at N = {wanted.world_size}"
    )


def largest_batch(wanted: Wanted) -> str:
    """The largest batch a rank whose step fits ``device_memory``, found by planning.

    Raises:
        OptionError: no budget is given, or not even one sequence fits it.
    """
    text = wanted.settings.get("device_memory")
    if text is None:
        raise OptionError("--largest-batch needs --device-memory")
    budget = parse_bytes(text)
    one, two = (wanted.of(n, device_memory=None).plan().peak for n in (1, 2))
    if two <= one:
        raise OptionError(
            f"{wanted.target} takes as much memory with --batch 2 as with 1: let what makes its input "
            "take a parameter named batch"
        )
    guess = max(1, (budget - one) // max(two - one, 1) + 1)
    best = _search(guess, lambda batch: _fits(wanted.of(batch), budget))
    if best == 0:
        raise OptionError(
            f"not one sequence of {wanted.shape.sequence} tokens fits {text}: a step takes "
            f"{si_bytes(one)} without a limit"
        )
    return f"largest batch a rank in {text}: {best} x {wanted.shape.sequence} tokens"


def _search(guess: int, fits: Callable[[int], bool]) -> int:
    """The largest number that fits, 0 for none, near ``guess``: in growing strides, then by halving."""
    low, high, stride = 0, guess, max(1, guess // 20)
    if fits(guess):
        low, high = guess, guess + stride
        while fits(high):
            stride *= 2
            low, high = high, high + stride
    else:
        while high - stride > 0 and not fits(high - stride):
            high, stride = high - stride, 2 * stride
        low = max(0, high - stride)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _fits(wanted: Wanted, budget: int) -> bool:
    try:
        return wanted.plan().peak <= budget
    except (PlanError, OptionError):
        return False
