"""Parameters that another module uses than the one that holds them: nothing need be said about it."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import ranks
import zero_compile
from training import Run, assert_same_training, train
from zero_compile.deepspeed import external
from zero_runtime.errors import OptionError


class TiedLogits(nn.Module):
    """A GPT's logits: the embedding's weight, used by the model itself."""

    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.broken = broken
        self.embed = nn.Embedding(20, 8)
        self.body = nn.Linear(8, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.body(self.embed(tokens)))
        if self.broken:
            torch._dynamo.graph_break()
        return hidden @ self.embed.weight.t()


class SkipBias(nn.Linear):
    """A linear layer that returns its bias, for the caller to add: Megatron's ``skip_bias_add``."""

    def forward(self, x: torch.Tensor) -> Any:
        return nn.functional.linear(x, self.weight), self.bias


class AddsLater(nn.Module):
    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.broken = broken
        self.up = SkipBias(8, 16)
        self.down = SkipBias(16, 8)
        self.embed = nn.Embedding(20, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden, bias = self.up(self.embed(tokens))
        if self.broken:
            torch._dynamo.graph_break()
        hidden, last = self.down(torch.relu(hidden + bias))
        if self.broken:
            torch._dynamo.graph_break()
        return hidden + last  # type: ignore[no-any-return]


MODELS = {"tied": TiedLogits, "bias": AddsLater}


def _batches() -> list[tuple[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randint(0, 20, (4, 5), generator=generator),) for _ in range(3)]


def _loss(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    out = model(tokens)
    return (out - torch.arange(float(out.shape[-1])) / 10).square().mean()  # type: ignore[no-any-return]


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def _trained(kind: str, how: str, inside: bool) -> tuple[Run, Run]:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    plain = train(MODELS[kind](False), _batches(), _loss, _optimizer, clip=1.0)
    torch.manual_seed(0)
    with zero_compile.Init(enabled=inside):
        model = MODELS[kind](how == "graph breaks")
    if how == "eager":
        zero_compile.partition(model)
        step: Any = model
    else:
        step = torch.compile(model, backend="zero3", options={"bucket_bytes": 256})
    trained = train(model, _batches(), _loss, _optimizer, step=step, clip=1.0)
    return plain.bare(), trained.bare()


@pytest.mark.slow
@pytest.mark.parametrize("inside", [False, True], ids=["whole", "Init"])
@pytest.mark.parametrize("how", ["graph", "graph breaks", "eager"])
@pytest.mark.parametrize("kind", MODELS)
def test_external_parameters_train_as_if_nothing_was_partitioned(
    kind: str, how: str, inside: bool
) -> None:
    for plain, trained in ranks.run(2, _trained, kind, how, inside):
        assert_same_training(plain, trained)


def test_registration_says_once_that_it_does_nothing() -> None:
    external._say.cache_clear()
    model = TiedLogits(False)
    with pytest.warns(UserWarning, match="need not be registered"):
        zero_compile.register_external_parameter(model, model.embed.weight)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        zero_compile.unregister_external_parameter(model, model.embed.weight)


@pytest.mark.parametrize(
    "call", [zero_compile.register_external_parameter, zero_compile.unregister_external_parameter]
)
def test_registration_checks_its_arguments(call: Any) -> None:
    model = TiedLogits(False)
    with pytest.raises(OptionError, match="got Tensor and Parameter"):
        call(torch.ones(1), model.embed.weight)
    with pytest.raises(OptionError, match="got TiedLogits and Tensor"):
        call(model, torch.ones(1))
