"""preview: whole steps planned with fake tensors, against closed formulas and as snapshots."""

import re
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from expecttest import TestCase
from torch import nn

from graphs import TinyGpt, make_mlp, snapshot
from tools.dump_schedule import sum_of_gradients
from zero_compile.analysis import hardware
from zero_compile.analysis.hardware import Hardware, Link
from zero_compile.analysis.resident_memory import Held, Resident, resident
from zero_compile.api.preview import Preview, preview
from zero_compile.scheduler.evaluate import evaluate, held_bytes
from zero_compile.scheduler.pose_problem import MARGIN
from zero_runtime.errors import OptionError, PlanError, ZeroError
from zero_runtime.ir.plan import (
    Channel,
    Phase,
    Plan,
    Residence,
    Stage,
    StatePolicy,
    StepKind,
    Tier,
)
from zero_runtime.ir.timeline import Category
from zoo_plain import ConvNet

Made = tuple[nn.Module, tuple[Any, ...], Mapping[str, Any]]
MS = 1e-3


class Chain(nn.Module):
    """Square linears without bias."""

    def __init__(self, layers: int, width: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(width, width, bias=False, dtype=dtype) for _ in range(layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def chain(
    layers: int, width: int, rows: int, dtype: torch.dtype = torch.float32
) -> Callable[[], Made]:
    return lambda: (Chain(layers, width, dtype), (torch.randn(rows, width, dtype=dtype),), {})


def mlp(rows: int = 3) -> Callable[[], Made]:
    return lambda: (make_mlp(), (torch.randn(rows, 8),), {})


def gathered(planned: Preview) -> int:
    """The most bytes of gathered parameters at once."""
    samples = (s for g in planned.graphs for s in g.timeline.memory)
    return max(s.held.get(Category.GATHERED, 0) for s in samples)


def least_budget(make: Callable[[], Made], world_size: int, options: Mapping[str, Any]) -> int:
    """The smallest ``device_memory`` that is accepted, out of the message that refuses a smaller one."""
    kept = preview(make, world_size=world_size, options=options).resident.total
    with pytest.raises(PlanError) as error:
        preview(make, world_size=world_size, options={**options, "device_memory": kept + 1})
    found = re.search(r"(\d+) more than the limit of 1;", str(error.value))
    assert found is not None, error.value
    return kept + 1 + int(found[1])


# ------------------------------------------------------------------------------ a chain

LAYERS, WIDTH, ROWS, WORLD = 24, 1024, 512, 4
BUCKET = 4 * WIDTH * WIDTH


def profile() -> Hardware:
    """A matmul takes a millisecond, a gather as it is planned 0.4, and nothing else anything."""
    matmul = 2 * ROWS * WIDTH * WIDTH / MS
    peaks = hardware.Peaks(float32=matmul, bfloat16=matmul, float16=matmul)
    ring = (WORLD - 1) / WORLD * BUCKET * MARGIN / (0.4 * MS)
    return hardware.load("h100").model_copy(
        update={
            "name": "made by hand",
            "peaks": peaks,
            "sustained": hardware.Sustained(matmul=1, memory=1, links=1),
            "memory_bandwidth": 1e18,
            "launch_seconds": 0.0,
            "intra_node": Link(bandwidth=ring, latency=0.0),
        }
    )


@pytest.fixture(scope="module")
def by_hand(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hardware") / "profile.json"
    hardware.save(profile(), path)
    return path


def preview_of_chain(by_hand: Path, **options: Any) -> Preview:
    settings = {"hardware": str(by_hand), "bucket_bytes": 1, **options}
    return preview(chain(LAYERS, WIDTH, ROWS), world_size=WORLD, options=settings)


def test_a_chain_exposes_what_cannot_be_hidden_and_gathers_two_buckets_at_once(
    by_hand: Path,
) -> None:
    planned = preview_of_chain(by_hand)
    (graph,) = planned.graphs
    compute = sum(graph.scheduled.problem.compute)
    assert compute == pytest.approx((3 * LAYERS - 1) * MS)  # the first input needs no gradient
    assert graph.timeline.exposed == pytest.approx(0.8 * MS)  # first gather, last reduction
    assert planned.seconds == pytest.approx(compute + 0.8 * MS)
    assert gathered(planned) == 2 * BUCKET
    stalls = [e.stall for e in graph.timeline.events if e.stall > 1e-9]
    assert stalls == pytest.approx([0.4 * MS, 0.4 * MS])


def test_without_overlap_every_transfer_is_exposed(by_hand: Path) -> None:
    planned = preview_of_chain(by_hand, schedule="on_demand")
    (graph,) = planned.graphs
    moved = len(graph.scheduled.problem.gathers)
    assert moved == 2 * LAYERS - 1  # backward needs no gradient of the input
    assert graph.timeline.exposed >= moved * 0.4 * MS
    assert gathered(planned) == BUCKET


@cache
def least_for_chain(by_hand: Path) -> int:
    """Room for one bucket where a step needs most memory."""
    options = {"hardware": str(by_hand), "bucket_bytes": 1}
    return least_budget(chain(LAYERS, WIDTH, ROWS), WORLD, options)


def test_a_chain_within_a_budget_of_one_bucket(by_hand: Path) -> None:
    least = least_for_chain(by_hand)
    planned = preview_of_chain(by_hand, device_memory=least)
    (graph,) = planned.graphs
    problem, schedule = graph.scheduled.problem, graph.scheduled.schedule
    assert problem.limit == least - planned.resident.total
    assert max(held_bytes(problem, schedule)) <= problem.limit
    assert graph.timeline.budget == least
    assert planned.peak <= least
    exposed = sum(evaluate(problem, schedule).stalls)
    assert graph.timeline.exposed == pytest.approx(exposed)
    assert exposed > 0.8 * MS
    assert planned.seconds == pytest.approx(sum(problem.compute) + exposed)


def test_a_chain_with_one_bucket_gathered_at_a_time(by_hand: Path) -> None:
    planned = preview_of_chain(by_hand, stage3_max_live_parameters=WIDTH * WIDTH)
    (graph,) = planned.graphs
    problem, schedule = graph.scheduled.problem, graph.scheduled.schedule
    assert gathered(planned) == BUCKET
    exposed = sum(evaluate(problem, schedule).stalls)
    assert graph.timeline.exposed == pytest.approx(exposed)
    assert exposed >= (LAYERS - 1) * 0.4 * MS


def test_a_budget_below_one_bucket_says_what_is_missing(by_hand: Path) -> None:
    least = least_for_chain(by_hand)
    with pytest.raises(PlanError, match=r"node \d+ \((mm_\d+|the beginning of .*)\).* 1 more than"):
        preview_of_chain(by_hand, device_memory=least - 1)
    with pytest.raises(OptionError, match=r"parameter shards .* take .* too much"):
        preview_of_chain(by_hand, device_memory=1 << 20)


def test_more_memory_keeps_more_and_sends_less(by_hand: Path) -> None:
    least = least_for_chain(by_hand)
    sent = [preview_of_chain(by_hand).traffic.all_gather]
    earlier = LAYERS * BUCKET // WORLD  # what gradients of an earlier backward take
    for buckets in (6, 12, 40):
        planned = preview_of_chain(by_hand, device_memory=least + earlier + buckets * BUCKET)
        sent.append(planned.traffic.all_gather)
        assert planned.graphs[0].timeline.exposed == pytest.approx(0.8 * MS)
        assert planned.peak <= least + buckets * BUCKET
    assert sent == sorted(sent, reverse=True)
    assert sent[-1] == LAYERS * BUCKET * 3 // 4  # each bucket once


# ------------------------------------------------------------------------------ closed formulas

N, DEPTH, SIDE = 4, 6, 256
P = DEPTH * SIDE * SIDE


@cache
def half(stage: int, **options: Any) -> Preview:
    settings = {"hardware": "h100", "bf16": True, "bucket_bytes": 1, **options}
    made = chain(DEPTH, SIDE, 64, torch.bfloat16)
    return preview(made, world_size=N, stage=stage, options=settings)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_stays_is_2_2_and_12_bytes_a_parameter(stage: int) -> None:
    planned = half(stage)
    assert planned.parameters == P
    assert planned.resident.shards == pytest.approx(2 * P / (N if stage == 3 else 1), rel=0.01)
    assert planned.resident.optimizer == pytest.approx(12 * P / N, rel=0.01)
    assert sum_of_gradients(planned) == pytest.approx(2 * P / (N if stage >= 2 else 1), rel=0.01)
    held = resident([Held(P, "bfloat16", True)], StatePolicy(Stage(stage), True), N)
    assert held.gradients == pytest.approx(sum_of_gradients(planned), rel=0.01)
    assert planned.peak >= planned.resident.total + sum_of_gradients(planned)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("tier", [Tier.HOST, Tier.NVME])
def test_what_lives_off_the_device_takes_none_of_its_memory(stage: int, tier: Tier) -> None:
    """Gradients follow the optimizer, but for stage 1; parameters can leave at stage 3 only."""
    policy, ranks = StatePolicy(Stage(stage), True), 8

    def kept(residence: Residence) -> Resident:
        return resident([Held(P, "bfloat16", True, True, residence)], policy, ranks)

    here = kept(Residence())
    optimizer = kept(Residence(optimizer=tier))
    assert optimizer == (here.shards, here.gradients if stage == 1 else 0, 0)
    parameters = kept(Residence(parameters=tier))
    assert parameters == (0 if stage == 3 else here.shards, here.gradients, here.optimizer)
    both = kept(Residence(tier, tier))
    assert both == (parameters.shards, optimizer.gradients, 0)


def test_what_is_left_on_the_device_still_counts() -> None:
    there = Held(1000, "float32", True, True, Residence(Tier.HOST, Tier.HOST))
    here = Held(10, "float32", True)
    assert resident([there, here], StatePolicy(), 1) == (40, 40, 80)


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.NVME])
def test_a_chain_off_the_device_is_planned_within_a_budget_that_its_state_exceeds(
    tier: Tier,
) -> None:
    options: dict[str, Any] = {"hardware": "h100", "bucket_bytes": 1, "device_memory": "64MiB"}
    plan = partial(preview, chain(8, 1024, 8192), world_size=1)
    with pytest.raises(OptionError, match="does not hold what stays on one rank"):
        plan(options=options)
    options |= {kind: {"device": str(tier)} for kind in ("offload_param", "offload_optimizer")}
    if tier is Tier.NVME:
        options["nvme_path"] = "/scratch"
    with pytest.raises(PlanError):
        plan(options={**options, "device_memory": "4MiB"})
    planned = plan(options={**options, "device_memory": "512MiB"})
    assert planned.resident.total == 0
    assert planned.peak <= 512 << 20
    moved = [
        op for g in planned.graphs for op in g.program.ops if op.channel is not Channel.COMPUTE
    ]
    kinds = {Channel.ALL_GATHER, Channel.REDUCE_SCATTER, Channel.HOST_TO_DEVICE}
    kinds |= {Channel.DEVICE_TO_HOST} | ({Channel.NVME_READ} if tier is Tier.NVME else set())
    assert {op.channel for op in moved} == kinds


def test_a_step_of_stage_3_sends_6_bytes_a_parameter_but_for_what_is_kept_or_not_needed() -> None:
    planned = half(3)
    forward, backward = planned.graphs[0].plans
    bucket, share = 2 * SIDE * SIDE, (N - 1) / N
    spared = len(forward.kept) + 1  # backward needs no gradient of the input
    assert len(forward.kept) >= 1
    assert planned.traffic.reduce_scatter == pytest.approx(2 * P * share, rel=0.01)
    assert planned.traffic.all_gather == pytest.approx(
        4 * P * share - spared * bucket * share, 0.01
    )
    whole = 6 * P * share
    assert planned.traffic.total == pytest.approx(whole - spared * bucket * share, rel=0.01)
    assert planned.traffic.all_gather == share * (moved(forward) + moved(backward, forward.kept))


def moved(plan: Plan, kept: tuple[int, ...] = ()) -> int:
    """Bytes of the gathers that the plan starts, those of kept buckets aside."""
    starts = (s for s in plan.steps if s.kind is StepKind.ALL_GATHER_START)
    return sum(s.bytes for s in starts if s.bucket not in kept)


@pytest.mark.parametrize("stage", [1, 2])
def test_stages_1_and_2_gather_nothing_and_reduce_everything_once(stage: int) -> None:
    planned = half(stage)
    assert planned.traffic.all_gather == 0
    assert planned.traffic.reduce_scatter == pytest.approx(2 * P * (N - 1) / N, rel=0.01)


def test_reductions_in_float32_send_twice_as_much_and_gradients_stay_narrow() -> None:
    wide = half(3, reduce_dtype="float32")
    assert wide.traffic.reduce_scatter == 2 * half(3).traffic.reduce_scatter
    assert sum_of_gradients(wide) == sum_of_gradients(half(3))


def test_one_rank_sends_nothing() -> None:
    planned = preview(mlp(), world_size=1, options={"hardware": "h100"})
    assert planned.traffic.total == 0


# ------------------------------------------------------------------------------ agreement


def plans(planned: Preview) -> list[Plan]:
    return [plan for graph in planned.graphs for plan in graph.plans]


def words(rows: int) -> Callable[[], Made]:
    def make() -> Made:
        tokens = torch.zeros(rows, 4, dtype=torch.int64)
        return TinyGpt(), (tokens, tokens), {}

    return make


SMALL = {"hardware": "h100", "bucket_bytes": 2048}


def test_two_previews_give_equal_plans() -> None:
    one, two = (preview(words(2), world_size=4, options=SMALL) for _ in range(2))
    assert [p.to_json() for p in plans(one)] == [p.to_json() for p in plans(two)]
    assert one.graphs[0].timeline == two.graphs[0].timeline
    assert one.graphs[0].code == two.graphs[0].code


def test_batch_sizes_change_no_order() -> None:
    """Ranks may differ in them: what they send each other must not."""
    found = [preview(words(rows), world_size=4, options=SMALL) for rows in (1, 64)]
    prints = [[p.fingerprint() for p in plans(one)] for one in found]
    assert prints[0] == prints[1]
    compute = [one.graphs[0].scheduled.problem.compute for one in found]
    assert compute[0] != compute[1]


def test_a_preview_is_independent_of_the_one_before() -> None:
    first = preview(mlp(), world_size=2, options={"hardware": "h100"})
    preview(mlp(50), world_size=8, stage=1, options={"hardware": "a100"})
    again = preview(mlp(), world_size=2, options={"hardware": "h100"})
    assert [p.to_json() for p in plans(first)] == [p.to_json() for p in plans(again)]


def test_a_preview_allocates_no_parameters() -> None:
    """A hundred billion elements."""
    made = chain(10, 100_000, 8)
    planned = preview(made, world_size=64, options={"hardware": "h100"})
    assert planned.parameters == 10**11
    assert planned.resident.shards == 4 * 10**11 // 64


# ------------------------------------------------------------------------------ kinds of models


class TwoGraphs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Chain(2, 64), Chain(3, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.one(x)
        torch._dynamo.graph_break()
        return self.two(x)


def two_graphs() -> Made:
    return TwoGraphs(), (torch.randn(4, 64),), {}


def test_a_model_of_two_graphs() -> None:
    """Each graph's memory counts the whole model: also the gradients that the other one makes."""
    planned = preview(
        two_graphs, world_size=4, options={"hardware": "h100", "device_memory": 10**7}
    )
    assert [g.name for g in planned.graphs] == ["graph0", "graph2"]
    assert [len(g.plans) for g in planned.graphs] == [2, 2]
    matrix = 64 * 64 * 4
    assert planned.resident.shards == 5 * matrix // 4
    assert planned.resident.optimizer == 2 * 5 * matrix // 4
    others = [dict(g.program.resident)[Category.GRADIENTS] for g in planned.graphs]
    assert others == [3 * matrix // 4, 2 * matrix // 4]
    assert all(g.timeline.budget == 10**7 for g in planned.graphs)
    assert planned.peak == max(g.timeline.peak for g in planned.graphs)
    assert planned.seconds == sum(g.timeline.seconds for g in planned.graphs)


def test_inference() -> None:
    options = {"hardware": "h100", "bucket_bytes": 512}
    planned = preview(mlp(), world_size=2, train=False, options=options)
    (graph,) = planned.graphs
    assert [p.phase for p in graph.plans] == [Phase.INFERENCE]
    assert planned.traffic.reduce_scatter == 0
    assert {e.channel for e in graph.timeline.events} == {Channel.COMPUTE, Channel.ALL_GATHER}
    assert len(graph.scheduled.problem.gathers) == 3


@pytest.mark.parametrize("stage", [1, 2])
def test_a_stage_that_keeps_parameters_whole(stage: int) -> None:
    planned = preview(mlp(), world_size=2, stage=stage, options={"hardware": "h100"})
    (graph,) = planned.graphs
    assert [p.phase for p in graph.plans] == [Phase.FORWARD, Phase.BACKWARD]
    kinds = {s.kind for p in graph.plans for s in p.steps}
    assert kinds == {StepKind.REDUCE_SCATTER_START, StepKind.REDUCE_SCATTER_WAIT}
    assert planned.resident.shards == 4 * planned.parameters


def test_a_frozen_parameter_is_gathered_and_not_reduced() -> None:
    def make() -> Made:
        model = Chain(3, 64)
        model.layers[1].weight.requires_grad_(False)
        return model, (torch.randn(4, 64),), {}

    planned = preview(make, world_size=2, options={"hardware": "h100", "bucket_bytes": 1})
    problem = planned.graphs[0].scheduled.problem
    assert len(problem.reductions) == 2
    assert planned.resident.optimizer == 2 * planned.resident.shards * 2 // 3


# ------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"options": {"bucket_byte": 1}},
            "unknown option 'bucket_byte'. Did you mean 'bucket_bytes'",
        ),
        ({"options": {"bucket_bytes": "many"}}, "option 'bucket_bytes'"),
        ({"options": {"device_memory": "a lot"}}, "'a lot' is not a size"),
        (
            {"options": {"hardware": "h1000"}},
            "unknown hardware profile 'h1000'. Did you mean 'h100'",
        ),
        (
            {"options": {"hardware": "nowhere/x.json"}},
            "cannot read hardware profile nowhere/x.json",
        ),
        (
            {"options": {"leaf_modules": "Nope"}},
            "no module of Sequential has the class or the name",
        ),
        (
            {"options": {"device_memory": 100}},
            "device_memory of 100 bytes does not hold what stays",
        ),
        ({"stage": 4}, "stage 4: ZeRO has the stages 1, 2 and 3"),
        ({"world_size": 0}, "a world has at least one rank, got 0"),
    ],
)
def test_wrong_options_are_refused_as_themselves(given: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError) as error:
        preview(**{"make_model": mlp(), "world_size": 2, **given})
    assert message in str(error.value)


def test_a_model_without_parameters_is_refused() -> None:
    with pytest.raises(ZeroError, match="Dynamo compiled no graph with parameters of this model"):
        preview(lambda: (nn.ReLU(), (torch.randn(4),), {}), world_size=2)


def test_what_the_model_itself_raises_comes_through() -> None:
    with pytest.raises(ZeroDivisionError):
        preview(lambda: 1 / 0, world_size=2)  # type: ignore[arg-type, return-value]


# ------------------------------------------------------------------------------ snapshots


class Tied(nn.Module):
    """The first and the last matrix are one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(16, 16, bias=False) for _ in range(3))
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.middle(torch.relu(self.first(x)))))


def tied() -> Made:
    return Tied(), (torch.randn(4, 16),), {}


def convnet() -> Made:
    return ConvNet(), (torch.randn(2, 3, 8, 8), torch.zeros(2, dtype=torch.int64)), {}


def summary(make: Callable[[], Made], budget: str, bucket_bytes: int) -> str:
    """A line a plan: where transfers start (``gather``, ``reduce``) and are waited for."""
    options: dict[str, Any] = {"hardware": "h100", "bucket_bytes": bucket_bytes}
    if budget == "loose":
        options["device_memory"] = 1 << 30
    if budget == "tight":
        options["device_memory"] = least_budget(make, 2, options)
    planned = preview(make, world_size=2, options=options)
    carried: set[int] = set()
    lines = []
    for plan in plans(planned):
        lines.append(f"{plan.phase}: {'; '.join(_steps(plan, carried))}")
        carried = {*plan.kept, *plan.early}
    return "\n".join([budget, *lines, f"peak {planned.peak}, {_exposed(planned)}"]) + "\n"


def _exposed(planned: Preview) -> str:
    return f"exposed {planned.graphs[0].timeline.exposed * 1e6:.1f} us"


def _steps(plan: Plan, carried: set[int]) -> list[str]:
    """``take``: what the graph before has gathered."""
    waited = {s.bucket for s in plan.steps if s.kind is StepKind.ALL_GATHER_WAIT}
    found = []
    for step in plan.steps:
        if step.kind is StepKind.RELEASE:
            continue
        word = {
            StepKind.ALL_GATHER_START: "gather" if step.bucket in waited else "early",
            StepKind.ALL_GATHER_WAIT: "wait",
            StepKind.REDUCE_SCATTER_START: "reduce",
            StepKind.REDUCE_SCATTER_WAIT: "reduced",
        }[step.kind]
        taken = word == "gather" and step.bucket in carried
        found.append(f"{'take' if taken else word} {step.bucket} @{step.before}")
    return [*found, *(f"keep {b}" for b in plan.kept)]


def summaries(make: Callable[[], Made], bucket_bytes: int) -> str:
    return "\n".join(summary(make, budget, bucket_bytes) for budget in ("none", "loose", "tight"))


class Snapshot(TestCase):
    maxDiff = None

    @snapshot
    def test_mlp(self) -> None:
        self.assertExpectedInline(
            summaries(mlp(), 512),
            """\
none
forward: gather 0 @permute; gather 1 @permute; wait 0 @permute; wait 1 @permute_1; gather 2 @addmm_1; wait 2 @permute_2; keep 2
backward: take 2 @permute_2; wait 2 @permute_2; gather 1 @mm_1; reduce 2 @le; wait 1 @permute_1; reduced 2 @mm_3; reduce 1 @le_1; reduced 1 @output; reduce 0 @output; reduced 0 @output
peak 4904, exposed 7.5 us

loose
forward: gather 0 @permute; gather 1 @permute; wait 0 @permute; wait 1 @permute_1; gather 2 @addmm_1; wait 2 @permute_2; keep 1; keep 2
backward: take 2 @permute_2; take 1 @permute_2; wait 2 @permute_2; reduce 2 @le; wait 1 @permute_1; reduced 2 @mm_3; reduce 1 @le_1; reduced 1 @output; reduce 0 @output; reduced 0 @output
peak 4904, exposed 7.5 us

tight
forward: gather 0 @permute; gather 1 @permute; wait 0 @permute; wait 1 @permute_1; gather 2 @addmm_1; wait 2 @permute_2; keep 1; keep 2
backward: take 2 @permute_2; take 1 @permute_2; wait 2 @permute_2; reduce 2 @le; wait 1 @permute_1; reduced 2 @mm_3; reduce 1 @le_1; reduced 1 @mm_4; reduce 0 @output; reduced 0 @output
peak 4872, exposed 11.3 us
""",
        )

    @snapshot
    def test_gpt(self) -> None:
        self.assertExpectedInline(
            summaries(words(2), 4096),
            """\
none
forward: gather 0 @embedding; gather 1 @embedding; wait 0 @embedding; wait 1 @permute; gather 2 @mm_1; wait 2 @permute_6; gather 3 @addmm; wait 3 @permute_7; keep 0
backward: take 0 @div_1; wait 0 @permute_8; gather 3 @mm_4; wait 3 @permute_7; gather 2 @mm_6; reduce 3 @view_21; wait 2 @permute_6; reduced 3 @mm_8; gather 1 @mm_8; reduce 2 @view_24; wait 1 @mul_17; reduced 2 @mm_10; reduce 1 @permute; reduced 1 @output; reduce 0 @output; reduced 0 @output
peak 50016, exposed 11.3 us

loose
forward: gather 0 @embedding; gather 1 @embedding; wait 0 @embedding; wait 1 @permute; gather 2 @mm_1; wait 2 @permute_6; gather 3 @addmm; wait 3 @permute_7; keep 0; keep 1; keep 2; keep 3
backward: take 0 @div_1; take 3 @div_1; take 2 @div_1; take 1 @div_1; wait 0 @permute_8; wait 3 @permute_7; reduce 3 @view_21; wait 2 @permute_6; reduced 3 @mm_8; reduce 2 @view_24; wait 1 @mul_17; reduced 2 @mm_10; reduce 1 @permute; reduced 1 @output; reduce 0 @output; reduced 0 @output
peak 53216, exposed 11.3 us

tight
forward: gather 0 @embedding; gather 1 @embedding; wait 0 @embedding; wait 1 @permute; gather 2 @mm_1; wait 2 @permute_6; gather 3 @addmm; wait 3 @permute_7; keep 0; keep 3
backward: take 0 @div_1; take 3 @div_1; wait 0 @permute_8; wait 3 @permute_7; reduce 3 @view_21; gather 2 @permute_6; wait 2 @permute_6; reduced 3 @mm_8; reduce 2 @view_24; gather 1 @mul_17; wait 1 @mul_17; reduced 2 @mm_10; reduce 1 @permute; reduced 1 @mm_12; reduce 0 @output; reduced 0 @output
peak 50016, exposed 22.5 us
""",
        )

    @snapshot
    def test_tied(self) -> None:
        self.assertExpectedInline(
            summaries(tied, 1024),
            """\
none
forward: gather 0 @permute; gather 1 @permute; wait 0 @permute; wait 1 @permute_1; keep 0
backward: take 0 @permute_3; wait 0 @permute; gather 1 @mm_5; reduce 1 @permute_1; wait 1 @permute_1; reduced 1 @mm_7; reduce 0 @output; reduced 0 @output
peak 7936, exposed 7.5 us

loose
forward: gather 0 @permute; gather 1 @permute; wait 0 @permute; wait 1 @permute_1; keep 0; keep 1
backward: take 0 @permute_3; take 1 @permute_3; wait 0 @permute; reduce 1 @permute_1; wait 1 @permute_1; reduced 1 @mm_7; reduce 0 @output; reduced 0 @output
peak 7936, exposed 7.5 us

tight
forward: gather 0 @permute; gather 1 @permute; wait 0 @permute; wait 1 @permute_1; keep 0
backward: take 0 @permute_3; wait 0 @permute; reduce 1 @permute_1; gather 1 @permute_1; wait 1 @permute_1; reduced 1 @mm_7; reduce 0 @output; reduced 0 @output
peak 7936, exposed 11.3 us
""",
        )

    @snapshot
    def test_convnet(self) -> None:
        self.assertExpectedInline(
            summaries(convnet, 1024),
            """\
none
forward: gather 0 @convolution; gather 1 @convolution; wait 0 @convolution; wait 1 @convolution_1; gather 2 @convolution_1; wait 2 @unsqueeze_4; keep 2
backward: take 2 @sum_2; wait 2 @permute; gather 1 @mm_1; reduce 2 @convolution_backward; wait 1 @convolution_backward; gather 0 @convolution_backward; reduced 2 @le_1; reduce 1 @le_1; wait 0 @mul_30; reduced 1 @output; reduce 0 @output; reduced 0 @output
peak 31852, exposed 7.5 us

loose
forward: gather 0 @convolution; gather 1 @convolution; wait 0 @convolution; wait 1 @convolution_1; gather 2 @convolution_1; wait 2 @unsqueeze_4; keep 0; keep 1; keep 2
backward: take 2 @sum_2; take 1 @sum_2; take 0 @sum_2; wait 2 @permute; reduce 2 @convolution_backward; wait 1 @convolution_backward; reduced 2 @le_1; reduce 1 @le_1; wait 0 @mul_30; reduced 1 @output; reduce 0 @output; reduced 0 @output
peak 31852, exposed 7.5 us

tight
forward: gather 0 @convolution; gather 1 @convolution; wait 0 @convolution; wait 1 @convolution_1; gather 2 @convolution_1; wait 2 @unsqueeze_4; keep 1; keep 2
backward: take 2 @sum_2; take 1 @sum_2; wait 2 @permute; reduce 2 @convolution_backward; wait 1 @convolution_backward; reduced 2 @convolution_backward; reduce 1 @le_1; gather 0 @mul_30; wait 0 @mul_30; reduced 1 @output; reduce 0 @output; reduced 0 @output
peak 28524, exposed 15.0 us
""",
        )
