"""Train every model of the zoo partitioned and unsharded, and compare: ``python tests/support/zoo.py``."""

import argparse
import contextlib
import copy
import itertools
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import ranks
from training import mean_over_ranks, relative, world
from zero_compile.api.report import sessions
from zero_runtime.sharding.sharded_gradient import ShardedGradient
from zoo_models import Entry, Inputs, Turn
from zoo_plain import ZOO

LOSS_TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 1e-4
UPDATE_TOLERANCE = 1e-3
BF16_TOLERANCE = 2e-2
SECONDS = 600
ROWS_PER_RANK = 2
#: Below this part of the model's largest gradient, a gradient may be nothing but rounding errors.
NOISE_FLOOR = 1e-3

Tensors = dict[str, torch.Tensor]
Precision = Callable[[], contextlib.AbstractContextManager[Any]]


class Trained(NamedTuple):
    """What one training run leaves behind."""

    losses: list[float]
    gradients: Tensors
    updates: Tensors
    whole: list[str]


class Result(NamedTuple):
    """One model, partitioned beside unsharded."""

    parameters: int
    buckets: int
    graphs: int
    loss: float
    gradient: float
    worst_gradient: str
    update: float
    worst_update: str
    whole: list[str]
    bf16: float | None
    reference: str

    def complaints(self) -> list[str]:
        """What is beyond its tolerance."""
        found = []
        if not self.loss <= LOSS_TOLERANCE:
            found.append(f"losses differ by {self.loss:.1e}")
        if not self.gradient <= GRADIENT_TOLERANCE:
            found.append(f"gradient of {self.worst_gradient} differs by {self.gradient:.1e}")
        if not self.update <= UPDATE_TOLERANCE:
            found.append(f"update of {self.worst_update} differs by {self.update:.1e}")
        if self.whole:
            found.append(f"{len(self.whole)} not partitioned, as {self.whole[0]}")
        if self.bf16 is not None and not self.bf16 <= BF16_TOLERANCE:
            found.append(f"bf16 losses differ by {self.bf16:.1e}")
        return found


# ------------------------------------------------------------------------------ on the ranks


def compare(name: str, steps: int, bf16: bool) -> Result:
    """Train model ``name`` both ways on this rank. Collective."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # whole parameters are read here on purpose
        return _compare(ZOO[name], steps, bf16)


def _compare(entry: Entry, steps: int, bf16: bool) -> Result:
    torch.manual_seed(0)
    model = entry.make()
    start = copy.deepcopy(model)
    batches = _batches(entry, steps)
    sharded = _train(entry, model, batches, "zero3")
    plain, reference = _train(entry, copy.deepcopy(start), batches), "eager"
    if _loss_difference(plain, sharded) > LOSS_TOLERANCE:
        torch._dynamo.reset()
        plain, reference = _train(entry, copy.deepcopy(start), batches, "inductor"), "inductor"
    gradient, worst_gradient = _difference(plain.gradients, sharded.gradients)
    update, worst_update = _difference(plain.updates, sharded.updates)
    owners = sessions(model)
    plans = [plan for session in owners for plan in session.plans]
    return Result(
        parameters=sum(p.numel() for p in model.parameters()),
        buckets=sum(len(session.buckets) for session in owners),
        graphs=len(plans),
        loss=_loss_difference(plain, sharded),
        gradient=gradient,
        worst_gradient=worst_gradient,
        update=update,
        worst_update=worst_update,
        whole=sharded.whole,
        bf16=_compare_bf16(entry, start, batches) if bf16 and entry.bf16 else None,
        reference=reference,
    )


def control(name: str, steps: int) -> list[float]:
    """Train model ``name`` with plain Inductor: what fails here too has nothing to do with us."""
    entry = ZOO[name]
    torch.manual_seed(0)
    return _train(entry, entry.make(), _batches(entry, steps), "inductor").losses


def _compare_bf16(entry: Entry, start: nn.Module, batches: Sequence[Inputs]) -> float:
    """The largest relative difference of the losses under autocast.

    Where eager code differs, plain Inductor is the reference: some of its kernels overflow in bfloat16
    by themselves.
    """
    torch._dynamo.reset()
    autocast = lambda: torch.autocast("cpu", torch.bfloat16)  # noqa: E731
    plain = _train(entry, copy.deepcopy(start), batches, precision=autocast)
    sharded = _train(entry, copy.deepcopy(start), batches, "zero3", autocast)
    if _loss_difference(plain, sharded) > BF16_TOLERANCE:
        torch._dynamo.reset()
        plain = _train(entry, copy.deepcopy(start), batches, "inductor", autocast)
        return _difference_while_finite(plain.losses, sharded.losses)
    return _loss_difference(plain, sharded)


def _difference_while_finite(expected: Sequence[float], found: Sequence[float]) -> float:
    """Of losses that must stop being finite at the same step."""
    finite = [list(itertools.takewhile(math.isfinite, losses)) for losses in (expected, found)]
    if not finite[0] or len(finite[0]) != len(finite[1]):
        return math.inf
    return relative(*finite)


def _loss_difference(expected: Trained, found: Trained) -> float:
    numbers = expected.losses + found.losses
    return relative(expected.losses, found.losses) if all(map(math.isfinite, numbers)) else math.inf


def _batches(entry: Entry, steps: int) -> list[Inputs]:
    generator = torch.Generator().manual_seed(3)
    rows = ROWS_PER_RANK * (2 if entry.same_rows else world()[1])
    return [entry.batch(generator, rows) for _ in range(steps)]


def _mine(entry: Entry, batch: Inputs) -> Inputs:
    rank, size = world()
    return batch if entry.same_rows else {k: v.chunk(size)[rank] for k, v in batch.items()}


def _train(
    entry: Entry,
    model: nn.Module,
    batches: Sequence[Inputs],
    backend: str | None = None,
    precision: Precision = contextlib.nullcontext,
) -> Trained:
    """Train ``model`` in place: partitioned where ``backend`` is zero3, else on whole batches."""
    sharded = backend == "zero3"
    before = _copies(model)
    step = entry.compile(model, backend) if backend else model
    turns = [(turn, _optimizer(turn, model)) for turn in entry.all_turns]
    losses: list[float] = []
    gradients: Tensors = {}
    whole: list[str] = []
    for number, batch in enumerate(batches):
        for turn, optimizer in turns:
            model.zero_grad()
            with precision():
                loss = turn.loss(step, _mine(entry, batch) if sharded else batch)
            loss.backward()
            if number == 0:
                gradients |= _gradients(model, turn)
            optimizer.step()
            losses.append(mean_over_ranks(loss))
        if number == 0 and sharded:
            whole = [n for n, p in model.named_parameters() if p.untyped_storage().nbytes()]
    after = _copies(model)
    return Trained(losses, gradients, {n: after[n] - before[n] for n in before}, whole)


def _optimizer(turn: Turn, model: nn.Module) -> torch.optim.Optimizer:
    """SGD: Adam divides by small gradients, and would compare their rounding errors."""
    return torch.optim.SGD(turn.parameters(model), lr=0.05, momentum=0.9)


def _copies(model: nn.Module) -> Tensors:
    """Parameters, and what else a step may change. Collective."""
    named = itertools.chain(model.named_parameters(), model.named_buffers())
    return {name: t.detach().clone() for name, t in named if t.is_floating_point()}


def _gradients(model: nn.Module, turn: Turn) -> Tensors:
    """Whole gradients; zeros where there is none, as AOTAutograd makes zeros for unused outputs. Collective."""
    trained = set(map(id, turn.parameters(model)))
    return {n: _gradient(p) for n, p in model.named_parameters() if id(p) in trained}


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros(parameter.shape)
    return gradient.full_tensor() if isinstance(gradient, ShardedGradient) else gradient.clone()


def _difference(expected: Tensors, found: Tensors) -> tuple[float, str]:
    """The largest difference of one tensor relative to its largest element, and whose it is."""
    sizes = {name: _largest(t) for name, t in expected.items() if t.numel()}
    floor = NOISE_FLOOR * max(sizes.values()) or 1.0
    differences = {
        name: _largest(found[name] - expected[name]) / max(size, floor)
        for name, size in sizes.items()
    }
    worst = max(differences, key=lambda name: differences[name])
    return differences[worst], worst


def _largest(tensor: torch.Tensor) -> float:
    return float(tensor.abs().nan_to_num(nan=math.inf, posinf=math.inf).max())


# ------------------------------------------------------------------------------ the report


class Outcome(NamedTuple):
    """What came of one model."""

    result: Result | None
    seconds: float
    error: str
    ours: bool = True
    """Whether plain Inductor does without the error."""

    @property
    def failed(self) -> bool:
        """Whether the run of the zoo fails because of it."""
        return bool(self.error) and self.ours

    @property
    def verdict(self) -> str:
        """In one line."""
        line = _last_line(self.error) or "ok"
        return line if self.ours else f"also with inductor: {line}"


def examine(name: str, size: int, steps: int, bf16: bool) -> Outcome:
    """Compare one model on ``size`` ranks; an error, or no answer in time, is part of the outcome."""
    start = time.monotonic()
    try:
        results = ranks.run(size, compare, name, steps, bf16, seconds=SECONDS)
    except (AssertionError, OSError) as failure:
        ours = _inductor_can(name, size, steps)
        return Outcome(None, time.monotonic() - start, str(failure), ours)
    complaints = {c: None for result in results for c in result.complaints()}
    return Outcome(results[0], time.monotonic() - start, "; ".join(complaints))


def _inductor_can(name: str, size: int, steps: int) -> bool:
    try:
        ranks.run(size, control, name, steps, seconds=SECONDS)
    except (AssertionError, OSError):
        return False
    return True


def table(outcomes: dict[str, Outcome]) -> Table:
    """One row a model."""
    made = Table(title="zero3 beside an unsharded run")
    made.add_column("model")
    for heading in (
        "parameters",
        "buckets",
        "graphs",
        "loss",
        "gradient",
        "update",
        "bf16",
        "seconds",
    ):
        made.add_column(heading, justify="right")
    made.add_column("beside")
    made.add_column("verdict")
    for name, outcome in outcomes.items():
        made.add_row(name, *_cells(outcome), style="red" if outcome.failed else None)
    return made


def _cells(outcome: Outcome) -> list[str]:
    seconds, verdict, r = f"{outcome.seconds:.0f}", outcome.verdict, outcome.result
    if r is None:
        return ["-"] * 7 + [seconds, "-", verdict]
    numbers = [f"{x:.1e}" if x is not None else "-" for x in (r.loss, r.gradient, r.update, r.bf16)]
    return [
        str(r.parameters),
        str(r.buckets),
        str(r.graphs),
        *numbers,
        seconds,
        r.reference,
        verdict,
    ]


def _last_line(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1][:160] if lines else ""


def main() -> int:
    """Returns the exit code: 1 if any model failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="names, separated by commas")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--bf16", action="store_true", help="also under bfloat16 autocast")
    arguments = parser.parse_args()
    names = arguments.only.split(",") if arguments.only else list(ZOO)
    if unknown := [name for name in names if name not in ZOO]:
        parser.error(f"no model {', '.join(unknown)}; there are: {', '.join(ZOO)}")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    console, outcomes = Console(width=None if sys.stdout.isatty() else 180), {}
    for name in names:
        outcome = outcomes[name] = examine(name, arguments.ranks, arguments.steps, arguments.bf16)
        console.print(f"{name}: {outcome.verdict} ({outcome.seconds:.0f} s)")
        if outcome.result is None:
            console.print(outcome.error, markup=False, highlight=False)
    console.print(table(outcomes))
    return int(any(outcome.failed for outcome in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
