"""What cannot be right is refused, with the reason and what to do."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from test_hazards import Base, Chain
from torch import nn

import zero_compile
from zero_runtime.session import session_of


class WritesInGraph(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.one.weight.mul_(0.9)
        return self.one(x)


class SparseEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 6, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table(x.long().abs() % 10)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (WritesInGraph, "writes to parameter one.weight"),
        (SparseEmbedding, "sparse=False"),
        (lambda: Chain().to("meta"), "meta device"),
    ],
)
def test_a_model_that_cannot_be_right_is_refused(
    make: Callable[[], nn.Module], message: str
) -> None:
    model = make()
    x = torch.ones(2, 6, device=next(model.parameters()).device)
    with pytest.raises(Exception, match=message):
        torch.compile(model, backend="zero3")(x)
    assert session_of(next(model.parameters())) is None


def _wrapped(how: str) -> str:
    model: Any = Chain()
    if how == "ddp_outside":
        model = nn.parallel.DistributedDataParallel(torch.compile(model, backend="zero3"))
    elif how == "ddp_inside":
        model = torch.compile(nn.parallel.DistributedDataParallel(model), backend="zero3")
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        model = torch.compile(model, backend="zero3")
    try:
        model(torch.ones(2, 6)).sum().backward()
    except Exception as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("how", "message"),
    [("ddp_outside", "Remove the DDP wrapper"), ("ddp_inside", "DDP"), ("fsdp2", "FSDP")],
)
def test_a_wrapper_that_does_the_same_job_is_refused(how: str, message: str) -> None:
    for said in ranks.run(2, _wrapped, how):
        assert message in said, said


def test_eager_use_before_the_first_graph_is_refused_with_what_to_do() -> None:
    model = Chain()
    early = model.one(torch.ones(2, 6, requires_grad=True))
    with pytest.raises(Exception, match="run the model once under"):
        torch.compile(model, backend="zero3")(early)


def test_after_a_pass_without_gradients_eager_use_before_the_graph_is_right() -> None:
    torch.manual_seed(0)
    model = Chain()
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, backend="zero3")
    x = torch.ones(2, 6)
    with torch.no_grad():
        compiled(x)
    compiled(model.one(x)).sum().backward()
    twin(twin.one(x)).sum().backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad)  # type: ignore[union-attr]


def test_an_unsupported_torch_is_named() -> None:
    from unittest import mock

    with (
        mock.patch("zero_runtime.compat.torch_version", (2, 9)),
        pytest.raises(Exception, match=r"works with torch 2\.11 to 2\.14"),
    ):
        torch.compile(nn.Linear(2, 2), backend="zero3")(torch.ones(1, 2))


def test_plans_of_an_uncompiled_model_say_what_to_do() -> None:
    with pytest.raises(RuntimeError, match=r"torch\.compile"):
        zero_compile.plans(Chain())


def _mixed_optimizer() -> str:
    model, head = Chain(), nn.Linear(6, 2)
    compiled = torch.compile(model, backend="zero3")
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
    head(compiled(torch.ones(2, 6))).sum().backward()
    try:
        optimizer.step()
    except NotImplementedError as error:
        return str(error)
    return "no error"


def test_parameters_outside_the_model_in_the_same_optimizer_are_refused() -> None:
    for said in ranks.run(2, _mixed_optimizer):
        assert "2 of the optimizer's 8 parameters" in said
        assert "zero_compile.partition(module)" in said


def _state_of_rank_zero() -> str:
    model = Chain()
    compiled = torch.compile(model, backend="zero3")
    optimizer = torch.optim.AdamW(model.parameters())
    compiled(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    sent = [copy.deepcopy(optimizer.state_dict())]
    optimizer.load_state_dict(sent[0])
    optimizer.step()  # its own part is welcome
    dist.broadcast_object_list(sent, src=0)
    optimizer.load_state_dict(sent[0])
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_optimizer_state_of_another_rank_is_refused() -> None:
    first, second = ranks.run(2, _state_of_rank_zero)
    assert first == "no error"
    assert "the part of rank 0 of 2, loaded on rank 1 of 2" in second


def test_shared_memory_is_refused() -> None:
    model = Chain()
    torch.compile(model, backend="zero3")(torch.ones(2, 6))
    with pytest.raises(NotImplementedError, match="no memory to share"):
        model.share_memory()
