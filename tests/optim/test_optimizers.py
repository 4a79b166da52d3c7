"""Stock elementwise optimizers step on shards and give what they give on whole parameters."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ranks
from training import (
    Run,
    against_unsharded,
    assert_same_training,
    copy_weights,
    mine,
    train,
    world,
)

CASES: dict[str, Any] = {
    "adamw": partial(torch.optim.AdamW, lr=1e-2),
    "adamw_foreach": partial(torch.optim.AdamW, lr=1e-2, foreach=True),
    "adamw_fused": partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "adamw_amsgrad": partial(torch.optim.AdamW, lr=1e-2, amsgrad=True),
    "adam": partial(torch.optim.Adam, lr=1e-2),
    "adam_fused": partial(torch.optim.Adam, lr=1e-2, fused=True),
    "sgd": partial(torch.optim.SGD, lr=1e-1),
    "sgd_momentum": partial(torch.optim.SGD, lr=1e-1, momentum=0.9, nesterov=True),
    "sgd_foreach": partial(torch.optim.SGD, lr=1e-1, momentum=0.9, foreach=True),
    "sgd_fused": partial(torch.optim.SGD, lr=1e-1, momentum=0.9, fused=True),
    "adagrad": partial(torch.optim.Adagrad, lr=1e-1),
    "adagrad_fused": partial(torch.optim.Adagrad, lr=1e-1, fused=True),
    "rmsprop": partial(torch.optim.RMSprop, lr=1e-3, momentum=0.9, centered=True),
    "rmsprop_foreach": partial(torch.optim.RMSprop, lr=1e-3, foreach=True),
    "nadam": partial(torch.optim.NAdam, lr=1e-2),
    "radam": partial(torch.optim.RAdam, lr=1e-2),
    "adamax": partial(torch.optim.Adamax, lr=1e-2),
    "adadelta": partial(torch.optim.Adadelta, lr=1.0),
    "asgd": partial(torch.optim.ASGD, lr=1e-2),
    "rprop": partial(torch.optim.Rprop, lr=1e-3),
}


class Small(nn.Module):
    """Shapes that no world size divides, and a parameter smaller than a chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(7, 33), nn.LayerNorm(33), nn.Linear(33, 5)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.norm(self.up(x)))) * self.scale


def _loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(x), y)


def _groups(make: Any, model: nn.Module) -> torch.optim.Optimizer:
    """Two parameter groups, one without decay and with a rate of its own."""
    vectors = [p for p in model.parameters() if p.dim() < 2]
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    return make([{"params": matrices}, {"params": vectors, "weight_decay": 0.0, "lr": 3e-3}])


def _every_optimizer(names: list[str]) -> dict[str, tuple[Run, Run]]:
    """Compiling dominates: one compiled model serves all, its weights put back before each."""
    torch.manual_seed(0)
    start = Small()
    batches = [(torch.randn(12, 7), torch.randn(12, 5)) for _ in range(4)]
    model = copy.deepcopy(start)
    step = torch.compile(model, backend="zero3")
    _loss(step, *mine(batches[0]))
    results = {}
    for name in names:
        make = partial(_groups, CASES[name])
        plain = train(copy.deepcopy(start), batches, _loss, make, clip=1.0)
        copy_weights(start, model)
        sharded = train(model, batches, _loss, make, clip=1.0, step=step)
        results[name] = (plain.bare(), sharded.bare())
    return results


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_every_stock_elementwise_optimizer_trains_as_unsharded(size: int) -> None:
    for results in ranks.run(size, _every_optimizer, list(CASES)):
        for name, (plain, sharded) in results.items():
            try:
                assert_same_training(plain, sharded)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from error


def _state_bytes() -> tuple[int, int, int]:
    torch.manual_seed(0)
    model = Small()
    batches = [(torch.randn(8, 7), torch.randn(8, 5)) for _ in range(2)]
    _, run = against_unsharded(model, batches, _loss, lambda m: torch.optim.AdamW(m.parameters()))
    state = [s for s in run.optimizer.state.values() for k, s in s.items() if k != "step"]
    return sum(t.numel() for t in state), sum(p.numel() for p in model.parameters()), world()[0]


def test_optimizer_state_is_born_partitioned() -> None:
    results = ranks.run(2, _state_bytes)
    whole = results[0][1]
    assert sum(elements for elements, _, _ in results) == 2 * whole


def _state_keys(names: list[str], folder: str) -> dict[str, list[list[str]]]:
    """What state each parameter has, by optimizer and by where it lives; one has all its elements on one rank."""
    found = {}
    for place in ("none", "cpu", "nvme"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        section = {"device": place, **({"nvme_path": folder} if place == "nvme" else {})}
        model = Small()
        compiled = torch.compile(model, backend="zero3", options={"offload_optimizer": section})
        for name in names:
            optimizer = CASES[name](model.parameters())
            compiled(torch.ones(2, 7)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            state = optimizer.state_dict()["state"]
            found[f"{name} on {place}"] = [sorted(state[i]) for i in range(len(state))]
    return found


def test_every_rank_has_every_key_of_the_state(tmp_path: Path) -> None:
    names = ["adamw", "adamw_foreach", "adamw_fused", "sgd_momentum", "rmsprop", "nadam", "asgd"]
    first, *others = ranks.run(3, _state_keys, names, str(tmp_path))
    for name, states in first.items():
        assert len(states) == 7, name
        assert all(states), name
        assert all(theirs[name] == states for theirs in others), name


def _state_before_compile() -> tuple[Run, Run]:
    """Two steps unsharded, then compiled: existing state and gradients are cut to each rank's part."""
    torch.manual_seed(0)
    model = Small()
    batches = [(torch.randn(8, 7), torch.randn(8, 5)) for _ in range(5)]
    runs = []
    for backend in (None, "zero3"):
        current = copy.deepcopy(model)
        optimizer = torch.optim.AdamW(current.parameters(), lr=1e-2)
        step: Any = current
        rank, size = world()
        for number, batch in enumerate(batches):
            if number == 2 and backend:
                step = torch.compile(current, backend=backend)
            sharded = number >= 2 and backend
            x, y = (t.chunk(size)[rank] for t in batch) if sharded else batch
            _loss(step, x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
        runs.append(
            Run([0.0], [], {n: p.detach() for n, p in current.named_parameters()}, None, None)
        )
    return runs[0], runs[1]


def test_an_optimizer_that_has_stepped_before_keeps_its_state() -> None:
    for plain, sharded in ranks.run(2, _state_before_compile):
        assert_same_training(plain, sharded)


def _closure() -> tuple[list[float], list[float]]:
    torch.manual_seed(0)
    model = Small()
    x, y = torch.randn(8, 7), torch.randn(8, 5)
    losses: list[list[float]] = []
    for backend in (None, "zero3"):
        current = copy.deepcopy(model)
        step = torch.compile(current, backend=backend) if backend else current
        optimizer = torch.optim.SGD(current.parameters(), lr=0.1)

        def closure(step: Any = step, optimizer: Any = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = _loss(step, x, y)
            loss.backward()
            return loss

        _loss(step, x, y)
        losses.append([float(optimizer.step(closure)) for _ in range(4)])
    return losses[0], losses[1]


def test_a_closure_meets_the_model_not_its_shards() -> None:
    for plain, sharded in ranks.run(2, _closure):
        assert plain == pytest.approx(sharded, rel=1e-5)


class Shouting(torch.optim.AdamW):
    """A user's subclass that leaves the update alone."""


class Normalised(torch.optim.SGD):
    """A user's subclass whose update needs the whole parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad / p.grad.norm())


def _stepped(make: Any) -> None:
    torch.manual_seed(0)
    model = Small()
    compiled = torch.compile(model, backend="zero3")
    compiled(torch.randn(2, 7)).sum().backward()
    make(model.parameters()).step()


def test_a_subclass_that_keeps_the_update_is_accepted() -> None:
    _stepped(partial(Shouting, lr=1e-3))


@pytest.mark.parametrize(
    "make",
    [
        partial(Normalised, lr=1e-3),
        partial(torch.optim.Adafactor, lr=1e-3),
        partial(torch.optim.LBFGS, lr=1e-3),
    ],
)
def test_an_optimizer_that_is_not_elementwise_is_refused_with_the_reason(make: Any) -> None:
    with pytest.raises(NotImplementedError, match=r"not known to be elementwise.*AdamW"):
        _stepped(make)


class Failing(torch.optim.AdamW):
    """Runs out of memory in the middle of its work, once."""

    def _init_group(self, *args: Any) -> Any:
        super()._init_group(*args)
        raise MemoryError


def _fails_in_a_hook(optimizer: torch.optim.Optimizer) -> None:
    def hook(*_: Any) -> None:
        raise MemoryError

    handle = optimizer.register_step_pre_hook(hook)
    try:
        optimizer.step()
    finally:
        handle.remove()


def _fails_in_its_closure(optimizer: torch.optim.Optimizer) -> None:
    def closure() -> float:
        raise MemoryError

    optimizer.step(closure)


def _fails_at_work(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["lr"] = "much"
    try:
        optimizer.step()
    except (TypeError, ValueError) as error:
        raise MemoryError from error
    finally:
        optimizer.param_groups[0]["lr"] = 1e-3


@pytest.mark.parametrize("offload", [False, True], ids=["device", "host"])
@pytest.mark.parametrize("fail", [_fails_in_a_hook, _fails_in_its_closure, _fails_at_work])
def test_after_a_step_that_failed_gradients_are_what_they_were_and_may_be_replaced(
    fail: Any, offload: bool
) -> None:
    torch.manual_seed(0)
    model = Small()
    options = {"offload_optimizer": {"device": "cpu"}} if offload else {}
    compiled = torch.compile(model, backend="zero3", options=options)
    x = torch.randn(2, 7)
    compiled(x).sum().backward()
    gradients = [p.grad for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(MemoryError):
        fail(optimizer)
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
    optimizer.zero_grad()
    expected = torch.full((33, 7), 0.5)
    model.up.weight.grad = expected.clone()
    compiled(x)
    assert [n for n, p in model.named_parameters() if p.grad is not None] == ["up.weight"]
    assert torch.equal(model.up.weight.grad, expected)


def _hooked() -> tuple[list[float], list[float], bool]:
    """Norms that a hook before the step takes; what a hook after it sees of the first weight."""
    torch.manual_seed(0)
    start, norms, seen = Small(), [], []
    batches = [(torch.randn(12, 7), torch.randn(12, 5)) for _ in range(3)]
    for backend in (None, "zero3"):
        torch._dynamo.reset()
        model = copy.deepcopy(start)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        found: list[float] = []
        after: list[torch.Tensor] = []

        def clip(*_: Any, model: nn.Module = model, found: list[float] = found) -> None:
            found.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))

        def look(*_: Any, model: Any = model, after: list[torch.Tensor] = after) -> None:
            after.append(model.up.weight.detach().clone())

        optimizer.register_step_pre_hook(clip)
        optimizer.register_step_post_hook(look)
        step = None if backend is None else torch.compile(model, backend=backend)
        train(model, batches, _loss, lambda _, optimizer=optimizer: optimizer, step=step)
        norms.append(found)
        seen.append(after)
    same = all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*seen, strict=True))
    return norms[0], norms[1], same


def test_hooks_around_the_step_meet_partitioned_parameters() -> None:
    for plain, sharded, same in ranks.run(2, _hooked):
        assert sharded == pytest.approx(plain, rel=1e-5)
        assert same


def test_an_optimizer_of_another_model_may_be_of_any_kind() -> None:
    _stepped(partial(torch.optim.SGD, lr=1e-3))
    p = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.LBFGS([p], lr=0.5)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (p**2).sum()
        loss.backward()
        return loss

    assert float(optimizer.step(closure)) == 3.0
    assert float(p.detach().abs().max()) < 1e-3


def test_an_exception_inside_step_leaves_the_model_usable() -> None:
    torch.manual_seed(0)
    model = Small()
    compiled = torch.compile(model, backend="zero3")
    x = torch.randn(2, 7)
    expected = compiled(x).detach()
    compiled(x).sum().backward()
    optimizer = Failing(model.parameters())
    with pytest.raises(MemoryError):
        optimizer.step()
    torch.testing.assert_close(compiled(x).detach(), expected)
    assert [p.shape for p in model.parameters()] == [p.shape for p in Small().parameters()]
    assert all(p.grad is not None for p in model.parameters())


def test_gradients_cleared_after_a_failed_step_stay_cleared() -> None:
    torch.manual_seed(0)
    model = Small()
    compiled = torch.compile(model, backend="zero3")
    compiled(torch.randn(2, 7)).sum().backward()
    optimizer = Failing(model.parameters())
    with pytest.raises(MemoryError):
        optimizer.step()
    optimizer.zero_grad()
    compiled(torch.randn(2, 7))
    assert all(p.grad is None for p in model.parameters())


def test_a_state_dict_saved_after_a_failed_step_holds_whole_parameters() -> None:
    torch.manual_seed(0)
    model = Small()
    expected = {n: v.clone() for n, v in model.state_dict().items()}
    torch.compile(model, backend="zero3")(torch.randn(2, 7)).sum().backward()
    with pytest.raises(MemoryError):
        Failing(model.parameters()).step()
    for name, saved in model.state_dict().items():
        torch.testing.assert_close(saved, expected[name])
