"""offload_activations: saved tensors leave the device in forward."""

import functools
from typing import Any

import pytest
import torch
from expecttest import TestCase
from torch import nn
from torch.fx import GraphModule

import zero_compile
from graphs import FORWARD, Recording, call_before, named, names, record, snapshot, text
from zero_compile.analysis.fx_graph import calls, output_node, readers
from zero_compile.config.options import parse
from zero_compile.passes.offload_activations import offload_activations
from zero_compile.scheduler.activations import Move
from zero_compile.verify import verify_moved
from zero_runtime.errors import OptionError, PlanError
from zero_runtime.ir import ops
from zero_runtime.ir.plan import Tier

ANY = {"device": "cpu", "min_bytes": 1}


@functools.cache
def recorded() -> Recording:
    """Four linears; the first activation leaves and comes back."""
    layers = [nn.Linear(64, 64) for _ in range(4)]
    model = nn.Sequential(*(m for layer in layers for m in (layer, nn.ReLU())))
    return record(model, torch.randn(4096, 64), offload_activations=ANY, run_backward=True)


class Snapshot(TestCase):
    maxDiff = None

    @snapshot
    def test_before(self):
        gm = recorded().before("offload_activations", FORWARD)
        self.assertExpectedInline(
            text(gm),
            """\
primals_1: float32[64, 64]
primals_2: float32[64]
primals_3: float32[4096, 64]
primals_4: float32[64, 64]
primals_5: float32[64]
primals_6: float32[64, 64]
primals_7: float32[64]
primals_8: float32[64, 64]
primals_9: float32[64]
token_default = zero3.token()
all_gather_start_default = zero3.all_gather_start(token_default, 0, float32)
all_gather_wait_default = zero3.all_gather_wait(all_gather_start_default, token_default, 0, 16640, float32, cpu)
as_strided_default = aten.as_strided(all_gather_wait_default, [64, 64], [64, 1])
as_strided_default_1 = aten.as_strided(all_gather_wait_default, [64], [1], 4096)
as_strided_default_2 = aten.as_strided(all_gather_wait_default, [64, 64], [64, 1], 4160)
as_strided_default_3 = aten.as_strided(all_gather_wait_default, [64], [1], 8256)
as_strided_default_4 = aten.as_strided(all_gather_wait_default, [64, 64], [64, 1], 8320)
as_strided_default_5 = aten.as_strided(all_gather_wait_default, [64], [1], 12416)
as_strided_default_6 = aten.as_strided(all_gather_wait_default, [64, 64], [64, 1], 12480)
as_strided_default_7 = aten.as_strided(all_gather_wait_default, [64], [1], 16576)
permute = aten.permute(as_strided_default, [1, 0])  # recompute
addmm = aten.addmm(as_strided_default_1, primals_3, permute)
relu = aten.relu(addmm)
permute_1 = aten.permute(as_strided_default_2, [1, 0])  # recompute
addmm_1 = aten.addmm(as_strided_default_3, relu, permute_1)
relu_1 = aten.relu(addmm_1)
permute_2 = aten.permute(as_strided_default_4, [1, 0])  # recompute
addmm_2 = aten.addmm(as_strided_default_5, relu_1, permute_2)
relu_2 = aten.relu(addmm_2)
permute_3 = aten.permute(as_strided_default_6, [1, 0])  # recompute
addmm_3 = aten.addmm(as_strided_default_7, relu_2, permute_3)
relu_3 = aten.relu(addmm_3)
le = aten.le.Scalar(relu_3, 0)
return [relu_3, primals_3, primals_4, primals_6, primals_8, relu, relu_1, relu_2, le]
""",
        )

    @snapshot
    def test_after(self):
        gm = recorded().after("offload_activations", FORWARD)
        self.assertExpectedInline(
            text(gm),
            """\
primals_1: float32[64, 64]
primals_2: float32[64]
primals_3: float32[4096, 64]
primals_4: float32[64, 64]
primals_5: float32[64]
primals_6: float32[64, 64]
primals_7: float32[64]
primals_8: float32[64, 64]
primals_9: float32[64]
token_default = zero3.token()
all_gather_start_default = zero3.all_gather_start(token_default, 0, float32)
all_gather_wait_default = zero3.all_gather_wait(all_gather_start_default, token_default, 0, 16640, float32, cpu)
as_strided_default = aten.as_strided(all_gather_wait_default, [64, 64], [64, 1])
as_strided_default_1 = aten.as_strided(all_gather_wait_default, [64], [1], 4096)
as_strided_default_2 = aten.as_strided(all_gather_wait_default, [64, 64], [64, 1], 4160)
as_strided_default_3 = aten.as_strided(all_gather_wait_default, [64], [1], 8256)
as_strided_default_4 = aten.as_strided(all_gather_wait_default, [64, 64], [64, 1], 8320)
as_strided_default_5 = aten.as_strided(all_gather_wait_default, [64], [1], 12416)
as_strided_default_6 = aten.as_strided(all_gather_wait_default, [64, 64], [64, 1], 12480)
as_strided_default_7 = aten.as_strided(all_gather_wait_default, [64], [1], 16576)
permute = aten.permute(as_strided_default, [1, 0])  # recompute
addmm = aten.addmm(as_strided_default_1, primals_3, permute)
relu = aten.relu(addmm)
permute_1 = aten.permute(as_strided_default_2, [1, 0])  # recompute
addmm_1 = aten.addmm(as_strided_default_3, relu, permute_1)
relu_1 = aten.relu(addmm_1)
permute_2 = aten.permute(as_strided_default_4, [1, 0])  # recompute
offload_start_default = zero3.offload_start(relu, token_default, 0, [64, 1], False)
addmm_2 = aten.addmm(as_strided_default_5, relu_1, permute_2)
relu_2 = aten.relu(addmm_2)
permute_3 = aten.permute(as_strided_default_6, [1, 0])  # recompute
offload_wait_default = zero3.offload_wait(relu, token_default, 0)
addmm_3 = aten.addmm(as_strided_default_7, relu_2, permute_3)
relu_3 = aten.relu(addmm_3)
le = aten.le.Scalar(relu_3, 0)
return [relu_3, primals_3, primals_4, primals_6, primals_8, offload_start_default, relu_1, relu_2, le]
""",
        )


# ------------------------------------------------------------------------------ the graph


def moved(start: str | None, wait: str | None, name: str = "relu") -> GraphModule:
    """The forward with one tensor sent off between two nodes, checked."""
    gm = recorded().before("offload_activations", FORWARD)
    move = Move(name, Tier.HOST, start, wait, "", "")
    offload_activations(gm, moves=[move])
    verify_moved(gm)
    return gm


@pytest.mark.parametrize("start", ["", "addmm", "addmm_1", "addmm_3", None])
@pytest.mark.parametrize("wait", ["", "addmm_1", "addmm_3", None])
def test_wherever_a_move_says_a_tensor_leaves_after_it_is_made_and_is_free_after_its_use(
    start: str | None, wait: str | None
) -> None:
    order = names(moved(start, wait))
    out, end = order.index("offload_start_default"), order.index("offload_wait_default")
    assert order.index("addmm_1") < end, "the matmul that reads it"
    assert order.index("relu") < out < end
    if start is None:
        assert out > order.index("addmm_3")


def test_backward_gets_what_stands_for_the_tensor_in_its_place() -> None:
    gm = recorded().before("offload_activations", FORWARD)
    before = [str(n) for n in output_node(gm.graph).args[0]]
    after = [str(n) for n in output_node(moved("addmm_1", None).graph).args[0]]
    assert after == ["offload_start_default" if n == "relu" else n for n in before]
    (start,) = calls(moved("addmm_1", None).graph, ops.offload_start)
    host = start.meta["val"]
    assert (host.shape, host.device.type) == ((4096 * 64,), "cpu")


def test_a_reader_behind_the_wait_is_refused() -> None:
    gm = moved("addmm_1", None)
    call_before(output_node(gm.graph), torch.ops.aten.exp.default, named(gm, "relu"))
    with pytest.raises(PlanError, match=r"\['exp_default'\] read relu after its memory is free"):
        verify_moved(gm)


def test_a_tensor_that_is_never_waited_for_is_refused() -> None:
    gm = moved("addmm_1", None)
    gm.graph.erase_node(named(gm, "offload_wait_default"))
    with pytest.raises(PlanError, match="relu is waited for 0 times on its way out"):
        verify_moved(gm)


def test_a_backward_that_would_get_the_tensor_itself_is_refused() -> None:
    gm = moved("addmm_1", None)
    start = named(gm, "offload_start_default")
    output_node(gm.graph).replace_input_with(start, named(gm, "relu_2"))
    with pytest.raises(PlanError, match="backward does not get what offload_start_default returns"):
        verify_moved(gm)


def test_every_schedule_keeps_the_order() -> None:
    gm = recorded().scheduled(FORWARD)
    order = names(gm)
    (wait,) = calls(gm.graph, ops.offload_wait)
    saved = wait.all_input_nodes[0]
    assert all(order.index(r.name) <= order.index(wait.name) for r in readers(saved))


# ------------------------------------------------------------------------------ options


def test_true_means_the_host_and_false_nothing() -> None:
    assert parse({"offload_activations": True}).offload_activations.device == "cpu"
    assert parse({"offload_activations": False}) == parse({})
    assert parse({"offload_activations": {"device": "cpu", "min_bytes": 1e6}}).offload_activations


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (1, r"option 'offload_activations': .*, got 1$"),
        ("cpu", r"option 'offload_activations': .*, got 'cpu'$"),
        ({"device": "disk"}, r"'offload_activations\.device': .*'none', 'cpu' or 'nvme'"),
        ({"device": "cpu", "min_bytes": -1}, r"'offload_activations\.min_bytes': .*\(got -1\)"),
        (
            {"device": "cpu", "min_byte": 1},
            r"'offload_activations\.min_byte'\. Did you mean 'min_bytes'",
        ),
    ],
)
def test_a_wrong_section_is_an_error_that_names_the_key(value: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        parse({"offload_activations": value})


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"device": "nvme"}, "offload_activations says device 'nvme' and no folder"),
        (
            {"device": "cpu", "nvme_path": "/tmp"},
            "offload_activations has an nvme_path and device 'cpu': say device 'nvme'",
        ),
    ],
)
def test_a_folder_and_nvme_go_together(section: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        zero_compile.partition(nn.Linear(4, 4), {"offload_activations": section})
