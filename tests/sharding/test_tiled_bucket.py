"""Training with weights in tiles: as without, in less memory, and eager code does not notice."""

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import ranks
import zero_compile
from tiles import Gpt, Mlp, adamw, distance, loss_of, of_tokens, of_vectors
from training import Run, against_unsharded, assert_same_training, mine, whole_parameters
from zero_compile import safe_get_full_grad
from zero_runtime.ir.plan import Plan
from zero_runtime.sharding.sharded_gradient import ShardedGradient

MODELS: dict[str, Any] = {
    "mlp": (Mlp, of_vectors, distance),
    "gpt": (Gpt, of_tokens, loss_of),
}


def _train(which: str, options: dict[str, Any]) -> tuple[Run, Run, list[Plan], Any]:
    make, batches, loss = MODELS[which]
    torch.manual_seed(0)
    plain, tiled = against_unsharded(make(), batches(), loss, adamw, clip=0.5, options=options)
    assert tiled.model is not None
    report = zero_compile.memory_report(tiled.model)
    return plain.bare(), tiled.bare(), zero_compile.plans(tiled.model), report


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(("which", "over"), [("mlp", "rows"), ("mlp", "columns"), ("gpt", "rows")])
def test_it_trains_as_without_tiles_and_holds_what_was_planned(
    which: str, over: str, world_size: int
) -> None:
    options = {"tile_bytes": 4096, "tile_over": over, "schedule": "on_demand"}
    for plain, tiled, plans, report in ranks.run(world_size, _train, which, options):
        assert_same_training(plain, tiled, tolerance=1e-6)
        names = {slot.name for plan in plans for b in plan.buckets for slot in b.slots}
        assert sum("[" in name for name in names) >= 8
        assert report.gathered_peak == report.gathered_planned
        if world_size > 1:  # one tile, and the bias of the wide linear
            assert 4096 <= report.gathered_peak <= 4096 + 1024


@pytest.mark.parametrize("built", [False, True], ids=["whole", "partitioned"])
def test_at_most_two_tiles_of_a_weight_are_there_at_once(
    built: bool, fake_group: Callable[[int], None]
) -> None:
    fake_group(2)
    with zero_compile.Init(enabled=built):
        model = nn.Linear(64, 256, bias=False)
    compiled = torch.compile(model, backend="zero3", options={"tile_bytes": 4096})
    compiled(torch.randn(4, 64, requires_grad=True)).sum().backward()
    report = zero_compile.memory_report(model)
    assert report.gathered_peak == report.gathered_planned == 2 * 4096


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["cpu", "nvme"])
@pytest.mark.parametrize("in_backward", [False, True])
def test_state_off_the_device_is_moved_by_the_tile(
    tier: str, in_backward: bool, tmp_path: Path
) -> None:
    section = {"device": tier, **({"nvme_path": str(tmp_path)} if tier == "nvme" else {})}
    options = {"tile_bytes": 4096, "offload_param": section, "offload_optimizer": section}
    for plain, tiled, plans, _ in ranks.run(2, _offloaded, options, in_backward):
        assert_same_training(plain, tiled, tolerance=1e-6)
        fetched = [s for plan in plans for s in plan.steps if s.kind == "fetch_start"]
        assert len(fetched) > 16
        assert max(step.bytes for step in fetched) <= 4096


def _offloaded(options: dict[str, Any], in_backward: bool) -> tuple[Run, Run, list[Plan], Any]:
    torch.manual_seed(0)
    options = {**options, "update_in_backward": in_backward}
    plain, tiled = against_unsharded(Gpt(), of_tokens(), loss_of, adamw, options=options)
    assert tiled.model is not None
    return plain.bare(), tiled.bare(), zero_compile.plans(tiled.model), None


# ------------------------------------------------------------------------------ eager code


def _tiled(model: nn.Module, **options: Any) -> Any:
    return torch.compile(model, backend="zero3", options={"tile_bytes": 4096, **options})


def _access(over: str) -> dict[str, bool]:
    """What eager code does with a tiled parameter and its gradient, against an equal plain model."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model, (x, y) = Mlp(), of_vectors(1)[0]
    twin, given = copy.deepcopy(model), list(model.state_dict())
    compiled = _tiled(model, tile_over=over)
    distance(compiled, *mine((x, y))).backward()
    distance(twin, x, y).backward()
    p, q = model.up.weight, twin.up.weight
    facts = {
        "tiled": "tiles" in vars(type(p).session.entry(p).place.bucket),
        "metadata": (p.shape, p.dtype, p.stride()) == (q.shape, q.dtype, q.stride()),
        "printed": "up.weight" in repr(p),
        "whole": torch.equal(p.detach(), q.detach()),
        "names": list(model.state_dict()) == given,
        "state_dict": all(
            torch.equal(a, b)
            for a, b in zip(model.state_dict().values(), twin.state_dict().values(), strict=True)
        ),
        "copied": torch.equal(copy.deepcopy(model).up.weight, q),
        "gradient": torch.allclose(p.grad.full_tensor(), q.grad, atol=1e-6),
        "gradient by name": torch.allclose(safe_get_full_grad(p), q.grad, atol=1e-6),
        "gradient's norm": torch.allclose(p.grad.norm(), q.grad.norm()),
        "gradient's least": torch.allclose(p.grad.min(), q.grad.min(), atol=1e-6),
        "sharded": isinstance(p.grad, ShardedGradient),
    }
    with torch.no_grad():
        p[3, 5] = 7.0
        q[3, 5] = 7.0
        p.mul_(2)
        q.mul_(2)
    facts["written"] = torch.equal(p.detach(), q.detach())
    model.load_state_dict(twin.state_dict())
    facts["loaded"] = torch.equal(p.detach(), q.detach())
    facts["used"] = torch.allclose(compiled(x), twin(x), atol=1e-5)
    (model.up.weight**2).sum().backward()
    (twin.up.weight**2).sum().backward()
    facts["gradient of eager code"] = torch.allclose(p.grad.full_tensor(), q.grad, atol=1e-5)
    return facts


@pytest.mark.parametrize("over", ["rows", "columns"])
def test_eager_code_meets_an_ordinary_parameter(over: str) -> None:
    for facts in ranks.run(2, _access, over):
        assert all(facts.values()), [name for name, right in facts.items() if not right]


def _put_off(to_the_step: bool) -> float:
    """Two backwards before a step, the first without reductions, or both."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model, batches = Gpt(), of_tokens(2)
    twin = copy.deepcopy(model)
    compiled = _tiled(model)
    with torch.no_grad():  # the first graph, which decides on the tiles
        loss_of(compiled, *mine(batches[0]))
    with zero_compile.no_sync(model):
        for batch in batches[: 2 if to_the_step else 1]:
            loss_of(compiled, *mine(batch)).backward()
    if not to_the_step:
        loss_of(compiled, *mine(batches[1])).backward()
    for batch in batches:
        loss_of(twin, *batch).backward()
    for one in (model, twin):
        torch.optim.SGD(one.parameters(), lr=1.0).step()
    found, wanted = model.embedding.weight.detach(), twin.embedding.weight.detach()
    return float((found - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("to_the_step", [False, True])
def test_reductions_of_tiles_can_be_put_off(to_the_step: bool) -> None:
    assert max(ranks.run(2, _put_off, to_the_step)) < 1e-6


class TwoWays(nn.Module):
    """A linear, and in some steps a penalty that needs its whole weight."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(32, 256)

    def forward(self, x: torch.Tensor, penalty: bool) -> torch.Tensor:
        loss = self.wide(x).square().mean()
        return loss + self.wide.weight.pow(3).sum() if penalty else loss


def _another_graph() -> list[float]:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model, (x, _) = TwoWays(), of_vectors(1)[0]
    twin = copy.deepcopy(model)
    compiled = _tiled(model)
    worst = []
    for penalty in (False, True):
        for one, step, rows in ((model, compiled, mine((x,))[0]), (twin, twin, x)):
            one.zero_grad()
            step(rows, penalty).backward()
        found, wanted = model.wide.weight.grad, twin.wide.weight.grad
        assert found is not None
        assert wanted is not None
        worst.append(float((found.full_tensor() - wanted).abs().max()))
    return worst


def test_a_later_graph_that_needs_the_whole_weight_gets_it() -> None:
    assert max(max(worst) for worst in ranks.run(2, _another_graph)) < 1e-6


def _narrow() -> tuple[list[float], list[float]]:
    """A bfloat16 model with float32 masters, tiled and not."""
    warnings.simplefilter("ignore")
    losses = []
    for options in ({"tile_bytes": 2048}, {}):
        torch.manual_seed(0)
        model = Gpt().bfloat16()
        compiled = torch.compile(model, backend="zero3", options={"bf16": True, **options})
        optimizer, found = adamw(model), []
        for batch in of_tokens():
            loss = loss_of(compiled, *mine(batch))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(float(loss.detach()))
        losses.append(found)
    return losses[0], losses[1]


def test_masters_of_tiled_weights_are_stepped_on() -> None:
    for tiled, whole in ranks.run(2, _narrow):
        assert all(abs(a - b) < 0.01 * b for a, b in zip(tiled, whole, strict=True))


def _whole_numbers() -> bool:
    """Sums that are exact in any order, so that what is left is which elements are multiplied."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = Mlp()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randint(-3, 4, p.shape))
    x = torch.randint(-3, 4, (12, 32)).float()
    expected = F.linear(x, model.up.weight, model.up.bias)
    compiled = _tiled(model.up)
    with torch.no_grad():
        return torch.equal(compiled(x), expected.detach())


def test_forward_is_the_same_to_the_bit_where_sums_are_exact() -> None:
    assert all(ranks.run(2, _whole_numbers))


def _resumed() -> bool:
    """A model, and an optimizer's state, saved and loaded into others."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    batches = of_vectors(4)

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, chosen: Any) -> None:
        compiled = _tiled(model)
        for batch in chosen:
            distance(compiled, *mine(batch)).backward()
            optimizer.step()
            optimizer.zero_grad()

    first = Mlp()
    optimizer = adamw(first)
    steps(first, optimizer, batches[:2])
    second = Mlp()
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    other = adamw(second)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    steps(first, optimizer, batches[2:])
    steps(second, other, batches[2:])
    ours, theirs = whole_parameters(first), whole_parameters(second)
    dist.barrier()
    return all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_training_goes_on_from_saved_state() -> None:
    assert all(ranks.run(2, _resumed))
