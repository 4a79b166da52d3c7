"""Random training programs: a model, a loop and options, as data that a rank can build and run.

``run`` trains one partitioned on this rank, and unsharded on the data of all ranks, and compares losses,
gradients and parameters after every step.
"""

import contextlib
import copy
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import zero_compile
from zero_runtime.errors import DivergenceError, PlanError, ZeroError

WIDTH = 6

#: What a model is made of, in order. Each maps rows of WIDTH to rows of WIDTH.
PARTS = (
    "linear",
    "norm",
    "scale",
    "eager",
    "break",
    "function",
    "foreign",
    "scripted",
    "tied",
    "empty",
    "branch",
    "experts",
    "checkpointed",
    "normed",
)


@dataclass(frozen=True)
class Step:
    """One optimizer step: how often it accumulates, what is put off, and what is done around it."""

    micro: int
    late: bool
    clip: float | None
    to_none: bool
    twice: bool
    before: str


@dataclass(frozen=True)
class Program:
    """A model of ``parts`` (those in ``frozen`` do not train at first), options, and a loop of ``steps``."""

    parts: tuple[str, ...]
    frozen: frozenset[int]
    stage: int
    dtype: str
    optimizer: str
    scaler: bool
    offload: str
    bucket_bytes: int | None
    tile_bytes: int | None
    schedule: str
    mesh: bool
    init: bool
    steps: tuple[Step, ...]
    seed: int


#: What may happen before a step: nothing, or something that changes no number of the training.
BEFORE = (
    "nothing",
    "evaluate",
    "load own",
    "resume",
    "compile anew",
    "convert",
    "read",
    "hold",
    "unfreeze",
    "add group",
)

steps = st.builds(
    Step,
    micro=st.integers(1, 3),
    late=st.booleans(),
    clip=st.sampled_from([None, None, 0.1]),
    to_none=st.booleans(),
    twice=st.booleans(),
    before=st.sampled_from(BEFORE),
)
# Inductor alone fails too at weight norm's backward in float16.
programs = st.builds(
    Program,
    parts=st.lists(st.sampled_from(PARTS), min_size=1, max_size=5).map(tuple),
    frozen=st.frozensets(st.integers(0, 4), max_size=2),
    stage=st.sampled_from([1, 2, 3, 3]),
    dtype=st.sampled_from(["float32", "float32", "float32", "bfloat16", "float16"]),
    optimizer=st.sampled_from(["SGD", "AdamW"]),
    scaler=st.booleans(),
    offload=st.sampled_from(["", "", "optimizer", "parameters", "both"]),
    bucket_bytes=st.sampled_from([None, 100, 400]),
    tile_bytes=st.sampled_from([None, None, 96]),
    schedule=st.sampled_from(["planned", "one_ahead", "on_demand"]),
    mesh=st.booleans(),
    init=st.booleans(),
    steps=st.lists(steps, min_size=2, max_size=4).map(tuple),
    seed=st.integers(0, 1 << 20),
).filter(lambda program: not (program.dtype == "float16" and "normed" in program.parts))


class _Square(torch.autograd.Function):
    """Rows times a matrix, whose gradient goes straight to autograd."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        w = w.detach().clone()
        ctx.save_for_backward(x, w)
        return x @ w.T

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, w = ctx.saved_tensors
        return gradient @ w, gradient.T @ x


@torch.jit.script
def _gated(scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(scale)


class Experts(nn.Module):
    """Rows of rank 0 go to one expert and those of rank 1 to another; a third has none."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor, chosen: int) -> torch.Tensor:
        out: torch.Tensor = self.experts[chosen % 2](x)
        return out


class Part(nn.Module):
    """One part of a model."""

    def __init__(self, kind: str, tied: nn.Parameter | None) -> None:
        super().__init__()
        self.kind = kind
        self.body: nn.Module = nn.Linear(WIDTH, WIDTH, bias=kind != "tied")
        self.vector = nn.Parameter(torch.ones(WIDTH))
        if kind == "norm":
            self.body = nn.LayerNorm(WIDTH)
        elif kind == "experts":
            self.body = Experts()
        elif kind == "normed":
            self.body = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        elif kind == "tied" and tied is not None:
            self.body.weight = tied
        if kind == "empty":
            self.none = nn.Linear(WIDTH, 0)
            self.nothing = nn.Parameter(torch.empty(0))

    @torch.compiler.disable
    def outside(self, x: torch.Tensor, kind: str) -> torch.Tensor:
        if kind == "eager":
            return self.body(x) * self.vector
        if kind == "foreign":
            return _Square.apply(x, self.body.weight)
        return _gated(self.vector.view_as(self.vector), self.body(x))

    def forward(self, x: torch.Tensor, chosen: int, number: int) -> torch.Tensor:
        kind = self.kind
        if kind in ("eager", "foreign", "scripted"):
            return x + torch.tanh(self.outside(x, kind))
        if kind == "function":
            return torch.tanh(_Square.apply(x, self.body.weight))
        if kind == "branch":
            return x + self.body(x) if number % 2 else x * self.vector
        if kind == "experts":
            return x + torch.tanh(self.body(x, chosen))
        if kind == "checkpointed":
            return checkpoint(self._inner, x, use_reentrant=False)
        if kind == "break":
            x = self.body(x)
            torch._dynamo.graph_break()
        if kind == "empty":
            return self.body(x) + self.none(x).sum() + self.nothing.sum()
        return self._inner(x)

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.body(x)) * self.vector


class Model(nn.Module):
    """The parts one after another, written out: Dynamo compiles no function whose graph breaks in a loop."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        tied = self.first.weight
        for n in range(5):
            kind = program.parts[n] if n < len(program.parts) else ""
            self.add_module(f"part{n}", Part(kind, tied) if kind else None)
        for n in program.frozen:
            part = getattr(self, f"part{n}")
            if part is not None and part.kind != "tied":
                part.requires_grad_(False)

    def forward(self, x: torch.Tensor, chosen: int, number: int) -> torch.Tensor:
        x = self.first(x)
        if self.part0 is not None:
            x = self.part0(x, chosen, number)
        if self.part1 is not None:
            x = self.part1(x, chosen, number)
        if self.part2 is not None:
            x = self.part2(x, chosen, number)
        if self.part3 is not None:
            x = self.part3(x, chosen, number)
        if self.part4 is not None:
            x = self.part4(x, chosen, number)
        return x


def _rows(program: Program, rank: int, number: int) -> torch.Tensor:
    seed = program.seed * 1009 + 31 * number + rank
    rows = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(seed))
    return rows.to(getattr(torch, program.dtype))


class WrongNumberError(AssertionError):
    """A number differs from the unsharded run's."""


class _Side:
    """One of the two trainings: the model, what is called, what steps."""

    def __init__(self, program: Program, model: nn.Module, call: Any, masters: bool) -> None:
        self.program, self.model, self.call = program, model, call
        self.trained = [p for p in model.parameters() if p.requires_grad]
        self.masters = (
            {p: p.detach().float().clone() for p in model.parameters()} if masters else {}
        )
        kinds = {
            "SGD": {"lr": 0.05, "momentum": 0.9},
            "AdamW": {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-3},
        }
        kind = getattr(torch.optim, program.optimizer)
        self.optimizer = kind([self._stepped(p) for p in self.trained], **kinds[program.optimizer])
        scale = program.dtype == "float16" or (program.scaler and program.dtype == "float32")
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=scale)

    def _stepped(self, parameter: nn.Parameter) -> torch.Tensor:
        return self.masters.get(parameter, parameter)

    def add(self, parameters: list[nn.Parameter]) -> None:
        self.trained += parameters
        if parameters:
            self.optimizer.add_param_group({"params": [self._stepped(p) for p in parameters]})

    def step(self, step: Step) -> float | None:
        """Clip and step; the norm. With masters of our own, as a loop by hand does it."""
        for p, master in self.masters.items():
            master.grad = None if p.grad is None else p.grad.float()
        stepped = [self._stepped(p) for p in self.trained]
        norm = None
        if step.clip is not None:
            self.scaler.unscale_(self.optimizer)
            norm = float(nn.utils.clip_grad_norm_(stepped, step.clip))
        self.scaler.step(self.optimizer)
        self.scaler.update()
        with torch.no_grad():
            for p, master in self.masters.items():
                p.copy_(master)
        self.optimizer.zero_grad(step.to_none)
        if self.masters:
            self.model.zero_grad(step.to_none)
        return norm


def _options(program: Program) -> dict[str, Any]:
    found: dict[str, Any] = {"schedule": program.schedule}
    if program.dtype != "float32":
        found |= {
            "bf16" if program.dtype == "bfloat16" else "fp16": True,
            "reduce_dtype": "float32",
        }
    if program.offload in ("optimizer", "both"):
        found["offload_optimizer"] = {"device": "cpu"}
    if program.offload in ("parameters", "both") and program.stage == 3:
        found["offload_param"] = {"device": "cpu"}
    for name in ("bucket_bytes", "tile_bytes"):
        if getattr(program, name) is not None:
            found[name] = getattr(program, name)
    if "experts" in program.parts:
        found["leaf_modules"] = ["Experts"]
    if program.mesh and dist.is_initialized() and dist.get_world_size() > 1:
        found["mesh"] = dist.device_mesh.init_device_mesh("cpu", (1, dist.get_world_size()))
    return found


def _tolerance(program: Program) -> float:
    return {"float32": 2e-4, "bfloat16": 3e-2, "float16": 1e-2}[program.dtype]


def _compare(
    what: str, found: torch.Tensor | None, expected: torch.Tensor | None, tol: float
) -> None:
    if (found is None) != (expected is None):
        if expected is None and found is not None and not found.any():
            return  # zeros where nothing is: a put-off gradient that was zeroed, say
        raise WrongNumberError(
            f"{what}: {'nothing' if found is None else 'something'} where it should not be"
        )
    if found is None or expected is None or not expected.numel():
        return
    worst = float(
        (found.float() - expected.float()).abs().max() / (expected.float().abs().max() + 1e-3)
    )
    if not worst <= tol:
        raise WrongNumberError(f"{what}: off by {worst:.3g}")


def _full(gradient: torch.Tensor | None) -> torch.Tensor | None:
    full = getattr(gradient, "full_tensor", None)
    return gradient if full is None else full()


def _meanwhile(what: str, side: _Side, number: int) -> None:
    """Something between two steps, the same on both sides."""
    model, program = side.model, side.program
    if what == "evaluate":
        model.eval()
        with torch.no_grad():
            side.call(_rows(program, 0, 1000), 0, 1)
        model.train()
    elif what == "load own":
        model.load_state_dict(model.state_dict())
    elif what == "resume":
        side.optimizer.load_state_dict(copy.deepcopy(side.optimizer.state_dict()))
    elif what == "compile anew":
        torch._dynamo.reset()
    elif what == "convert":
        model.to("cpu")
        if (
            program.dtype != "float16"
        ):  # it would cast gradients that stand as float32 for GradScaler
            model.to(getattr(torch, program.dtype))
    elif what == "read":
        with torch.no_grad():
            sum(float(p.detach().sum()) for p in model.parameters())
    elif what in ("unfreeze", "add group"):
        frozen = [p for p in model.parameters() if not p.requires_grad]
        for p in frozen:
            p.requires_grad_(True)
        side.add(frozen)


def _hold(model: nn.Module) -> None:
    with zero_compile.GatheredParameters(list(model.parameters()), modifier_rank=0):
        for p in model.parameters():
            p.detach().sum()


def run(program: Program) -> str:
    """``"right"``, or why the program was refused.

    Raises:
        WrongNumberError: a number differs.
        Exception: what is no refusal of ours.
    """
    torch._dynamo.reset()
    warnings.simplefilter("ignore")
    try:
        _train(program)
    except WrongNumberError:
        raise
    except Exception as error:
        reason = _refusal(error)
        if reason is None:
            raise
        return reason
    return "right"


def _refusal(error: BaseException | None) -> str | None:
    while error is not None:
        if isinstance(error, ZeroError) and not isinstance(error, PlanError | DivergenceError):
            return f"{type(error).__name__}: {error}"
        inner = getattr(error, "inner_exception", None)
        error = error.__cause__ or inner or error.__context__
    return None


def _train(program: Program) -> None:
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    torch.manual_seed(program.seed)
    dtype = getattr(torch, program.dtype)
    reference = Model(program).to(dtype)
    torch.manual_seed(program.seed)
    options = _options(program)
    built = {name: value for name, value in options.items() if name != "leaf_modules"}
    inside = program.init and program.stage == 3
    with zero_compile.Init(options=built) if inside else contextlib.nullcontext():
        model = Model(program).to(dtype)
    if "experts" in program.parts:
        zero_compile.partition(model, options, stage=program.stage)
    compiled = torch.compile(model, backend=f"zero{program.stage}", options=options)
    ours = _Side(program, model, compiled, masters=False)
    theirs = _Side(program, reference, reference, masters=program.dtype != "float32")
    number, tol = 0, _tolerance(program)
    for count, step in enumerate(program.steps):
        if step.before == "hold":
            _hold(model)
        else:
            for side in (ours, theirs):
                _meanwhile(step.before, side, count)
        for micro in range(step.micro):
            put_off = step.late and micro < step.micro - 1
            for _ in range(2 if step.twice else 1):
                with zero_compile.no_sync(model) if put_off else contextlib.nullcontext():
                    loss = ours.call(_rows(program, rank, number), rank, number).square().mean()
                    ours.scaler.scale(loss).backward()
                losses = [
                    reference(_rows(program, r, number), r, number).square().mean()
                    for r in range(world)
                ]
                theirs.scaler.scale(sum(losses) / world).backward()
                _compare(f"loss {number}", loss.detach(), losses[rank].detach(), tol)
            number += 1
        _compare_gradients(f"step {count}", model, reference, 3 * tol)
        norm, expected = ours.step(step), theirs.step(step)
        if norm is not None and expected is not None:
            _compare(f"norm {count}", torch.tensor(norm), torch.tensor(expected), 2 * tol)
    state, wanted = model.state_dict(), reference.state_dict()
    for name, value in wanted.items():
        _compare(name, state[name], value, 2 * tol)


def _compare_gradients(what: str, model: nn.Module, reference: nn.Module, tol: float) -> None:
    wrong = []
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        try:
            _compare(f"gradient of {name} at {what}", _full(p.grad), q.grad, tol)
        except WrongNumberError as error:  # gathering goes on, on every rank
            wrong.append(str(error))
    if wrong:
        raise WrongNumberError("; ".join(wrong))


def drawn(count: int, seed: int) -> Iterator[Program]:
    """``count`` programs, the same for a seed."""
    import random

    import hypothesis
    from hypothesis import HealthCheck, Phase, settings

    found: list[Program] = []

    @hypothesis.seed(random.Random(seed).getrandbits(32))
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(programs)
    def draw(program: Program) -> None:
        found.append(program)

    draw()
    yield from found[:count]
