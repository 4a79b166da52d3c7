"""tile_cross_entropy: logits of which only a cross-entropy is made exist one tile at a time."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import TestCase
from torch import nn

import ranks
from graphs import BACKWARD, FORWARD, INFERENCE, JOINT, Autocast, Recording, record, snapshot, text
from tiles import adamw, of_tokens
from training import Run, against_unsharded, assert_same_training
from zero_compile.analysis.fx_graph import calls
from zero_runtime.ir import tile_ops

VOCABULARY = 48

Loss = Callable[[torch.Tensor, torch.Tensor], Any]


class Head(nn.Module):
    """A table that is looked up and multiplied with, and a loss of the products."""

    def __init__(self, loss: Loss = F.cross_entropy, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, 16)
        self.loss = loss

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> Any:
        logits = F.linear(self.table(tokens), self.table.weight)
        return self.loss(logits.flatten(0, 1), targets.flatten())


class Narrow(nn.Module):
    """The head alone, as autocast users have it: the loss in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Autocast(nn.Linear(16, VOCABULARY, bias=False))

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.inner(x).float(), targets)


def of(loss: Loss, **options: Any) -> Recording:
    tokens = torch.zeros(2, 5, dtype=torch.int64)
    return record(Head(loss), tokens, tokens, tile_bytes=1024, **options)


def whole_logits(recording: Recording, *graphs: str, rows: int = 10) -> list[str]:
    """Nodes as large as all logits."""
    values = [
        (n.name, n.meta.get("val")) for g in graphs for n in recording.scheduled(g).graph.nodes
    ]
    tensors = [(name, v) for name, v in values if isinstance(v, torch.Tensor)]
    return [name for name, v in tensors if v.numel() == rows * VOCABULARY]


@pytest.mark.parametrize(
    "loss",
    [
        pytest.param(F.cross_entropy, id="mean"),
        pytest.param(partial(F.cross_entropy, reduction="sum"), id="sum"),
        pytest.param(partial(F.cross_entropy, reduction="none"), id="none"),
        pytest.param(partial(F.cross_entropy, ignore_index=3), id="ignored"),
        pytest.param(lambda x, y: F.nll_loss(F.log_softmax(x, -1), y), id="in two steps"),
    ],
)
def test_no_node_holds_all_logits(loss: Loss) -> None:
    recording = of(loss)
    assert not whole_logits(recording, FORWARD, BACKWARD)
    forward, backward = (recording.scheduled(g).graph for g in (FORWARD, BACKWARD))
    assert len(calls(forward, tile_ops.logits)) == 3
    assert len(calls(backward, tile_ops.logits_backward)) == 3


def test_without_gradients_either() -> None:
    recording = of(F.cross_entropy, train=False, infer=True)
    assert not whole_logits(recording, INFERENCE)


def test_under_autocast_the_logits_are_narrow_and_the_loss_is_not() -> None:
    targets = torch.zeros(10, dtype=torch.int64)
    recording = record(Narrow(), torch.randn(10, 16), targets, tile_bytes=512)
    assert not whole_logits(recording, FORWARD, BACKWARD)
    gradients = calls(recording.scheduled(BACKWARD).graph, tile_ops.logits_backward)
    assert {n.meta["val"].dtype for n in gradients} == {torch.bfloat16}
    states = calls(recording.scheduled(FORWARD).graph, tile_ops.logits)
    assert {n.meta["val"].dtype for n in states} == {torch.float32}


@pytest.mark.parametrize(
    "loss",
    [
        pytest.param(lambda x, y: (F.cross_entropy(x, y), x), id="logits are returned"),
        pytest.param(lambda x, y: F.cross_entropy(x * 2, y), id="scaled"),
        pytest.param(partial(F.cross_entropy, label_smoothing=0.1), id="smoothed"),
        pytest.param(lambda x, y: F.cross_entropy(x, y, torch.arange(48.0)), id="weighted"),
        pytest.param(lambda x, y: F.log_softmax(x, -1).exp().sum(), id="a softmax"),
        pytest.param(lambda x, y: F.cross_entropy(x.t(), y.repeat(5)[:48] % 10), id="transposed"),
    ],
)
def test_other_uses_keep_them_whole(loss: Loss) -> None:
    recording = of(loss)
    assert whole_logits(recording, FORWARD)
    assert not calls(recording.scheduled(FORWARD).graph, tile_ops.logits)


def _reduced(kind: str, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    if kind == "weighted rows":
        rows = F.cross_entropy(logits, targets, reduction="none", ignore_index=3)
        return (rows * torch.linspace(0.5, 2.0, len(rows))).sum() / len(rows)
    large = logits * 1 + 300.0 if kind == "large" else logits
    return F.cross_entropy(large, targets, ignore_index=3)


def _train(kind: str) -> tuple[Run, Run]:
    torch.manual_seed(0)
    model = Head(partial(_reduced, kind), 250)
    plain, tiled = against_unsharded(
        model,
        of_tokens(vocabulary=250),
        lambda m, tokens, targets: m(tokens, targets),
        adamw,
        options={"tile_bytes": 2048},
    )
    return plain.bare(), tiled.bare()


@pytest.mark.parametrize("kind", ["mean", "weighted rows"])
def test_it_trains_as_the_whole_does(kind: str) -> None:
    """One rank: with a mean over targets that are not ignored, ranks would weigh rows differently."""
    for plain, tiled in ranks.run(1, _train, kind):
        assert_same_training(plain, tiled, tolerance=1e-6)


def test_the_kernels_are_a_cross_entropy_and_its_gradient() -> None:
    x, weight, targets = torch.randn(7, 4) * 30, torch.randn(4, 10), torch.randint(10, (7,))
    scale = torch.rand(7, 1)
    logits = (x @ weight).requires_grad_()
    (F.cross_entropy(logits, targets, reduction="none") * scale.squeeze(1)).sum().backward()
    state, lse = None, logits.detach().logsumexp(1, keepdim=True)
    gradients = []
    for start, stop in ((0, 4), (4, 9), (9, 10)):
        tile = weight[:, start:stop]
        state = tile_ops.logits(state, x, tile, targets, start, torch.float32)
        gradient = tile_ops.logits_backward(x, tile, targets, lse, scale, start, torch.float32)
        gradients.append(gradient)
    assert state is not None
    torch.testing.assert_close(state[0] + state[1].log(), lse.squeeze(1))
    picked = logits.detach().gather(1, targets.unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(state[2], picked)
    torch.testing.assert_close(torch.cat(gradients, 1), logits.grad)


class Snapshot(TestCase):
    @snapshot
    def test_before(self):
        gm = of(F.cross_entropy).before("tile_cross_entropy", JOINT)
        self.assertExpectedInline(
            text(gm),
            """\
primals_1: float32[48, 16]
primals_2: int64[2, 5]
tangents_1: float32[]
gather_default = zero3.gather(primals_1, 1, None, [16, 16])
gather_default_1 = zero3.gather(primals_1, 2, None, [16, 16])
gather_default_2 = zero3.gather(primals_1, 3, None, [16, 16])
lookup_default = zero3.lookup(None, gather_default, primals_2, 0, 48)
lookup_default_1 = zero3.lookup(lookup_default, gather_default_1, primals_2, 16, 48)
lookup_default_2 = zero3.lookup(lookup_default_1, gather_default_2, primals_2, 32, 48)
view = aten.view(lookup_default_2, [10, 16])
permute_default = aten.permute(gather_default, [1, 0])
mm_default = aten.mm(view, permute_default)
permute_default_1 = aten.permute(gather_default_1, [1, 0])
mm_default_1 = aten.mm(view, permute_default_1)
permute_default_2 = aten.permute(gather_default_2, [1, 0])
mm_default_2 = aten.mm(view, permute_default_2)
cat_default = aten.cat([mm_default, mm_default_1, mm_default_2], 1)
view_3 = aten.view(primals_2, [10])
amax = aten.amax(cat_default, [1], True)
sub = aten.sub.Tensor(cat_default, amax)
exp = aten.exp(sub)
sum_1 = aten.sum.dim_IntList(exp, [1], True)
log = aten.log(sum_1)
sub_1 = aten.sub.Tensor(sub, log)
ne = aten.ne.Scalar(view_3, -100)
full_default = aten.full([], 0, dtype=int64, layout=torch.strided, device=cpu, pin_memory=False)
where = aten.where.self(ne, view_3, full_default)
unsqueeze = aten.unsqueeze(where, 1)
gather_1 = aten.gather(sub_1, 1, unsqueeze)
squeeze = aten.squeeze.dim(gather_1, 1)
neg = aten.neg(squeeze)
ne_1 = aten.ne.Scalar(view_3, -100)
full_default_1 = aten.full([], 0.0, dtype=float32, layout=torch.strided, device=cpu, pin_memory=False)
where_1 = aten.where.self(ne_1, neg, full_default_1)
ne_2 = aten.ne.Scalar(view_3, -100)
sum_2 = aten.sum(ne_2)
convert_element_type = prims.convert_element_type(sum_2, float32)
sum_3 = aten.sum(where_1)
div = aten.div.Tensor(sum_3, convert_element_type)
div_1 = aten.div.Tensor(tangents_1, convert_element_type)
unsqueeze_1 = aten.unsqueeze(view_3, 1)
ne_3 = aten.ne.Scalar(unsqueeze_1, -100)
full_default_2 = aten.full([], 0, dtype=int64, layout=torch.strided, device=cpu, pin_memory=False)
where_2 = aten.where.self(ne_3, unsqueeze_1, full_default_2)
iota_default = prims.iota(48, start=0, step=1, dtype=int64, device=cpu, requires_grad=False)
view_default = aten.view(iota_default, [1, 48])
expand_default = aten.expand(where_2, [10, 48])
eq_tensor = aten.eq.Tensor(expand_default, view_default)
scalar_tensor_default = aten.scalar_tensor(0, dtype=float32, layout=torch.strided, device=cpu)
scalar_tensor_default_1 = aten.scalar_tensor(-1.0, dtype=float32, layout=torch.strided, device=cpu)
where_self = aten.where.self(eq_tensor, scalar_tensor_default_1, scalar_tensor_default)
ne_4 = aten.ne.Scalar(unsqueeze_1, -100)
full_default_4 = aten.full([], 0.0, dtype=float32, layout=torch.strided, device=cpu, pin_memory=False)
where_3 = aten.where.self(ne_4, div_1, full_default_4)
mul = aten.mul.Tensor(where_self, where_3)
exp_1 = aten.exp(sub_1)
sum_4 = aten.sum.dim_IntList(mul, [1], True)
mul_1 = aten.mul.Tensor(exp_1, sum_4)
sub_2 = aten.sub.Tensor(mul, mul_1)
permute_1 = aten.permute(sub_2, [1, 0])
slice_tensor_3 = aten.slice.Tensor(permute_1, 0, 0, 16)
mm_default_4 = aten.mm(slice_tensor_3, view)
reduce_default = zero3.reduce(mm_default_4, 1)
slice_tensor_4 = aten.slice.Tensor(permute_1, 0, 16, 32)
mm_default_5 = aten.mm(slice_tensor_4, view)
reduce_default_1 = zero3.reduce(mm_default_5, 2)
slice_tensor_5 = aten.slice.Tensor(permute_1, 0, 32, 48)
mm_default_6 = aten.mm(slice_tensor_5, view)
reduce_default_2 = zero3.reduce(mm_default_6, 3)
permute_default_3 = aten.permute(gather_default, [1, 0])
permute_default_4 = aten.permute(permute_default_3, [1, 0])
slice_tensor = aten.slice.Tensor(sub_2, 1, 0, 16)
mm_default_3 = aten.mm(slice_tensor, permute_default_4)
permute_default_5 = aten.permute(gather_default_1, [1, 0])
permute_default_6 = aten.permute(permute_default_5, [1, 0])
slice_tensor_1 = aten.slice.Tensor(sub_2, 1, 16, 32)
addmm_default = aten.addmm(mm_default_3, slice_tensor_1, permute_default_6)
permute_default_7 = aten.permute(gather_default_2, [1, 0])
permute_default_8 = aten.permute(permute_default_7, [1, 0])
slice_tensor_2 = aten.slice.Tensor(sub_2, 1, 32, 48)
addmm_default_1 = aten.addmm(addmm_default, slice_tensor_2, permute_default_8)
view_6 = aten.view(addmm_default_1, [2, 5, 16])
ge = aten.ge.Scalar(primals_2, 0)
lt = aten.lt.Scalar(primals_2, 48)
bitwise_and = aten.bitwise_and.Tensor(ge, lt)
ne_5 = aten.ne.Scalar(primals_2, -1)
bitwise_and_1 = aten.bitwise_and.Tensor(bitwise_and, ne_5)
unsqueeze_2 = aten.unsqueeze(bitwise_and_1, -1)
lookup_backward_default = zero3.lookup_backward(view_6, primals_2, unsqueeze_2, 0, 16)
reduce_default_3 = zero3.reduce(lookup_backward_default, 1)
lookup_backward_default_1 = zero3.lookup_backward(view_6, primals_2, unsqueeze_2, 16, 16)
reduce_default_4 = zero3.reduce(lookup_backward_default_1, 2)
lookup_backward_default_2 = zero3.lookup_backward(view_6, primals_2, unsqueeze_2, 32, 16)
reduce_default_5 = zero3.reduce(lookup_backward_default_2, 3)
join_default = zero3.join([reduce_default, reduce_default_1, reduce_default_2, reduce_default_3, reduce_default_4, reduce_default_5], 0, [48, 16])
return [div, join_default, None]
""",
        )

    @snapshot
    def test_after(self):
        gm = of(F.cross_entropy).after("tile_cross_entropy", JOINT)
        self.assertExpectedInline(
            text(gm),
            """\
primals_1: float32[48, 16]
primals_2: int64[2, 5]
tangents_1: float32[]
gather_default = zero3.gather(primals_1, 1, None, [16, 16])
gather_default_1 = zero3.gather(primals_1, 2, None, [16, 16])
gather_default_2 = zero3.gather(primals_1, 3, None, [16, 16])
lookup_default = zero3.lookup(None, gather_default, primals_2, 0, 48)
lookup_default_1 = zero3.lookup(lookup_default, gather_default_1, primals_2, 16, 48)
lookup_default_2 = zero3.lookup(lookup_default_1, gather_default_2, primals_2, 32, 48)
view = aten.view(lookup_default_2, [10, 16])
view_3 = aten.view(primals_2, [10])
ne = aten.ne.Scalar(view_3, -100)
full_default = aten.full([], 0, dtype=int64, layout=torch.strided, device=cpu, pin_memory=False)
where = aten.where.self(ne, view_3, full_default)
unsqueeze = aten.unsqueeze(where, 1)
squeeze_dim = aten.squeeze.dim(unsqueeze, 1)
permute_default_9 = aten.permute(gather_default, [1, 0])
logits_default = zero3.logits(None, view, permute_default_9, squeeze_dim, 0, float32)
permute_default_10 = aten.permute(gather_default_1, [1, 0])
logits_default_1 = zero3.logits(logits_default, view, permute_default_10, squeeze_dim, 16, float32)
permute_default_11 = aten.permute(gather_default_2, [1, 0])
logits_default_2 = zero3.logits(logits_default_1, view, permute_default_11, squeeze_dim, 32, float32)
select_int = aten.select.int(logits_default_2, 0, 0)
select_int_1 = aten.select.int(logits_default_2, 0, 1)
select_int_2 = aten.select.int(logits_default_2, 0, 2)
log_default = aten.log(select_int_1)
add_tensor = aten.add.Tensor(log_default, select_int)
unsqueeze_default = aten.unsqueeze(add_tensor, 1)
unsqueeze_default_1 = aten.unsqueeze(select_int_2, 1)
sub_tensor = aten.sub.Tensor(unsqueeze_default_1, unsqueeze_default)
squeeze = aten.squeeze.dim(sub_tensor, 1)
neg = aten.neg(squeeze)
ne_1 = aten.ne.Scalar(view_3, -100)
full_default_1 = aten.full([], 0.0, dtype=float32, layout=torch.strided, device=cpu, pin_memory=False)
where_1 = aten.where.self(ne_1, neg, full_default_1)
ne_2 = aten.ne.Scalar(view_3, -100)
sum_2 = aten.sum(ne_2)
convert_element_type = prims.convert_element_type(sum_2, float32)
sum_3 = aten.sum(where_1)
div = aten.div.Tensor(sum_3, convert_element_type)
div_1 = aten.div.Tensor(tangents_1, convert_element_type)
unsqueeze_1 = aten.unsqueeze(view_3, 1)
ne_3 = aten.ne.Scalar(unsqueeze_1, -100)
full_default_2 = aten.full([], 0, dtype=int64, layout=torch.strided, device=cpu, pin_memory=False)
where_2 = aten.where.self(ne_3, unsqueeze_1, full_default_2)
ne_4 = aten.ne.Scalar(unsqueeze_1, -100)
full_default_4 = aten.full([], 0.0, dtype=float32, layout=torch.strided, device=cpu, pin_memory=False)
where_3 = aten.where.self(ne_4, div_1, full_default_4)
squeeze_dim_1 = aten.squeeze.dim(where_2, 1)
permute_default_12 = aten.permute(gather_default, [1, 0])
logits_backward_default = zero3.logits_backward(view, permute_default_12, squeeze_dim_1, unsqueeze_default, where_3, 0, float32)
permute_default_3 = aten.permute(gather_default, [1, 0])
permute_default_4 = aten.permute(permute_default_3, [1, 0])
mm_default_3 = aten.mm(logits_backward_default, permute_default_4)
permute_default_13 = aten.permute(logits_backward_default, [1, 0])
mm_default_4 = aten.mm(permute_default_13, view)
reduce_default = zero3.reduce(mm_default_4, 1)
permute_default_14 = aten.permute(gather_default_1, [1, 0])
logits_backward_default_1 = zero3.logits_backward(view, permute_default_14, squeeze_dim_1, unsqueeze_default, where_3, 16, float32)
permute_default_5 = aten.permute(gather_default_1, [1, 0])
permute_default_6 = aten.permute(permute_default_5, [1, 0])
addmm_default = aten.addmm(mm_default_3, logits_backward_default_1, permute_default_6)
permute_default_15 = aten.permute(logits_backward_default_1, [1, 0])
mm_default_5 = aten.mm(permute_default_15, view)
reduce_default_1 = zero3.reduce(mm_default_5, 2)
permute_default_16 = aten.permute(gather_default_2, [1, 0])
logits_backward_default_2 = zero3.logits_backward(view, permute_default_16, squeeze_dim_1, unsqueeze_default, where_3, 32, float32)
permute_default_7 = aten.permute(gather_default_2, [1, 0])
permute_default_8 = aten.permute(permute_default_7, [1, 0])
addmm_default_1 = aten.addmm(addmm_default, logits_backward_default_2, permute_default_8)
permute_default_17 = aten.permute(logits_backward_default_2, [1, 0])
mm_default_6 = aten.mm(permute_default_17, view)
reduce_default_2 = zero3.reduce(mm_default_6, 3)
view_6 = aten.view(addmm_default_1, [2, 5, 16])
ge = aten.ge.Scalar(primals_2, 0)
lt = aten.lt.Scalar(primals_2, 48)
bitwise_and = aten.bitwise_and.Tensor(ge, lt)
ne_5 = aten.ne.Scalar(primals_2, -1)
bitwise_and_1 = aten.bitwise_and.Tensor(bitwise_and, ne_5)
unsqueeze_2 = aten.unsqueeze(bitwise_and_1, -1)
lookup_backward_default = zero3.lookup_backward(view_6, primals_2, unsqueeze_2, 0, 16)
reduce_default_3 = zero3.reduce(lookup_backward_default, 1)
lookup_backward_default_1 = zero3.lookup_backward(view_6, primals_2, unsqueeze_2, 16, 16)
reduce_default_4 = zero3.reduce(lookup_backward_default_1, 2)
lookup_backward_default_2 = zero3.lookup_backward(view_6, primals_2, unsqueeze_2, 32, 16)
reduce_default_5 = zero3.reduce(lookup_backward_default_2, 3)
join_default = zero3.join([reduce_default, reduce_default_1, reduce_default_2, reduce_default_3, reduce_default_4, reduce_default_5], 0, [48, 16])
return [div, join_default, None]
""",
        )
