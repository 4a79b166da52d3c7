"""What a rank really holds, by storages and by the process's own resident memory."""

from pathlib import Path

import pytest
import torch
from torch import nn

import ranks
import zero_compile
from training import world
from zero_runtime.memory import native
from zero_runtime.session import session_of
from zero_runtime.sharding.sharded_gradient import ShardedGradient

LAYERS, WIDTH = 24, 2048
LAYER = WIDTH * WIDTH * 4


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def _peak_of(action) -> tuple[object, int]:  # type: ignore[no-untyped-def]
    """(result, bytes by which resident memory rose above its level before, at the most).

    The kernel's own high-water mark, reset before the action; the arena gives back what it keeps.
    """
    native.trim()
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident()
    result = action()
    lines = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024
    return result, peak - before


def _linears() -> dict[str, float]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    compiled = torch.compile(model, backend="zero3")
    x = torch.randn(8, WIDTH)
    for _ in range(2):  # compile, then settle: only the steps after are measured
        model.zero_grad()
        compiled(x).square().mean().backward()
    model.zero_grad()
    y, forward = _peak_of(lambda: compiled(x))
    _, backward = _peak_of(y.square().mean().backward)  # type: ignore[attr-defined]
    shards = sum(p.grad.local.nbytes for p in model.parameters())  # type: ignore[union-attr]
    plans = {plan.phase: plan for plan in zero_compile.plans(model)}
    return {
        "forward": forward,
        "backward": backward,
        "shards": shards,
        "planned_forward": plans["forward"].peak_bytes,
        "planned_backward": plans["backward"].peak_bytes,
        "gathered": max(s.gathered_peak for s in {session_of(p) for p in model.parameters()}),  # type: ignore[union-attr]
        "planned_gathered": max(p.peak_gathered_bytes for p in plans.values()),
    }


@pytest.mark.generated_kernels
def test_twenty_four_linears_hold_few_layers_at_once_and_what_the_plan_says() -> None:
    for found in ranks.run(2, _linears):
        print({k: round(v / LAYER, 3) for k, v in found.items()}, "layers of 16 MiB")
        assert found["forward"] <= 3 * LAYER
        assert found["backward"] <= found["shards"] + 4 * LAYER
        assert found["gathered"] == found["planned_gathered"]
        activations = LAYERS * 8 * WIDTH * 4
        assert found["planned_forward"] + activations == pytest.approx(found["forward"], rel=0.05)
        # Resident memory counts a receive buffer as its bytes arrive, the plan from its allocation on.
        assert (
            0.85 * found["planned_backward"]
            <= found["backward"]
            <= 1.02 * found["planned_backward"]
        )


def _held() -> tuple[int, int, int]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(1000, 96), *(nn.Linear(96, 96) for _ in range(8)))
    compiled = torch.compile(model, backend="zero3", options={"bucket_bytes": 1 << 16})
    optimizer = torch.optim.AdamW(model.parameters())
    compiled(torch.randint(0, 1000, (4, 7))).square().mean().backward()
    optimizer.step()
    report = zero_compile.memory_report(model, optimizer)
    session = session_of(next(model.parameters()))
    assert session is not None
    padding = sum(b.plan.padded - sum(s.numel for s in b.plan.slots) for b in session.buckets)
    held = report.parameters + report.gradients + report.optimizer
    return held, sum(p.numel() for p in model.parameters()), padding


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_shards_gradients_and_state_take_sixteen_bytes_a_parameter_over_the_world(
    size: int,
) -> None:
    for held, parameters, padding in ranks.run(size, _held):
        promised = 16 * parameters / size
        assert promised * 0.99 <= held <= promised * 1.01 + 16 * padding


def _freed() -> tuple[int, int, bool]:
    """Nothing is left when the model is gone."""
    model = nn.Linear(512, 512)
    compiled = torch.compile(model, backend="zero3")
    compiled(torch.randn(2, 512)).sum().backward()
    assert isinstance(model.weight.grad, ShardedGradient)
    held = model.weight.grad.local.nbytes
    before = native.stats().live
    model.zero_grad()
    return held, before - native.stats().live, world()[1] == 1


def test_clearing_gradients_returns_their_memory() -> None:
    held, returned, _ = _freed()
    assert returned >= held > 0


def _steady() -> tuple[tuple[int, int], tuple[int, int]]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)))
    compiled = torch.compile(model, backend="zero3", options={"bucket_bytes": 1 << 18})
    optimizer = torch.optim.AdamW(model.parameters())
    seen = []
    for _ in range(6):
        compiled(torch.randn(4, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append((native.stats().os_allocations, native.stats().held))
    return seen[2], seen[-1]


@pytest.mark.generated_kernels
@pytest.mark.skipif(not native.AVAILABLE, reason="the arena is the extension's")
def test_steady_steps_ask_the_operating_system_for_nothing() -> None:
    for (early, _), (late, _) in ranks.run(2, _steady):
        assert early == late


@pytest.mark.generated_kernels
@pytest.mark.skipif(not native.AVAILABLE, reason="the arena is the extension's")
def test_steady_steps_hold_no_more_from_step_to_step() -> None:
    for (_, early), (_, late) in ranks.run(2, _steady):
        assert 0 < late <= early
