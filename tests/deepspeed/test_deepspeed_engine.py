"""initialize and the engine train as a plain loop does."""

import copy
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import IterableDataset

import ranks
import zero_compile
from training import mean_over_ranks, relative
from zero_compile.api.report import sessions
from zero_runtime.errors import OptionError, UnsupportedError, ZeroError
from zero_runtime.optim.lion import Lion

MICRO, ACCUMULATION, STEPS = 3, 2, 5

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": MICRO,
    "gradient_accumulation_steps": ACCUMULATION,
    "gradient_clipping": 0.2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.02, "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_type": "linear"}},
    "zero_optimization": {"stage": 3},
}


@pytest.fixture(autouse=True)
def _compiled_afresh() -> None:
    """Dynamo gives up on code that it has compiled for eight models."""
    torch._dynamo.reset()


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 5))


def samples(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    draw = lambda size: torch.randn(size, generator=generator)  # noqa: E731
    return [(draw(7), draw(5)) for _ in range(count)]


def loss_of(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(x.to(dtype_of(model))).float(), y)


def dtype_of(model: Any) -> torch.dtype:
    dtype: torch.dtype = next(iter(model.parameters())).dtype
    return dtype


def config(**changes: Any) -> dict[str, Any]:
    return {**CONFIG, **changes}


class Trained(NamedTuple):
    losses: list[float]
    norms: list[float | None]
    rates: list[float]
    weights: list[torch.Tensor]


def _backward(engine: Any, loss: torch.Tensor) -> None:
    engine.backward(loss)


def with_engine(
    settings: dict[str, Any], model: nn.Module | None = None, backward: Any = _backward
) -> Trained:
    """All samples once, in the loader's order; losses and norms are averages of optimizer steps."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    data = samples(world * MICRO * ACCUMULATION * STEPS)
    model = model or net()
    engine, _, loader, _ = zero_compile.initialize(
        model=model, training_data=data, config=copy.deepcopy(settings)
    )
    losses, norms, rates, step = [], [], [], 0.0
    for x, y in loader:
        rates.append(engine.get_lr()[0])
        loss = loss_of(engine, x, y)
        step += mean_over_ranks(loss) / ACCUMULATION
        backward(engine, loss)
        boundary = engine.is_gradient_accumulation_boundary()
        engine.step()
        if boundary:
            losses.append(step)
            norms.append(engine.get_global_grad_norm())
            step = 0.0
    weights = [p.detach().float().clone() for p in model.parameters()]
    assert engine.global_steps == STEPS
    return Trained(losses, norms, rates[::ACCUMULATION], weights)


def plainly(world: int, clip: float, make: Any = torch.optim.AdamW) -> Trained:
    """The same in plain PyTorch: whole model, one process, the ranks' batches one after the other."""
    data = samples(world * MICRO * ACCUMULATION * STEPS)
    model = net()
    optimizer = make(model.parameters(), lr=0.02, weight_decay=0.1)
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0)).tolist()
    parts = [order[rank::world] for rank in range(world)]  # as DistributedSampler deals them out
    losses, norms, rates = [], [], []
    for step in range(STEPS):
        rate = 0.02 * min(1.0, max(0, step - 1) / 4)
        optimizer.param_groups[0]["lr"] = rate
        total = torch.zeros(())
        for micro in range(ACCUMULATION):
            first = (step * ACCUMULATION + micro) * MICRO
            for part in parts:
                x, y = (
                    torch.stack(t)
                    for t in zip(*(data[i] for i in part[first : first + MICRO]), strict=True)
                )
                total = total + loss_of(model, x, y) / (ACCUMULATION * world)
        total.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total.detach()))
        rates.append(rate)
    return Trained(losses, norms, rates, [p.detach() for p in model.parameters()])


def assert_same(found: Trained, expected: Trained) -> None:
    assert relative(expected.losses, found.losses) < 1e-5
    assert relative(expected.norms, found.norms) < 1e-4  # type: ignore[arg-type]
    assert found.rates == pytest.approx(expected.rates)
    for mine, theirs in zip(found.weights, expected.weights, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=2e-5)


# ------------------------------------------------------------------------------ one rank


def test_one_rank_trains_as_a_plain_loop() -> None:
    expected = plainly(1, 0.2)
    assert max(expected.norms) > 0.2, "the norm is clipped"
    assert_same(with_engine(CONFIG), expected)


def test_without_clipping_the_norm_is_known_all_the_same() -> None:
    assert_same(with_engine(config(gradient_clipping=0.0)), plainly(1, math.inf))


def _by_engine(engine: Any, x: torch.Tensor, y: torch.Tensor, steps: int) -> None:
    for _ in range(steps):
        engine.backward(loss_of(engine, x, y))
        engine.step()


def test_counters_and_questions() -> None:
    settings = config(steps_per_print=1)
    engine, optimizer, loader, schedule = zero_compile.initialize(model=net(), config=settings)
    assert loader is None
    x, y = torch.randn(MICRO, 7), torch.randn(MICRO, 5)
    seen = []
    for _ in range(4):
        seen.append((engine.is_gradient_accumulation_boundary(), engine.global_steps))
        engine.backward(loss_of(engine, x, y))
        engine.step()
    assert seen == [(False, 0), (True, 0), (False, 1), (True, 1)]
    assert (engine.global_steps, engine.micro_steps, engine.skipped_steps) == (2, 4, 0)
    assert engine.global_samples == 2 * engine.train_batch_size() == 12
    assert engine.train_micro_batch_size_per_gpu() == MICRO
    assert engine.gradient_accumulation_steps() == 2
    assert engine.zero_optimization_stage() == 3
    assert engine.gradient_clipping() == 0.2
    assert (engine.fp16_enabled(), engine.bfloat16_enabled(), engine.loss_scale) == (
        False,
        False,
        1,
    )
    assert engine.get_lr() == schedule.get_last_lr() == [optimizer.param_groups[0]["lr"]]
    assert engine.get_mom() == [(0.9, 0.999)]
    assert engine.was_step_applied()


def test_the_boundary_can_be_set() -> None:
    engine, *_ = zero_compile.initialize(model=net(), config=CONFIG)
    engine.set_gradient_accumulation_boundary(True)
    _by_engine(engine, torch.randn(MICRO, 7), torch.randn(MICRO, 5), 3)
    assert engine.global_steps == 3


def test_rank_0_prints_as_often_as_asked(capsys: pytest.CaptureFixture[str]) -> None:
    settings = config(gradient_accumulation_steps=1, steps_per_print=2)
    engine, *_ = zero_compile.initialize(model=net(), config=settings)
    _by_engine(engine, torch.randn(MICRO, 7), torch.randn(MICRO, 5), 4)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in lines] == ["step=2", "step=4"]


class Model(nn.Linear):
    """Has what an engine does not."""

    def greet(self) -> str:
        return f"{self.in_features} in"


def test_the_engine_stands_for_the_model(tmp_path: Path) -> None:
    model = nn.Sequential(Model(7, 5))
    model.greet = model[0].greet  # type: ignore[assignment]
    engine, *_ = zero_compile.initialize(model=model, config=CONFIG)
    assert engine.greet() == "7 in"
    with pytest.raises(AttributeError, match="wave"):
        engine.wave()
    assert engine.module is model
    assert list(engine.parameters()) == list(model.parameters())
    assert engine.eval() is engine
    assert not model.training
    assert engine.train().training
    _by_engine(engine, torch.randn(MICRO, 7), torch.randn(MICRO, 5), 1)
    assert engine.state_dict()["0.weight"].shape == (5, 7)
    engine.zero_grad()
    assert model[0].weight.grad is None
    with pytest.warns(UserWarning, match="compiled already"):
        engine.compile(backend="inductor")
    assert engine.save_16bit_model(tmp_path / "out")
    saved = torch.load(tmp_path / "out" / "pytorch_model.bin")
    torch.testing.assert_close(saved["0.weight"], model[0].weight.detach())
    engine.load_state_dict({n: torch.full_like(v, 0.5) for n, v in saved.items()})
    assert float(model[0].weight.detach().min()) == 0.5


@pytest.mark.parametrize("call", ["save_checkpoint", "load_checkpoint"])
def test_checkpoints_say_what_to_use(call: str) -> None:
    engine, *_ = zero_compile.initialize(model=net(), config=CONFIG)
    with pytest.raises(UnsupportedError, match=rf"{call} .*engine\.module\.state_dict\(\)"):
        getattr(engine, call)("folder")


def test_an_engine_without_optimizer_infers_and_says_what_it_lacks() -> None:
    settings = config(optimizer={}, scheduler={}, gradient_accumulation_steps=1)
    engine, optimizer, _, schedule = zero_compile.initialize(model=net(), config=settings)
    assert (optimizer, schedule) == (None, None)
    with torch.no_grad():
        assert engine(torch.ones(1, 7)).shape == (1, 5)
    with pytest.raises(ZeroError, match="no optimizer: give initialize an optimizer"):
        engine.step()


def test_what_is_passed_goes_before_the_config() -> None:
    model = net()
    mine = torch.optim.SGD(model.parameters(), lr=0.5)
    schedule = LambdaLR(mine, lambda step: 0.5**step)
    engine, optimizer, _, returned = zero_compile.initialize(
        model=model, optimizer=mine, lr_scheduler=schedule, config=CONFIG
    )
    assert optimizer is mine
    assert returned is schedule
    _by_engine(engine, torch.randn(MICRO, 7), torch.randn(MICRO, 5), 2)
    assert engine.get_lr() == [0.25]


def test_functions_make_optimizer_and_schedule() -> None:
    model = net()
    _, optimizer, _, schedule = zero_compile.initialize(
        model=model,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5),
        lr_scheduler=lambda made: LambdaLR(made, lambda step: 0.1),
        model_parameters=[model[0].weight],
        config=CONFIG,
    )
    assert optimizer.param_groups[0]["params"][0] is model[0].weight
    assert schedule.get_last_lr() == [0.05]


def test_parameter_groups_keep_their_settings() -> None:
    model = net()
    groups = [
        {"params": [model[0].weight], "lr": 0.3},
        {"params": [model[2].weight], "weight_decay": 0.5},
    ]
    settings = config(scheduler={})
    _, optimizer, _, _ = zero_compile.initialize(
        model=model, model_parameters=groups, config=settings
    )
    assert [g["lr"] for g in optimizer.param_groups] == [0.3, 0.02]
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.1, 0.5]


def test_the_config_may_come_three_ways(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(CONFIG))
    ways: tuple[dict[str, Any], ...] = (
        {"config": str(path)},
        {"config_params": CONFIG},
        {"args": SimpleNamespace(deepspeed_config=str(path))},
    )
    for way in ways:
        engine, *_ = zero_compile.initialize(model=net(), **way)
        assert engine.train_batch_size() == MICRO * ACCUMULATION
    with pytest.raises(OptionError, match=r"config and args\.deepspeed_config are given"):
        zero_compile.initialize(model=net(), config=CONFIG, **ways[2])
    with pytest.raises(OptionError, match="none is given"):
        zero_compile.initialize(model=net())


def test_leaf_modules_are_gathered_whole_from_the_first_forward_on() -> None:
    leaf = {"name_suffixes": ["2"]}
    settings = config(zero_optimization={"stage": 3, "leaf_module": leaf})
    model = net()
    engine, *_ = zero_compile.initialize(model=model, config=settings)
    (session,) = sessions(model)
    assert list(session.leaves) == [model[2]]
    _by_engine(engine, torch.randn(MICRO, 7), torch.randn(MICRO, 5), 2)
    assert engine.was_step_applied()


class Stream(IterableDataset[int]):
    """Data without a length."""

    def __iter__(self) -> Iterator[int]:
        yield 1


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"model": None}, OptionError, "give model="),
        ({"config": config(zero_optimization={})}, UnsupportedError, "stage is 0"),
        ({"optimizer": 3.0}, TypeError, "not callable"),
        ({"optimizer": lambda parameters: None}, OptionError, r"torch\.optim\.Optimizer, got None"),
        ({"optimizer": torch.optim.Adafactor}, UnsupportedError, "not known to be elementwise"),
        ({"mesh_param": (2, 2)}, UnsupportedError, "sequence parallelism"),
        (
            {"mpu": SimpleNamespace(get_model_parallel_world_size=lambda: 2)},
            UnsupportedError,
            "over 2 ranks",
        ),
        ({"training_data": Stream()}, UnsupportedError, "iterable only"),
    ],
)
def test_arguments_that_cannot_be_are_refused(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        zero_compile.initialize(**{"model": net(), "config": CONFIG, **arguments})


def test_notices_come_as_one_warning() -> None:
    zero = {"stage": 3, "contiguous_gradients": True, "sub_group_size": 1e9}
    with pytest.warns(UserWarning, match="have no effect") as caught:
        zero_compile.initialize(model=net(), config=config(zero_optimization=zero))
    (warning,) = (w for w in caught if "have no effect" in str(w.message))
    assert len(str(warning.message).splitlines()) == 3
    assert warning.filename == __file__


# ------------------------------------------------------------------------------ precision


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_a_model_is_cast_and_trains_on_masters(name: str, dtype: torch.dtype) -> None:
    model = net()
    found = with_engine(config(**{name: {"enabled": True}}), model)
    assert {p.dtype for p in model.parameters()} == {dtype}
    expected = plainly(1, 0.2)
    assert found.losses == pytest.approx(expected.losses, rel=2e-2)
    assert found.norms == pytest.approx(expected.norms, rel=3e-2)


def test_auto_precision_is_the_models() -> None:
    settings = config(bf16={"enabled": "auto"}, fp16={"enabled": "auto"})
    engine, *_ = zero_compile.initialize(model=net().bfloat16(), config=settings)
    assert (engine.bfloat16_enabled(), engine.fp16_enabled()) == (True, False)
    engine, *_ = zero_compile.initialize(model=net(), config=settings)
    assert (engine.bfloat16_enabled(), engine.fp16_enabled()) == (False, False)


class Dtypes(nn.Module):
    """Says in what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 5)

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.linear(x), index


@pytest.mark.parametrize(
    ("section", "dtype"),
    [
        ({"fp16": {"enabled": True, "auto_cast": True}}, torch.float16),
        ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, torch.bfloat16),
    ],
)
def test_inputs_are_cast_where_the_config_says(section: Any, dtype: torch.dtype) -> None:
    engine, *_ = zero_compile.initialize(model=Dtypes(), config=config(**section))
    out, index = engine(torch.ones(2, 7), index=torch.ones(2, dtype=torch.int64))
    assert out.dtype is dtype
    assert index.dtype is torch.int64


def test_bfloat16_may_skip_steps_that_are_not_finite() -> None:
    bf16 = {"enabled": True, "check_grad_overflow": True}
    settings = config(bf16=bf16, gradient_accumulation_steps=1)
    engine, *_ = zero_compile.initialize(model=net(), config=settings)
    x, y = torch.randn(MICRO, 7), torch.randn(MICRO, 5)
    _by_engine(engine, x, y, 1)
    before = engine.module[0].weight.detach().clone()
    engine.backward(loss_of(engine, x, y) * math.inf)
    engine.step()
    assert not engine.was_step_applied()
    assert (engine.global_steps, engine.skipped_steps) == (2, 1)
    assert torch.equal(engine.module[0].weight.detach(), before)
    assert engine.lr_scheduler.last_batch_iteration == 0, "a skipped step leaves the schedule alone"


# ------------------------------------------------------------------------------ two ranks


def _both(settings: dict[str, Any], clip: float) -> tuple[Trained, Trained]:
    """Ranks begin with different weights: rank 0's win."""
    world = dist.get_world_size()
    return with_engine(settings, net(seed=dist.get_rank())), plainly(world, clip)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_two_ranks_train_as_one_whole_model(stage: int) -> None:
    settings = config(zero_optimization={"stage": stage})
    for found, expected in ranks.run(2, _both, settings, 0.2):
        assert max(expected.norms) > 0.2, "the norm is clipped"
        assert_same(found, expected)


class Alone:
    """An mpu whose data-parallel groups have one rank each."""

    def __init__(self) -> None:
        groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
        self._group = groups[dist.get_rank()]

    def get_data_parallel_group(self) -> Any:
        return self._group

    def get_data_parallel_world_size(self) -> int:
        return 1

    def get_data_parallel_rank(self) -> int:
        return 0


def _in_groups() -> tuple[int, int, float]:
    engine, _, loader, _ = zero_compile.initialize(
        model=net(dist.get_rank()), config=CONFIG, training_data=samples(6), mpu=Alone()
    )
    for x, y in loader:
        engine.backward(loss_of(engine, x, y))
        engine.step()
    (session,) = sessions(engine.module)
    return session.group.world_size, len(loader), float(engine.module[0].weight.detach().sum())


def test_the_groups_of_an_mpu_train_apart() -> None:
    first, second = ranks.run(2, _in_groups)
    assert first[:2] == second[:2] == (1, 2)
    assert first[2] != second[2]


class Overflow(NamedTuple):
    scales: list[float]
    skipped: list[bool]
    kept: bool
    rates: list[float]
    losses: list[float]


def _overflow() -> Overflow:
    fp16 = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1, "loss_scale_window": 3}
    settings = config(fp16=fp16, gradient_accumulation_steps=1)
    engine, *_ = zero_compile.initialize(model=net(), config=settings)
    x, y = torch.randn(MICRO, 7), torch.randn(MICRO, 5)
    scales, skipped, kept, rates, losses = [], [], False, [], []
    for number in range(8):
        bad = number == 2 and dist.get_rank() == 1
        before = engine.module[0].weight.detach().clone()
        loss = loss_of(engine, x, y)
        engine.backward(loss * (1e8 if bad else 1.0))
        engine.step()
        if number == 2:
            kept = torch.equal(before, engine.module[0].weight.detach())
        scales.append(engine.loss_scale)
        skipped.append(not engine.was_step_applied())
        rates.append(engine.get_lr()[0])
        losses.append(mean_over_ranks(loss))
    return Overflow(scales, skipped, kept, rates, losses)


def test_an_overflow_on_one_rank_skips_the_step_on_both() -> None:
    first, second = ranks.run(2, _overflow)
    assert first == second
    assert first.skipped == [False, False, True] + [False] * 5
    assert first.kept
    assert first.scales == [256, 256, 128, 128, 128, 256, 256, 256]
    assert first.rates[1] == first.rates[2] < first.rates[3], "the schedule waits too"
    assert first.losses[-1] < first.losses[0]


def _put_off(stage: int) -> tuple[list[float], list[float]]:
    """Accumulation by hand: reductions put off in all but the last backward of a step."""
    runs = []
    for lazy in (False, True):
        torch._dynamo.reset()
        engine, *_ = zero_compile.initialize(
            model=net(), config=config(zero_optimization={"stage": stage})
        )
        losses = []
        for x, y in zip(torch.randn(8, MICRO, 7), torch.randn(8, MICRO, 5), strict=True):
            x, y = x + dist.get_rank(), y
            boundary = engine.is_gradient_accumulation_boundary()
            if lazy and not boundary:
                with engine.no_sync():
                    engine.backward(loss_of(engine, x, y))
            else:
                engine.backward(loss_of(engine, x, y))
            engine.step()
            losses.append(engine.get_global_grad_norm() or 0.0)
        runs.append(losses)
        torch.manual_seed(0)
    return runs[0], runs[1]


@pytest.mark.parametrize("stage", [1, 3])
def test_no_sync_changes_no_value(stage: int) -> None:
    for eager, lazy in ranks.run(2, _put_off, stage):
        assert relative(eager[1:], lazy[1:]) < 1e-4


def _lion() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    settings = config(
        optimizer={"type": "Lion", "params": {"lr": 0.02, "weight_decay": 0.1}},
    )
    return with_engine(settings).weights, plainly(dist.get_world_size(), 0.2, Lion).weights


def test_lion_steps_on_shards_as_on_whole_parameters() -> None:
    for found, expected in ranks.run(2, _lion):
        for mine, theirs in zip(found, expected, strict=True):
            # the sign of a momentum that rounds to either side of 0 is a step of 0.04
            assert (mine - theirs).abs().gt(1e-4).float().mean() < 0.01


def _group_made() -> tuple[bool, int, int]:
    """In a process of its own: the group comes from torchrun's environment."""
    engine, _, loader, _ = zero_compile.initialize(
        model=net(), config=CONFIG, training_data=samples(7)
    )
    return dist.is_initialized(), engine.world_size, len(loader)


def test_the_process_group_is_made_from_torchruns_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }.items():
        monkeypatch.setenv(name, value)
    try:
        assert _group_made() == (True, 1, 3)
    finally:
        dist.destroy_process_group()


def test_one_process_needs_no_group() -> None:
    assert "RANK" not in os.environ
    assert _group_made() == (False, 1, 3)
