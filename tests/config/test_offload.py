"""Parameters, gradients and optimizer state off the device: the same training, wherever they live."""

import copy
import errno
import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ranks
import zero_compile
from swaps import flip
from zero_runtime.errors import SwapError, UnsupportedError
from zero_runtime.ir.plan import Tier
from zero_runtime.offload import memory_tiers as depots
from zero_runtime.offload.swap_file import Faults
from zero_runtime.optim.lion import Lion
from zero_runtime.session import session_of
from zero_runtime.sharding.sharded_gradient import SpentGradient

PLACES = ("none", "cpu", "nvme")
#: Small, so that the model has a bucket a layer.
BUCKET = 1 << 13


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 3)
    ).to(dtype)


def off(
    folder: Any, parameters: str = "none", optimizer: str = "none", **more: Any
) -> dict[str, Any]:
    """Options that put parameters and optimizer state somewhere."""
    options: dict[str, Any] = {"bucket_bytes": BUCKET, **more}
    if parameters != "none":
        options["offload_param"] = {"device": parameters}
    if optimizer != "none":
        options["offload_optimizer"] = {"device": optimizer}
    if "nvme" in (parameters, optimizer):
        options["nvme_path"] = str(folder)
    return options


class Trained:
    """A short training and what it leaves behind."""

    def __init__(
        self,
        options: dict[str, Any],
        kind: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
        *,
        dtype: torch.dtype = torch.float32,
        backend: str = "zero3",
        clip: float | None = None,
        state: Any = None,
        **hyper: Any,
    ) -> None:
        torch._dynamo.reset()
        self.model = network(dtype)
        if state is not None:
            self.model.load_state_dict(state[0])
        self.optimizer = kind(self.model.parameters(), **{"lr": 1e-2, **hyper})
        if options.get("update_in_backward") == "the optimizer":
            options = {**options, "update_in_backward": self.optimizer}
        self.compiled = torch.compile(self.model, backend=backend, options=options)
        self.dtype, self.clip = dtype, clip
        self.losses: list[float] = []
        if state is not None:
            self.forward(0)  # partitions, so that loaded state goes where state lives
            self.optimizer.load_state_dict(copy.deepcopy(state[1]))

    def forward(self, step: int) -> torch.Tensor:
        torch.manual_seed(100 + step)
        x, y = torch.randn(8, 24).to(self.dtype), torch.randn(8, 3).to(self.dtype)
        return nn.functional.mse_loss(self.compiled(x), y)

    def step(self, step: int) -> None:
        loss = self.forward(step)
        loss.backward()
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(float(loss.detach()))

    def run(self, *steps: int) -> "Trained":
        for step in steps or (0, 1, 2):
            self.step(step)
        return self

    def weights(self) -> dict[str, torch.Tensor]:
        return {n: v.detach().clone() for n, v in self.model.state_dict().items()}

    @property
    def session(self) -> Any:
        return session_of(next(self.model.parameters()))


def assert_same(ours: Trained, theirs: Trained, tolerance: float = 1e-6) -> None:
    assert ours.losses == pytest.approx(theirs.losses, rel=tolerance)
    for name, value in theirs.weights().items():
        torch.testing.assert_close(ours.weights()[name], value, rtol=1e-5, atol=1e-6)


def assert_equal_bits(ours: Trained, theirs: Trained) -> None:
    assert ours.losses == theirs.losses
    for name, value in theirs.weights().items():
        assert torch.equal(ours.weights()[name], value), name


# ------------------------------------------------------------------------------ where state lives


def _everywhere(folder: str) -> dict[str, list[float]]:
    """Losses of every combination, on the calling rank."""
    losses = {}
    for parameters, optimizer in itertools.product(PLACES, PLACES):
        run = Trained(off(folder, parameters, optimizer), clip=0.5).run()
        losses[f"3 {parameters} {optimizer}"] = run.losses
    for stage, optimizer in itertools.product((1, 2), PLACES):
        run = Trained(off(folder, "none", optimizer), clip=0.5, backend=f"zero{stage}").run()
        losses[f"{stage} none {optimizer}"] = run.losses
    return losses


@pytest.mark.slow
def test_two_ranks_train_alike_wherever_state_lives(tmp_path):
    for losses in ranks.run(2, _everywhere, str(tmp_path)):
        plain = losses["3 none none"]
        for where, values in losses.items():
            assert values == pytest.approx(plain, rel=1e-6), where
        assert plain[0] != plain[2]


def test_a_bucket_lives_where_its_options_say(tmp_path):
    session = Trained(off(tmp_path, "nvme", "cpu")).run(0).session
    assert len(session.buckets) > 1
    for bucket in session.buckets:
        assert bucket.plan.residence.parameters is Tier.NVME
        assert bucket.plan.residence.optimizer is Tier.HOST


@pytest.mark.parametrize("place", ["cpu", "nvme"])
@pytest.mark.parametrize(
    ("kind", "hyper"),
    [
        (torch.optim.Adam, {"weight_decay": 0.1, "amsgrad": True}),
        (torch.optim.AdamW, {"weight_decay": 0.1, "maximize": True}),
        (torch.optim.AdamW, {"lr": torch.tensor(1e-2)}),
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
        (torch.optim.SGD, {}),
        (Lion, {"lr": 1e-3, "weight_decay": 0.1}),
        (torch.optim.Adagrad, {"lr_decay": 0.1, "initial_accumulator_value": 0.2}),
    ],
)
def test_a_stock_optimizer_is_taken_over(tmp_path, place, kind, hyper):
    ours = Trained(off(tmp_path, "none", place), kind, clip=0.5, **hyper).run()
    assert_same(ours, Trained(off(tmp_path), kind, clip=0.5, **hyper).run())


@pytest.mark.parametrize("place", ["cpu", "nvme"])
@pytest.mark.parametrize("kind", [torch.optim.RMSprop, torch.optim.NAdam, torch.optim.Rprop])
def test_an_optimizer_without_a_kernel_steps_on_host_shards(tmp_path, place, kind):
    ours = Trained(off(tmp_path, place, place), kind).run()
    assert_equal_bits(ours, Trained(off(tmp_path), kind).run())


@pytest.mark.parametrize("place", ["cpu", "nvme"])
def test_a_plain_16_bit_model_steps_in_16_bits(tmp_path, place):
    ours = Trained(off(tmp_path, place, place), dtype=torch.bfloat16).run()
    assert_equal_bits(ours, Trained(off(tmp_path), dtype=torch.bfloat16).run())


@pytest.mark.parametrize(
    ("parameters", "optimizer"), [("none", "cpu"), ("cpu", "nvme"), ("nvme", "none")]
)
def test_float32_masters_of_a_16_bit_model(tmp_path, parameters, optimizer):
    bf16 = {"bf16": True}
    ours = Trained(off(tmp_path, parameters, optimizer, **bf16), dtype=torch.bfloat16).run()
    assert_same(ours, Trained(off(tmp_path, **bf16), dtype=torch.bfloat16).run())


def test_parameter_groups_keep_their_own_hyper_parameters(tmp_path):
    def kind(parameters: Any, lr: float) -> torch.optim.Optimizer:
        parameters = list(parameters)
        weights = [p for p in parameters if p.dim() == 2]
        biases = [p for p in parameters if p.dim() == 1]
        groups = [{"params": weights, "weight_decay": 0.2}, {"params": biases, "lr": 0.05}]
        return torch.optim.AdamW(groups, lr=lr, weight_decay=0.0)

    assert_same(
        Trained(off(tmp_path, "cpu", "cpu"), kind).run(), Trained(off(tmp_path), kind).run()
    )


def test_a_parameter_without_a_gradient_is_skipped(tmp_path):
    runs = []
    for options in (off(tmp_path, "nvme", "nvme"), off(tmp_path)):
        run = Trained(options, weight_decay=0.3)
        run.step(0)
        run.forward(1).backward()
        run.model[2].weight.grad = None
        run.optimizer.step()
        run.optimizer.zero_grad()
        runs.append(run.run(2))
    assert_same(*runs)


def test_a_closure_runs_the_model_inside_the_step(tmp_path):
    def train(options: dict[str, Any]) -> Trained:
        run = Trained(options)
        for step in range(3):

            def closure(step: int = step) -> torch.Tensor:
                run.optimizer.zero_grad()
                loss = run.forward(step)
                loss.backward()
                return loss

            run.losses.append(float(run.optimizer.step(closure).detach()))
        return run

    assert_same(train(off(tmp_path, "nvme", "nvme")), train(off(tmp_path)))


def test_gradients_accumulate_over_backwards(tmp_path):
    def train(options: dict[str, Any]) -> Trained:
        run = Trained(options)
        for step in range(3):
            run.forward(2 * step).backward()
            run.forward(2 * step + 1).backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
        return run.run(9)

    assert_same(train(off(tmp_path, "cpu", "nvme")), train(off(tmp_path)))


def test_reductions_that_are_put_off_reach_the_host(tmp_path):
    def train(options: dict[str, Any]) -> Trained:
        run = Trained(options).run(0)
        for step in (2, 4):
            with zero_compile.no_sync(run.model):
                run.forward(step).backward()
            run.forward(step + 1).backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
        return run.run(9)

    plain = train(off(tmp_path))
    options = off(tmp_path, "nvme", "nvme")
    assert_same(train(options), plain)
    assert_same(train({**options, "update_in_backward": True}), plain)


def test_eager_code_reads_and_writes_parameters_on_nvme(tmp_path):
    run = Trained(off(tmp_path, "nvme", "nvme")).run(0)
    with torch.no_grad():
        run.model[0].weight.mul_(2.0)
    doubled = run.weights()["0.weight"]
    plain = Trained(off(tmp_path)).run(0)
    torch.testing.assert_close(doubled, 2 * plain.weights()["0.weight"])
    with torch.no_grad():
        plain.model[0].weight.mul_(2.0)
    assert_same(run.run(1, 2), plain.run(1, 2))


# ------------------------------------------------------------------------------ optimizer.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [("nvme", "nvme"), ("nvme", "none"), ("none", "nvme"), ("cpu", "nvme"), ("none", "cpu")],
)
def test_state_is_saved_and_loaded_across_places(tmp_path, saved, loaded):
    whole = Trained(off(tmp_path, "none", saved)).run(0, 1)
    state = whole.weights(), copy.deepcopy(whole.optimizer.state_dict())
    part = Trained(off(tmp_path, "none", loaded), state=state).run(2, 3)
    whole.losses.clear()
    assert_same(part, whole.run(2, 3))


def test_state_on_nvme_is_in_memory_only_while_it_is_asked_for(tmp_path):
    run = Trained(off(tmp_path, "none", "nvme")).run(0)
    state = run.optimizer.state_dict()["state"]
    assert {len(entry) for entry in state.values()} == {3}
    assert all(set(run.optimizer.state[p]) == {"step"} for p in run.model.parameters())


def _resumed(folder: str) -> tuple[list[float], list[float]]:
    """Losses of five steps, without and with the optimizer's state saved and loaded in between."""
    found = []
    for saves in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
        options = {"offload_optimizer": {"device": "nvme", "nvme_path": folder}}
        compiled = torch.compile(model, backend="zero3", options=options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for step in range(5):
            loss = compiled(torch.linspace(-1, 1, 64).view(4, 16)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if saves and step in (1, 2):
                state = copy.deepcopy(optimizer.state_dict())
                optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
                optimizer.load_state_dict(state)
        found.append(losses)
    return found[0], found[1]


def test_each_rank_loads_its_own_part_of_the_state(tmp_path):
    for through, resumed in ranks.run(2, _resumed, str(tmp_path)):
        assert resumed == through


def test_momentum_that_was_loaded_is_not_begun_anew(tmp_path):
    kind = functools.partial(torch.optim.SGD, momentum=0.9)
    whole = Trained(off(tmp_path), kind).run(0, 1)
    state = whole.weights(), copy.deepcopy(whole.optimizer.state_dict())
    part = Trained(off(tmp_path, "none", "nvme"), kind, state=state).run(2)
    whole.losses.clear()
    assert_same(part, whole.run(2))


# ------------------------------------------------------------------------------ bytes


def moved(run: Trained) -> tuple[int, int]:
    run.session.memory_tiers.swap.drain()
    stats = run.session.memory_tiers.swap.stats()
    return stats.bytes_read, stats.bytes_written


def test_a_step_moves_at_most_thirty_bytes_a_parameter(tmp_path):
    options = off(tmp_path, "nvme", "nvme", bf16=True)
    run = Trained(options, dtype=torch.bfloat16).run(0, 1)
    before = moved(run)
    run.run(2)
    read, written = (b - a for a, b in zip(before, moved(run), strict=True))
    elements = sum(bucket.plan.chunk for bucket in run.session.buckets)
    assert written == (12 + 2) * elements
    assert 12 * elements < read <= (12 + 4) * elements


def test_nothing_of_a_model_on_nvme_stays_in_memory(tmp_path):
    run = Trained(off(tmp_path, "nvme", "nvme")).run()
    report = zero_compile.memory_report(run.model, run.optimizer)
    elements = sum(bucket.plan.chunk for bucket in run.session.buckets)
    largest = max(bucket.plan.chunk for bucket in run.session.buckets)
    counts = 4 * len(list(run.model.parameters()))
    assert report.parameters == report.optimizer == 0
    assert (
        report.host <= 4 * largest + counts
    )  # on its way for the next forward, and numbers of steps
    assert report.nvme >= 12 * elements


def test_state_in_host_memory_is_counted_there(tmp_path):
    run = Trained(off(tmp_path, "cpu", "cpu")).run()
    report = zero_compile.memory_report(run.model, run.optimizer)
    elements = sum(bucket.plan.chunk for bucket in run.session.buckets)
    assert report.parameters == 0
    assert report.host >= 12 * elements


def test_the_ratio_leaves_a_share_on_the_device(tmp_path):
    options = {"bucket_bytes": 1 << 10, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}
    session = Trained(options).run(0).session
    sizes = dict.fromkeys(Tier, 0)
    for bucket in session.buckets:
        sizes[bucket.plan.residence.optimizer] += bucket.plan.chunk
    assert sizes[Tier.NVME] == 0
    assert 0.25 < sizes[Tier.HOST] / sum(sizes.values()) < 0.75


def test_max_in_cpu_keeps_that_many_elements_on_the_host(tmp_path):
    options = off(tmp_path, "nvme", bucket_bytes=1 << 10)
    options["offload_param"]["max_in_cpu"] = 1000
    session = Trained(options).run(0).session
    on_host = sum(b.plan.chunk for b in session.buckets if b.plan.residence.parameters is Tier.HOST)
    assert 0 < on_host <= 2000


def test_budgets_alone_decide_what_leaves_the_device(tmp_path):
    options = {
        "bucket_bytes": 1 << 10,
        "device_memory": 40_000,
        "host_memory": 8_000,
        "nvme_path": str(tmp_path),
    }
    run = Trained(options).run()
    homes = {bucket.plan.residence.optimizer for bucket in run.session.buckets}
    assert homes >= {Tier.HOST, Tier.NVME}
    report = zero_compile.memory_report(run.model, run.optimizer)
    assert report.parameters + report.optimizer <= 40_000
    assert report.nvme > 0
    assert_same(run, Trained(off(tmp_path)).run())


# ------------------------------------------------------------------------------ loss scaling


@pytest.mark.parametrize("place", ["cpu", "nvme"])
@pytest.mark.parametrize("fused", [False, True])
def test_a_loss_scaler_unscales_and_skips(tmp_path, place, fused):
    def train(options: dict[str, Any]) -> Trained:
        run = Trained(options, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(4):
            loss = run.forward(step) * (float("inf") if step == 1 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(run.optimizer)
            scaler.update()
            run.optimizer.zero_grad()
            run.losses.append(scaler.get_scale())
        return run

    ours, plain = train(off(tmp_path, "none", place)), train(off(tmp_path))
    assert ours.losses == [1024.0, 512.0, 512.0, 512.0]
    assert_same(ours, plain)


# ------------------------------------------------------------------------------ inside backward


def test_an_update_inside_backward_gives_the_same_bits(tmp_path):
    options = off(tmp_path, "nvme", "nvme")
    plain = Trained(options).run()
    assert_equal_bits(Trained({**options, "update_in_backward": True}).run(), plain)


def test_an_optimizer_that_is_given_updates_from_the_first_backward(tmp_path):
    options = off(tmp_path, "nvme", "nvme")
    given = Trained({**options, "update_in_backward": "the optimizer"})
    given.forward(0).backward()
    assert all(type(p.grad) is SpentGradient for p in given.model.parameters())
    given.optimizer.step()
    given.optimizer.zero_grad()
    plain = Trained(options).run()
    plain.losses.pop(0)
    assert_equal_bits(given.run(1, 2), plain)


def test_a_consumed_gradient_is_refused_to_whoever_would_use_it(tmp_path):
    options = off(tmp_path, "none", "cpu", update_in_backward=True)
    run = Trained(options).run(0)
    run.forward(1).backward()
    with pytest.raises(UnsupportedError, match="consumed by its update inside backward"):
        nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
    with pytest.raises(UnsupportedError, match="'update_in_backward' off"):
        run.forward(2).backward()


def test_two_forwards_before_a_backward_are_updated_at_the_step(tmp_path):
    def train(options: dict[str, Any]) -> Trained:
        run = Trained(options).run(0)
        for step in (1, 3):
            first, second = run.forward(step), run.forward(step + 1)
            first.backward()
            second.backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
        return run

    options = off(tmp_path, "none", "cpu")
    assert_equal_bits(train({**options, "update_in_backward": True}), train(options))


# ------------------------------------------------------------------------------ faults


def faulty(monkeypatch: pytest.MonkeyPatch, faults: Faults) -> None:
    monkeypatch.setattr(depots, "StripedSwap", functools.partial(depots.StripedSwap, faults=faults))


def swap_error(caught: BaseException) -> SwapError:
    """The failure, also where Dynamo passes it on because it happened while partitioning."""
    error = getattr(caught, "inner_exception", caught)
    assert isinstance(error, SwapError), caught
    return error


PAGE = 4096


@pytest.mark.slow
def test_a_full_disk_at_any_write_is_an_error_that_names_what_and_where(tmp_path, monkeypatch):
    plain = Trained(off(tmp_path, "nvme", "nvme")).run(0)
    failed = 0
    for pages in itertools.count():
        faulty(monkeypatch, Faults(enospc_after=pages * PAGE))
        try:
            assert_equal_bits(Trained(off(tmp_path, "nvme", "nvme")).run(0), plain)
            break
        except Exception as caught:
            error = swap_error(caught)
            assert error.errno == errno.ENOSPC
            assert "bucket" in str(error)
            assert str(tmp_path) in str(error)
            failed += 1
    assert failed >= 5


def test_a_read_that_fails_is_an_error_that_names_what_and_where(tmp_path, monkeypatch):
    plain = Trained(off(tmp_path, "nvme", "nvme")).run(0, 1)
    failed = 0
    for number in (1, 4, 8, 12, 16, 20, 24, 1000):
        faulty(monkeypatch, Faults(eio_on=number))
        try:
            assert_equal_bits(Trained(off(tmp_path, "nvme", "nvme")).run(0, 1), plain)
        except Exception as caught:
            error = swap_error(caught)
            assert error.errno == errno.EIO
            assert "bucket" in str(error)
            assert str(tmp_path) in str(error)
            failed += 1
    assert failed == 7


@pytest.mark.parametrize(
    ("optimizer", "masters"), [("none", False), ("none", True), ("cpu", False), ("nvme", False)]
)
def test_bytes_that_change_on_nvme_are_an_error_each_time_and_never_a_number(
    tmp_path, optimizer, masters
):
    """All but the step that is told: whatever comes next is told the same, not something else."""
    options = off(tmp_path, "nvme", optimizer, bf16=masters)
    run = Trained(options, dtype=torch.bfloat16 if masters else torch.float32)
    run.run(0)
    loss = run.forward(1)
    loss.backward()
    swap = run.session.memory_tiers.swap
    swap.drain()
    names = list(swap._tensors)
    assert names
    for name in names:
        (part,) = swap.parts(name)
        flip(part.file.path, part.file.extent(name).offset)
    act = run.optimizer.step
    for _ in range(3):
        with pytest.raises(Exception, match="the data has changed on the disk") as caught:
            act()
        error = swap_error(caught.value)
        assert error.errno == errno.EBADMSG
        assert "bucket" in str(error)
        assert str(tmp_path) in str(error)
        act = functools.partial(run.forward, 1)


def test_after_a_request_that_failed_once_training_goes_on_or_is_told_again(tmp_path, monkeypatch):
    """What could not be read can be read again; what could not be written is lost."""
    recovered = failed = 0
    for number in range(10, 24):
        faulty(monkeypatch, Faults(eio_on=number))
        run = Trained(off(tmp_path, "nvme"))
        try:
            run.run(0)
        except Exception as caught:
            swap_error(caught)
            continue
        told = 0
        for step in range(1, 4):
            try:
                run.step(step)
            except SwapError:
                told += 1
                run.optimizer.zero_grad()
        assert max(run.losses) < 10
        assert len(run.losses) + told == 4
        failed += told > 0
        recovered += told == 1
    assert failed >= recovered >= 3


def test_delayed_and_reordered_transfers_change_nothing(tmp_path, monkeypatch):
    plain = Trained(off(tmp_path, "nvme", "nvme")).run()
    faulty(monkeypatch, Faults(delay_us=2000, reorder=True, short_every=3))
    assert_equal_bits(Trained(off(tmp_path, "nvme", "nvme")).run(), plain)
