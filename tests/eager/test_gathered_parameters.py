"""Partitioned parameters, whole for a block of code."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ranks
import zero_compile
from zero_compile import GatheredParameters
from zero_runtime.errors import DivergenceError, GroupError, OptionError, ZeroError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(6, 5)
        self.two = nn.Linear(5, 6, bias=False)
        self.tied = nn.Linear(6, 5)
        self.tied.weight = self.one.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(torch.tanh(self.one(x))) + self.tied(x).sum()  # type: ignore[no-any-return]


def _plain() -> Net:
    torch.manual_seed(0)
    return Net()


def _compiled(folder: str = "") -> Net:
    model = _plain()
    options = {"offload_param": {"device": "nvme", "nvme_path": folder}} if folder else {}
    torch.compile(model, backend="zero3", options=options)(torch.ones(1, 6))
    return model


def _built(folder: str = "") -> Net:
    torch.manual_seed(0)
    section = {"device": "nvme", "nvme_path": folder}
    with zero_compile.Init(options={"offload_param": section} if folder else None):
        return Net()


def _eager(folder: str = "") -> Net:
    model = _plain()
    options = {"offload_param": {"device": "nvme", "nvme_path": folder}} if folder else {}
    zero_compile.partition(model, options)
    return model


MAKERS = {"compiled": _compiled, "built": _built, "eager": _eager}
WAYS = pytest.mark.parametrize("way", MAKERS)


def _husk(parameter: nn.Parameter) -> bool:
    return parameter.untyped_storage().nbytes() == 0


def _same(model: nn.Module, expected: nn.Module) -> bool:
    pairs = zip(model.state_dict().values(), expected.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def _reading(way: str, folder: str) -> dict[str, bool]:
    model, plain = MAKERS[way](folder), _plain()
    p, q = model.one.weight, plain.one.weight
    facts = {}
    with GatheredParameters(model):
        facts["data"] = torch.equal(p.data, q.data) and p.data.data_ptr() == p.data_ptr()
        facts["shape"] = p.shape == q.shape and p.stride() == q.stride()
        facts["numpy"] = bool((p.detach().numpy() == q.detach().numpy()).all())
        facts["math"] = torch.equal(p @ p.t(), q @ q.t())
        facts["forward"] = torch.equal(model(torch.ones(2, 6)), plain(torch.ones(2, 6)))
        facts["state_dict"] = _same(model, plain)
        facts["deepcopy"] = torch.equal(copy.deepcopy(p), q)
        facts["all"] = not any(map(_husk, model.parameters()))
    facts["afterwards"] = all(map(_husk, model.parameters())) and _same(model, plain)
    with GatheredParameters([p, model.two]):
        facts["subset"] = _husk(model.one.bias) and not _husk(p) and not _husk(model.two.weight)
    with GatheredParameters(model.one.weight, enabled=False):
        facts["disabled"] = _husk(p)
    return facts


@WAYS
@pytest.mark.parametrize("nvme", [False, True], ids=["memory", "nvme"])
def test_parameters_are_whole_inside_and_partitioned_afterwards(
    way: str, nvme: bool, tmp_path: Path
) -> None:
    for facts in ranks.run(2, _reading, way, str(tmp_path) if nvme else ""):
        assert all(facts.values()), facts


def _change(model: Net) -> None:
    model.one.weight.data.mul_(2.0)
    model.one.weight.data.numpy()[0] = 9.0
    nn.init.normal_(model.one.bias)
    with torch.no_grad():
        model.two.weight[1] = 3.0
        model.two.weight.data = model.two.weight.data + 1.0


def _modified(way: str, folder: str, stage: int) -> dict[str, bool]:
    if stage == 3:
        model = MAKERS[way](folder)
    else:
        model = _plain()
        zero_compile.partition(model, stage=stage)
    plain = _plain()
    torch.manual_seed(7)
    _change(plain)
    with GatheredParameters(model, modifier_rank=1):
        torch.manual_seed(7)
        if dist.get_rank() == 1:
            _change(model)
    facts = {"kept": _same(model, plain)}
    step: Any = model
    if stage == 3:
        step = torch.compile(model, backend="zero3", options=_options(folder))
    loss = step(torch.ones(2, 6)).sum()
    facts["used"] = abs(float(loss - plain(torch.ones(2, 6)).sum())) < 1e-4
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    plain(torch.ones(2, 6)).sum().backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    facts["trained"] = all(
        torch.allclose(a, b, atol=1e-5)
        for a, b in zip(model.state_dict().values(), plain.state_dict().values(), strict=True)
    )
    return facts


def _options(folder: str) -> dict[str, Any]:
    return {"offload_param": {"device": "nvme", "nvme_path": folder}} if folder else {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "nvme", "stage"),
    [
        ("compiled", False, 3),
        ("built", False, 3),
        ("built", True, 3),
        ("eager", True, 3),
        ("eager", False, 1),
        ("eager", False, 2),
    ],
)
def test_what_the_modifier_rank_changes_is_kept_on_every_rank(
    way: str, nvme: bool, stage: int, tmp_path: Path
) -> None:
    for facts in ranks.run(2, _modified, way, str(tmp_path) if nvme else "", stage):
        assert all(facts.values()), facts


def _lost(way: str) -> dict[str, Any]:
    model, plain = MAKERS[way](), _plain()
    told = ""
    try:
        with GatheredParameters(model):
            model.one.weight.data.mul_(2.0)
            model.two.weight.data[:] = model.two.weight.data.flip(
                0
            )  # equal elements, another order
    except ZeroError as error:
        told = str(error)
    return {"told": told, "undone": _same(model, plain), "husk": _husk(model.one.weight)}


@WAYS
def test_a_change_without_modifier_rank_is_an_error_and_undone(way: str) -> None:
    for facts in ranks.run(2, _lost, way):
        assert "one.weight, two.weight changed" in facts["told"] or (
            way == "built" and "Linear.weight, " in facts["told"]
        ), facts
        assert "modifier_rank" in facts["told"]
        assert facts["undone"]
        assert facts["husk"]


def _lost_on_one() -> dict[str, Any]:
    model, plain = _compiled(), _plain()
    told = ""
    try:
        with GatheredParameters(model):
            if dist.get_rank() == 1:
                model.two.weight.data.mul_(2.0)
    except ZeroError as error:
        told = str(error)
    return {"told": told, "undone": _same(model, plain)}


@pytest.mark.slow
def test_a_change_on_one_rank_without_modifier_rank_is_told_to_all() -> None:
    for facts in ranks.run(3, _lost_on_one):
        assert facts["told"].startswith(
            "two.weight changed while held whole, on this rank or another"
        )
        assert facts["undone"]


def _strangers() -> list[str]:
    """Who is named does not share the model, or is not there at all."""
    rank = dist.get_rank()
    alone = [dist.new_group([r]) for r in range(2)][rank]
    model, said = _plain(), []
    torch.compile(model, backend="zero3", options={"group": alone})(torch.ones(1, 6))
    for source in (1 - rank, 2, -1):
        try:
            with GatheredParameters(model, modifier_rank=source):
                said.append("entered")
        except (GroupError, OptionError) as error:
            said.append(str(error))
    return said


def test_a_modifier_rank_that_cannot_be_is_refused_before_the_block() -> None:
    for rank, said in enumerate(ranks.run(2, _strangers)):
        assert said == [
            f"rank {1 - rank} does not share this model: its ranks are [{rank}]",
            "modifier_rank: there is no rank 2 among 2",
            "modifier_rank: there is no rank -1 among 2",
        ]


def _nested() -> dict[str, bool]:
    model, facts = _compiled(), {}
    weight = model.one.weight
    with GatheredParameters(model):
        with GatheredParameters(weight, modifier_rank=0):
            if dist.get_rank() == 0:
                weight.data.fill_(4.0)
        facts["still whole"] = not _husk(weight)
        facts["seen by the outer"] = bool((weight.data == 4.0).all())
    facts["kept"] = bool((weight == 4.0).all()) and _husk(weight)
    with GatheredParameters(weight, modifier_rank=0):
        with GatheredParameters(model):  # the outer block says whose change counts
            weight.data.fill_(5.0 + dist.get_rank())
    facts["kept by the outer"] = bool((weight == 5.0).all())
    block = GatheredParameters(weight)
    with block, block:
        facts["one block twice"] = not _husk(weight)
    facts["done"] = _husk(weight)
    return facts


def test_blocks_can_be_nested() -> None:
    for facts in ranks.run(2, _nested):
        assert all(facts.values()), facts


def _raising() -> dict[str, bool]:
    model, plain = _compiled(), _plain()
    facts = {}
    try:
        with GatheredParameters(model, modifier_rank=0), GatheredParameters(model.two.weight):
            model.one.weight.data.zero_()
            model.two.weight.data.zero_()
            raise KeyError
    except KeyError:
        facts["restored"] = _same(model, plain) and _husk(model.one.weight)
    try:
        with GatheredParameters(model, modifier_rank=9):
            pass
    except OptionError as error:
        facts["no such rank"] = "rank 9" in str(error) and _same(model, plain)
    return facts


def test_an_exception_leaves_everything_as_it_was() -> None:
    for facts in ranks.run(2, _raising):
        assert facts == {"restored": True, "no such rank": True}


def _unpartitioned() -> dict[str, bool]:
    plain, reference = _plain(), _plain()
    facts = {}
    with GatheredParameters(plain):
        plain.one.weight.data.mul_(2.0)
        reference.one.weight.data.mul_(2.0)
    facts["kept"] = _same(plain, reference)
    with GatheredParameters(plain.one.bias, modifier_rank=1):
        if dist.get_rank() == 1:
            plain.one.bias.data.fill_(3.0)
    facts["broadcast"] = bool((plain.one.bias == 3.0).all())
    return facts


def test_parameters_that_are_not_partitioned_are_as_they_are() -> None:
    for facts in ranks.run(2, _unpartitioned):
        assert all(facts.values()), facts


def _graph_inside() -> list[str]:
    model = _plain()
    step = torch.compile(model, backend="zero3")
    expected = step(torch.ones(1, 6)).detach()
    told = []
    with GatheredParameters(model):
        same = torch.equal(step(torch.ones(1, 6)), expected)
    try:
        with GatheredParameters(model.one.weight, modifier_rank=0):
            with torch.no_grad():
                model.one.weight.add_(1.0)
            step(torch.ones(1, 6))
    except ZeroError as error:
        told.append(str(error))
    loss = step(torch.ones(1, 6)).sum()
    loss.backward()
    try:
        with GatheredParameters(model):
            torch.optim.SGD(model.parameters(), lr=0.1).step()
    except ZeroError as error:
        told.append(str(error))
    return [*told, "" if same else "differs"]


def test_graphs_inside_see_the_parameters_or_say_why_not() -> None:
    for changed, stepped, same in ranks.run(2, _graph_inside):
        assert "would not see" in changed
        assert "optimizer.step() inside" in stepped
        assert not same


def _on_one_rank_only() -> str:
    model = _compiled()
    try:
        if dist.get_rank() == 0:
            with GatheredParameters(model.one.weight):
                pass
        else:
            model(torch.ones(1, 6))
    except DivergenceError as error:
        return str(error)
    return ""


def test_a_block_that_one_rank_enters_alone_is_told() -> None:
    for message in ranks.run(2, _on_one_rank_only):
        assert "to be held whole" in message, message


@pytest.mark.parametrize(
    "make",
    [
        lambda p: GatheredParameters(3),  # type: ignore[arg-type]
        lambda p: GatheredParameters([p, "weight"]),
        lambda p: GatheredParameters(torch.ones(2)),  # type: ignore[arg-type]
        lambda p: GatheredParameters(p, modifier_rank="0"),  # type: ignore[arg-type]
        lambda p: GatheredParameters(p, fwd_module=p),
    ],
)
def test_wrong_arguments_are_refused(make: Callable[[Any], Any]) -> None:
    with pytest.raises(OptionError):
        make(nn.Parameter(torch.ones(2)))
