"""Meshes and groups: shard within, replicate across; reductions put off by no_sync."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import ranks
import zero_compile
from training import Run, assert_same_training, mine, train
from zero_runtime.sharding.put_off import PutOffGradient


def _mse(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(x), y)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 33), nn.Tanh(), nn.Linear(33, 6))


def _batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(12, 6, generator=generator), torch.randn(12, 6, generator=generator))
        for _ in range(4)
    ]


def _on_mesh(shape: tuple[int, ...]) -> tuple[Run, Run, int, int]:
    model, make = _model(), partial(torch.optim.AdamW, lr=1e-2)
    plain = train(copy.deepcopy(model), _batches(), _mse, lambda m: make(m.parameters()), clip=0.1)
    step = torch.compile(model, backend="zero3", options={"mesh": init_device_mesh("cpu", shape)})
    sharded = train(model, _batches(), _mse, lambda m: make(m.parameters()), clip=0.1, step=step)
    held = zero_compile.memory_report(model).parameters
    return plain.bare(), sharded.bare(), held, sum(p.numel() for p in model.parameters()) * 4


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2,), (2, 1), (1, 2), (2, 2)])
def test_a_mesh_shards_over_its_last_dimension_and_replicates_over_the_first(
    shape: tuple[int, ...],
) -> None:
    world = shape[0] * (shape[1] if len(shape) > 1 else 1)
    for plain, sharded, held, whole in ranks.run(world, _on_mesh, shape):
        assert_same_training(plain, sharded)
        assert whole / shape[-1] <= held < whole / shape[-1] + 1500


def _two_groups() -> tuple[float, float]:
    """Two models in one process, each on a group of its own: all ranks, and this rank alone."""
    alone = [dist.new_group([r]) for r in range(dist.get_world_size())][dist.get_rank()]
    shared, own = _model(), _model()
    one = torch.compile(shared, backend="zero3", options={"group": dist.group.WORLD})
    other = torch.compile(own, backend="zero3", options={"group": alone})
    x, y = mine(_batches()[0])
    (_mse(one, x, y) + _mse(other, x, y)).backward()
    norms = [nn.utils.clip_grad_norm_(m.parameters(), 1.0) for m in (shared, own)]
    return float(norms[0]), float(norms[1])


def test_two_models_on_different_groups() -> None:
    whole = _model()
    _mse(whole, *_batches()[0]).backward()
    averaged = float(nn.utils.clip_grad_norm_(whole.parameters(), 1.0))
    (first, own_first), (second, own_second) = ranks.run(2, _two_groups)
    assert first == pytest.approx(second, rel=1e-5) == pytest.approx(averaged, rel=1e-5)
    assert own_first != pytest.approx(own_second, rel=1e-3)


def _accumulated(last_outside: bool) -> tuple[Run, Run, int]:
    model = _model()
    reference = copy.deepcopy(model)
    compiled = torch.compile(model, backend="zero3")
    with torch.no_grad():
        compiled(torch.ones(1, 6))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (reference, model)]
    sent = 0
    for micro in (_batches()[:3], _batches()[1:]):
        for x, y in micro:
            _mse(reference, x, y).backward()
        with zero_compile.no_sync(model):
            for x, y in micro[:-1] if last_outside else micro:
                _mse(compiled, *mine((x, y))).backward()
                sent += sum(not isinstance(p.grad, PutOffGradient) for p in model.parameters())
        if last_outside:
            _mse(compiled, *mine(micro[-1])).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    named = [{n: p.detach() for n, p in m.named_parameters()} for m in (reference, model)]
    return Run([0.0], [], named[0], None, None), Run([0.0], [], named[1], None, None), sent


@pytest.mark.parametrize("last_outside", [True, False])
def test_no_sync_puts_reductions_off_and_loses_nothing(last_outside: bool) -> None:
    for plain, sharded, sent in ranks.run(2, _accumulated, last_outside):
        assert_same_training(plain, sharded)
        assert sent == 0


def test_no_sync_before_the_first_forward_says_what_to_do() -> None:
    with (
        pytest.raises(RuntimeError, match="run one forward first"),
        zero_compile.no_sync(_model()),
    ):
        pass


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mesh": "cpu"}, "'mesh': expected a DeviceMesh"),
        ({"group": 3}, "'group': expected a ProcessGroup"),
    ],
)
def test_a_wrong_group_or_mesh_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message):
        torch.compile(_model(), backend="zero3", options=options)(torch.ones(1, 6))
