"""Trainings with saved tensors off the device: the same losses, in less memory."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

import ranks
import zero_compile
from peaks import peak_of
from zero_compile.analysis.liveness import Liveness
from zero_runtime.errors import SwapError, UnsupportedError
from zero_runtime.ir.plan import Channel, Plan, StepKind, Tier
from zero_runtime.ir.timeline import Category, Timeline
from zero_runtime.offload import memory_tiers
from zero_runtime.session import session_of

WIDTH, ROWS = 128, 512
SIZE = WIDTH * ROWS * 4
ANY = {"device": "cpu", "min_bytes": 1}


# ------------------------------------------------------------------------------ training


class Block(nn.Module):
    """A residual block with attention, as transformers have them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.norm(x)).chunk(3, dim=-1)
        heads = [t.unflatten(-1, (4, -1)).transpose(1, 2) for t in parts]
        mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.after(x))))


class Images(nn.Module):
    """Convolutions, batch norms and shortcuts."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = torch.relu(norm(convolution(x))) + x
        return x


class Checkpointed(nn.Module):
    """Linears whose insides are computed again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(lambda t, layer=layer: layer(t).tanh().square(), x, use_reentrant=False)
        return x


class TwoResults(nn.Module):
    """Also returns what it saves for backward, and a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        seen = []
        for layer in self.layers:
            x = layer(x).tanh()
            seen.append(x)
        return x, seen[0], seen[1].t()


class WithLoss(nn.Module):
    """Returns the loss alone."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.inner(x).square().mean()
        return loss


def mlp(layers: int = 7) -> nn.Module:
    linears = [nn.Linear(WIDTH, WIDTH) for _ in range(layers)]
    return nn.Sequential(*(m for linear in linears for m in (linear, nn.GELU())))


def _rows(*shape: int, **how: Any) -> Callable[[], torch.Tensor]:
    return lambda: torch.randn(*shape).to(**how)


class Trained(NamedTuple):
    """Losses, and the plans."""

    losses: list[float]
    weights: dict[str, torch.Tensor]
    plans: Sequence[Plan]
    model: nn.Module

    @property
    def saved(self) -> set[str]:
        """Names of what leaves the device."""
        return {s.name for plan in self.plans for s in plan.saved}


def trained(
    make: Callable[[], nn.Module],
    inputs: Callable[[], torch.Tensor],
    backend: str = "zero3",
    steps: int = 2,
    dynamic: bool | None = None,
    **options: Any,
) -> Trained:
    """A few steps from fixed weights and data, on one thread, whose sums always run in one order."""
    torch._dynamo.reset()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        torch.manual_seed(0)
        model = make()
        compiled = torch.compile(model, backend=backend, options=options, dynamic=dynamic)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses = []
        for _ in range(steps):
            found = compiled(inputs())
            loss = sum(t.square().mean() for t in (found if isinstance(found, tuple) else (found,)))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
    finally:
        torch.set_num_threads(threads)
    weights = {n: v.detach().clone() for n, v in model.state_dict().items()}
    return Trained(losses, weights, zero_compile.plans(model), model)


@functools.cache
def kept(
    make: Callable[[], nn.Module], inputs: Callable[[], torch.Tensor], backend: str = "zero3"
) -> Trained:
    """The training that keeps everything on the device."""
    found = trained(make, inputs, backend)
    assert not found.saved
    return found


def assert_equal_bits(ours: Trained, theirs: Trained) -> None:
    assert ours.losses == theirs.losses
    for name, value in theirs.weights.items():
        assert torch.equal(ours.weights[name], value), name


def transformer() -> nn.Module:
    return nn.Sequential(*(Block() for _ in range(2)))


def channels_last() -> nn.Module:
    return Images().to(memory_format=torch.channels_last)


LINES = _rows(ROWS, WIDTH)
IMAGES = _rows(8, 8, 32, 32, memory_format=torch.channels_last)
TOKENS = _rows(8, 64, WIDTH)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "inputs", "most"),
    [
        pytest.param(mlp, LINES, "addmm", id="mlp"),
        pytest.param(transformer, TOKENS, "getitem_1", id="transformer"),
        pytest.param(channels_last, IMAGES, "convolution", id="channels last"),
        pytest.param(Images, _rows(8, 8, 32, 32), None, id="images"),
        pytest.param(Checkpointed, LINES, "", id="checkpointed"),
    ],
)
def test_losses_and_weights_are_those_of_a_training_that_keeps_everything(
    make: Callable[[], nn.Module], inputs: Callable[[], torch.Tensor], most: str | None
) -> None:
    plain = kept(make, inputs)
    away = trained(make, inputs, offload_activations=ANY)
    assert_equal_bits(away, plain)
    assert away.saved
    if most is None:  # images in an order that Inductor is going to change
        assert not any("convolution" in name for name in away.saved)
    elif most:
        assert most in away.saved


@pytest.mark.parametrize("schedule", ["one_ahead", "on_demand", "all_first"])
def test_schedules_without_a_planner_move_the_same_tensors(schedule: str) -> None:
    plain = kept(mlp, LINES)
    away = trained(mlp, LINES, schedule=schedule, bucket_bytes=1 << 16, offload_activations=ANY)
    assert away.losses == plain.losses
    assert "addmm" in away.saved


@pytest.mark.parametrize("backend", ["zero1", "zero2"])
def test_the_other_stages_offload_too(backend: str) -> None:
    plain = kept(mlp, LINES, backend)
    away = trained(mlp, LINES, backend, offload_activations=ANY)
    assert_equal_bits(away, plain)
    assert "addmm" in away.saved


def test_what_the_user_gets_stays_and_so_does_what_shares_its_memory() -> None:
    plain = kept(TwoResults, LINES)
    away = trained(TwoResults, LINES, offload_activations=ANY)
    assert_equal_bits(away, plain)
    assert away.saved
    assert not away.saved & {"tanh", "tanh_1"}


def test_tensors_of_symbolic_size_stay() -> None:
    plain = trained(mlp, LINES, dynamic=True)
    away = trained(mlp, LINES, dynamic=True, offload_activations=ANY)
    assert_equal_bits(away, plain)
    assert not away.saved


def test_small_tensors_stay() -> None:
    large = trained(mlp, LINES, offload_activations={**ANY, "min_bytes": SIZE})
    assert large.saved
    larger = trained(mlp, LINES, offload_activations={**ANY, "min_bytes": SIZE + 1})
    assert not larger.saved


def _on_ranks(offload: Any) -> tuple[list[float], int]:
    run = trained(mlp, LINES, bucket_bytes=1 << 16, offload_activations=offload)
    return run.losses, len(run.saved)


def test_two_ranks_train_alike() -> None:
    plain = ranks.run(2, _on_ranks, False)
    away = ranks.run(2, _on_ranks, ANY)
    for (losses, moved_there), (expected, none) in zip(away, plain, strict=True):
        assert losses == expected
        assert moved_there > 0
        assert none == 0


def test_together_with_parameters_and_optimizer_state_off_the_device() -> None:
    off = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
    plain = trained(mlp, LINES, bucket_bytes=1 << 16, **off)
    away = trained(mlp, LINES, bucket_bytes=1 << 16, offload_activations=ANY, **off)
    assert_equal_bits(away, plain)
    assert away.saved


# ------------------------------------------------------------------------------ loops


def _compiled(offload: Any, make: Callable[[], nn.Module] = mlp) -> tuple[nn.Module, Any]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = make()
    return model, torch.compile(model, backend="zero3", options={"offload_activations": offload})


def _retained(compiled: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    loss = compiled(x).square().mean()
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    loss.backward()


def _two_forwards(compiled: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    first, second = compiled(x).square().mean(), compiled(y).square().mean()
    (second + 2 * first).backward()


def _forgotten(compiled: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    compiled(y)
    with torch.no_grad():
        compiled(y)
    compiled(x).square().mean().backward()


def _packed_by_the_user(compiled: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    kept: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> int:
        kept.append(tensor.detach().clone())
        return len(kept) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, kept.__getitem__):
        loss = compiled(x).square().mean()
    loss.backward()


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "nvme"])
@pytest.mark.parametrize("loop", [_retained, _two_forwards, _forgotten])
def test_gradients_are_right_however_forward_and_backward_follow_each_other(
    loop: Callable[..., None], device: str, tmp_path: Any
) -> None:
    torch.manual_seed(1)
    x, y = torch.randn(2, ROWS, WIDTH)
    gradients = []
    where = {"nvme_path": str(tmp_path)} if device == "nvme" else {}
    for offload in (False, {**ANY, "device": device, **where}):
        model, compiled = _compiled(offload)
        loop(compiled, x, y)
        gradients.append([p.grad.full_tensor() for p in model.parameters()])  # type: ignore[union-attr]
        saved = {s for plan in zero_compile.plans(model) for s in plan.saved}
        assert bool(saved) == bool(offload)
    for expected, found in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


def test_hooks_on_saved_tensors_get_copies_on_the_host_and_no_handles(tmp_path: Any) -> None:
    x, y = torch.randn(2, ROWS, WIDTH)
    gradients = []
    for offload in (False, ANY):
        model, compiled = _compiled(offload)
        _packed_by_the_user(compiled, x, y)
        gradients.append([p.grad.full_tensor() for p in model.parameters()])  # type: ignore[union-attr]
    for expected, found in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
    _, compiled = _compiled({**ANY, "device": "nvme", "nvme_path": str(tmp_path)})
    with pytest.raises(UnsupportedError, match=r"handles of tensors on NVMe.*device 'cpu'"):
        _packed_by_the_user(compiled, x, y)


def test_inference_moves_nothing() -> None:
    model, compiled = _compiled(ANY)
    with torch.no_grad():
        compiled(torch.randn(ROWS, WIDTH))
    assert all(not plan.saved for plan in zero_compile.plans(model))


# ------------------------------------------------------------------------------ NVMe


def test_what_is_on_nvme_comes_back_and_its_room_is_used_again(tmp_path: Any) -> None:
    plain = kept(mlp, LINES)
    options = {"device": "nvme", "nvme_path": str(tmp_path), "min_bytes": 1}
    away = trained(mlp, LINES, steps=4, offload_activations=options)
    assert away.losses[:2] == plain.losses
    assert {s.tier for plan in away.plans for s in plan.saved} == {Tier.NVME}
    session = session_of(next(away.model.parameters()))
    assert session is not None
    sent = sum(s.bytes for s in away.plans[0].saved)
    assert sent > 0
    assert session.memory_tiers.swapped_bytes <= sent, "four steps take the room of one"


def test_a_disk_without_room_is_told_to_whoever_waits_for_the_tensor(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, compiled = _compiled({**ANY, "device": "nvme", "nvme_path": str(tmp_path)})

    class Full:
        def allocate(self, name: str, nbytes: int) -> None:
            raise SwapError(28, f"no room for '{name}' of {nbytes} bytes")

    monkeypatch.setattr(memory_tiers.MemoryTiers, "swap", property(lambda self: Full()))
    with pytest.raises(SwapError, match="no room for 'saved 0' of 262144 bytes"):
        compiled(torch.randn(ROWS, WIDTH))
    monkeypatch.undo()
    compiled(torch.randn(ROWS, WIDTH)).square().mean().backward()
    assert model[0].weight.grad is not None


# ------------------------------------------------------------------------------ memory


class Measured(NamedTuple):
    """The most bytes of device memory that a step held, and was predicted to hold."""

    measured: int
    predicted: int
    moved: int


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Measured]:
    """Everything of the device goes through torch's allocator, the host's copies through the arena."""
    monkeypatch.setattr(
        memory_tiers,
        "flat_buffer",
        lambda n, dtype, device: torch.empty(n, dtype=dtype, device=device),
    )

    def run(offload: Any) -> Measured:
        graphs: list[GraphModule] = []
        compile_inner = zero_compile.backend.compat.compile_fx_inner

        def spy(gm: GraphModule, *args: Any, **kwargs: Any) -> Any:
            graphs.append(gm)
            return compile_inner(gm, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(zero_compile.backend.compat, "compile_fx_inner", spy)
            model, compiled = _compiled(offload, lambda: WithLoss(mlp()))
            x = torch.randn(8 * ROWS, WIDTH)

            def step() -> None:
                compiled(x).backward()

            step()
            model.zero_grad()
        plans = zero_compile.plans(model)
        halves = [Liveness.of(g.graph, p.buckets) for g, p in zip(graphs, plans, strict=True)]
        predicted = Liveness.step(*halves).peak([Category.ACTIVATIONS, Category.GRADIENTS]).bytes
        return Measured(peak_of(step), predicted, sum(s.bytes for s in plans[0].saved))

    return run


@pytest.mark.generated_kernels
def test_the_measured_peak_falls_as_planned(measure: Callable[[Any], Measured]) -> None:
    kept, away = measure(False), measure(ANY)
    print(kept, away)
    assert kept.measured == pytest.approx(kept.predicted, rel=0.01)
    assert away.measured == pytest.approx(away.predicted, rel=0.01)
    assert away.measured < 0.6 * kept.measured
    assert kept.measured - away.measured <= away.moved


def test_a_budget_that_would_not_do_is_kept_with_tensors_away(
    measure: Callable[[Any], Measured],
) -> None:
    def steps(**options: Any) -> Trained:
        return trained(mlp, _rows(8 * ROWS, WIDTH), device_memory=budget, **options)

    state = sum(p.numel() for p in mlp().parameters()) * 16
    budget = state + measure(False).measured
    assert not steps(offload_activations=ANY).saved, "all of it fits"
    budget = state + measure(False).measured * 6 // 10
    with pytest.raises(Exception, match="activations and gradients"):
        steps()
    away = steps(offload_activations=ANY)
    assert 0 < len(away.saved) < 14
    assert away.losses == trained(mlp, _rows(8 * ROWS, WIDTH)).losses


# ------------------------------------------------------------------------------ what is shown


def test_a_plan_lists_what_leaves_and_counts_its_bytes() -> None:
    away = trained(mlp, LINES, offload_activations=ANY)
    forward, backward = away.plans
    assert forward.saved == backward.saved
    assert {s.bytes for s in forward.saved} == {SIZE}
    numbers = list(range(len(forward.saved)))
    for plan, kinds, channel in (
        (forward, (StepKind.OFFLOAD_START, StepKind.OFFLOAD_WAIT), Channel.DEVICE_TO_HOST),
        (backward, (StepKind.RELOAD_START, StepKind.RELOAD_WAIT), Channel.HOST_TO_DEVICE),
    ):
        for kind in kinds:
            steps = [s for s in plan.steps if s.kind is kind]
            assert sorted(s.bucket for s in steps) == numbers
            assert {(s.bytes, s.channel, s.dtype) for s in steps} == {(SIZE, channel, "float32")}
    assert Plan.from_json(forward.to_json()) == forward
    assert all("load" not in line for plan in away.plans for line in plan.outline())


def test_a_recorded_timeline_shows_the_way_there_and_back() -> None:
    away = trained(mlp, LINES, offload_activations=ANY, record=True)
    (timeline,) = zero_compile.timelines(away.model)
    assert isinstance(timeline, Timeline)
    for channel, phase in (
        (Channel.DEVICE_TO_HOST, "forward"),
        (Channel.HOST_TO_DEVICE, "backward"),
    ):
        events = [e for e in timeline.events if e.channel is channel]
        assert {e.name for e in events} == away.saved
        assert {e.phase for e in events} == {phase}
