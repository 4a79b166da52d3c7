"""Modules that hold several compiled models, each partitioned in its own way, and code of their own."""

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

import ranks
import zero_compile
from training import Run, assert_same_training, train
from zero_runtime.ir.plan import Stage
from zero_runtime.session import session_of

Ways = Mapping[str, tuple[str, dict[str, Any] | None]]

HOST = {"offload_param": {"device": "cpu"}}
ALIKE: Ways = dict.fromkeys(("policy", "frozen", "value"), ("zero3", None))


class Net(nn.Sequential):
    """A class of our own: Dynamo compiles nothing of a bare module of torch."""

    def __init__(self, outputs: int) -> None:
        super().__init__(nn.Linear(6, 10), nn.Tanh(), Head(10, outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)  # type: ignore[no-any-return]


class Head(nn.Linear):
    """As :class:`Net`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


class Trio(nn.Module):
    """A policy, a frozen copy of it and a value function, called side by side; ``heat`` is its own."""

    def __init__(self) -> None:
        super().__init__()
        self.policy, self.frozen, self.value = Net(3), Net(3).requires_grad_(False), Net(1)
        self.heat = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value = self.value(x)
        with torch.no_grad():
            wanted = self.frozen(x)
        distance = (self.policy(x) * self.heat - wanted).square().mean(1, keepdim=True)
        return distance + value.square()

    def score(self, x: torch.Tensor) -> torch.Tensor:
        """Of the policy alone."""
        return self.policy(x).sum()  # type: ignore[no-any-return]


def _batches() -> list[tuple[torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 6, generator=generator),) for _ in range(3)]


def _loss(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model(x).mean()  # type: ignore[no-any-return]


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def _trained(ways: Ways) -> tuple[Run, Run, list[Any]]:
    torch.manual_seed(0)
    plain = Trio()
    model = copy.deepcopy(plain)
    for name, (backend, options) in ways.items():
        model.get_submodule(name).compile(backend=backend, options=options)
    runs = [
        train(m, _batches(), _loss, _optimizer, step=step, clip=1.0).bare()
        for m, step in ((plain, None), (model, model))
    ]
    owners = [session_of(next(model.get_submodule(name).parameters())) for name in ALIKE]
    facts = [(int(s.stage), str(s.offload.what), owners.index(s)) for s in owners if s]
    return runs[0], runs[1], facts


@pytest.mark.parametrize(
    ("ways", "facts"),
    [
        (ALIKE, [(3, "nothing", 0)] * 3),
        (
            {**ALIKE, "frozen": ("zero3", HOST)},
            [(3, "nothing", 0), (3, "parameters on host", 1), (3, "nothing", 0)],
        ),
        (
            {**ALIKE, "value": ("zero2", None)},
            [(3, "nothing", 0), (3, "nothing", 0), (2, "nothing", 2)],
        ),
        ({"policy": ("zero3", None)}, [(3, "nothing", 0)] * 3),
    ],
    ids=["alike", "one on the host", "one at stage 2", "one compiled"],
)
def test_each_compiled_module_is_partitioned_in_its_own_way(ways: Ways, facts: list[Any]) -> None:
    for plain, trained, found in ranks.run(2, _trained, ways):
        assert_same_training(plain, trained)
        assert found == facts


def test_one_module_compiled_in_two_ways_is_refused() -> None:
    model = Trio()
    zero_compile.partition(model.policy, HOST)
    model.policy.compile(backend="zero3")
    with pytest.raises(Exception, match="differs in what is offloaded"):
        model(torch.ones(2, 6))


def test_modules_inside_one_that_is_compiled_otherwise_are_left_to_it() -> None:
    model = Trio()
    model.value.compile(backend="zero2")
    model.value[2].compile(backend="zero3")  # type: ignore[index]
    model.policy.compile(backend="zero3")
    model.score(torch.ones(2, 6))
    assert {session_of(p) for p in model.value.parameters()} == {None}
    model.value(torch.ones(2, 6))  # one graph, the inner module inlined
    assert {s.stage for p in model.value.parameters() if (s := session_of(p))} == {Stage.GRADIENTS}


def _early(before: bool) -> list[torch.Tensor]:
    """The mean gradient of a parameter of which a graph was made before the model was known."""
    torch.manual_seed(0)
    model = Trio()
    model.policy.compile(backend="zero3")
    x = torch.full((2, 6), 1.0 + torch.distributed.get_rank())
    early = model.value(x).sum()
    loss = model.score(x) + (0.0 if before else early)
    loss.backward()
    if before:
        early.backward()
    model.value(x).sum().backward()  # known by now
    return [p.grad.full_tensor() for p in model.value.parameters()]  # type: ignore[union-attr]


@pytest.mark.parametrize("before", [False, True], ids=["together", "apart"])
def test_gradients_of_a_graph_of_before_are_averaged(before: bool) -> None:
    torch.manual_seed(0)
    model = Trio()
    x = torch.cat([torch.full((2, 6), 1.0), torch.full((2, 6), 2.0)])
    model.value(x).sum().backward()  # the sum over both ranks: the mean of twice each
    for found in ranks.run(2, _early, before):
        for gradient, p in zip(found, model.value.parameters(), strict=True):
            torch.testing.assert_close(gradient, p.grad)


def test_a_backward_of_such_a_graph_may_come_after_a_step_that_changes_other_parameters() -> None:
    model = Trio()
    plain = copy.deepcopy(model.value)
    model.policy.compile(backend="zero3")
    optimizer = _optimizer(model)
    early = model.value(torch.ones(2, 6)).square().sum()
    model.score(torch.ones(2, 6)).backward()
    optimizer.step()
    early.backward()
    plain(torch.ones(2, 6)).square().sum().backward()
    for p, q in zip(model.value.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad)  # type: ignore[union-attr]
