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
