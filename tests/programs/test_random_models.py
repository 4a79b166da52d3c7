"""Random small models and loops against the unsharded run, at one, two and three ranks."""

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn

import ranks
import zero_compile
from training import mine

KINDS = ("linear", "norm", "scale", "tied", "eager", "break", "returned", "cast")


@dataclass(frozen=True)
class Spec:
    """A model as a list of layers, what is frozen, and how its loop runs."""

    width: int
    layers: tuple[str, ...]
    frozen: tuple[bool, ...]
    forwards: int
    evaluate: bool
    clip: bool
    bucket_bytes: int
    explicit: bool
    seed: int


class Built(nn.Module):
    """The layers of a spec, one after another; each kind meets the partition in another way."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        torch.manual_seed(spec.seed)
        self.kinds = spec.layers
        self.first = nn.Linear(spec.width, spec.width)
        self.layers = nn.ModuleList(self._layer(kind, spec.width) for kind in spec.layers)
        for layer, frozen in zip(self.layers, spec.frozen, strict=True):
            layer.requires_grad_(not frozen)

    def _layer(self, kind: str, width: int) -> nn.Module:
        if kind == "norm":
            return nn.LayerNorm(width)
        if kind == "scale":
            return nn.ParameterList([torch.full((width,), 0.9)])
        return nn.Linear(width, width, bias=kind != "tied")

    @torch.compiler.disable
    def eagerly(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(layer(x))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.rest(0, torch.tanh(self.first(x)), x.new_zeros(()))

    def rest(
        self, number: int, x: torch.Tensor, penalty: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """By recursion: Dynamo skips a function whose graph breaks inside a loop."""
        if number == len(self.kinds):
            return x, penalty
        kind, layer = self.kinds[number], self.layers[number]
        x = self.one(kind, layer, x)
        if kind == "break":
            torch._dynamo.graph_break()
        if kind == "returned":
            penalty = penalty + layer.weight.square().mean()
        return self.rest(number + 1, x, penalty)

    def one(self, kind: str, layer: Any, x: torch.Tensor) -> torch.Tensor:
        if kind == "scale":
            return x * layer[0]
        if kind == "tied":
            return torch.tanh(x @ self.first.weight.t()) + layer(x)
        if kind == "eager":
            return self.eagerly(layer, x)
        if kind == "cast":
            return layer(x.double().float())
        return torch.tanh(layer(x))


SPECS = st.integers(1, 4).flatmap(
    lambda count: st.builds(
        Spec,
        width=st.sampled_from([1, 5, 8, 33]),
        layers=st.tuples(*[st.sampled_from(KINDS)] * count),
        frozen=st.tuples(*[st.sampled_from([False, False, True])] * count),
        forwards=st.integers(1, 2),
        evaluate=st.booleans(),
        clip=st.booleans(),
        bucket_bytes=st.sampled_from([1, 600, 1 << 20]),
        explicit=st.sampled_from([False, False, True]),
        seed=st.integers(0, 1000),
    )
)


def _loop(spec: Spec, model: nn.Module, step: Any, cut: Any) -> dict[str, torch.Tensor]:
    """Three steps; the gradients of the last, and the parameters after it."""
    generator = torch.Generator().manual_seed(spec.seed)
    optimizer = torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.5
    )
    for _ in range(3):
        optimizer.zero_grad()
        for _ in range(spec.forwards):
            x = torch.randn(6, spec.width, generator=generator)
            out, penalty = step(cut(x))
            (out.square().mean() + 0.1 * penalty).backward()
        if spec.clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        if spec.evaluate:
            with torch.no_grad():
                step(cut(x))
    found = {f"{n}.grad": _whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}
    return {**found, **{n: p.detach() for n, p in model.named_parameters()}}


def _whole(gradient: Any) -> torch.Tensor:
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


def _compared(spec: Spec) -> list[str]:
    """What differs between the partitioned and the unsharded run."""
    torch._dynamo.reset()
    reference = Built(spec)
    model = copy.deepcopy(reference)
    options = {"bucket_bytes": spec.bucket_bytes}
    if spec.explicit:
        zero_compile.partition(model, options)
    step = torch.compile(model, backend="zero3", options=options)
    found = _loop(spec, model, step, lambda x: mine((x,))[0])
    expected = _loop(spec, reference, reference, lambda x: x)
    wrong = [
        f"{name}: {(found[name] - value).abs().max():.2e}"
        for name, value in expected.items()
        if name not in found or not torch.allclose(found[name], value, rtol=1e-3, atol=1e-5)
    ]
    whole = [n for n, p in model.named_parameters() if p.untyped_storage().nbytes()]
    return [*wrong, *(f"{n} is not partitioned" for n in whole), *(set(found) - set(expected))]


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3])
@settings(
    max_examples=4,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],  # shrinking would compile for minutes
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(spec=SPECS)
def test_a_random_model_trains_as_unsharded(size: int, spec: Spec) -> None:
    for wrong in ranks.run(size, _compared, spec):
        assert wrong == []
