"""Every error says what is wrong and what to do: those that no other test file provokes."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_hazards import Chain
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

import zero_compile
import zero_compile.backend
from zero_compile.capture.captured_graph import Capture, lay_out_rest
from zero_compile.config.options import parse
from zero_runtime.comm.transports import ALONE
from zero_runtime.eager.open_session import open_session
from zero_runtime.errors import (
    GroupError,
    OptionError,
    PlanError,
    UnsupportedError,
    ZeroError,
)
from zero_runtime.executor import Executor, current
from zero_runtime.ir import ops
from zero_runtime.ir.plan import (
    BucketPlan,
    Channel,
    Phase,
    Plan,
    Slot,
    StatePolicy,
    Step,
    StepKind,
)
from zero_runtime.session import session_of
from zero_runtime.sharding.bucket import Bucket
from zero_runtime.sharding.parameter_state import Entry
from zero_runtime.sharding.sharded_gradient import ShardedGradient

FakeGroup = Callable[[int], None]

# ------------------------------------------------------------------------------ groups and meshes


def test_a_group_and_a_mesh_together_are_refused(fake_group: FakeGroup) -> None:
    fake_group(2)
    both = {"group": dist.group.WORLD, "mesh": init_device_mesh("cpu", (2,))}
    with pytest.raises(OptionError, match=r"'group' and 'mesh' say the same .* give one of them"):
        parse(both)


def test_a_mesh_without_this_rank_is_refused(fake_group: FakeGroup) -> None:
    fake_group(4)
    mesh = DeviceMesh("cpu", [1, 2])
    with pytest.raises(GroupError, match="this rank is not part of the device mesh DeviceMesh"):
        zero_compile.partition(Chain(), {"mesh": mesh})


def test_a_mesh_of_three_dimensions_is_refused_with_which_to_pass(fake_group: FakeGroup) -> None:
    fake_group(8)
    mesh = init_device_mesh("cpu", (2, 2, 2))
    with pytest.raises(GroupError, match=r"mesh of 3 dimensions.*sub-mesh.*'replicate', 'shard'"):
        zero_compile.partition(Chain(), {"mesh": mesh})


def test_ranks_without_a_process_group_are_told_how_many_there_should_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(GroupError, match=r"WORLD_SIZE is 3 .*init_process_group\(\) before"):
        zero_compile.partition(Chain())


# ------------------------------------------------------------------------------ parameters, models


def test_a_parameter_that_is_a_dtensor_is_refused(fake_group: FakeGroup) -> None:
    fake_group(2)
    model = nn.Linear(4, 4)
    mesh = init_device_mesh("cpu", (2,))
    model.weight = nn.Parameter(DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0)]))
    with pytest.raises(UnsupportedError, match=r"^weight is a DTensor.*zero3 on plain"):
        zero_compile.partition(model)
    assert session_of(model.bias) is None


def test_a_parameter_of_another_layout_is_refused() -> None:
    model = nn.ParameterDict({"table": nn.Parameter(torch.eye(3).to_sparse())})
    with pytest.raises(UnsupportedError, match=r"^table has layout torch\.sparse_coo; only strid"):
        zero_compile.partition(model)


def test_a_model_that_fsdp_manages_is_refused_by_name(fake_group: FakeGroup) -> None:
    fake_group(2)
    model = Chain()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    message = r"FSDPChain is managed by FSDP.*remove fully_shard / FullyShardedDataParallel"
    with pytest.raises(Exception, match=message):
        torch.compile(model, backend="zero3")(torch.ones(2, 6))


def test_a_model_inside_ddp_is_refused_with_what_to_do(fake_group: FakeGroup) -> None:
    fake_group(2)
    model = nn.parallel.DistributedDataParallel(torch.compile(Chain(), backend="zero3"))
    message = r"wrapped in DistributedDataParallel, which .* Remove the DDP wrapper: zero3 replaces"
    with pytest.raises(Exception, match=message):
        model(torch.ones(2, 6))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_conversion_after_partitioning_names_parameter_and_dtypes(stage: int) -> None:
    model = nn.Linear(4, 4)
    zero_compile.partition(model, stage=stage)
    message = r"^weight is partitioned as torch\.float32 \(4, 4\) .* become torch\.float16 \(4, 4\)"
    with pytest.raises(UnsupportedError, match=message):
        model.half()


def test_a_leaf_class_that_the_model_lacks_is_named() -> None:
    with pytest.raises(OptionError, match=r"the class or the name 'LSTM'\. Its classes: Linear\."):
        zero_compile.partition(nn.Linear(2, 2), {"leaf_modules": [nn.LSTM]})


def test_a_compiled_model_that_never_ran_is_named_with_its_first_parameters(
    fake_group: FakeGroup,
) -> None:
    fake_group(2)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    compiled = torch.compile(model, backend="zero3")
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    message = r"no graph of Sequential.*\(0\.weight, 0\.bias, 1\.weight, \.\.\.\) are neither"
    with pytest.raises(UnsupportedError, match=message):
        optimizer.step()


# ------------------------------------------------------------------------------ options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({1: True}, r"^names of options are strings, got 1\. Valid options: aio, bf16, "),
        ([("bf16", True)], r"^options: expected a dict of names and values, got \[\("),
        ({"bf16": {1: True}}, r"^option 'bf16': unknown key bf16\.1\. Valid keys: enabled\.$"),
        (
            {"fp16": {"hysteresis": 0}},
            r"^option 'fp16': fp16\.hysteresis: Input should be greater than 0 \(got 0\)$",
        ),
        ({"device_memory": "much"}, r"^option 'device_memory': 'much' is not a size: write bytes"),
        (
            {"reduce_dtype": "float32", "communication_data_type": "fp32"},
            r"^options 'reduce_dtype' and 'communication_data_type' mean the same: give one of them$",
        ),
        ({"leaf_modules": 3}, r"^option 'leaf_modules.*\(got 3\)$"),
    ],
)
def test_a_wrong_option_is_named_once_with_what_was_given(options: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        parse(options)


@pytest.mark.parametrize("stage", [0, 4, "3", None])
def test_a_stage_that_there_is_not_is_refused(stage: Any) -> None:
    with pytest.raises(OptionError, match=rf"^stage {stage!r}: ZeRO has the stages 1, 2 and 3$"):
        zero_compile.partition(Chain(), stage=stage)


# ------------------------------------------------------------------------------ our own mistakes


def test_a_graph_called_with_another_parameter_is_our_mistake() -> None:
    parameter, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    session = open_session(ALONE, lay_out_rest, StatePolicy())
    capture = Capture(session, {1: 0}, [session.claim("up.weight", parameter)], "graph0")
    run = capture.bound(lambda *args: len(args))
    assert run(other, parameter) == 2
    with pytest.raises(PlanError, match=r"compiled for up\.weight .*Please report it\.$"):
        run(parameter, other)


def test_the_place_of_what_no_bucket_holds_is_an_error() -> None:
    entry = Entry("up.weight", nn.Parameter(torch.ones(2)))
    with pytest.raises(ZeroError, match=r"^parameter up\.weight is not partitioned yet$"):
        _ = entry.place


@pytest.mark.parametrize(
    "call",
    [
        lambda t: ops.all_gather_start(t, 0, torch.float32),
        lambda t: ops.release(t, t, 0, torch.float32),
        lambda t: ops.reduce_scatter_wait(t, t, 0, 1, torch.float32, t.device),
    ],
)
def test_an_operator_outside_a_graph_says_so(call: Callable[[torch.Tensor], Any]) -> None:
    with pytest.raises(PlanError, match=r"^a zero3 operator ran outside a graph that a zero"):
        call(torch.zeros(1, dtype=torch.int64))


GATHER, WAIT, RELEASE = (
    StepKind.ALL_GATHER_START,
    StepKind.ALL_GATHER_WAIT,
    StepKind.RELEASE,
)


def _executor(compiled: Callable[[Any], Any]) -> Executor:
    """Of a graph that is planned to gather, wait for and release its one bucket."""
    slot = Slot("weight", (4,), (1,), True, 0, 4)
    bucket = BucketPlan("float32", "cpu", 1, 32, (slot,))
    steps = tuple(
        Step(i, kind, 0, "float32", 128, Channel.COMPUTE, "x", 0, 0, 0)
        for i, kind in enumerate((GATHER, WAIT, RELEASE))
    )
    plan = Plan("graph0.forward", Phase.FORWARD, 1, "one_ahead", (bucket,), steps)
    session = open_session(ALONE, lay_out_rest, StatePolicy())
    return Executor(session, plan, [Bucket(bucket, ALONE)], compiled, {})


def _run(order: Sequence[StepKind]) -> list[torch.Tensor]:
    """What a graph does that takes its steps in this order."""
    calls: dict[StepKind, Callable[[], Any]] = {
        GATHER: lambda: current().start_gather(0, torch.float32),
        WAIT: lambda: current().finish_gather(0),
        RELEASE: lambda: current().release(0, torch.float32),
        StepKind.REDUCE_SCATTER_START: lambda: current().start_reduce(0, [], []),
        StepKind.REDUCE_SCATTER_WAIT: lambda: current().finish_reduce(0),
    }
    for kind in order:
        calls[kind]()
    return []


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (
            [RELEASE],
            "step 0 was planned as all_gather_start of bucket 0 and ran as release of bucket 0. "
            "The compiled code left the planned order; please report it.",
        ),
        (
            [GATHER, StepKind.REDUCE_SCATTER_START],
            "step 1 was planned as release of bucket 0 and ran as reduce_scatter_start of bucket 0",
        ),
        (
            [GATHER, WAIT, RELEASE, RELEASE],
            "step 2 was planned as the end and ran as release of bucket 0",
        ),
        ([WAIT, GATHER], "all_gather_wait of bucket 0 ran before its start"),
        (
            [GATHER, WAIT, StepKind.REDUCE_SCATTER_WAIT],
            "reduce_scatter_wait of bucket 0 ran before its start",
        ),
        ([GATHER, RELEASE], "all_gather_start of bucket 0 was never waited for"),
        ([], "0 of 2 planned steps ran; next would have been all_gather_start of bucket 0."),
        ([GATHER, WAIT], "1 of 2 planned steps ran; next would have been release of bucket 0."),
    ],
)
def test_a_graph_that_leaves_its_plan_is_named_with_both_steps(
    order: list[StepKind], message: str
) -> None:
    executor = _executor(_run)
    with pytest.raises(PlanError) as caught:
        executor(order)
    assert str(caught.value).startswith(f"graph0.forward: {message}")
    with pytest.raises(PlanError, match="outside a graph"):
        current()
    in_flight = GATHER in order and WAIT not in order
    assert len(executor.session.abandoned) == int(in_flight)
    assert executor([GATHER, WAIT, RELEASE]) == []  # what failed once may run again


# ------------------------------------------------------------------------------ gradients


@pytest.fixture
def gradients(fake_group: FakeGroup) -> list[ShardedGradient]:
    """Of two square weights over two ranks."""
    fake_group(2)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    zero_compile.partition(model)
    model(torch.ones(2, 4)).sum().backward()
    found = [model[0].weight.grad, model[1].weight.grad]
    assert all(isinstance(g, ShardedGradient) for g in found)
    return found  # type: ignore[return-value]


_WHOLE = r"Call p\.grad\.full_tensor\(\) on every rank .*, or work on p\.grad\.local"


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda g, h: g.t_(), r"^aten\.t_\.default is not supported on a part.* " + _WHOLE),
        (lambda g, h: g.cumsum_(0), r"^aten\.cumsum_\.default is not supported on a .* " + _WHOLE),
        (
            lambda g, h: g.add_(h),
            r"^aten\.add_\.Tensor combines gradients of different parameters \(0\.weight, 1\.weight"
            r".*Call \.full_tensor\(\) on each first, on every rank\.",
        ),
        (
            lambda g, h: h.mul_(torch.ones(2, 4, 4)),
            r"^aten\.mul_\.Tensor broadcasts a tensor of shape \(2, 4, 4\) against the partitioned "
            r"gradient of 1\.weight \(4, 4\)\. " + _WHOLE,
        ),
        (
            lambda g, h: torch._foreach_mul([g, torch.ones(4, 4)], 2.0),
            r"^aten\._foreach_mul\.Scalar mixes partitioned gradients with plain tensors in one",
        ),
    ],
)
def test_what_a_partitioned_gradient_cannot_do_is_named(
    gradients: list[ShardedGradient], use: Callable[[Any, Any], Any], message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        use(*gradients)


def test_a_model_beyond_the_recompile_limit_is_told_which_one(fake_group: FakeGroup) -> None:
    fake_group(2)
    first, second = Chain(), Chain()
    counters.clear()
    try:
        with torch._dynamo.config.patch(accumulated_recompile_limit=1):
            compiled = [torch.compile(model, backend="zero3") for model in (first, second)]
            for call in compiled:
                call(torch.ones(2, 6)).sum().backward()
            optimizer = torch.optim.SGD(second.parameters(), 0.1)
            message = (
                r"has passed torch\._dynamo\.config\.accumulated_recompile_limit = 1, .*reset\(\)"
            )
            with pytest.raises(UnsupportedError, match=message):
                optimizer.step()
    finally:
        counters.clear()


def test_another_parameter_of_a_partitioned_one_is_refused_with_what_to_write() -> None:
    model = nn.Linear(2, 2)
    zero_compile.partition(model)
    with pytest.raises(
        UnsupportedError, match=r"^nn\.Parameter\(\) of weight.*detach\(\)\.clone\(\)"
    ):
        nn.Parameter(model.weight)
