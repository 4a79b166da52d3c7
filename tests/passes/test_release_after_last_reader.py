"""release_after_last_reader: each gathered bucket is released once, after its last reader."""

import pytest
import torch
from expecttest import TestCase
from torch import nn
from torch.fx import GraphModule, Node

from graphs import BACKWARD, FORWARD, INFERENCE, gpt, index, lowered, mlp, record, snapshot, text
from zero_compile.analysis.fx_graph import calls
from zero_runtime.ir import ops

P, X = torch.randn(4, 4), torch.randn(4, 4)
mm = torch.ops.aten.mm.default


def release_of(gm: GraphModule) -> Node:
    (release,) = calls(gm.graph, ops.release)
    return release


def touches_gathered_memory(gm: GraphModule, wait: Node) -> list[Node]:
    """Nodes that read a tensor in the gathered storage, found by running the views on real memory."""
    values: dict[Node, object] = {wait: torch.zeros(wait.args[3], dtype=wait.args[4])}
    storage = values[wait].untyped_storage()._cdata
    for node in gm.graph.nodes:
        if node.target in ops.SCHEDULED or node.op != "call_function":
            continue
        if node.all_input_nodes and all(i in values for i in node.all_input_nodes):
            result = node.target(*torch.fx.node.map_arg(node.args, values.get), **node.kwargs)
            parts = result if isinstance(result, list | tuple) else [result]
            if all(t.untyped_storage()._cdata == storage for t in parts):
                values[node] = result
    return [user for node in values for user in node.users if user.target is not ops.release]


class Snapshot(TestCase):
    @snapshot
    def test_before(self):
        gm = mlp().before("release_after_last_reader", FORWARD)
        self.assertExpectedInline(
            text(gm),
            """\
primals_1: float32[16, 8]
primals_2: float32[16]
primals_3: float32[3, 8]
primals_4: float32[8, 16]
primals_5: float32[8]
primals_6: float32[4, 8]
primals_7: float32[4]
token_default = zero3.token()
all_gather_start_default = zero3.all_gather_start(token_default, 0, float32)
all_gather_start_default_1 = zero3.all_gather_start(token_default, 1, float32)
all_gather_wait_default = zero3.all_gather_wait(all_gather_start_default, token_default, 0, 192, float32, cpu)
as_strided_default = aten.as_strided(all_gather_wait_default, [16, 8], [8, 1])
as_strided_default_1 = aten.as_strided(all_gather_wait_default, [16], [1], 128)
permute = aten.permute(as_strided_default, [1, 0])  # recompute
addmm = aten.addmm(as_strided_default_1, primals_3, permute)
relu = aten.relu(addmm)
all_gather_start_default_2 = zero3.all_gather_start(token_default, 2, float32)
all_gather_wait_default_1 = zero3.all_gather_wait(all_gather_start_default_1, token_default, 1, 192, float32, cpu)
as_strided_default_2 = aten.as_strided(all_gather_wait_default_1, [8, 16], [16, 1])
as_strided_default_3 = aten.as_strided(all_gather_wait_default_1, [8], [1], 128)
permute_1 = aten.permute(as_strided_default_2, [1, 0])  # recompute
addmm_1 = aten.addmm(as_strided_default_3, relu, permute_1)
relu_1 = aten.relu(addmm_1)
all_gather_wait_default_2 = zero3.all_gather_wait(all_gather_start_default_2, token_default, 2, 64, float32, cpu)
as_strided_default_4 = aten.as_strided(all_gather_wait_default_2, [4, 8], [8, 1])
as_strided_default_5 = aten.as_strided(all_gather_wait_default_2, [4], [1], 32)
permute_2 = aten.permute(as_strided_default_4, [1, 0])  # recompute
addmm_2 = aten.addmm(as_strided_default_5, relu_1, permute_2)
return [addmm_2, primals_3, primals_4, primals_6, relu, relu_1]
""",
        )

    @snapshot
    def test_after(self):
        self.assertExpectedInline(
            text(mlp().scheduled(FORWARD)),
            """\
primals_1: float32[16, 8]
primals_2: float32[16]
primals_3: float32[3, 8]
primals_4: float32[8, 16]
primals_5: float32[8]
primals_6: float32[4, 8]
primals_7: float32[4]
token_default = zero3.token()
all_gather_start_default = zero3.all_gather_start(token_default, 0, float32)
all_gather_start_default_1 = zero3.all_gather_start(token_default, 1, float32)
all_gather_wait_default = zero3.all_gather_wait(all_gather_start_default, token_default, 0, 192, float32, cpu)
as_strided_default = aten.as_strided(all_gather_wait_default, [16, 8], [8, 1])
as_strided_default_1 = aten.as_strided(all_gather_wait_default, [16], [1], 128)
permute = aten.permute(as_strided_default, [1, 0])  # recompute
addmm = aten.addmm(as_strided_default_1, primals_3, permute)
release_default = zero3.release(all_gather_wait_default, token_default, 0, float32)
relu = aten.relu(addmm)
all_gather_start_default_2 = zero3.all_gather_start(token_default, 2, float32)
all_gather_wait_default_1 = zero3.all_gather_wait(all_gather_start_default_1, token_default, 1, 192, float32, cpu)
as_strided_default_2 = aten.as_strided(all_gather_wait_default_1, [8, 16], [16, 1])
as_strided_default_3 = aten.as_strided(all_gather_wait_default_1, [8], [1], 128)
permute_1 = aten.permute(as_strided_default_2, [1, 0])  # recompute
addmm_1 = aten.addmm(as_strided_default_3, relu, permute_1)
release_default_1 = zero3.release(all_gather_wait_default_1, token_default, 1, float32)
relu_1 = aten.relu(addmm_1)
all_gather_wait_default_2 = zero3.all_gather_wait(all_gather_start_default_2, token_default, 2, 64, float32, cpu)
as_strided_default_4 = aten.as_strided(all_gather_wait_default_2, [4, 8], [8, 1])
as_strided_default_5 = aten.as_strided(all_gather_wait_default_2, [4], [1], 32)
permute_2 = aten.permute(as_strided_default_4, [1, 0])  # recompute
addmm_2 = aten.addmm(as_strided_default_5, relu_1, permute_2)
release_default_2 = zero3.release(all_gather_wait_default_2, token_default, 2, float32)
return [addmm_2, primals_3, primals_4, primals_6, relu, relu_1]
""",
        )


@pytest.mark.parametrize("recording", [mlp, gpt])
@pytest.mark.parametrize("graph", [FORWARD, BACKWARD, INFERENCE])
def test_every_bucket_of_a_model_is_released_once_and_after_its_readers(recording, graph):
    gm = recording().scheduled(graph)
    waits = calls(gm.graph, ops.all_gather_wait)
    assert len(waits) > 1
    for wait in waits:
        (release,) = [user for user in wait.users if user.target is ops.release]
        last = max(index(gm, reader) for reader in touches_gathered_memory(gm, wait))
        assert last < index(gm, release)


def test_a_release_directly_follows_the_matmul_that_reads_last():
    gm = lowered(lambda p, x: (x @ ops.gather(p, 0)).relu().sum(), P, X)
    assert release_of(gm).prev.target is mm


def test_a_release_names_its_bucket_and_dtype():
    gm = lowered(lambda p, x: x @ ops.gather(p, 0), P, X)
    (wait,) = calls(gm.graph, ops.all_gather_wait)
    assert release_of(gm).args[0] is wait
    assert release_of(gm).args[2:] == (0, torch.float32)


def test_the_last_of_several_readers_counts():
    def function(p, x):
        weight = ops.gather(p, 0)
        return ((x @ weight).relu() @ x) @ weight

    gm = lowered(function, P, X)
    assert release_of(gm).prev is calls(gm.graph, mm)[-1]


@pytest.mark.parametrize(
    "view",
    [
        pytest.param(lambda w: w.t(), id="transpose"),
        pytest.param(lambda w: w.view(2, 8).view(4, 4), id="view of a view"),
        pytest.param(lambda w: w[:, :].unsqueeze(0).squeeze(0), id="slice"),
        pytest.param(lambda w: torch.cat([w, w]).split(4)[0] + w.chunk(1)[0], id="chunk added"),
        pytest.param(lambda w: w.chunk(2, dim=1)[1].t().repeat(2, 1), id="chunk"),
        pytest.param(lambda w: w.unbind(0)[3].expand(4, 4), id="unbind"),
    ],
)
def test_readers_through_views_count(view):
    def function(p, x):
        return x.exp() @ x @ view(ops.gather(p, 0))

    gm = lowered(function, P, X)
    assert index(gm, release_of(gm)) > index(gm, calls(gm.graph, mm)[-1])


def test_a_reader_through_a_chunk_counts():
    def function(p, x):
        first, second = ops.gather(p, 0).chunk(2, dim=1)
        return x @ first, (x.sin() @ x) @ second

    gm = lowered(function, P, X)
    assert index(gm, release_of(gm)) > index(gm, calls(gm.graph, mm)[-1])


def test_a_release_waits_for_delayed_elementwise_users():
    """Inductor fuses the product into whatever needs it in memory, here the matmul."""
    gm = lowered(lambda p, x: ((ops.gather(p, 0) * 2).sin() + 1) @ x, P, X)
    assert release_of(gm).prev.target is mm


def test_a_release_does_not_wait_for_what_reads_a_result_from_memory():
    def function(p, x):
        product = ops.gather(p, 0) * 2
        first = product @ x
        return first, (x @ x) @ product

    gm = lowered(function, P, X)
    first = next(n for n in calls(gm.graph, mm) if n.args[0].target is not mm)
    assert release_of(gm).prev is first


def test_a_matmul_reads_from_memory_through_a_view_too():
    """The gradient of a residual stream: held back by its later elementwise users, every bucket
    with a norm's weight in it would stay until the end of backward."""

    def function(p, x):
        product = ops.gather(p, 0) * 2
        first = product.view(2, 8).view(4, 4).t() @ x
        return first, (first @ x) + product

    gm = lowered(function, P, X)
    assert release_of(gm).prev is calls(gm.graph, mm)[0]


def test_what_backward_holds_does_not_grow_with_depth():
    """Each block's norm weight feeds the gradient of the residual stream, which never ends."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

        def forward(self, x):
            return x + self.down(torch.relu(self.up(self.norm(x))))

    def peak(depth: int) -> int:
        model = nn.Sequential(*(Block() for _ in range(depth)))
        recording = record(model, torch.randn(2, 4, 16), bucket_bytes=4096)
        return recording.plans[BACKWARD].peak_gathered_bytes

    assert peak(6) == peak(3)


def test_a_returned_parameter_is_released_after_it_was_copied():
    gm = lowered(lambda p: ops.gather(p, 0), P)
    (kept,) = calls(gm.graph, ops.keep)
    assert index(gm, release_of(gm)) > index(gm, kept)
