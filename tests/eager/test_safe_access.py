"""Values, gradients and optimizer state of partitioned parameters, read and written by name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ranks
import zero_compile
from training import mine
from zero_compile import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
)
from zero_runtime.errors import OptionError, UnsupportedError, ZeroError

#: Where state may live, as options; "folder" stands for one.
PLACES: dict[str, dict[str, Any]] = {
    "device": {},
    "host": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
    "nvme": {
        "offload_optimizer": {"device": "nvme"},
        "offload_param": {"device": "nvme"},
        "nvme_path": "folder",
    },
}


def _network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 14), nn.Tanh(), nn.Linear(14, 3))


def _batch(step: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(step)
    return (torch.randn(8, 10, generator=generator), torch.randn(8, 3, generator=generator))


class Pair:
    """A plain model and a partitioned one, in the same state."""

    def __init__(
        self,
        options: dict[str, Any],
        folder: str = "",
        kind: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
        stage: int = 3,
    ) -> None:
        torch._dynamo.reset()
        options = {k: folder if v == "folder" else v for k, v in options.items()}
        self.plain, self.model = _network(), _network()
        self.compiled = torch.compile(
            self.model, backend=f"zero{stage}", options={"bucket_bytes": 1 << 10, **options}
        )
        self.optimizers = [kind(m.parameters(), lr=0.05) for m in (self.plain, self.model)]
        self.steps = 0

    def backward(self) -> None:
        x, y = _batch(self.steps)
        nn.functional.mse_loss(self.plain(x), y).backward()
        x, y = mine((x, y))
        nn.functional.mse_loss(self.compiled(x), y).backward()
        self.steps += 1

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def parameters(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        return list(zip(self.plain.parameters(), self.model.parameters(), strict=True))

    def same(self) -> bool:
        return all(_close(q, p) for p, q in self.parameters())


def _close(found: Any, expected: Any) -> bool:
    return found is not None and torch.allclose(found.float(), expected.float(), atol=2e-5)


def _part(parameter: nn.Parameter, whole: torch.Tensor) -> torch.Tensor:
    """What this rank should have of ``whole``, by the library's own word for where it lies."""
    bucket, slot = parameter.session.entry(parameter).place  # type: ignore[attr-defined]
    return bucket.part_of(slot, whole)  # type: ignore[no-any-return]


# ------------------------------------------------------------------------------ reading


def _reads(place: str, folder: str, kind: str, stage: int) -> dict[str, bool]:
    optimizer = getattr(torch.optim, kind)
    states = {"AdamW": ["exp_avg", "exp_avg_sq"], "Adamax": ["exp_avg", "exp_inf"]}[kind]
    pair = Pair(PLACES[place], folder, optimizer, stage)
    pair.backward()
    pair.step()
    pair.backward()
    facts: dict[str, bool] = {}
    for number, (p, q) in enumerate(pair.parameters()):
        facts[f"value {number}"] = _close(safe_get_full_fp32_param(q), p)
        facts[f"gradient {number}"] = _close(safe_get_full_grad(q), p.grad)
        for name in states:
            expected = pair.optimizers[0].state[p][name]
            facts[f"{name} {number}"] = _close(safe_get_full_optimizer_state(q, name), expected)
            own = safe_get_local_optimizer_state(q, name)
            mine_of = _part(q, expected)
            facts[f"own {name} {number}"] = not mine_of.numel() or _close(own, mine_of)
        facts[f"own value {number}"] = _close(safe_get_local_fp32_param(q), _part(q, p))
        assert p.grad is not None
        facts[f"own gradient {number}"] = _close(safe_get_local_grad(q), _part(q, p.grad))
        step = safe_get_full_optimizer_state(q, "step")
        facts[f"step {number}"] = step is not None and float(step) == 1.0
        facts[f"nothing {number}"] = safe_get_full_optimizer_state(q, "momentum") is None
    pair.step()
    facts["trains on"] = pair.same()
    facts["no gradient"] = safe_get_full_grad(q) is None and safe_get_local_grad(q) is None
    return facts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "kind", "stage"),
    [(place, kind, 3) for place in PLACES for kind in ("AdamW", "Adamax")]
    + [("device", "AdamW", 1), ("device", "AdamW", 2)],
)
def test_state_is_read_wherever_it_lives(tmp_path: Path, place: str, kind: str, stage: int) -> None:
    for facts in ranks.run(2, _reads, place, str(tmp_path), kind, stage):
        assert all(facts.values()), [name for name, right in facts.items() if not right]


# ------------------------------------------------------------------------------ writing


def _writes(place: str, folder: str, local: bool, stage: int) -> dict[str, bool]:
    pair = Pair(PLACES[place], folder, stage=stage)
    pair.backward()
    pair.step()
    pair.backward()
    for p, q in pair.parameters():
        state = pair.optimizers[0].state[p]
        with torch.no_grad():
            p.mul_(-0.5)
            state["exp_avg"].add_(0.25)
            state["exp_avg_sq"].mul_(3.0)
            assert p.grad is not None
            p.grad.mul_(2.0)
        if local:
            safe_set_local_fp32_param(q, _part(q, p))
            safe_set_local_optimizer_state(q, _part(q, state["exp_avg"]), "exp_avg")
            safe_set_local_optimizer_state(q, _part(q, state["exp_avg_sq"]), "exp_avg_sq")
            safe_set_local_grad(q, _part(q, p.grad))
        else:
            safe_set_full_fp32_param(q, p.detach())
            safe_set_full_optimizer_state(q, state["exp_avg"], "exp_avg")
            safe_set_full_optimizer_state(q, state["exp_avg_sq"], "exp_avg_sq")
            safe_set_full_grad(q, p.grad)
    facts = {"value": pair.same()}
    facts["gradients"] = all(_close(safe_get_full_grad(q), p.grad) for p, q in pair.parameters())
    for p, _ in pair.parameters():
        pair.optimizers[0].state[p]["step"].fill_(7.0)
    for _, q in pair.parameters():
        safe_set_full_optimizer_state(q, torch.tensor(7.0), "step")
    pair.step()
    facts["first step"] = pair.same()
    pair.backward()
    pair.step()
    facts["second step"] = pair.same()
    return facts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "local", "stage"),
    [(place, local, 3) for place in PLACES for local in (False, True)]
    + [("device", False, 1), ("device", False, 2)],
)
def test_what_is_written_is_what_training_goes_on_with(
    tmp_path: Path, place: str, local: bool, stage: int
) -> None:
    for facts in ranks.run(2, _writes, place, str(tmp_path), local, stage):
        assert all(facts.values()), facts


def _masters(place: str, folder: str) -> dict[str, bool]:
    """A bfloat16 model with float32 masters: what is set is not rounded."""
    torch._dynamo.reset()
    options = {k: folder if v == "folder" else v for k, v in PLACES[place].items()}
    model = _network().bfloat16()
    compiled = torch.compile(model, backend="zero3", options={"bf16": True, **options})
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    weight = model[0].weight
    compiled(torch.ones(2, 10, dtype=torch.bfloat16)).sum().backward()
    fine = torch.linspace(0.0, 1.0, 140).view(14, 10) + 1.0
    facts = {"before": torch.equal(safe_get_full_fp32_param(weight), weight.detach().float())}
    safe_set_full_fp32_param(weight, fine)
    facts["exact"] = torch.equal(safe_get_full_fp32_param(weight), fine)
    facts["rounded"] = torch.equal(weight.detach(), fine.bfloat16())
    gradient = safe_get_full_grad(weight)
    assert gradient is not None
    facts["gradient"] = gradient.dtype is torch.float32
    optimizer.step()
    moved = safe_get_full_fp32_param(weight)
    facts["stepped"] = torch.allclose(moved, fine - 1e-4 * gradient, atol=1e-7)
    facts["own"] = torch.equal(safe_get_local_fp32_param(weight), _part(weight, moved))
    return facts


@pytest.mark.parametrize("place", PLACES)
def test_master_weights_are_read_and_written_exactly(tmp_path: Path, place: str) -> None:
    for facts in ranks.run(2, _masters, place, str(tmp_path)):
        assert all(facts.values()), facts


def _loaded_state() -> dict[str, bool]:
    """State that was loaded whole, before any step, is found if the optimizer is named."""
    source = Pair({})
    source.backward()
    source.step()
    state = source.optimizers[0].state_dict()
    pair = Pair({})
    pair.backward()
    pair.optimizers[1].load_state_dict(state)
    p, q = source.parameters()[0]
    expected = source.optimizers[0].state[p]["exp_avg"]
    q = next(pair.model.parameters())
    facts = {}
    try:
        safe_get_full_optimizer_state(q, "exp_avg")
    except ZeroError as error:
        facts["unknown"] = "pass optimizer=" in str(error)
    named = {"optimizer": pair.optimizers[1]}
    facts["full"] = _close(safe_get_full_optimizer_state(q, "exp_avg", **named), expected)
    facts["local"] = torch.equal(
        safe_get_local_optimizer_state(q, "exp_avg", **named), _part(q, expected)
    )
    safe_set_full_optimizer_state(q, expected + 1.0, "exp_avg", **named)
    facts["set"] = _close(safe_get_full_optimizer_state(q, "exp_avg", **named), expected + 1.0)
    return facts


def test_state_that_was_loaded_is_found() -> None:
    for facts in ranks.run(2, _loaded_state):
        assert facts == {"unknown": True, "full": True, "local": True, "set": True}


# ------------------------------------------------------------------------------ ordinary parameters


def test_ordinary_parameters_are_their_own_part() -> None:
    parameter = nn.Parameter(torch.randn(3, 2, dtype=torch.float64).bfloat16())
    optimizer = torch.optim.AdamW([parameter], lr=0.1)
    parameter.square().sum().backward()
    optimizer.step()
    assert torch.equal(safe_get_full_fp32_param(parameter), parameter.detach().float())
    assert safe_get_local_fp32_param(parameter).shape == (6,)
    gradient = safe_get_full_grad(parameter)
    assert gradient is not None
    assert gradient.shape == (3, 2)
    moment = safe_get_full_optimizer_state(parameter, "exp_avg", optimizer=optimizer)
    assert torch.equal(moment, optimizer.state[parameter]["exp_avg"])
    safe_set_full_fp32_param(parameter, torch.ones(3, 2))
    safe_set_full_grad(parameter, torch.full((3, 2), 2.0))
    safe_set_local_fp32_param(parameter, safe_get_local_fp32_param(parameter) * 3)
    assert bool((parameter == 3.0).all())
    assert parameter.grad is not None
    assert bool((parameter.grad == 2.0).all())


# ------------------------------------------------------------------------------ refusals


def _refused() -> list[str]:
    pair = Pair({}, stage=2)
    pair.backward()
    pair.step()
    weight = pair.model[0].weight
    told = []
    calls: list[Callable[[], Any]] = [
        lambda: safe_set_local_fp32_param(weight, _part(weight, torch.ones(14, 10))),
        lambda: safe_set_full_fp32_param(weight, torch.ones(3, 3)),
        lambda: safe_set_local_grad(weight, torch.ones(3)),
        lambda: safe_set_full_optimizer_state(weight, torch.ones(14, 10), "momentum"),
        lambda: safe_get_full_grad(torch.ones(3)),  # type: ignore[arg-type]
    ]
    for call in calls:
        try:
            call()
        except (OptionError, UnsupportedError, ZeroError) as error:
            told.append(str(error))
    return told


def test_what_cannot_be_done_is_refused() -> None:
    whole, shape, count, state, kind = ranks.run(2, _refused)[0]
    assert "safe_set_full_fp32_param" in whole
    assert "(14, 10), got (3, 3)" in shape
    assert "elements of the parameter, got 3" in count
    assert "no state 'momentum'" in state
    assert "exp_avg" in state
    assert "expected a parameter, got Tensor" in kind


def test_gradients_consumed_inside_backward_cannot_be_read() -> None:
    options = {"offload_optimizer": {"device": "cpu"}}
    model = _network()
    optimizer = torch.optim.AdamW(model.parameters())
    options["update_in_backward"] = optimizer  # type: ignore[assignment]
    torch.compile(model, backend="zero3", options=options)(torch.ones(2, 10)).sum().backward()
    with pytest.raises(UnsupportedError, match="update_in_backward"):
        safe_get_full_grad(model[0].weight)


def test_held_parameters_are_not_accessed() -> None:
    model = _network()
    torch.compile(model, backend="zero3")(torch.ones(2, 10))
    with zero_compile.GatheredParameters(model):
        with pytest.raises(ZeroError, match="leave it first"):
            safe_get_full_fp32_param(model[0].weight)
