"""16-bit parameters with float32 master weights, and the dtype in which gradients are averaged."""

import copy
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ranks
import zero_compile
from training import mean_over_ranks, mine


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)).bfloat16()


def _batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    make = lambda: torch.randn(12, 16, generator=generator).bfloat16()  # noqa: E731
    return [(make(), make()) for _ in range(count)]


def _loss(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(x).float(), y.float())


def _reference(steps: int, size: int) -> list[float]:
    """Unsharded: bfloat16 working copies of float32 masters, gradients averaged over parts of the batch."""
    model = _model()
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-3)
    losses = []
    for x, y in _batches(steps):
        parts = [_loss(model, a, b) for a, b in zip(x.chunk(size), y.chunk(size), strict=True)]
        (sum(parts) / size).backward()
        for master, p in zip(masters, model.parameters(), strict=True):
            master.grad, p.grad = p.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            for master, p in zip(masters, model.parameters(), strict=True):
                p.copy_(master)
        losses.append(float(sum(parts)) / size)
    return losses


def _trained(steps: int, options: dict[str, Any], backend: str) -> tuple[list[float], list[float]]:
    model = _model()
    compiled = torch.compile(model, backend=backend, options=options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for batch in _batches(steps):
        loss = _loss(compiled, *mine(batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_over_ranks(loss))
    return losses, _reference(steps, dist.get_world_size())


@pytest.mark.parametrize("backend", ["zero1", "zero2", "zero3"])
def test_master_weights_follow_an_unsharded_reference(backend: str) -> None:
    options = {"bf16": True, "reduce_dtype": "float32"}
    for losses, reference in ranks.run(2, _trained, 30, options, backend):
        assert losses == pytest.approx(reference, rel=2e-2)


def test_plain_bfloat16_loses_small_updates_that_masters_keep() -> None:
    """Updates of 1e-5 of a weight vanish in bfloat16 and add up in float32."""
    moved = {}
    for options in ({}, {"bf16": True}):
        model = _model()
        before = copy.deepcopy(model)
        compiled = torch.compile(model, backend="zero3", options=options)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
        for _ in range(400):
            compiled(torch.ones(2, 16).bfloat16()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        changed = [
            (p.detach() != q).float().mean()
            for p, q in zip(model.parameters(), before.parameters(), strict=True)
        ]
        moved[bool(options)] = float(sum(changed))
    assert moved[True] > 2 * moved[False]


def _held() -> tuple[int, int, int, int]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(96, 96) for _ in range(8))).bfloat16()
    compiled = torch.compile(
        model, backend="zero3", options={"bf16": True, "bucket_bytes": 1 << 15}
    )
    optimizer = torch.optim.AdamW(model.parameters())
    compiled(torch.randn(4, 96).bfloat16()).square().mean().backward()
    optimizer.step()
    report = zero_compile.memory_report(model, optimizer)
    elements = sum(p.numel() for p in model.parameters())
    return report.parameters, report.gradients, report.optimizer, elements


def test_two_and_two_and_twelve_bytes_a_parameter_over_the_world() -> None:
    for parameters, gradients, state, elements in ranks.run(2, _held):
        assert parameters == pytest.approx(2 * elements / 2, rel=0.01)
        assert gradients == pytest.approx(2 * elements / 2, rel=0.01)
        assert state == pytest.approx(12 * elements / 2, rel=0.01)


def _loaded(backend: str) -> tuple[float, float]:
    """Weights loaded after the first step reach the masters too."""
    model = _model()
    compiled = torch.compile(model, backend=backend, options={"bf16": True})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    compiled(torch.ones(2, 16).bfloat16()).sum().backward()
    optimizer.step()
    fresh = {n: torch.full_like(v, 0.25) for n, v in model.state_dict().items()}
    model.load_state_dict(fresh)
    optimizer.step()
    value = model[0].weight.detach().float()
    return float(value.min()), float(value.max())


@pytest.mark.parametrize("backend", ["zero1", "zero2", "zero3"])
def test_loaded_weights_survive_the_next_step(backend: str) -> None:
    assert ranks.run(2, _loaded, backend) == [(0.25, 0.25)] * 2


def _apply_nothing(model: nn.Module) -> None:
    model._apply(lambda t: t)


def _load_own(model: nn.Module) -> None:
    model.load_state_dict(model.state_dict())


def _swap_in_others(model: nn.Module) -> None:
    """As an evaluation with averaged weights does."""
    own = {n: v.clone() for n, v in model.state_dict().items()}
    model.load_state_dict({n: v + 1 for n, v in own.items()})
    model.load_state_dict(own)


def _masters_after(options: dict[str, Any], backend: str, between: Any) -> dict[str, torch.Tensor]:
    torch._dynamo.reset()
    model = _model()
    compiled = torch.compile(model, backend=backend, options={"bf16": True, **options})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for batch in _batches(6):
        _loss(compiled, *mine(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if between is not None:
            between(model)
    get = zero_compile.safe_get_full_fp32_param
    return {n: get(p).clone() for n, p in model.named_parameters()}


def _undisturbed(options: dict[str, Any], backend: str) -> dict[str, bool]:
    expected = _masters_after(options, backend, None)
    same = {}
    for between in (_apply_nothing, _load_own, _swap_in_others):
        found = _masters_after(options, backend, between)
        same[between.__name__] = all(torch.equal(found[n], v) for n, v in expected.items())
    rounded = all(torch.equal(v, v.bfloat16().float()) for v in expected.values())
    return {**same, "finer than bfloat16": not rounded}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "place"), [("zero1", None), ("zero3", None), ("zero3", "cpu"), ("zero3", "nvme")]
)
def test_writing_the_same_values_leaves_masters_as_they_are(
    backend: str, place: str | None, tmp_path: Path
) -> None:
    section = {"device": place, **({"nvme_path": str(tmp_path)} if place == "nvme" else {})}
    options = {} if place is None else {"offload_param": section, "offload_optimizer": section}
    for facts in ranks.run(2, _undisturbed, options, backend):
        assert all(facts.values()), facts


def _one_element(backend: str) -> bool:
    """One element is given another value between two steps that change nothing."""
    model = _model()
    compiled = torch.compile(model, backend=backend, options={"bf16": True})
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for lr in (1e-4, 0.0):
        optimizer.param_groups[0]["lr"] = lr
        compiled(torch.ones(2, 16).bfloat16()).sum().backward()
        optimizer.step()
        if lr:
            expected = zero_compile.safe_get_full_fp32_param(model[0].weight).clone()
            expected[3, 5] = 7.0
            with torch.no_grad():
                model[0].weight[3, 5] = 7.0
    return torch.equal(zero_compile.safe_get_full_fp32_param(model[0].weight), expected)


@pytest.mark.parametrize("backend", ["zero1", "zero3"])
def test_only_the_masters_of_elements_that_were_written_change(backend: str) -> None:
    assert all(ranks.run(2, _one_element, backend))


def _unfrozen(dtype: torch.dtype, options: dict[str, Any]) -> tuple[list[bool], bool]:
    """A frozen layer begins to train. Whether each step moved it, and whether by its gradient in float32."""
    model, rate = _model().to(dtype), 2.0**-4
    model[0].requires_grad_(False)
    compiled = torch.compile(model, backend="zero3", options=options)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    p = model[0].bias
    before, moved, expected = p.detach().float(), [], None
    for x, y in _batches(2):
        _loss(compiled, x.to(dtype), y.to(dtype)).backward()
        if p.grad is not None:
            expected = before - rate * p.grad.full_tensor().float()  # type: ignore[attr-defined]
        optimizer.step()
        optimizer.zero_grad()
        moved.append(not torch.equal(before, p.detach().float()))
        model[0].requires_grad_(True)
    assert expected is not None
    master = zero_compile.safe_get_full_fp32_param(p)
    return moved, torch.allclose(master, expected, rtol=1e-6)


@pytest.mark.parametrize("place", [None, "cpu"])
@pytest.mark.parametrize(("dtype", "option"), [(torch.bfloat16, "bf16"), (torch.float16, "fp16")])
def test_a_frozen_part_begins_to_train(dtype: torch.dtype, option: str, place: str | None) -> None:
    options = {option: True, **({"offload_optimizer": {"device": place}} if place else {})}
    assert ranks.run(2, _unfrozen, dtype, options) == [([False, True], True)] * 2


def _reduced(name: str | None) -> float:
    """One element whose ranks' gradients cancel only in a wide enough dtype."""
    torch.manual_seed(0)
    model = nn.Linear(1, 1, bias=False).bfloat16()
    options = {"reduce_dtype": name} if name else {}
    compiled = torch.compile(model, backend="zero3", options=options)
    compiled(torch.full((1, 1), 1.0 + dist.get_rank() / 128).bfloat16()).sum().backward()
    assert model.weight.grad is not None
    return float(model.weight.grad.full_tensor())  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize("name", [None, "float32", "bfloat16"])
def test_gradients_are_averaged_in_the_dtype_asked_for(name: str | None) -> None:
    for value in ranks.run(3, _reduced, name):
        assert value == pytest.approx(1 + 1 / 128, abs=1 / 128)


@pytest.mark.parametrize(("option", "call"), [("bf16", "bfloat16"), ("fp16", "half")])
def test_masters_of_a_float32_model_are_refused_with_what_to_do(option: str, call: str) -> None:
    with pytest.raises(Exception, match=call):
        torch.compile(nn.Linear(2, 2), backend="zero3", options={option: True})(torch.ones(1, 2))


class Mixed(nn.Module):
    """Graphs without a 16-bit parameter, in a model that has some."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(4, 4).bfloat16(), nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x * 2)
        torch._dynamo.graph_break()
        return self.inner(x.bfloat16())


def test_a_graph_without_16_bit_parameters_is_no_reason_to_refuse() -> None:
    compiled = torch.compile(Mixed(), backend="zero3", options={"bf16": True})
    assert compiled(torch.ones(1, 4)).dtype is torch.bfloat16


def _half_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)).half()


class _Scaled(NamedTuple):
    losses: list[float]
    scales: list[float]
    skipped: bool
    gradient_bytes: int
    dtype: torch.dtype


def _scaled(backend: str, overflow_rank: int) -> _Scaled:
    """Trained with a dynamic loss scale; in step 2 one rank alone meets an overflow."""
    model = _half_model()
    compiled = torch.compile(model, backend=backend, options={"fp16": True})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=5)
    losses, scales, skipped, held = [], [], False, 0
    for number, (x, y) in enumerate(_batches(1) * 30):
        inputs = mine((x.half(), y.half()))
        factor = 1e6 if number == 2 and dist.get_rank() == overflow_rank else 1.0
        loss = _loss(compiled, *inputs)
        scaler.scale(loss * factor).backward()
        if number == 0:
            held = zero_compile.memory_report(model).gradients
        before = model[0].weight.detach().clone()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        scaler.step(optimizer)
        scaler.update()
        if number == 2:
            skipped = torch.equal(before, model[0].weight.detach())
        optimizer.zero_grad()
        losses.append(mean_over_ranks(loss))
        scales.append(scaler.get_scale())
    return _Scaled(losses, scales, skipped, held, model[0].weight.dtype)


@pytest.mark.parametrize("backend", ["zero1", "zero3"])
def test_float16_trains_under_a_dynamic_loss_scale_and_all_ranks_skip_together(
    backend: str,
) -> None:
    first, second = ranks.run(2, _scaled, backend, 1)
    assert first.scales == second.scales
    assert first.scales[2] == first.scales[1] / 2, "an overflow halves the scale"
    assert first.scales[-1] > first.scales[2], "and it grows again"
    assert first.skipped
    assert second.skipped
    assert first.losses[-1] < first.losses[0]
    assert first.dtype is torch.float16
    if backend == "zero3":
        elements = sum(p.numel() for p in _half_model().parameters())
        assert first.gradient_bytes == pytest.approx(2 * elements / 2, rel=0.05)


def _underflow() -> tuple[float, float]:
    """A gradient that float16 cannot hold without its scale, after the scale is taken out."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1, bias=False).half()
    compiled = torch.compile(model, backend="zero3", options={"fp16": True})
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    loss = compiled(torch.full((1, 4), 2.0**-10).half()).float().sum() * 2.0**-17
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    assert model.weight.grad is not None
    return float(model.weight.grad.full_tensor().min()), 2.0**-27  # type: ignore[attr-defined]


def test_unscaled_gradients_are_float32() -> None:
    for found, expected in ranks.run(2, _underflow):
        assert found == expected
