"""Gradients that reach a parameter past our operators are averaged like any other."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import ranks
import zero_compile
from training import mine, whole_parameters
from zero_runtime.memory import freed


class Product(torch.autograd.Function):
    """``x @ w.T`` as fused losses write it: a matrix in, its gradient straight out to autograd."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        w = w.detach()
        ctx.save_for_backward(x, w.clone())
        return x @ w.T

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, w = ctx.saved_tensors
        return gradient @ w, gradient.T @ x


class Model(nn.Module):
    """One weight is used by the graphs, by a function of the user's, or by both, in either order."""

    def __init__(self, order: str, inside: bool) -> None:
        super().__init__()
        self.first, self.shared = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self._order, self._inside = order, inside

    @torch.compiler.disable
    def foreign(self, x: torch.Tensor) -> torch.Tensor:
        return Product.apply(x, self.shared.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        if self._order.startswith("g"):
            x = torch.tanh(self.shared(x))
        if self._inside:
            x = self.foreign(x)
        if self._order.endswith("fg"):
            x = torch.tanh(self.shared(x))
        return x


def _loss(call: Any, model: Model, x: torch.Tensor) -> torch.Tensor:
    out = call(x)
    return (out if model._inside else Product.apply(out, model.shared.weight)).square().mean()


def _train(stage: int, order: str, inside: bool, late: bool) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Model(order, inside)
    reference = copy.deepcopy(model)
    compiled = torch.compile(model, backend=f"zero{stage}")
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (model, reference)]
    for step in range(3):
        rows = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(step))
        if late:
            with zero_compile.no_sync(model):
                _loss(compiled, model, *mine((rows[0],))).backward()
            _loss(reference, reference, rows[0]).backward()
        _loss(compiled, model, *mine((rows[1],))).backward()
        _loss(reference, reference, rows[1]).backward()
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            full = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
            torch.testing.assert_close(full, q.grad, rtol=1e-4, atol=1e-6)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, value in whole_parameters(model).items():
        torch.testing.assert_close(value, reference.get_parameter(name), rtol=1e-4, atol=1e-6)


def _orders(stage: int, late: bool) -> None:
    warnings.simplefilter("ignore")
    for order, inside in (
        ("f", True),
        ("gf", True),
        ("fg", True),
        ("gfg", True),
        ("", False),
        ("g", False),
    ):
        try:
            _train(stage, order, inside, late)
        except Exception as error:
            raise AssertionError(f"order {order!r}, inside: {inside}") from error


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("late", [False, True])
def test_gradients_of_a_users_function_are_averaged(stage: int, late: bool) -> None:
    ranks.run(2, _orders, stage, late)


def _grad_of() -> None:
    """torch.autograd.grad() over such a function gives the mean too."""
    torch.manual_seed(0)
    model = Model("gf", True)
    reference = copy.deepcopy(model)
    compiled = torch.compile(model, backend="zero3")
    rows = torch.randn(4, 6)
    found = torch.autograd.grad(
        _loss(compiled, model, *mine((rows,))), [model.shared.weight, model.first.weight]
    )
    expected = torch.autograd.grad(
        _loss(reference, reference, rows), [reference.shared.weight, reference.first.weight]
    )
    for one, other in zip(found, expected, strict=True):
        full = one.full_tensor() if hasattr(one, "full_tensor") else one
        torch.testing.assert_close(full, other, rtol=1e-4, atol=1e-6)


def test_autograd_grad_gives_their_mean() -> None:
    ranks.run(2, _grad_of)


def _thawed() -> None:
    """A frozen parameter is watched too, for when it begins to train."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Model("", False)
    model.shared.requires_grad_(False)
    reference = copy.deepcopy(model)
    compiled = torch.compile(model, backend="zero3")
    compiled(torch.ones(1, 6)).sum().backward()
    model.zero_grad()
    for m in (model, reference):
        m.shared.requires_grad_(True)
    rows = torch.randn(4, 6)
    _loss(compiled, model, *mine((rows,))).backward()
    _loss(reference, reference, rows).backward()
    gradient = model.shared.weight.grad
    full = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    torch.testing.assert_close(full, reference.shared.weight.grad, rtol=1e-4, atol=1e-6)


def test_a_parameter_that_was_frozen_is_watched_too() -> None:
    ranks.run(2, _thawed)


class Early(nn.Module):
    """Uses parameters before the first graph of the very first forward, and again inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))
        self.before = nn.Linear(6, 6)
        self.normed = nn.utils.weight_norm(nn.Linear(6, 6))
        self.last = nn.Linear(6, 6)

    @torch.compiler.disable
    def early(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.before(x * self.scale))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.early(x)
        return self.last(self.before(self.normed(x)) * self.scale)


def _early(stage: int) -> None:
    warnings.simplefilter("ignore")
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Early()
    reference = Early()
    reference.load_state_dict(model.state_dict())
    compiled = torch.compile(model, backend=f"zero{stage}")
    optimizers = [torch.optim.AdamW(m.parameters(), 0.1) for m in (model, reference)]
    for step in range(3):
        rows = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        compiled(*mine((rows,))).square().mean().backward()
        reference(rows).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, value in whole_parameters(model).items():
        torch.testing.assert_close(value, reference.get_parameter(name), rtol=1e-4, atol=1e-5)
    if stage == 3:
        assert all(p.untyped_storage().nbytes() == 0 for p in model.parameters())


@pytest.mark.parametrize("stage", [1, 3])
def test_code_before_the_first_graph_trains_from_the_first_step(stage: int) -> None:
    ranks.run(2, _early, stage)


def test_a_loss_of_before_the_partition_has_a_backward() -> None:
    model = nn.Linear(2, 2)
    reference = copy.deepcopy(model)
    losses = [m(torch.ones(1, 2)).square().sum() for m in (model, reference)]
    zero_compile.partition(model)
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(model.weight.grad.full_tensor(), reference.weight.grad)


def test_after_a_step_it_is_autograds_own_error() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    loss = model(torch.ones(1, 2)).square().sum()
    zero_compile.partition(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@torch.jit.script
def scripted(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (w * x).sum()


@pytest.mark.skipif(not freed.AVAILABLE, reason="the extension for this was not built")
@pytest.mark.parametrize(
    "read",
    [
        lambda p: scripted(p, torch.ones(3)),
        lambda p: torch.func.grad(lambda w: w.square().sum())(p),
        lambda p: torch.func.vmap(lambda w: w.square().sum())(p),
        lambda p: torch.func.grad(lambda w: (torch.ones(2, 3) @ w.t()[:, 1:]).sum())(p),
        lambda p: p.data_ptr(),
    ],
    ids=["scripted", "grad", "vmap", "view", "pointer"],
)
def test_code_that_reads_freed_memory_is_told_what_to_do(read: Any) -> None:
    model = nn.Linear(3, 3)
    zero_compile.partition(model)
    with pytest.raises(RuntimeError, match=r"weight is partitioned .*\.view_as\(parameter\)"):
        read(model.weight)


def test_what_the_message_advises_is_right() -> None:
    model = nn.Linear(3, 3)
    reference = copy.deepcopy(model)
    zero_compile.partition(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted(model.weight.view_as(model.weight), torch.ones(3)).backward()
    scripted(reference.weight, torch.ones(3)).backward()
    torch.testing.assert_close(model.weight.grad.full_tensor(), reference.weight.grad)
