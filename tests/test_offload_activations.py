"""offload_activations: saved tensors leave the device in forward; trainings do not notice."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import ranks
import torch
from expecttest import TestCase
from graphs import FORWARD, Recording, call_before, named, names, record, snapshot, text
from peaks import peak_of
from torch import nn
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

import zero_compile
from zero_compile.fx_graph import calls, output_node, readers
from zero_compile.passes.offload_activations import offload_activations
from zero_compile.planner.activations import Move
from zero_compile.planner.liveness import Liveness
from zero_compile.verify import verify_moved
from zero_runtime import depot, ops
from zero_runtime.errors import PlanError, SwapError, UnsupportedError
from zero_runtime.plan import Channel, Plan, StepKind, Tier
from zero_runtime.session import session_of
from zero_runtime.timeline import Category, Timeline

WIDTH, ROWS = 128, 512
SIZE = WIDTH * ROWS * 4
ANY = {"device": "cpu", "min_bytes": 1}


@functools.cache
def recorded() -> Recording:
    """Four linears; the first activation leaves and comes back."""
    layers = [nn.Linear(64, 64) for _ in range(4)]
    model = nn.Sequential(*(m for layer in layers for m in (layer, nn.ReLU())))
    return record(model, torch.randn(4096, 64), offload_activations=ANY, run_backward=True)


class Snapshot(TestCase):
    maxDiff = None

    @snapshot
    def test_before(self):
        gm = recorded().before("offload_activations", FORWARD)
        self.assertExpectedInline(
            text(gm),
            """\
primals_1: float32[64, 64]
primals_2: float32[64]
primals_3: float32[4096, 64]
primals_4: float32[64, 64]
primals_5: float32[64]
primals_6: float32[64, 64]
primals_7: float32[64]
primals_8: float32[64, 64]
primals_9: float32[64]
channel_default = zero3.channel()
all_gather_start_default = zero3.all_gather_start(channel_default, 0, float32)
all_gather_wait_default = zero3.all_gather_wait(all_gather_start_default, channel_default, 0, 16640, float32, cpu)
as_strided_default = aten.as_strided(all_gather_wait_default, [64, 64], [64, 1], 0)
as_strided_default_1 = aten.as_strided(all_gather_wait_default, [64], [1], 4096)
as_strided_default_2 = aten.as_strided(all_gather_wait_default, [64, 64], [64, 1], 4160)
as_strided_default_3 = aten.as_strided(all_gather_wait_default, [64], [1], 8256)
as_strided_default_4 = aten.as_strided(all_gather_wait_default, [64, 64], [64, 1], 8320)
as_strided_default_5 = aten.as_strided(all_gather_wait_default, [64], [1], 12416)
as_strided_default_6 = aten.as_strided(all_gather_wait_default, [64, 64], [64, 1], 12480)
as_strided_default_7 = aten.as_strided(all_gather_wait_default, [64], [1], 16576)
permute = aten.permute(as_strided_default, [1, 0])  # recompute
addmm = aten.addmm(as_strided_default_1, primals_3, permute)
relu = aten.relu(addmm)
permute_1 = aten.permute(as_strided_default_2, [1, 0])  # recompute
addmm_1 = aten.addmm(as_strided_default_3, relu, permute_1)
relu_1 = aten.relu(addmm_1)
permute_2 = aten.permute(as_strided_default_4, [1, 0])  # recompute
addmm_2 = aten.addmm(as_strided_default_5, relu_1, permute_2)
relu_2 = aten.relu(addmm_2)
permute_3 = aten.permute(as_strided_default_6, [1, 0])  # recompute
addmm_3 = aten.addmm(as_strided_default_7, relu_2, permute_3)
relu_3 = aten.relu(addmm_3)
le = aten.le.Scalar(relu_3, 0)
return [relu_3, primals_3, primals_4, primals_6, primals_8, relu, relu_1, relu_2, le]
""",
        )

    @snapshot
    def test_after(self):
        gm = recorded().after("offload_activations", FORWARD)
        self.assertExpectedInline(
            text(gm),
            """\
primals_1: float32[64, 64]
primals_2: float32[64]
primals_3: float32[4096, 64]
primals_4: float32[64, 64]
primals_5: float32[64]
primals_6: float32[64, 64]
primals_7: float32[64]
primals_8: float32[64, 64]
primals_9: float32[64]
channel_default = zero3.channel()
all_gather_start_default = zero3.all_gather_start(channel_default, 0, float32)
all_gather_wait_default = zero3.all_gather_wait(all_gather_start_default, channel_default, 0, 16640, float32, cpu)
as_strided_default = aten.as_strided(all_gather_wait_default, [64, 64], [64, 1], 0)
as_strided_default_1 = aten.as_strided(all_gather_wait_default, [64], [1], 4096)
as_strided_default_2 = aten.as_strided(all_gather_wait_default, [64, 64], [64, 1], 4160)
as_strided_default_3 = aten.as_strided(all_gather_wait_default, [64], [1], 8256)
as_strided_default_4 = aten.as_strided(all_gather_wait_default, [64, 64], [64, 1], 8320)
as_strided_default_5 = aten.as_strided(all_gather_wait_default, [64], [1], 12416)
as_strided_default_6 = aten.as_strided(all_gather_wait_default, [64, 64], [64, 1], 12480)
as_strided_default_7 = aten.as_strided(all_gather_wait_default, [64], [1], 16576)
permute = aten.permute(as_strided_default, [1, 0])  # recompute
addmm = aten.addmm(as_strided_default_1, primals_3, permute)
relu = aten.relu(addmm)
permute_1 = aten.permute(as_strided_default_2, [1, 0])  # recompute
addmm_1 = aten.addmm(as_strided_default_3, relu, permute_1)
relu_1 = aten.relu(addmm_1)
permute_2 = aten.permute(as_strided_default_4, [1, 0])  # recompute
offload_start_default = zero3.offload_start(relu, channel_default, 0, [64, 1], False)
addmm_2 = aten.addmm(as_strided_default_5, relu_1, permute_2)
relu_2 = aten.relu(addmm_2)
permute_3 = aten.permute(as_strided_default_6, [1, 0])  # recompute
offload_wait_default = zero3.offload_wait(relu, channel_default, 0)
addmm_3 = aten.addmm(as_strided_default_7, relu_2, permute_3)
relu_3 = aten.relu(addmm_3)
le = aten.le.Scalar(relu_3, 0)
return [relu_3, primals_3, primals_4, primals_6, primals_8, offload_start_default, relu_1, relu_2, le]
""",
        )


# ------------------------------------------------------------------------------ the graph


def moved(start: str | None, wait: str | None, name: str = "relu") -> GraphModule:
    """The forward with one tensor sent off between two nodes, checked."""
    gm = recorded().before("offload_activations", FORWARD)
    move = Move(name, Tier.HOST, start, wait, "", "")
    offload_activations(gm, moves=[move])
    verify_moved(gm)
    return gm


@pytest.mark.parametrize("start", ["", "addmm", "addmm_1", "addmm_3", None])
@pytest.mark.parametrize("wait", ["", "addmm_1", "addmm_3", None])
def test_wherever_a_move_says_a_tensor_leaves_after_it_is_made_and_is_free_after_its_use(
    start: str | None, wait: str | None
) -> None:
    order = names(moved(start, wait))
    out, end = order.index("offload_start_default"), order.index("offload_wait_default")
    assert order.index("addmm_1") < end, "the matmul that reads it"
    assert order.index("relu") < out < end
    if start is None:
        assert out > order.index("addmm_3")


def test_backward_gets_what_stands_for_the_tensor_in_its_place() -> None:
    gm = recorded().before("offload_activations", FORWARD)
    before = [str(n) for n in output_node(gm.graph).args[0]]
    after = [str(n) for n in output_node(moved("addmm_1", None).graph).args[0]]
    assert after == ["offload_start_default" if n == "relu" else n for n in before]
    (start,) = calls(moved("addmm_1", None).graph, ops.offload_start)
    host = start.meta["val"]
    assert (host.shape, host.device.type) == ((4096 * 64,), "cpu")


def test_a_reader_behind_the_wait_is_refused() -> None:
    gm = moved("addmm_1", None)
    call_before(output_node(gm.graph), torch.ops.aten.exp.default, named(gm, "relu"))
    with pytest.raises(PlanError, match=r"\['exp_default'\] read relu after its memory is free"):
        verify_moved(gm)


def test_a_tensor_that_is_never_waited_for_is_refused() -> None:
    gm = moved("addmm_1", None)
    gm.graph.erase_node(named(gm, "offload_wait_default"))
    with pytest.raises(PlanError, match="relu is waited for 0 times on its way out"):
        verify_moved(gm)


def test_a_backward_that_would_get_the_tensor_itself_is_refused() -> None:
    gm = moved("addmm_1", None)
    start = named(gm, "offload_start_default")
    output_node(gm.graph).replace_input_with(start, named(gm, "relu_2"))
    with pytest.raises(PlanError, match="backward does not get what offload_start_default returns"):
        verify_moved(gm)


def test_every_schedule_keeps_the_order() -> None:
    gm = recorded().scheduled(FORWARD)
    order = names(gm)
    (wait,) = calls(gm.graph, ops.offload_wait)
    saved = wait.all_input_nodes[0]
    assert all(order.index(r.name) <= order.index(wait.name) for r in readers(saved))


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
        self.convolutions = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(6))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(6))

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


def _compiled(offload: Any) -> tuple[nn.Module, Any]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = mlp()
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
    assert session.depot.swapped_bytes <= sent, "four steps take the room of one"


def test_a_disk_without_room_is_told_to_whoever_waits_for_the_tensor(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, compiled = _compiled({**ANY, "device": "nvme", "nvme_path": str(tmp_path)})

    class Full:
        def allocate(self, name: str, nbytes: int) -> None:
            raise SwapError(28, f"no room for '{name}' of {nbytes} bytes")

    monkeypatch.setattr(depot.Depot, "swap", property(lambda self: Full()))
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
        depot, "flat_buffer", lambda n, dtype, device: torch.empty(n, dtype=dtype, device=device)
    )

    def run(offload: Any) -> Measured:
        graphs: list[GraphModule] = []
        compile_inner = zero_compile.backend.compat.compile_fx_inner

        def spy(gm: GraphModule, *args: Any, **kwargs: Any) -> Any:
            graphs.append(gm)
            return compile_inner(gm, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(zero_compile.backend.compat, "compile_fx_inner", spy)
            model, compiled = _compiled(offload)
            x = torch.randn(8 * ROWS, WIDTH)

            def step() -> None:
                compiled(x).square().mean().backward()

            step()
            model.zero_grad()
        plans = zero_compile.plans(model)
        halves = [Liveness.of(g.graph, p.buckets) for g, p in zip(graphs, plans, strict=True)]
        predicted = Liveness.step(*halves).peak([Category.ACTIVATIONS, Category.GRADIENTS]).bytes
        return Measured(peak_of(step), predicted, sum(s.bytes for s in plans[0].saved))

    return run


def test_the_measured_peak_falls_as_planned(measure: Callable[[Any], Measured]) -> None:
    kept, away = measure(False), measure(ANY)
    print(kept, away)
    assert kept.measured == pytest.approx(kept.predicted, rel=0.1)
    assert away.measured == pytest.approx(away.predicted, rel=0.1)
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
