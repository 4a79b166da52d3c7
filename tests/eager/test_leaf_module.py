"""Leaf modules: ranks may take different ways inside, and train as one process would on all the data."""

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ranks
import zero_compile
from training import mine, relative, whole_parameters, world
from zero_compile.api.report import sessions
from zero_runtime.errors import OptionError
from zero_runtime.memory import native


class Mixture(nn.Module):
    """Each row goes to the expert its sign chooses; an expert without rows does not run."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 1)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = x * torch.sigmoid(self.gate(x))
        for number, expert in enumerate(self.experts):
            rows = (x[:, 0].floor().long() == number).nonzero().flatten()
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]))
        return out


class Model(nn.Module):
    """A mixture between two layers, under a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.mixture = Mixture()
        self.last = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, routes: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x)) * 0.1 + routes[:, None]
        return self.last(h + self.mixture(h)).mean()


def _batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Rank 0's rows go to expert 0, rank 1's to experts 1 and 2; then the other way round; then one only."""
    torch.manual_seed(1)
    routes = [
        [0.5, 0.5, 1.5, 2.5],
        [1.5, 2.5, 0.5, 0.5],
        [0.5, 0.5, 0.5, 0.5],
        [0.5, 1.5, 1.5, 0.5],
    ]
    return [(torch.randn(4, 8), torch.tensor(r)) for r in routes]


def _train(step: Any, model: nn.Module, sharded: bool, clip: float = 0.5) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for batch in _batches():
        loss = step(*(mine(batch) if sharded else batch))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        value = loss.detach().clone()
        if sharded:
            dist.all_reduce(value)
            value /= world()[1]
        losses.append(float(value))
    return losses


def _both(stage: str, leaves: tuple[Any, ...], eagerly: bool) -> tuple[float, float, int]:
    torch.manual_seed(0)
    plain, model = Model(), Model()
    model.load_state_dict(plain.state_dict())
    expected = _train(plain, plain, sharded=False)
    options = {"leaf_modules": leaves}
    if eagerly:
        zero_compile.partition(model, options)
        step: Any = model
    else:
        step = torch.compile(model, backend=stage, options=options)
    found = _train(step, model, sharded=True)
    whole = whole_parameters(model)
    worst = max(float((whole[n] - p).abs().max()) for n, p in plain.named_parameters())
    held = [p.untyped_storage().nbytes() for p in model.mixture.parameters()]
    (session,) = sessions(model)
    return relative(expected, found), worst, sum(held) if session.stage == 3 else 0


@pytest.mark.parametrize("stage", ["zero3", "zero2", "zero1"])
def test_experts_chosen_by_a_ranks_own_rows_train_as_on_one_process(stage: str) -> None:
    for losses, parameters, held in ranks.run(2, _both, stage, ("Mixture",), False):
        assert losses < 1e-5
        assert parameters < 1e-6
        assert held == 0, "a leaf holds no whole parameter between steps"


def test_a_leaf_by_its_name_in_a_model_that_is_not_compiled() -> None:
    for losses, parameters, _ in ranks.run(2, _both, "zero3", ("mixture",), True):
        assert losses < 1e-5
        assert parameters < 1e-6


def _held_between_forward_and_backward() -> list[int]:
    """Bytes of gathered memory alive there."""
    torch.manual_seed(0)
    model = Model()
    # A planned schedule keeps the bucket that forward uses last.
    options = {"leaf_modules": [Mixture], "schedule": "one_ahead"}
    step = torch.compile(model, backend="zero3", options=options)
    seen = []
    for batch in _batches()[:3]:
        model.zero_grad()
        before = native.stats().live
        loss = step(*mine(batch))
        seen.append(native.stats().live - before)
        loss.backward()
    return seen


def test_nothing_gathered_is_kept_from_forward_to_backward() -> None:
    for held in ranks.run(2, _held_between_forward_and_backward):
        assert held[1:] == [0, 0]


def _put_off() -> list[bool]:
    """Two micro-batches with one reduction, against two with two."""
    results = []
    for together in (False, True):
        torch.manual_seed(0)
        model = Model()
        step = torch.compile(model, backend="zero3", options={"leaf_modules": [Mixture]})
        batches = [mine(b) for b in _batches()]
        step(*batches[2]).backward()
        model.zero_grad()
        with zero_compile.no_sync(model) if together else contextlib.nullcontext():
            step(*batches[0]).backward()
        step(*batches[1]).backward()
        results.append({n: p.grad.full_tensor() for n, p in model.named_parameters()})  # type: ignore[union-attr]
        torch._dynamo.reset()
    apart, once = results
    return [torch.allclose(apart[n], once[n], atol=1e-7) for n in apart]


def test_no_sync_puts_off_the_reductions_of_a_leaf_too() -> None:
    for equal in ranks.run(2, _put_off):
        assert all(equal)


def test_an_unknown_leaf_is_refused_with_the_classes_there_are() -> None:
    with pytest.raises(
        OptionError, match=r"no module of Model has the class or the name 'Mixtur'.*Mixture"
    ):
        zero_compile.partition(Model(), {"leaf_modules": ["Mixtur"]})
    with pytest.raises(OptionError, match="expected module classes or names, got 3"):
        zero_compile.partition(Model(), {"leaf_modules": [3]})


def test_an_unknown_leaf_leaves_the_model_as_it_was() -> None:
    model = Model()
    with pytest.raises(OptionError, match="no module of Model"):
        zero_compile.partition(model, {"leaf_modules": ["Mixture", "Mixtur"]})
    assert {type(p) for p in model.parameters()} == {nn.Parameter}
    assert not model.mixture._forward_pre_hooks


def test_an_unknown_leaf_of_a_compiled_model_is_refused_with_the_users_classes() -> None:
    compiled = torch.compile(Model(), backend="zero3", options={"leaf_modules": ["Mixtur"]})
    with pytest.raises(Exception, match="no module of Model has the class or") as caught:
        compiled(torch.ones(2, 8), torch.ones(2))
    assert "OptimizedModule" not in str(caught.value)


@pytest.mark.parametrize("leaf", ["Mixture", "mixture", Mixture])
def test_one_leaf_alone_need_not_stand_in_a_list(leaf: Any) -> None:
    model = Model()
    zero_compile.partition(model, {"leaf_modules": leaf})
    assert len(model.mixture._forward_pre_hooks) == 1


def test_a_leaf_inside_a_compiled_block_keeps_its_name() -> None:
    model = nn.Sequential(torch.compile(Model(), backend="eager"))
    zero_compile.partition(model, {"leaf_modules": ["0.mixture"]})
    assert len(model[0].mixture._forward_pre_hooks) == 1


def test_a_container_that_is_never_called_is_no_leaf() -> None:
    with pytest.raises(
        OptionError, match=r"mixture\.experts is a ModuleList, which is never called"
    ):
        zero_compile.partition(Model(), {"leaf_modules": ["mixture.experts"]})


class Chosen(nn.Module):
    """The choice is a number of Python's, which Dynamo would compile in."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor, choice: int) -> torch.Tensor:
        return self.experts[choice](x)


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.chosen, self.last = nn.Linear(8, 8), Chosen(), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, choice: int) -> torch.Tensor:
        return self.last(self.chosen(torch.tanh(self.first(x)), choice)).mean()


def _chosen_by_number() -> float:
    """The largest difference to one process that averages what both ranks do."""
    torch.manual_seed(0)
    plain, model = Around(), Around()
    model.load_state_dict(plain.state_dict())
    options = {"leaf_modules": [Chosen]}
    zero_compile.partition(model, options)
    step = torch.compile(model, backend="zero3", options=options)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
    x = torch.randn(2, 4, 8)
    for turn in range(3):
        (sum(plain(x[r], (r + turn) % 2) for r in range(2)) / 2).backward()
        step(x[dist.get_rank()], (dist.get_rank() + turn) % 2).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    whole = whole_parameters(model)
    return max(float((whole[n] - p).abs().max()) for n, p in plain.named_parameters())


def test_experts_chosen_by_a_number_train_once_the_model_is_partitioned_first() -> None:
    for worst in ranks.run(2, _chosen_by_number):
        assert worst < 1e-6
