"""What code outside the graphs may do with a partitioned parameter."""

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import ranks
import torch
from test_hazards import Chain
from torch import nn


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
        (lambda m: m.one.weight.data, "detach"),
        (lambda m: m.half(), "Convert the model before"),
        (lambda m: m.to(torch.bfloat16), "Convert the model before"),
        (lambda m: m.one.weight.mul_(2), "leaf Variable"),
    ],
)
def test_what_would_be_lost_is_refused(use: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        use(_partitioned())
