"""How long the planner takes, by the size of the graph: a chain of layers, one bucket each."""

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from zero_compile import pipeline
from zero_compile.analysis.hardware import load
from zero_compile.bucketing import LayoutPolicy, Use, group_uses, plan_bucket
from zero_compile.scheduler.decide_schedule import Limits, plan_graph
from zero_compile.scheduler.pose_problem import pose_problem
from zero_runtime.ir import ops
from zero_runtime.ir.plan import BucketPlan, StatePolicy

WIDTH, RANKS = 64, 8
LAYERS = (400, 900, 1800, 3600)


class Planning(NamedTuple):
    """CPU seconds of each part of planning a graph of ``nodes`` nodes."""

    nodes: int
    buckets: int
    bucketing: float
    posing: float
    solving: float
    scheduling: float

    @property
    def total(self) -> float:
        """All parts."""
        return self.bucketing + self.posing + self.solving + self.scheduling


def compare(report: Callable[[str], None], layers: Sequence[int] = LAYERS) -> Iterator[Planning]:
    """Plan graphs of growing length."""
    for count in layers:
        report(f"tracing {count} layers")
        gm = _chain(count)
        report(f"planning {count} layers")
        yield _timed(gm, count)


def lines(found: Sequence[Planning]) -> list[str]:
    """A table in Markdown."""
    rows = [
        "| nodes | buckets | bucketing s | liveness and costs s | solving s | moving s | together s |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for p in found:
        parts = (p.bucketing, p.posing, p.solving, p.scheduling, p.total)
        rows.append(
            f"| {p.nodes:,} | {p.buckets:,} | " + " | ".join(f"{x:.2f}" for x in parts) + " |"
        )
    return rows


def _timed(gm: GraphModule, layers: int) -> Planning:
    buckets, places = _layout(layers)
    marks = [time.process_time()]
    gm = pipeline.run(pipeline.bucket(buckets, places), gm, verify=False)
    marks.append(time.process_time())
    posed = pose_problem(gm.graph, buckets, StatePolicy(), load("h100"))
    marks.append(time.process_time())
    decided = plan_graph(posed, Limits())
    marks.append(time.process_time())
    gm = pipeline.run(pipeline.schedule("planned", decided), gm, verify=False)
    marks.append(time.process_time())
    spans = [b - a for a, b in pairwise(marks)]
    return Planning(len(gm.graph.nodes), len(buckets), *spans)


def _chain(layers: int) -> GraphModule:
    def forward(x: Tensor, *weights: Tensor) -> Tensor:
        for number, weight in enumerate(weights):
            x = torch.relu(x @ ops.gather(weight, number)) * 0.5 + x
            x = x - x.mean()
        return x

    inputs = [torch.randn(WIDTH, WIDTH) for _ in range(layers + 1)]
    traced: Any = make_fx(forward, tracing_mode="fake")(*inputs)
    result: GraphModule = traced
    return result


def _layout(layers: int) -> tuple[list[BucketPlan], dict[int, tuple[int, int]]]:
    shape, numel = (WIDTH, WIDTH), WIDTH * WIDTH
    dtype, device = torch.float32, torch.device("cpu")
    uses = [
        Use(n, f"layers.{n}", shape, (WIDTH, 1), numel, dtype, dtype, device, True)
        for n in range(layers)
    ]
    buckets = [plan_bucket(group, RANKS) for group in group_uses(uses, LayoutPolicy(1))]
    return buckets, {n: (n, 0) for n in range(layers)}
