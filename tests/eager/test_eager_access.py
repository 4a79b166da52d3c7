"""What code outside the graphs may do with a partitioned parameter."""

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from test_hazards import Chain
from torch import nn

import ranks
import zero_compile
from zero_runtime.errors import ZeroError


def _partitioned() -> nn.Module:
    torch.manual_seed(0)
    model = Chain()
    torch.compile(model, backend="zero3")(torch.ones(1, 6))
    return model


def _access() -> dict[str, bool]:
    """What eager code may do with a partitioned parameter, against an equal plain model."""
    model = _partitioned()
    torch.manual_seed(0)
    twin = Chain()
    p, q = model.one.weight, twin.one.weight
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    facts = {
        "state_dict": all(
            torch.equal(a, b)
            for a, b in zip(torch.load(buffer).values(), twin.state_dict().values(), strict=True)
        ),
        "deepcopy": torch.equal(copy.deepcopy(model).one.weight, q),
        "pickle": torch.equal(pickle.loads(pickle.dumps(p)), q),
        "equal": torch.equal(p, q),
        "compare": bool((p == q).all()),
        "item": p[0, 0].item() == q[0, 0].item(),
        "numpy": (p.detach().numpy() == q.detach().numpy()).all(),
        "numel": sum(x.numel() for x in model.parameters())
        == sum(x.numel() for x in twin.parameters()),
        "shape": p.shape == q.shape and p.dtype == q.dtype and p.stride() == q.stride(),
        "whole_model": torch.equal(pickle.loads(pickle.dumps(model)).one.weight, q),
        "clone": torch.equal(p.clone(), q),
        "to_same": torch.equal(model.to(torch.float32).one.weight, q),
    }
    with torch.no_grad():
        for weight in (p, q):
            weight[0] = 1.0
            weight.mul_(0.5)
        facts["in_place"] = torch.equal(p, q)
        for weight in (p, q):
            weight[1].fill_(3.0)
            weight.detach().mul_(0.5)
            weight.t()[2] += 1.0
            weight.view(-1)[::5].zero_()
        facts["through_views"] = torch.equal(p, q)
        alias_of_p, alias_of_q = p.detach(), q.detach()
        for alias in (alias_of_p, alias_of_q):
            alias.add_(1.0)
        facts["kept_alias"] = torch.equal(p, q)
        for alias in (alias_of_p, alias_of_q):
            alias.sub_(3.0)
        facts["kept_alias_later"] = torch.equal(model(torch.ones(1, 6)), twin(torch.ones(1, 6)))
        p.copy_(torch.ones(6, 6))
        facts["copy_"] = torch.equal(p, torch.ones(6, 6))
    model.load_state_dict(twin.state_dict())
    facts["load_state_dict"] = torch.equal(p, q)
    torch.manual_seed(5)
    nn.init.normal_(p)
    torch.manual_seed(5)
    nn.init.normal_(q)
    facts["init"] = torch.equal(p, q)
    return facts


def test_eager_access_meets_the_logical_parameter() -> None:
    for facts in ranks.run(2, _access):
        assert all(facts.values()), facts


def test_a_read_warns_once_and_names_the_place() -> None:
    model = _partitioned()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(3):
            model.one.weight.sum()
    ours = [w for w in seen if "outside the compiled graph" in str(w.message)]
    assert len(ours) == 1
    assert ours[0].filename == __file__


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda m: m.half(), "Convert the model before"),
        (lambda m: m.to(torch.bfloat16), "Convert the model before"),
        (lambda m: m.one.weight.mul_(2), "leaf Variable"),
    ],
)
def test_what_would_be_lost_is_refused(use: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        use(_partitioned())


def _merge(weight: Any) -> None:
    """As adapters are merged."""
    weight.data += torch.ones(6, 6)
    weight.data = weight.data * 2


def _average(weight: Any) -> None:
    """As a moving average is kept."""
    weight.data.mul_(0.9).add_(weight.data, alpha=0.1)


def _held(weight: Any) -> None:
    alias = weight.data
    alias[0].fill_(2.0)
    weight.sum()
    alias.t()[1] = 5.0


def _numpy(weight: Any) -> None:
    weight.detach().numpy()[1] = 3.0
    array = weight.data.numpy()
    array *= 2
    weight.sum()
    array[0] -= 1


def _frozen(weight: Any) -> None:
    """``numpy()`` of the parameter itself."""
    weight.requires_grad_(False)
    weight.numpy()[2] = 7.0
    np.asarray(weight)[3] = 8.0


def _inference(weight: Any) -> None:
    """Tensors of inference mode count no versions."""
    with torch.inference_mode():
        weight.detach().mul_(3.0)
        weight[1].zero_()


def _resized(weight: Any) -> None:
    """As embeddings are resized: the old rows into a new parameter, then back."""
    grown = nn.Linear(6, 8)
    grown.weight.data[:6] = weight.data[:6]
    weight.data.copy_(grown.weight.data[:6].flip(0))


WRITES = [_merge, _average, _held, _numpy, _frozen, _inference, _resized]


def _written(write: Callable[[Any], None], built: bool) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    twin = Chain()
    torch.manual_seed(0)
    if built:
        with zero_compile.Init():
            model: Any = Chain()
    else:
        model = _partitioned()
    write(twin.one.weight)
    write(model.one.weight)
    return model.one.weight.detach().clone(), twin.one.weight.detach()


@pytest.mark.parametrize("built", [False, True], ids=["compiled", "Init"])
@pytest.mark.parametrize("write", WRITES, ids=lambda w: w.__name__[1:])
def test_writes_through_data_and_arrays_are_kept(write: Callable[[Any], None], built: bool) -> None:
    for found, expected in ranks.run(2, _written, write, built):
        assert torch.equal(found, expected)


def _late(change: str) -> tuple[str, bool]:
    """Write to an alias of a value that has been replaced since."""
    model: Any = _partitioned()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.one.weight.sum().backward()
    alias = model.one.weight.data
    alias.add_(1.0)
    if change == "step":
        optimizer.step()
    elif change == "write":
        with torch.no_grad():
            model.one.weight.fill_(2.0)
    elif change == "load":
        model.load_state_dict(model.state_dict())
    before = model.one.weight.detach().clone()
    alias.mul_(2.0)
    try:
        model.one.weight.sum()
    except ZeroError as error:
        return str(error), torch.equal(model.one.weight, before)
    return "no error", False


@pytest.mark.parametrize("change", ["step", "write", "load"])
def test_a_write_to_a_view_that_is_out_of_date_is_refused(change: str) -> None:
    for said, unchanged in ranks.run(2, _late, change):
        assert "one.weight was written to after" in said
        assert "GatheredParameters" in said
        assert unchanged


def _late_array() -> str:
    """A write that no version counter shows, to memory of before a step: found at the next one."""
    model: Any = _partitioned()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    array = model.one.weight.data.numpy()
    for _ in range(2):
        model.one.weight.sum().backward()
        optimizer.step()
    array[0] = 1.0
    try:
        optimizer.step()
    except ZeroError as error:
        return str(error)
    return "no error"


def test_a_write_to_an_array_that_is_out_of_date_is_refused_at_the_next_step() -> None:
    for said in ranks.run(2, _late_array):
        assert "one.weight was written to after" in said


def test_a_replaced_parameter_does_not_care_for_its_old_memory() -> None:
    model: Any = _partitioned()
    alias = model.one.weight.data
    model.one.weight.data = torch.ones(6, 6)
    alias.fill_(3.0)
    assert torch.equal(model.one.weight, torch.ones(6, 6))


def _communicated() -> list[float]:
    """A user's own collectives on parameters, which no version counter shows."""
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    expected = model.weight.detach().clone()
    zero_compile.partition(model)
    size, worst = dist.get_world_size(), []
    with torch.no_grad():
        dist.all_reduce(model.weight)
        expected *= size
        worst.append(float((model.weight.detach() - expected).abs().max()))
        dist.all_reduce(model.weight, async_op=True).wait()
        expected *= size
        worst.append(float((model.weight.detach() - expected).abs().max()))
        dist.broadcast(model.weight, src=0)
        worst.append(float((model.weight.detach() - expected).abs().max()))
        torch.add(expected, 1.0, out=model.weight)
        worst.append(float((model.weight.detach() - expected - 1.0).abs().max()))
    return worst


@pytest.mark.filterwarnings("ignore:.*partitioned parameter")
def test_what_a_users_own_collective_or_out_writes_is_kept() -> None:
    for worst in ranks.run(2, _communicated):
        assert max(worst) < 1e-6, worst


class Around(nn.Module):
    """A module around one, so that Dynamo compiles it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x)
        return out


def _fused_step(parameters: list[nn.Parameter]) -> None:
    gradients = [torch.ones(3, 3), torch.ones(3)]
    rest = {"weight_decay": 0.0, "momentum": 0.0, "lr": 0.1, "dampening": 0.0, "nesterov": False}
    torch._fused_sgd_(parameters, gradients, [], **rest, maximize=False, is_first_step=True)


@pytest.mark.filterwarnings("ignore:.*partitioned parameter")
@pytest.mark.parametrize(
    "change",
    [
        lambda ps: torch._foreach_mul_(ps, 0.5),
        lambda ps: torch._foreach_copy_(ps, [torch.ones(3, 3), torch.ones(3)]),
        lambda ps: torch._foreach_lerp_(ps, [torch.ones(3, 3), torch.ones(3)], 0.1),
        lambda ps: torch._foreach_add_(ps, [p * 2 for p in ps]),
        lambda ps: torch.mm(ps[0], ps[0].clone(), out=ps[0]),
        lambda ps: torch.ops.aten.add.out(ps[0], torch.ones(3, 3), out=ps[0]),
        lambda ps: nn.functional.relu(ps[0], inplace=True),
        lambda ps: nn.functional.embedding(torch.tensor([0, 1]), ps[0], max_norm=0.1),
        lambda ps: torch.linalg.qr(ps[0], out=(ps[0], torch.empty(3, 3))),
        lambda ps: [row.add_(1) for row in ps[0].split(1)],
        _fused_step,
    ],
    ids=[
        "mul",
        "copy",
        "lerp",
        "add",
        "out",
        "aten-out",
        "inplace",
        "renorm",
        "two-outs",
        "split",
        "fused",
    ],
)
def test_whatever_writes_to_parameters_writes_to_them(
    change: Callable[[list[nn.Parameter]], Any],
) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    plain = copy.deepcopy(model)
    zero_compile.partition(model)
    for m in (model, plain):
        with torch.no_grad():
            change(list(m.parameters()))
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.detach(), expected.detach())


def test_a_list_of_leaves_is_not_written_to_while_gradients_are_on() -> None:
    model = nn.Linear(3, 3)
    zero_compile.partition(model)
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        torch._foreach_mul_(list(model.parameters()), 0.5)


@pytest.mark.filterwarnings("ignore:.*whole gradient", "ignore:.*partitioned parameter")
@pytest.mark.parametrize("together", [False, True])
def test_a_step_written_by_hand_is_a_step(together: bool) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    plain = copy.deepcopy(model)
    compiled = torch.compile(Around(model), backend="zero3")
    for m in (compiled, plain):
        m(torch.ones(2, 3)).square().sum().backward()
    for m in (model, plain):
        parameters, gradients = list(m.parameters()), [p.grad for p in m.parameters()]
        with torch.no_grad():
            if together:
                torch._foreach_add_(parameters, gradients, alpha=-0.1)
            else:
                for p, g in zip(parameters, gradients, strict=True):
                    p.add_(g, alpha=-0.1)
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.detach(), expected.detach())
