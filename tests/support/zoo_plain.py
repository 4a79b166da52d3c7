"""Architectures of plain torch.nn code, and the whole zoo by name."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from zoo_models import (
    CLASSES,
    HIDDEN,
    PIXELS,
    TRANSFORMERS,
    VOCABULARY,
    Entry,
    Inputs,
    Turn,
    _images,
    _pixels,
    _unmasked,
)


class ConvNet(nn.Module):
    """Convolutions with batch normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(16, CLASSES),
        )

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.layers(pixel_values), labels)


class UNet(nn.Module):
    """Two levels, joined by concatenation; predicts every pixel's class."""

    def __init__(self) -> None:
        super().__init__()
        self.top, self.bottom = self._block(3, 8, 1), self._block(8, 16, 2)
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.joined = self._block(16, 8, 1)
        self.head = nn.Conv2d(8, 4, 1)

    @staticmethod
    def _block(inputs: int, outputs: int, stride: int) -> nn.Module:
        convolution = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1)
        return nn.Sequential(convolution, nn.GroupNorm(2, outputs), nn.SiLU())

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        top = self.top(pixel_values)
        up = self.up(self.bottom(top))
        logits = self.head(self.joined(torch.cat([top, up], dim=1)))
        return nn.functional.cross_entropy(logits, labels)


class Lstm(nn.Module):
    """A language model of two recurrent layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.lstm = nn.LSTM(HIDDEN, HIDDEN, num_layers=2, batch_first=True)
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.lstm(self.embedding(input_ids))
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


class Vae(nn.Module):
    """A variational autoencoder; the noise is an input."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 16))
        self.decoder = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 64))

    def forward(self, labels: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        mean, log_variance = self.encoder(labels).chunk(2, dim=-1)
        decoded = self.decoder(mean + noise * (0.5 * log_variance).exp())
        divergence = (mean.square() + log_variance.exp() - log_variance - 1).sum(-1).mean() / 2
        return nn.functional.mse_loss(decoded, labels) + 0.1 * divergence


class Gan(nn.Module):
    """Two networks that are compiled and trained apart."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))
        self.discriminator = nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))


class CompiledGan(NamedTuple):
    """A :class:`Gan` whose networks are compiled."""

    generator: Any
    discriminator: Any


def _compile_gan(model: nn.Module, backend: str) -> CompiledGan:
    assert isinstance(model, Gan)
    return CompiledGan(
        torch.compile(model.generator, backend=backend),
        torch.compile(model.discriminator, backend=backend),
    )


def _is(logits: torch.Tensor, real: bool) -> torch.Tensor:
    target = torch.full_like(logits, float(real))
    return nn.functional.binary_cross_entropy_with_logits(logits, target)


def _discriminate(model: Any, batch: Inputs) -> torch.Tensor:
    fake = model.generator(batch["noise"]).detach()
    judge = model.discriminator
    return _is(judge(batch["labels"]), True) + _is(judge(fake), False)


def _fool(model: Any, batch: Inputs) -> torch.Tensor:
    return _is(model.discriminator(model.generator(batch["noise"])), True)


def _own_loss(model: Any, batch: Inputs) -> torch.Tensor:
    loss: torch.Tensor = model(**batch)
    return loss


def _loss_of_rnn(model: Any, batch: Inputs) -> torch.Tensor:
    """Dynamo compiles nothing of a forward that calls ``nn.LSTM``, unless it is told to."""
    with torch._dynamo.config.patch(allow_rnn=True):
        return _own_loss(model, batch)


def _with_noise(width: int) -> Callable[[torch.Generator, int], Inputs]:
    def batch(generator: torch.Generator, rows: int) -> Inputs:
        return {
            "labels": torch.randn(rows, width, generator=generator),
            "noise": torch.randn(rows, 8, generator=generator),
        }

    return batch


def _segments(generator: torch.Generator, rows: int) -> Inputs:
    labels = torch.randint(4, (rows, PIXELS, PIXELS), generator=generator)
    return {"pixel_values": _pixels(generator, rows), "labels": labels}


_PLAIN = [
    Entry("convnet", ConvNet, _images, loss=_own_loss, same_rows=True),
    Entry("unet", UNet, _segments, loss=_own_loss),
    Entry("lstm", Lstm, _unmasked, loss=_loss_of_rnn),
    Entry("vae", Vae, _with_noise(64), loss=_own_loss),
    Entry(
        "gan",
        Gan,
        _with_noise(16),
        turns=(
            Turn(lambda m: list(m.discriminator.parameters()), _discriminate),
            Turn(lambda m: list(m.generator.parameters()), _fool),
        ),
        compile=_compile_gan,
    ),
]

ZOO: dict[str, Entry] = {entry.name: entry for entry in [*TRANSFORMERS, *_PLAIN]}
