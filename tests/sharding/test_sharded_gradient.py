"""``p.grad`` after backward: partitioned, of logical shape, and at home in stock code."""

import copy
import io
import math
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import ranks
from training import mean_over_ranks, mine
from zero_runtime.errors import UnsupportedError
from zero_runtime.sharding.sharded_gradient import ShardedGradient


def _pair(loss_scale: float = 1.0, options: Any = None) -> tuple[nn.Module, nn.Module]:
    """(partitioned, unsharded) after one backward each, on the same global batch."""
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 5))
    model = copy.deepcopy(reference)
    x = torch.randn(12, 7)
    (local,) = mine((x,))
    compiled = torch.compile(model, backend="zero3", options=options)
    (loss_scale * compiled(local).square().mean()).backward()
    (loss_scale * reference(x).square().mean()).backward()
    return model, reference


def _readings(gradient: torch.Tensor) -> dict[str, float]:
    """What a script may read off a gradient."""
    return {
        "norm": float(gradient.norm()),
        "norm1": float(gradient.norm(1)),
        "norm_inf": float(gradient.norm(math.inf)),
        "vector_norm": float(torch.linalg.vector_norm(gradient, 3)),
        "sum": float(gradient.sum()),
        "mean": float(gradient.mean()),
        "max": float(gradient.max()),
        "abs_max": float(gradient.abs().max()),
        "min": float(gradient.min()),
        "squares": float((gradient * gradient).sum()),
        "scaled": float((2 * gradient + 1).sum()),
        "any": float((gradient > 0).any()),
        "all_finite": float(torch.isfinite(gradient).all()),
        "nan": float(torch.isnan(gradient).any()),
    }


def _all_readings() -> list[tuple[dict[str, float], dict[str, float]]]:
    model, reference = _pair()
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return [(_readings(p.grad), _readings(q.grad)) for p, q in pairs]  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_reductions_are_completed_over_the_ranks(size: int) -> None:
    for readings in ranks.run(size, _all_readings):
        for found, expected in readings:
            assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)


def _clip_by_norm(parameters: Any) -> float:
    return float(nn.utils.clip_grad_norm_(parameters, 0.01))


def _clip_inf(parameters: Any) -> float:
    return float(nn.utils.clip_grad_norm_(parameters, 0.01, norm_type=math.inf))


def _clip_by_value(parameters: Any) -> None:
    nn.utils.clip_grad_value_(parameters, 1e-3)


def _by_hand(parameters: Any) -> None:
    for p in parameters:
        p.grad.mul_(0.5).add_(p.detach(), alpha=0.1)
        p.grad /= 3
        p.grad[p.grad > 0.01] = 0.0
        p.grad.masked_fill_(p.grad < -0.01, 0.5)
        p.grad = p.grad.clone() + 1e-3


def _edited(edit: Callable[[Any], Any]) -> tuple[Any, Any, float]:
    model, reference = _pair()
    returned = edit(list(model.parameters())), edit(list(reference.parameters()))
    gaps = [
        float((p.grad.full_tensor() - q.grad).abs().max())  # type: ignore[union-attr]
        for p, q in zip(model.parameters(), reference.parameters(), strict=True)
    ]
    return *returned, max(gaps)


@pytest.mark.parametrize("edit", [_clip_by_norm, _clip_inf, _clip_by_value, _by_hand])
def test_stock_and_hand_written_edits(edit: Callable[[Any], Any]) -> None:
    for ours, theirs, gap in ranks.run(2, _edited, edit):
        assert gap < 1e-6
        if theirs is not None:
            assert ours == pytest.approx(theirs, rel=1e-5)


def _loop_facts() -> dict[str, Any]:
    model, _ = _pair()
    parameters = list(model.parameters())
    facts: dict[str, Any] = {"kinds": {type(p.grad).__name__ for p in parameters}}
    facts["shapes"] = all(p.grad.shape == p.shape for p in parameters)  # type: ignore[union-attr]
    facts["elements"] = sum(p.grad.local.numel() for p in parameters)  # type: ignore[union-attr]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    optimizer.zero_grad(set_to_none=False)
    facts["zeroed"] = float(sum(p.grad.abs().sum() for p in parameters))  # type: ignore[misc,union-attr]
    optimizer.zero_grad()
    facts["none"] = all(p.grad is None for p in parameters)
    return facts


def test_shape_zero_grad_and_none() -> None:
    results = ranks.run(2, _loop_facts)
    assert sum(r["elements"] for r in results) == 7 * 33 + 33 + 33 * 5 + 5
    for facts in results:
        assert facts["kinds"] == {"ShardedGradient"}
        assert facts["shapes"]
        assert facts["zeroed"] == 0
        assert facts["none"]


def _accumulated() -> float:
    """Three backwards before a step add up."""
    torch.manual_seed(0)
    reference = nn.Linear(7, 5)
    model = copy.deepcopy(reference)
    compiled = torch.compile(model, backend="zero3")
    for _ in range(3):
        x = torch.randn(4, 7)
        compiled(*mine((x,))).square().mean().backward()
        reference(x).square().mean().backward()
    assert model.weight.grad is not None
    assert reference.weight.grad is not None
    return float((model.weight.grad.full_tensor() - reference.weight.grad).abs().max())  # type: ignore[attr-defined]


def test_gradients_accumulate() -> None:
    assert max(ranks.run(2, _accumulated)) < 1e-6


def _scaler(overflow_rank: int | None) -> tuple[float, bool]:
    torch.manual_seed(0)
    model = nn.Linear(7, 5)
    compiled = torch.compile(model, backend="zero3")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    x = torch.randn(4, 7)
    compiled(x)
    before = model.weight.detach().clone()
    scaler.scale(compiled(x).square().mean()).backward()
    if torch.distributed.get_rank() == overflow_rank:
        for p in model.parameters():  # one of them lies wholly on the other rank
            p.grad.local.fill_(math.inf)  # type: ignore[union-attr]
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale(), bool((model.weight.detach() != before).any())


def test_grad_scaler_skips_on_all_ranks_when_one_overflows() -> None:
    assert ranks.run(2, _scaler, None) == [(4.0, True)] * 2
    assert ranks.run(2, _scaler, 1) == [(2.0, False)] * 2


def _one_collective_a_clip() -> int:
    model, _ = _pair()
    events = []
    with torch.profiler.profile() as profile:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    events = [
        e for e in profile.events() if "c10d::allreduce_" in e.name or "gloo:all_reduce" in e.name
    ]
    return len({e.name for e in events}) and sum(e.name == events[0].name for e in events)


def test_clipping_costs_one_collective() -> None:
    assert ranks.run(2, _one_collective_a_clip) == [1, 1]


def _gradient() -> ShardedGradient:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    torch.compile(model, backend="zero3")(torch.randn(2, 4)).sum().backward()
    assert isinstance(model.weight.grad, ShardedGradient)
    return model.weight.grad


def _reads(gradient: Any) -> dict[str, Any]:
    """What a script may read off a gradient that needs all of its elements in one place."""
    plain = torch.ones(gradient.shape)
    plain.copy_(gradient)
    doubled, ema = torch.empty(gradient.shape), torch.ones(gradient.shape)
    torch.mul(gradient, 2, out=doubled)
    torch._foreach_add_([ema], [gradient])
    buffer = io.BytesIO()
    torch.save(gradient, buffer)
    buffer.seek(0)
    return {
        "matmul": gradient @ gradient.t(),
        "rows": gradient.sum(dim=0),
        "columns": gradient.norm(dim=1),
        "deviations": torch.stack([gradient.std(), gradient.var()]),
        "first": gradient[0],
        "slice": gradient[1:, ::2],
        "mask": gradient[gradient > 0],
        "flat": gradient.view(-1),
        "reshaped": gradient.reshape(-1).sort().values,
        "topk": gradient.flatten().topk(2).values,
        "quantile": torch.quantile(gradient, 0.5),
        "histogram": torch.histc(gradient, 4, -1, 1),
        "singular": torch.linalg.svdvals(gradient),
        "scaled": gradient * torch.arange(float(gradient.shape[-1])),
        "outer": gradient * torch.arange(2.0)[:, None, None],
        "numpy": torch.from_numpy(gradient.numpy().copy()),
        "array": torch.as_tensor(np.asarray(gradient, dtype="float64").copy()),
        "list": torch.tensor(gradient.tolist()),
        "item": torch.tensor(gradient[0, 0].item()),
        "formatted": f"{gradient[0, 0]:.3f}",
        "shown": str(gradient[0]),
        "saved": torch.load(buffer),
        "pickled": pickle.loads(pickle.dumps(gradient)),
        "fresh": gradient.new_zeros(2),
        "written": plain,
        "out": doubled,
        "summed": ema,
        "unequal": torch.equal(gradient, torch.ones(1)),
    }


def _all_reads(tile: bool) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    options = {"tile_bytes": 256, "verify": True} if tile else None
    model, reference = _pair(options=options)
    pairs = [(model[i].weight, reference[i].weight) for i in (0, 2)]  # type: ignore[index]
    return [(_reads(p.grad), _reads(q.grad)) for p, q in pairs]


@pytest.mark.parametrize("tile", [False, True], ids=["whole", "tiles"])
def test_what_needs_all_elements_gathers_them(tile: bool) -> None:
    for reads in ranks.run(2, _all_reads, tile):
        for found, expected in reads:
            for name, value in expected.items():
                if isinstance(value, torch.Tensor):
                    assert type(found[name]) is torch.Tensor, name
                    torch.testing.assert_close(
                        found[name], value, msg=lambda m, n=name: f"{n}: {m}"
                    )
                elif name != "shown":
                    assert found[name] == value, name
            assert found["shown"].startswith("tensor([")


def test_a_gradient_that_is_gathered_warns_once_and_names_the_place() -> None:
    gradient = _gradient()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            gradient.view(-1).topk(2)
    ours = [w for w in seen if "needs the whole gradient of weight" in str(w.message)]
    assert [w.filename for w in ours] == [__file__]


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda g: g.__setitem__(0, 1.0), "writes to a copy"),
        (lambda g: g.view(-1).mul_(2), "writes to a copy"),
        (lambda g: g[0][1:].zero_(), "writes to a copy"),
        (lambda g: torch.add(g, 1, out=g.t()), "writes to a copy"),
        (lambda g: g.t().data.fill_(1), "writes to a copy"),
        (lambda g: g.cumsum_(0), "full_tensor"),
        (lambda g: g.mul_(torch.ones(2, 1, 1)), "broadcasts a tensor"),
        (lambda g: g.__setitem__(g > 0, torch.ones(3)), "full_tensor"),
        (lambda g: g.share_memory_(), "no memory to share"),
        (torch.from_dlpack, "no memory to share"),
        (lambda g: torch.from_dlpack(g[0]), "full_tensor"),
    ],
)
def test_a_write_that_would_be_lost_is_refused(write: Callable[[Any], Any], message: str) -> None:
    gradient = _gradient()
    before = gradient.full_tensor()
    with pytest.raises(UnsupportedError, match=message):
        write(gradient)
    with pytest.raises(ValueError, match="read-only"):
        gradient.numpy()[0] = 1.0
    assert torch.equal(gradient.full_tensor(), before)


def _noise(seeded: bool) -> float:
    """Noise as differentially private training adds it, against the whole gradient's."""
    model, reference = _pair()
    lists = [[p.grad for p in m.parameters()] for m in (model, reference)]
    for gradients in lists:
        torch.manual_seed(3)
        for g in gradients:
            g.add_(torch.randn_like(g), alpha=0.1)  # type: ignore[arg-type, union-attr]
            if seeded:
                g.normal_(generator=torch.Generator().manual_seed(1))  # type: ignore[union-attr]
    return max(float((g.full_tensor() - h).abs().max()) for g, h in zip(*lists, strict=True))  # type: ignore[union-attr]


@pytest.mark.parametrize("seeded", [False, True])
def test_random_elements_are_those_of_the_whole_gradient(seeded: bool) -> None:
    assert max(ranks.run(2, _noise, seeded)) < 1e-6


def test_copies_are_partitioned_and_apart() -> None:
    gradient = _gradient()
    copied = copy.deepcopy(gradient)
    assert type(copied) is ShardedGradient
    copied.zero_()
    assert gradient.local.any()


def test_a_gradient_as_the_target_keeps_its_identity() -> None:
    gradient = _gradient()
    assert torch.add(gradient, torch.ones(gradient.shape), out=gradient) is gradient


def _on_lists(gradients: Any, others: Any) -> None:
    """Each with a whole tensor of its shape, with itself, and with one number for all."""
    torch._foreach_add_(gradients, others)
    torch._foreach_addcmul_(gradients, others, gradients)
    torch._foreach_mul_(gradients, torch.tensor(0.5))
    torch._foreach_copy_(gradients, torch._foreach_mul(gradients, others))


def _listed() -> float:
    model, reference = _pair()
    lists = [[p.grad for p in m.parameters()] for m in (model, reference)]
    others = [torch.randn(g.shape) for g in lists[1]]  # type: ignore[union-attr]
    for gradients in lists:
        _on_lists(gradients, others)
    return max(float((g.full_tensor() - h).abs().max()) for g, h in zip(*lists, strict=True))  # type: ignore[union-attr]


def test_operations_on_lists_cut_whole_tensors_to_each_members_elements() -> None:
    assert max(ranks.run(2, _listed)) < 1e-5


@pytest.mark.parametrize(
    ("operation", "message"),
    [
        (lambda a, b: torch._foreach_add_([a, b], [b, a]), "different parameters"),
        (lambda a, b: torch._foreach_mul_([a], [torch.ones(2)]), "broadcasts a tensor"),
        (lambda a, b: torch._foreach_norm([a, torch.ones(2)]), "mixes partitioned"),
        (
            lambda a, b: torch._amp_foreach_non_finite_check_and_unscale_(
                [a, torch.ones(2)], torch.zeros(1), torch.ones(1)
            ),
            "mixes partitioned",
        ),
    ],
)
def test_what_a_list_cannot_do_says_so(operation: Callable[[Any, Any], Any], message: str) -> None:
    torch._dynamo.reset()
    model = nn.Linear(4, 4)
    torch.compile(model, backend="zero3")(torch.randn(2, 4)).sum().backward()
    with pytest.raises(UnsupportedError, match=message):
        operation(model.weight.grad, model.bias.grad)


def _clip_two_groups() -> tuple[float, float]:
    """One norm over a model shared by the ranks and one that each has for itself."""
    alone = [dist.new_group([r]) for r in range(dist.get_world_size())][dist.get_rank()]
    shared, own = nn.Linear(7, 33), nn.Linear(7, 33)
    steps = [
        torch.compile(shared, backend="zero3"),
        torch.compile(own, backend="zero3", options={"group": alone}),
    ]
    x = torch.randn(4, 7)
    for step in steps:
        step(x).square().mean().backward()
    gradients = [p.grad.full_tensor() for m in (shared, own) for p in m.parameters()]  # type: ignore[union-attr]
    expected = torch.cat([g.flatten() for g in gradients]).norm()
    norm = nn.utils.clip_grad_norm_([*shared.parameters(), *own.parameters()], 1.0)
    return float(norm), float(expected)


def test_one_norm_over_models_on_different_groups() -> None:
    for found, expected in ranks.run(2, _clip_two_groups):
        assert found == pytest.approx(expected, rel=1e-5)


def test_printing_a_gradient_names_it() -> None:
    assert "weight" in repr(_gradient())


def test_the_mean_over_ranks_of_one_rank_is_itself() -> None:
    assert mean_over_ranks(torch.tensor(3.0)) == 3.0
