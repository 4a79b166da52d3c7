"""What cannot be right is refused, with the reason and what to do."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_hazards import Base, Chain
from torch import nn

import ranks
import zero_compile
from zero_runtime.session import session_of


class WritesThrough(Base):
    """Writes to a parameter with the operation it is given."""

    def __init__(self, write: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.write = write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.write(self.one.weight)
        return self.one(x)


def _augmented(w: torch.Tensor) -> None:
    w += 1


def _augmented_row(w: torch.Tensor) -> None:
    w[0] += 1


def _checkpointed(w: torch.Tensor) -> None:
    torch.utils.checkpoint.checkpoint(lambda v: v.data.mul_(2), w, use_reentrant=False)


_WRITES: list[tuple[Callable[[torch.Tensor], Any], str]] = [
    (lambda w: w.mul_(0.9), "mul_"),
    (_augmented, "__iadd__|iadd"),
    (_augmented_row, "__iadd__|iadd|setitem"),
    (lambda w: w.__setitem__(0, 1.0), "setitem"),
    (lambda w: w.t().mul_(2), "mul_"),
    (lambda w: w.T.mul_(2), "mul_"),
    (lambda w: w.chunk(2)[1].mul_(2), "mul_"),
    (lambda w: w.select(0, 0).mul_(2), "mul_"),
    (lambda w: torch.split(w, 2)[0].mul_(2), "mul_"),
    (lambda w: w.unbind()[1].zero_(), "zero_"),
    (lambda w: w.view_as(w).mul_(2), "mul_"),
    (lambda w: w[:1].expand(1, 6).mul_(2), "mul_"),
    (lambda w: w.diagonal().zero_(), "zero_"),
    (lambda w: nn.functional.relu(w, inplace=True), "relu"),
    (lambda w: nn.functional.dropout(w, 0.5, True, True), "dropout"),
    (lambda w: torch._foreach_mul_([w, torch.ones(2)], 2.0), "_foreach_mul_"),
    (lambda w: torch._foreach_mul_([w.data], 2.0), "_foreach_mul_"),
    (lambda w: w.data.mul_(2), "mul_"),
    (lambda w: w.data.__setitem__(0, 1.0), "setitem"),
    (lambda w: torch.add(w, 1, out=w), "add"),
    (lambda w: torch.add(w.data, 1, out=w.data), "add"),
    (lambda w: torch.add(w[0], 1, out=w[0]), "add"),
    (lambda w: torch.ops.aten.mul_.Scalar(w, 2), r"mul_\.Scalar"),
    (lambda w: nn.init.zeros_(w), "zero_"),
    (lambda w: nn.functional.embedding(torch.tensor([0]), w, max_norm=0.1), "embedding"),
    (_checkpointed, "mul_"),
]


@pytest.mark.parametrize(("write", "operation"), _WRITES)
def test_a_write_in_a_graph_is_refused_and_named(
    write: Callable[[torch.Tensor], Any], operation: str
) -> None:
    torch._dynamo.reset()
    model = WritesThrough(write)
    message = rf"writes to parameter one\.weight \(({operation})\)\. .*under torch\.no_grad\(\), or"
    with pytest.raises(Exception, match=message):
        torch.compile(model, backend="zero3")(torch.ones(2, 6))
    assert session_of(model.one.weight) is None


@torch.library.custom_op("test_refusals::double_", mutates_args=("x",))
def _double(x: torch.Tensor) -> None:
    x.mul_(2)


@_double.register_fake
def _(x: torch.Tensor) -> None:
    return None


def test_a_write_by_an_operator_of_the_users_own_is_refused() -> None:
    with pytest.raises(Exception, match=r"writes to parameter one\.weight"):
        torch.compile(WritesThrough(_double), backend="zero3")(torch.ones(2, 6))


class OneStorage(nn.Module):
    """Parameters that lie side by side in one piece of memory, of which one may be doubled."""

    def __init__(self, doubled: str | None) -> None:
        super().__init__()
        flat = torch.randn(3 * 36)
        self.one, self.two, self.three = (nn.Parameter(p.view(6, 6)) for p in flat.chunk(3))
        self.doubled = doubled

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.doubled is not None:
            _double(getattr(self, self.doubled))
        return x @ self.one @ self.two @ self.three


@pytest.mark.parametrize("doubled", ["one", "two", "three"])
def test_a_write_to_one_of_several_parameters_in_one_storage_is_refused(doubled: str) -> None:
    with pytest.raises(Exception, match=rf"writes to parameter {doubled}"):
        torch.compile(OneStorage(doubled), backend="zero3")(torch.ones(2, 6))


def test_parameters_in_one_storage_train() -> None:
    model = OneStorage(None)
    twin = copy.deepcopy(model)
    x = torch.randn(2, 6)
    torch.compile(model, backend="zero3")(x).sum().backward()
    twin(x).sum().backward()
    for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), other.grad)


@pytest.mark.parametrize("stage", [1, 2])
def test_a_model_that_was_partitioned_first_compiles_at_its_stage(stage: int) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
    twin = copy.deepcopy(model)
    zero_compile.partition(model, stage=stage)
    x = torch.randn(2, 6)
    found = torch.compile(model, backend=f"zero{stage}")(x)
    torch.testing.assert_close(found, twin(x))


class WritesElsewhere(Base):
    """Buffers and activations are written to in every way; parameters are only read."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.relu, self.drop = nn.ReLU(inplace=True), nn.Dropout(0.0, inplace=True)
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.relu(self.norm(self.one(x))) * 2
        h = self.drop(h)
        h += 1
        h[0] = h[0] * 2
        h.t().mul_(0.5)
        with torch.no_grad():
            self.seen += h.detach().mean(0)
            self.seen.lerp_(self.two.weight.mean(0), 0.5)
            torch._foreach_mul_([self.seen], 0.9)
            scaled = torch.empty(6, 6)
            torch.mul(self.two.weight, 2, out=scaled)
            scaled.copy_(self.two.weight).add_(self.two.bias)
        return self.two(h) + scaled.sum()


def test_writes_to_buffers_and_activations_stay_right() -> None:
    torch.manual_seed(0)
    model = WritesElsewhere()
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, backend="zero3")
    for step in range(2):
        x = torch.randn(4, 6) + step
        found, expected = compiled(x), twin(x)
        torch.testing.assert_close(found, expected)
        found.sum().backward()
        expected.sum().backward()
    for (name, found), expected in zip(model.named_buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(found, expected, msg=name)


class Sparse(nn.Module):
    """A table that is read with the operation it is given."""

    def __init__(self, read: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 6, sparse=True)
        self.read = read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.read(self.table.weight, x.long().abs() % 10)


def _bag(w: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    return torch.embedding_bag(w, i.flatten(), torch.tensor([0]), False, 0, True)[0]


_SPARSE: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
    lambda w, i: nn.functional.embedding(i, w, sparse=True),
    lambda w, i: nn.functional.embedding(i, w, None, None, 2.0, False, True),
    lambda w, i: nn.functional.embedding_bag(i, w, mode="sum", sparse=True),
    lambda w, i: nn.functional.embedding_bag(i, w, None, None, 2.0, False, "sum", True),
    lambda w, i: torch.embedding(w, i, -1, False, True),
    lambda w, i: torch.ops.aten.embedding(w, i, sparse=True),
    _bag,
]


@pytest.mark.parametrize("read", _SPARSE)
def test_sparse_gradients_of_compiled_code_are_refused(read: Callable[..., Any]) -> None:
    torch._dynamo.reset()
    model = Sparse(read)
    with pytest.raises(Exception, match=r"embedding table\.weight asks .* Set sparse=False"):
        torch.compile(model, backend="zero3")(torch.ones(2, 6))
    assert session_of(model.table.weight) is None


@pytest.mark.parametrize("stage", [1, 3])
def test_sparse_gradients_of_eager_code_are_refused(stage: int) -> None:
    model = Sparse(_SPARSE[0])
    zero_compile.partition(model, stage=stage)
    with pytest.raises(Exception, match=r"embedding table\.weight asks .* Set sparse=False"):
        model(torch.ones(2, 6)).sum().backward()


def test_sparse_gradients_inside_a_leaf_are_refused() -> None:
    model = nn.Sequential(nn.Embedding(10, 6, sparse=True))
    zero_compile.partition(model, {"leaf_modules": "0"})
    with pytest.raises(Exception, match=r"embedding 0\.weight asks .* Set sparse=False"):
        model(torch.ones(2, 6).long()).sum().backward()


def test_an_embedding_of_dense_gradients_may_do_what_it_likes() -> None:
    model = Sparse(lambda w, i: nn.functional.embedding_bag(i, w, mode="sum"))
    torch.compile(model, backend="zero3")(torch.ones(2, 6)).sum().backward()
    assert model.table.weight.grad is not None


def test_a_model_on_the_meta_device_is_refused() -> None:
    model = Chain().to("meta")
    with pytest.raises(Exception, match="meta device"):
        torch.compile(model, backend="zero3")(torch.ones(2, 6, device="meta"))
    assert session_of(model.one.weight) is None


def _wrapped(how: str) -> str:
    model: Any = Chain()
    if how == "ddp_outside":
        model = nn.parallel.DistributedDataParallel(torch.compile(model, backend="zero3"))
    elif how == "ddp_inside":
        model = torch.compile(nn.parallel.DistributedDataParallel(model), backend="zero3")
    elif how == "ddp_eager":
        model = nn.Sequential(nn.parallel.DistributedDataParallel(model))
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        if how == "fsdp2":
            model = torch.compile(model, backend="zero3")
    try:
        if how.endswith("_eager"):
            zero_compile.partition(model)
        model(torch.ones(2, 6)).sum().backward()
    except Exception as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("ddp_outside", "Remove the DDP wrapper"),
        ("ddp_inside", "DDP"),
        ("ddp_eager", "Remove the DDP wrapper"),
        ("fsdp2", "FSDP"),
        ("fsdp2_eager", "remove fully_shard"),
    ],
)
def test_a_wrapper_that_does_the_same_job_is_refused(how: str, message: str) -> None:
    for said in ranks.run(2, _wrapped, how):
        assert message in said, said


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
    own = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(own)
    optimizer.step()  # its own part is welcome
    sent = [own]
    dist.broadcast_object_list(sent, src=0)
    optimizer.load_state_dict(sent[0])
    try:
        optimizer.step()
    except RuntimeError as error:
        optimizer.load_state_dict(own)
        optimizer.step()  # the other rank has, and may have begun the next gather
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


# ------------------------------------------------------------------------------ one way only


def _both(model: nn.Module, first: Any, second: Any, how: str) -> None:
    """Partition with the first options, use with the second."""
    zero_compile.partition(model, first)
    if how == "partition":
        zero_compile.partition(model, second)
    else:
        torch.compile(model, backend="zero3", options=second)(torch.ones(2, 6, dtype=_dtype(model)))


def _dtype(model: nn.Module) -> torch.dtype:
    return next(model.parameters()).dtype


@pytest.mark.parametrize("how", ["partition", "compile"])
@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ({"bf16": True}, None, r"master weights .*: True before, False now"),
        (None, {"reduce_dtype": "float32"}, "reduce_dtype: None before, float32 now"),
    ],
)
def test_another_policy_for_the_same_model_is_refused(
    first: Any, second: Any, message: str, how: str
) -> None:
    torch._dynamo.reset()
    with pytest.raises(Exception, match=message + r"\. .*the same options"):
        _both(Chain().bfloat16(), first, second, how)


def _other_ranks(how: str) -> list[str]:
    from torch.distributed.device_mesh import init_device_mesh

    alone = [dist.new_group([r]) for r in range(dist.get_world_size())][dist.get_rank()]
    replicated = init_device_mesh("cpu", (2, 1))
    same = init_device_mesh("cpu", (2,))
    said = []
    for options in ({"group": alone}, {"mesh": replicated}, {"mesh": same}, None):
        try:
            _both(Chain(), None, options, how)
            said.append("no error")
        except Exception as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("how", ["partition", "compile"])
def test_other_ranks_for_the_same_model_are_refused(how: str) -> None:
    for rank, said in enumerate(ranks.run(2, _other_ranks, how)):
        assert "sharded over [0, 1] before, this rank alone now" in said[0]
        assert f"now sharded over [{rank}], replicated over [0, 1]" in said[1].replace(
            "before, sharded", "before, now sharded"
        )
        assert said[2:] == ["no error"] * 2


def test_blocks_compiled_one_by_one_with_equal_options_share_a_session() -> None:
    model = nn.Sequential(Chain(), Chain()).bfloat16()
    for block in model:
        block.compile(backend="zero3", options={"bf16": True, "reduce_dtype": "float32"})
    model(torch.ones(2, 6, dtype=torch.bfloat16)).sum().backward()
    assert len({session_of(p) for p in model.parameters()}) == 1


def test_master_weights_for_a_wide_model_are_refused_before_it_is_touched() -> None:
    model = Chain()
    with pytest.raises(Exception, match=r"no parameter of the model is torch\.bfloat16"):
        zero_compile.partition(model, {"bf16": True})
    assert session_of(model.one.weight) is None
