"""Partitioned training gives what unsharded training gives."""

import copy
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ranks
from training import Run, against_unsharded, assert_same_training, relative, train

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from train_gpt import GPT

SMALL = {"dim": 64, "layers": 2, "heads": 4, "seq": 32}


def _language_loss(model: Any, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def _texts(count: int, rows: int, length: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(0, 256, (count, rows, length + 1), generator=generator)
    return [(t[:, :-1], t[:, 1:]) for t in text]


def _demo_model(steps: int, **options: Any) -> tuple[Run, Run]:
    torch.manual_seed(0)
    model = GPT(**SMALL)
    make = partial(torch.optim.AdamW, lr=3e-4, weight_decay=0.1)
    plain, sharded = against_unsharded(
        model,
        _texts(steps, 4, 32),
        _language_loss,
        lambda m: make(m.parameters()),
        clip=1.0,
        **options,
    )
    return plain.bare(), sharded.bare()


@pytest.mark.parametrize("options", [{}, {"bucket_bytes": 20_000}, {"schedule": "on_demand"}])
def test_twenty_steps_of_the_demo_model_on_two_ranks(options: dict[str, Any]) -> None:
    for plain, sharded in ranks.run(2, partial(_demo_model, 20, options=options)):
        assert relative(plain.losses, sharded.losses) < 1e-5
        assert relative(plain.norms, sharded.norms) < 1e-4
        # A key's bias has no gradient but rounding, which AdamW turns into full steps.
        matrices = {n: p for n, p in plain.parameters.items() if p.dim() > 1}
        for name, expected in matrices.items():
            torch.testing.assert_close(sharded.parameters[name], expected, rtol=1e-3, atol=1e-4)


@pytest.mark.generated_kernels
def test_one_rank_gives_inductors_losses_bit_for_bit(request: pytest.FixtureRequest) -> None:
    torch.manual_seed(0)
    model = GPT(**SMALL)
    losses = {}
    # With more threads Inductor adds an embedding's gradient atomically, in no fixed order.
    threads = torch.get_num_threads()
    request.addfinalizer(lambda: torch.set_num_threads(threads))
    torch.set_num_threads(1)
    for backend in ("inductor", "zero3"):
        torch._dynamo.reset()
        current = copy.deepcopy(model)
        step = torch.compile(current, backend=backend)
        run = train(
            current,
            _texts(20, 4, 32),
            _language_loss,
            lambda m: torch.optim.AdamW(m.parameters(), lr=3e-4),
            step=step,
        )
        losses[backend] = run.losses
    assert losses["zero3"] == losses["inductor"]


def _autocast_loss(model: Any, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return _language_loss(model, tokens, targets)


def _autocast() -> tuple[list[float], list[float], list[tuple[str, int]]]:
    torch.manual_seed(0)
    model = GPT(**SMALL)
    plain, sharded = against_unsharded(
        model,
        _texts(6, 4, 32),
        _autocast_loss,
        lambda m: torch.optim.AdamW(m.parameters(), lr=3e-4),
    )
    import zero_compile

    plan = zero_compile.plans(model)[0]
    moved = [(s.dtype, s.bytes) for s in plan.steps if s.kind == "all_gather_start"]
    return plain.losses, sharded.losses, moved


def test_autocast_moves_two_bytes_an_element_and_trains_alike() -> None:
    for plain, sharded, moved in ranks.run(2, _autocast):
        assert relative(plain, sharded) < 2e-2
        narrow = sum(b for d, b in moved if d == "bfloat16")
        wide = sum(b for d, b in moved if d == "float32")
        linears = 2 * (3 * 64 + 64 + 4 * 64 + 4 * 64) * 64
        assert linears * 2 <= narrow < linears * 2 * 1.05
        assert wide < 4 * (2 * 256 + 32 + 4 * 2) * 64  # embeddings and norms: used as they are


class Branching(nn.Module):
    """A returned view of a parameter, a tied weight, a frozen one, and one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(101, 16), nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 63), nn.Linear(63, 16)
        self.frozen = nn.Linear(16, 16)
        self.frozen.requires_grad_(False)
        self.unused = nn.Linear(3, 3)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.embed(tokens)
        x = x + self.down(torch.relu(self.up(self.norm(x)))) + self.frozen(x)
        return x @ self.embed.weight.t(), self.up.weight.t()


def _branching_loss(model: Any, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    logits, view = model(tokens)
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()) + 1e-3 * (
        view.square().sum()
    )


def _branching(dynamic: bool) -> tuple[Run, Run, list[str]]:
    torch.manual_seed(0)
    model = Branching()
    generator = torch.Generator().manual_seed(1)
    lengths = (5, 6, 7, 8, 5) if dynamic else (8,) * 5
    batches = [tuple(torch.randint(0, 101, (2, 4, n), generator=generator)) for n in lengths]
    plain, sharded = against_unsharded(
        model,
        batches,
        _branching_loss,
        lambda m: torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1),
        dynamic=dynamic,
    )
    without = [n for n, p in model.named_parameters() if p.untyped_storage().nbytes()]
    return plain.bare(), sharded.bare(), without


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_returned_tied_frozen_and_unused_parameters(dynamic: bool) -> None:
    for plain, sharded, whole in ranks.run(2, _branching, dynamic):
        assert_same_training(plain, sharded)
        assert whole == []


def _evaluation() -> tuple[float, float, float]:
    """Inference before, between and after training steps, by no_grad and inference_mode."""
    torch.manual_seed(0)
    model = GPT(**SMALL)
    reference = copy.deepcopy(model)
    batches = _texts(3, 2, 32)
    compiled = torch.compile(model, backend="zero3")
    worst = 0.0
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            worst = max(
                worst, float((compiled(batches[0][0]) - reference(batches[0][0])).abs().max())
            )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    twin = torch.optim.SGD(reference.parameters(), lr=0.1)
    for tokens, targets in batches:
        for current, step, runner in ((model, optimizer, compiled), (reference, twin, reference)):
            current.train()
            _language_loss(runner, tokens, targets).backward()
            step.step()
            step.zero_grad()
            current.eval()
        with torch.no_grad():
            worst = max(worst, float((compiled(tokens) - reference(tokens)).abs().max()))
    return worst, *(float(next(m.parameters()).detach().sum()) for m in (model, reference))


def test_inference_graphs_between_training_steps() -> None:
    for worst, ours, theirs in ranks.run(2, _evaluation):
        assert worst < 1e-4
        assert ours == pytest.approx(theirs, rel=1e-4)


def _optimizer_first() -> tuple[list[float], list[float]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    twin = copy.deepcopy(model)
    early = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = torch.compile(model, backend="zero3")
    second = torch.compile(twin, backend="zero3")
    late = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    x, y = torch.randn(4, 8), torch.randn(4, 4)
    losses: tuple[list[float], list[float]] = ([], [])
    for record, step, optimizer in ((losses[0], first, early), (losses[1], second, late)):
        for _ in range(4):
            loss = nn.functional.mse_loss(step(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            record.append(float(loss))
    return losses


def test_the_optimizer_may_be_made_before_or_after_compile() -> None:
    for early, late in ranks.run(2, _optimizer_first):
        assert early == late
        assert early[-1] < early[0]
