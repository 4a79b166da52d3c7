"""A run records its real timeline in the planner's format."""

import itertools
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import ranks
import zero_compile
from zero_runtime.errors import ZeroError
from zero_runtime.ir.plan import Channel
from zero_runtime.ir.timeline import Category, Source, Timeline


def _recorded() -> tuple[Timeline, float, list[list[int]]]:
    """The last step's timeline, how long it took by the clock, and the planned order of transfers."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    options = {"record": True, "bucket_bytes": 1 << 18}
    compiled = torch.compile(model, backend="zero3", options=options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        began = time.perf_counter()
        compiled(torch.randn(16, 256)).square().mean().backward()
        took = time.perf_counter() - began
        optimizer.step()
    (timeline,) = zero_compile.timelines(model)
    orders = [
        [s.bucket for plan in zero_compile.plans(model) for s in plan.steps if s.kind == kind]
        for kind in ("all_gather_start", "reduce_scatter_start")
    ]
    return timeline, took, orders


def test_the_timeline_of_the_last_step_has_every_transfer_in_the_planned_order() -> None:
    for timeline, took, (gathers, reductions) in ranks.run(2, _recorded):
        assert timeline.source is Source.MEASURED
        assert timeline.world_size == 2
        assert 0 < timeline.seconds <= took
        assert 0 <= timeline.exposed <= timeline.seconds
        assert {e.phase for e in timeline.events} == {"forward", "backward"}
        moved = [e for e in timeline.events if e.channel is Channel.ALL_GATHER]
        assert sorted({e.bucket for e in moved}) == sorted(set(gathers))
        reduced = [e.bucket for e in timeline.events if e.channel is Channel.REDUCE_SCATTER]
        assert reduced == reductions
        compute = [e for e in timeline.events if e.channel is Channel.COMPUTE]
        assert all(a.end <= b.start + 1e-9 for a, b in itertools.pairwise(compute))
        peak = max(s.held.get(Category.GATHERED, 0) for s in timeline.memory)
        assert 256 * 257 * 4 <= peak <= 4 * 257 * 257 * 4


def _kept() -> tuple[list[str], set[str]]:
    """The buckets gathered in the last step, with memory to keep them, and those that are kept."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    options = {"record": True, "bucket_bytes": 1 << 14, "device_memory": "1GiB"}
    compiled = torch.compile(model, backend="zero3", options=options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        compiled(torch.randn(16, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    (timeline,) = zero_compile.timelines(model)
    forward = zero_compile.plans(model)[0]
    kept = {forward.buckets[b].slots[0].name for b in forward.kept}
    moved = [e for e in timeline.events if e.channel is Channel.ALL_GATHER]
    return [e.name.split(" ")[0] for e in moved], kept


def test_a_bucket_that_is_kept_for_backward_is_gathered_once() -> None:
    for gathered, kept in ranks.run(2, _kept):
        assert kept
        for name in kept:
            assert gathered.count(name) == 1


def test_a_recorded_timeline_is_shown_by_the_tool(tmp_path: Path) -> None:
    from tools.document import read

    model = nn.Linear(4, 4)
    compiled = torch.compile(model, backend="zero3", options={"record": True})
    compiled(torch.ones(1, 4)).sum().backward()
    (timeline,) = zero_compile.timelines(model)
    (tmp_path / "a.json").write_text(timeline.to_json())
    assert read(tmp_path / "a.json").timelines == (timeline,)


def test_a_model_that_did_not_record_says_how_to() -> None:
    model = nn.Linear(4, 4)
    torch.compile(model, backend="zero3")(torch.ones(1, 4))
    with pytest.raises(ZeroError, match=r'options=\{"record": True\}'):
        zero_compile.timelines(model)
