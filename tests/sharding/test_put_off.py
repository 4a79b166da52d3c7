"""Gradients that no_sync puts off: whatever is done with p.grad meanwhile is done with them."""

import contextlib
import copy
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import ranks
import zero_compile
from training import mine, whole_parameters
from zero_runtime.comm.transports import GlooTransport
from zero_runtime.sharding.put_off import PutOffGradient


class Branches(nn.Module):
    """``way`` 0 uses a layer that the others do not; ``broken`` makes two graphs of one forward."""

    def __init__(self, broken: bool = False) -> None:
        super().__init__()
        self.first, self.side, self.last = (nn.Linear(6, 6) for _ in range(3))
        self._broken = broken

    def forward(self, x: torch.Tensor, way: int) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        if self._broken:
            torch._dynamo.graph_break()
        x = x + self.side(x) if way == 0 else x
        return self.last(x).square().mean()


def _rows(seed: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))


def _pair(
    stage: int, partitioned: bool = False, **options: Any
) -> tuple[nn.Module, nn.Module, Callable[..., torch.Tensor]]:
    """A model, the same unsharded, and the first compiled."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Branches(broken=partitioned)
    reference = copy.deepcopy(model)
    if partitioned:  # one bucket for both graphs
        zero_compile.partition(model, options, stage=stage)
    return model, reference, torch.compile(model, backend=f"zero{stage}", options=options)


def _whole(gradient: torch.Tensor | None) -> torch.Tensor | None:
    full = getattr(gradient, "full_tensor", None)
    return gradient if full is None else full()


def _same(model: nn.Module, reference: nn.Module) -> None:
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        found = _whole(p.grad)
        assert (found is None) == (q.grad is None), name
        if found is not None:
            torch.testing.assert_close(found, q.grad, rtol=1e-4, atol=1e-6, msg=name)


def _micro_batches(
    model: nn.Module,
    reference: nn.Module,
    compiled: Callable[..., Any],
    ways: Sequence[int],
    late: int,
) -> None:
    """Backwards, of which the first ``late`` are put off."""
    for number, way in enumerate(ways):
        rows = _rows(number)
        with zero_compile.no_sync(model) if number < late else contextlib.nullcontext():
            compiled(*mine((rows,)), way).backward()
        reference(rows, way).backward()


Change = Callable[[nn.Module], Any]


def _zero(model: nn.Module) -> None:
    model.zero_grad(set_to_none=False)


def _drop(model: nn.Module) -> None:
    model.zero_grad()


def _clip(model: nn.Module) -> float:
    return float(nn.utils.clip_grad_norm_(model.parameters(), 0.05))


def _scale(model: nn.Module) -> None:
    torch._foreach_mul_([p.grad for p in model.parameters() if p.grad is not None], 0.5)


def _nothing(model: nn.Module) -> None:
    pass


def _changed_between(stage: int, partitioned: bool, late: int, name: str) -> None:
    change: Change = globals()[name]
    model, reference, compiled = _pair(stage, partitioned)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (model, reference)]
    for _ in range(2):
        _micro_batches(model, reference, compiled, (0, 1), min(late, 2))
        if late == 2:
            assert all(isinstance(p.grad, PutOffGradient) for p in model.parameters())
        found, expected = change(model), change(reference)
        assert expected is None or found == pytest.approx(expected, rel=1e-4)
        _micro_batches(model, reference, compiled, (0, 1), max(late - 2, 0))
        _same(model, reference)
        for optimizer in optimizers:
            optimizer.step()
        for name_, value in whole_parameters(model).items():
            torch.testing.assert_close(value, reference.get_parameter(name_), rtol=1e-4, atol=1e-6)
        for optimizer in optimizers:
            optimizer.zero_grad()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "late"),
    [("_nothing", 1), ("_nothing", 2)]
    + [(name, late) for name in ("_zero", "_drop", "_clip", "_scale") for late in (3, 4)],
)
def test_what_is_done_with_gradients_is_done_with_those_put_off(name: str, late: int) -> None:
    ranks.run(2, _changed_between, 3, False, late, name)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("name", ["_nothing", "_zero", "_clip"])
def test_at_the_other_stages_too(stage: int, name: str) -> None:
    ranks.run(2, _changed_between, stage, False, 3, name)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_two_graphs_share_a_bucket(stage: int) -> None:
    ranks.run(2, _changed_between, stage, True, 1, "_nothing")


def _not_accumulated() -> None:
    """torch.autograd.grad() neither takes along what is put off nor leaves its own behind."""
    model, reference, compiled = _pair(3)
    _micro_batches(model, reference, compiled, (1,), 1)
    for inside in (True, False):
        with zero_compile.no_sync(model) if inside else contextlib.nullcontext():
            used = [model.first.weight, model.last.weight]
            found = torch.autograd.grad(compiled(*mine((_rows(7),)), 1), used)
        expected = torch.autograd.grad(
            reference(_rows(7), 1), [reference.first.weight, reference.last.weight]
        )
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(_whole(one), other, rtol=1e-4, atol=1e-6)
    _same(model, reference)


def test_autograd_grad_leaves_what_is_put_off_alone() -> None:
    ranks.run(2, _not_accumulated)


def _hooked() -> None:
    model, reference, compiled = _pair(3)
    kept: list[torch.Tensor] = []
    for m in (model, reference):
        m.first.weight.register_hook(lambda g: g * 2)
    model.last.weight.register_hook(kept.append)  # autograd copies what a hook holds
    _micro_batches(model, reference, compiled, (0, 1, 1), 2)
    _same(model, reference)
    assert len(kept) == 3


def test_hooks_see_gradients_that_are_put_off() -> None:
    ranks.run(2, _hooked)


def _from_the_start() -> None:
    model, reference, compiled = _pair(3)
    ways = (0, 1, 1)
    with zero_compile.no_sync(model):
        compiled(*mine((_rows(0),)), ways[0]).backward()
    assert isinstance(model.first.weight.grad, PutOffGradient)
    compiled(*mine((_rows(1),)), ways[1]).backward()
    for number in (0, 1):
        reference(_rows(number), ways[number]).backward()
    _same(model, reference)


def test_no_sync_may_begin_before_the_first_forward() -> None:
    ranks.run(2, _from_the_start)


def _in_tiles() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
    reference = copy.deepcopy(model)
    compiled = torch.compile(model, backend="zero3", options={"tile_bytes": 512})
    for number in range(3):
        rows = torch.randn(4, 16, generator=torch.Generator().manual_seed(number))
        with zero_compile.no_sync(model) if number < 2 else contextlib.nullcontext():
            compiled(*mine((rows,))).square().mean().backward()
        reference(rows).square().mean().backward()
    _same(model, reference)


def test_gradients_of_tiled_weights_are_put_off_whole() -> None:
    ranks.run(2, _in_tiles)


def _sent(late: int) -> int:
    """How often a rank sends gradients in three backwards, of which ``late`` are put off."""
    model, reference, compiled = _pair(3)
    _micro_batches(model, reference, compiled, (0,), 0)
    count = 0
    original = GlooTransport.reduce_scatter

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        return original(self, *args, **kwargs)

    with mock.patch.object(GlooTransport, "reduce_scatter", counted):
        _micro_batches(model, reference, compiled, (0, 0, 0), late)
    _same(model, reference)
    return count


def test_what_is_put_off_goes_along_with_the_next_reduction() -> None:
    eager, late = ranks.run(2, _sent, 0)[0], ranks.run(2, _sent, 2)[0]
    assert eager == 3 * late > 0
