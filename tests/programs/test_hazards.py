"""Ways in which real models and loops meet the partition: each is right, or refused with the reason."""

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ranks
import zero_compile
from training import Run, against_unsharded, assert_same_training, mine

SGD = partial(torch.optim.SGD, lr=0.05)


def _mse(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(x), y)


def _batches(count: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(12, 6, generator=generator), torch.randn(12, 6, generator=generator))
        for _ in range(count)
    ]


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(6, 6) for _ in range(3))


class BreaksBetween(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.one(x))
        torch._dynamo.graph_break()
        x = torch.relu(self.two(x))
        torch._dynamo.graph_break()
        return self.three(x) + self.one(x)


class EagerBetween(Base):
    """Code that is not compiled uses parameters, some of them in no graph at all."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((6,), 0.5))

    @torch.compiler.disable
    def eager(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.two(x)) * self.scale + self.one.weight.sum()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.three(self.eager(self.one(x)))


class EagerAfter(Base):
    @torch.compiler.disable
    def eager(self, x: torch.Tensor) -> torch.Tensor:
        return self.three(x) + self.one.weight.sum()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.eager(self.two(self.one(x)))


class Checkpointed(Base):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.two(torch.relu(self.one(x))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.three(x)  # the reentrant form gives gradients only where its input has one
        return self.three(checkpoint(self.inner, x, use_reentrant=self.reentrant) + x)


class Tied(Base):
    def __init__(self) -> None:
        super().__init__()
        self.three.weight = self.one.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.three(torch.relu(self.two(torch.relu(self.one(x)))))


class Odd(nn.Module):
    """Scalars, empty parameters, transposed memory, mixed dtypes, lists and dicts, weight norm."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.transposed = nn.Parameter(torch.randn(6, 6).t())
        self.strided = nn.Parameter(torch.randn(6, 12)[:, ::2])
        self.precise = nn.Parameter(torch.randn(6, dtype=torch.float64))
        self.many = nn.ParameterList(torch.randn(6) for _ in range(3))
        self.named = nn.ParameterDict({"a": torch.randn(6)})
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
        self.batch = nn.BatchNorm1d(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.batch(x @ self.transposed + x @ self.strided) * self.scalar
        x = x + (x.double() * self.precise).float() + self.empty.sum()
        return self.normed(x + sum(self.many) * self.named["a"])


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv2d(1, 4, 3, padding=1)
        self.two = nn.ConvTranspose2d(4, 1, 3, padding=1)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.view(-1, 1, 2, 3)
        return self.two(torch.relu(self.one(x))).flatten(1)


class Helper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class SkippedFrame(nn.Module):
    """A frame that Dynamo skips calls one that it compiles and a layer that it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.helper = nn.LayerNorm(6), Helper()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            torch._dynamo.graph_break()
            x = self.norm(self.helper(x))
        return x


class WorksElsewhere(Base):
    """The only graph has no parameters."""

    @torch.compiler.disable
    def work(self, x: torch.Tensor) -> torch.Tensor:
        return self.three(torch.relu(self.two(torch.relu(self.one(x)))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.work(x * 2) + 1


class Lazy(nn.Module):
    """Layers that learn their sizes in the first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(6))
        self.body(torch.ones(1, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


class Spectral(Base):
    """A parametrization that computes the weight in each forward, and a frozen base under an adapter."""

    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.orthogonal(self.one)
        self.two.requires_grad_(False)
        self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.one(x))
        return self.three(torch.relu(self.two(x) + self.up(self.down(x))))


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.head = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=6))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "breaks_between": BreaksBetween,
    "eager_between": EagerBetween,
    "eager_after": EagerAfter,
    "checkpoint": partial(Checkpointed, False),
    "checkpoint_reentrant": partial(Checkpointed, True),
    "tied": Tied,
    "convolutions": Convolutions,
    "skipped_frame": SkippedFrame,
    "works_elsewhere": WorksElsewhere,
    "lazy": Lazy,
    "adapter": Spectral,
    "complex": Complex,
}


def _trained(name: str, **options: Any) -> tuple[Run, Run, list[str]]:
    torch.manual_seed(0)
    model = MODELS[name]()
    plain, sharded = against_unsharded(
        model, _batches(), _mse, lambda m: SGD(m.parameters()), clip=1.0, **options
    )
    whole = [n for n, p in model.named_parameters() if p.untyped_storage().nbytes()]
    return plain.bare(), sharded.bare(), whole


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_as_unsharded_with_all_parameters_partitioned(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for plain, sharded, whole in ranks.run(2, _trained, name):
            assert_same_training(plain, sharded)
            assert whole == []


def _odd() -> tuple[Run, Run]:
    """Batch statistics differ between ranks and the whole batch, so every rank gets the same rows."""
    torch.manual_seed(0)
    model = Odd()
    same = [tuple(t[:4].repeat(2, 1) for t in batch) for batch in _batches()]
    plain, sharded = against_unsharded(model, same, _mse, lambda m: SGD(m.parameters()))
    return plain.bare(), sharded.bare()


def test_parameters_of_every_kind() -> None:
    for plain, sharded in ranks.run(2, _odd):
        assert_same_training(plain, sharded)


# ------------------------------------------------------------------------------ loops


def _two_forwards(step: Any, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    first, second = _mse(step, x, y), _mse(step, y, x)
    (first + 2 * second).backward()


def _retain_graph(step: Any, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    loss = _mse(step, x, y)
    loss.backward(retain_graph=True)
    loss.backward()


def _functional_loss(step: Any, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    loss = _mse(step, x, y)
    (loss + 1e-3 * sum(p.square().sum() for p in model.parameters())).backward()


def _hooks(step: Any, model: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    def halve(p: torch.Tensor) -> None:
        assert p.grad is not None
        p.grad.mul_(0.5)

    handles = [p.register_post_accumulate_grad_hook(halve) for p in model.parameters()]
    handles.append(model.one.weight.register_hook(lambda g: g * 3))
    held: list[torch.Tensor] = []  # what somebody holds on to autograd does not hand on, but copies
    handles.append(model.two.weight.register_hook(held.append))
    _mse(step, x, y).backward()
    for handle in handles:
        handle.remove()


def _frozen_between(step: Any, model: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    model.two.requires_grad_(not model.two.weight.requires_grad)
    _mse(step, x, y).backward()


def _autograd_grad(step: Any, model: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(_mse(step, x, y), parameters)
    for p, g in zip(parameters, gradients, strict=True):
        p.grad = g


def _functional_call(step: Any, model: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    """A model called with parameters made from its own: a script that regularises, or meta-learns."""
    with torch.no_grad():
        step(x)
    scaled = {n: p * 0.9 for n, p in step.named_parameters()}
    nn.functional.mse_loss(torch.func.functional_call(step, scaled, (x,)), y).backward()


def _accumulated(step: Any, model: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    for part in range(2):
        _mse(step, x[part::2], y[part::2]).backward()


def _moving_average(step: Any, model: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    """Weights pulled towards their own running average, kept by torch's public class."""
    _mse(step, x, y).backward()
    averaged = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    averaged.update_parameters(model)
    with torch.no_grad():
        for p, q in zip(model.parameters(), averaged.module.parameters(), strict=True):
            p.lerp_(q + 0.01, 0.5)


def _clipped_values(step: Any, model: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    _mse(step, x, y).backward()
    nn.utils.clip_grad_value_(model.parameters(), 1e-2)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.inner = nn.Parameter(torch.randn(6)), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x)) * self.weight


class Blocks(nn.Module):
    """More equal blocks than Dynamo's recompile limit."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(10))
        self.head = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Chain(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.three(torch.relu(self.two(torch.relu(self.one(x)))))


LOOPS = [
    _two_forwards,
    _retain_graph,
    _functional_loss,
    _hooks,
    _frozen_between,
    _autograd_grad,
    _functional_call,
    _accumulated,
    _moving_average,
    _clipped_values,
]


def _looped(loop: Callable[..., None]) -> tuple[Run, Run]:
    torch.manual_seed(0)
    start = Chain()
    runs = []
    for sharded in (False, True):
        model = copy.deepcopy(start)
        step = torch.compile(model, backend="zero3") if sharded else model
        optimizer = SGD(model.parameters())
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
        for x, y in _batches():
            loop(step, model, *(mine((x, y)) if sharded else (x, y)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        runs.append(
            Run([0.0], [], {n: p.detach() for n, p in model.named_parameters()}, None, None)
        )
    return runs[0], runs[1]


@pytest.mark.slow
@pytest.mark.parametrize("loop", LOOPS, ids=lambda f: f.__name__.strip("_"))
def test_a_loop_trains_as_unsharded(loop: Callable[..., None]) -> None:
    for plain, sharded in ranks.run(2, _looped, loop):
        assert_same_training(plain, sharded)


def _group_added() -> tuple[Run, Run]:
    """A frozen layer begins to train after two steps, in a parameter group of its own."""
    torch.manual_seed(0)
    start = Chain()
    start.three.requires_grad_(False)
    runs = []
    for sharded in (False, True):
        model = copy.deepcopy(start)
        step = torch.compile(model, backend="zero3") if sharded else model
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
        for number, (x, y) in enumerate(_batches()):
            if number == 2:
                model.three.requires_grad_(True)
                optimizer.add_param_group({"params": model.three.parameters(), "lr": 0.02})
            _mse(step, *(mine((x, y)) if sharded else (x, y))).backward()
            optimizer.step()
            optimizer.zero_grad()
        runs.append(
            Run([0.0], [], {n: p.detach() for n, p in model.named_parameters()}, None, None)
        )
    return runs[0], runs[1]


def test_a_parameter_group_added_between_steps() -> None:
    for plain, sharded in ranks.run(2, _group_added):
        assert_same_training(plain, sharded)


def _in_parts(way: str) -> tuple[Run, Run]:
    torch.manual_seed(0)
    start = Blocks() if way == "blocks" else Chain()
    runs = []
    for sharded in (False, True):
        model: Any = copy.deepcopy(start)
        step: Any = model
        if sharded and way == "blocks":
            for block in model.blocks:
                block.compile(backend="zero3")
        if sharded and way == "in_place":
            model.compile(backend="zero3")
        if sharded and way == "closure":
            step = torch.compile(lambda x, m=model: m(x) * 1.0, backend="zero3")
        optimizer = SGD(model.parameters())
        for x, y in _batches():
            _mse(step, *(mine((x, y)) if sharded else (x, y))).backward()
            optimizer.step()
            optimizer.zero_grad()
        runs.append(
            Run([0.0], [], {n: p.detach() for n, p in model.named_parameters()}, None, None)
        )
    return runs[0], runs[1]


@pytest.mark.parametrize("way", ["blocks", "in_place", "closure"])
def test_a_model_compiled_in_another_way_trains_as_unsharded(way: str) -> None:
    for plain, sharded in ranks.run(2, _in_parts, way):
        assert_same_training(plain, sharded)


def _two_models() -> tuple[Run, Run]:
    """A generator and a discriminator, two optimizers, one backward through both."""
    torch.manual_seed(0)
    starts = Chain(), Chain()
    runs = []
    for sharded in (False, True):
        models = [copy.deepcopy(m) for m in starts]
        g, d = (torch.compile(m, backend="zero3") if sharded else m for m in models)
        optimizers = [SGD(m.parameters()) for m in models]
        for x, y in _batches():
            x, y = mine((x, y)) if sharded else (x, y)
            (d(g(x).detach()).square().mean() + (d(y) - 1).square().mean()).backward()
            optimizers[1].step()
            optimizers[1].zero_grad()
            (d(g(x)) - 1).square().mean().backward()
            optimizers[0].step()
            for optimizer in optimizers:
                optimizer.zero_grad()
        named = {
            f"{i}.{n}": p.detach() for i, m in enumerate(models) for n, p in m.named_parameters()
        }
        runs.append(Run([0.0], [], named, None, None))
    return runs[0], runs[1]


def test_two_models_with_two_optimizers() -> None:
    for plain, sharded in ranks.run(2, _two_models):
        assert_same_training(plain, sharded)


def _disabled_after_limit() -> tuple[Run, Run]:
    """Past the recompile limit Dynamo runs the frame eagerly: slow, warned of, and right."""
    torch.manual_seed(0)
    start = Chain()
    runs = []
    for sharded in (False, True):
        model = copy.deepcopy(start)
        step = torch.compile(model, backend="zero3", dynamic=False) if sharded else model
        optimizer = SGD(model.parameters())
        with torch._dynamo.config.patch(recompile_limit=2):
            for count, (x, y) in enumerate(_batches(5)):
                x, y = x[: 4 + 2 * count], y[: 4 + 2 * count]
                _mse(step, *(mine((x, y)) if sharded else (x, y))).backward()
                optimizer.step()
                optimizer.zero_grad()
        runs.append(
            Run([0.0], [], {n: p.detach() for n, p in model.named_parameters()}, None, None)
        )
    return runs[0], runs[1]


def test_past_the_recompile_limit_training_stays_right() -> None:
    for plain, sharded in ranks.run(2, _disabled_after_limit):
        assert_same_training(plain, sharded)


class LoopsWithBreaks(Base):
    """Dynamo skips a function whose graph breaks inside a loop: nothing of this model is compiled."""

    @torch.compiler.disable
    def eager(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(layer(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.one, self.two, self.three):
            x = self.eager(layer, x)
        return x


def _never_compiled(kind: str) -> str:
    model: Any = LoopsWithBreaks() if kind == "loop" else nn.Linear(6, 6)
    optimizer = SGD(model.parameters())
    if kind == "bare":
        model.compile(backend="zero3")
    step = model if kind == "bare" else torch.compile(model, backend="zero3")
    step(torch.ones(2, 6)).sum().backward()
    try:
        optimizer.step()
    except NotImplementedError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("kind", ["loop", "bare"])
def test_a_model_of_which_nothing_is_compiled_is_refused_at_its_first_step(kind: str) -> None:
    for said in ranks.run(2, _never_compiled, kind):
        assert "neither partitioned nor averaged" in said
        assert "zero_compile.partition(model)" in said


def _partitioned_explicitly() -> tuple[Run, Run]:
    torch.manual_seed(0)
    start = LoopsWithBreaks()
    runs = []
    for sharded in (False, True):
        model = copy.deepcopy(start)
        step: Any = model
        if sharded:
            zero_compile.partition(model)
            step = torch.compile(model, backend="zero3")
        optimizer = SGD(model.parameters())
        for x, y in _batches():
            _mse(step, *(mine((x, y)) if sharded else (x, y))).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        runs.append(
            Run([0.0], [], {n: p.detach() for n, p in model.named_parameters()}, None, None)
        )
    return runs[0], runs[1]


def test_an_explicitly_partitioned_model_is_right_without_any_graph() -> None:
    for plain, sharded in ranks.run(2, _partitioned_explicitly):
        assert_same_training(plain, sharded)
