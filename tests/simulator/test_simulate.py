"""simulate: when operations run on their channels, what stalls them, and what memory they hold."""

import time

import pytest
from test_solve_starts import large

from zero_compile.scheduler.solve_starts import solve
from zero_compile.simulator.build_program import build_program
from zero_compile.simulator.program import Buffer, Op, Program
from zero_compile.simulator.simulate import (
    exposed_by_channel,
    overlap_efficiency,
    peak_by_category,
    simulate,
)
from zero_runtime.errors import PlanError
from zero_runtime.ir.plan import Channel
from zero_runtime.ir.timeline import Category, Source, Timeline

COMPUTE, GATHER, REDUCE = Channel.COMPUTE, Channel.ALL_GATHER, Channel.REDUCE_SCATTER
READ, UPLOAD = Channel.NVME_READ, Channel.HOST_TO_DEVICE


def op(name: str, channel: Channel, seconds: float, *after: str, **fields) -> Op:
    return Op(name, channel, seconds, "forward", after, **fields)


def program(*ops: Op, **fields) -> Program:
    return Program("x", 2, ops, **fields)


def spans(timeline: Timeline) -> dict[str, tuple[float, float, float]]:
    return {e.name: (e.start, e.end, e.stall) for e in timeline.events}


def samples(timeline: Timeline) -> list[tuple[float, int]]:
    return [(s.time, s.total) for s in timeline.memory]


# ------------------------------------------------------------------------------ time


def test_channels_run_side_by_side_and_each_in_order():
    timeline = simulate(
        program(op("g0", GATHER, 2.0), op("g1", GATHER, 1.0), op("a", COMPUTE, 1.5, "g0"))
    )
    assert spans(timeline) == {"g0": (0, 2, 0), "g1": (2, 3, 0), "a": (2, 3.5, 2)}
    assert timeline.source is Source.PREDICTED
    assert (timeline.seconds, timeline.exposed) == (3.5, 2.0)


def test_a_transfer_is_not_issued_before_earlier_compute_has_ended():
    """That is no stall: the host has not asked for it yet."""
    timeline = simulate(program(op("a", COMPUTE, 3.0), op("g", GATHER, 1.0)))
    assert spans(timeline)["g"] == (3, 4, 0)


def test_transfers_nest():
    timeline = simulate(
        program(
            op("read0", READ, 1.0),
            op("up0", UPLOAD, 0.5, "read0"),
            op("gather0", GATHER, 0.25, "up0"),
            op("read1", READ, 1.0),
            op("up1", UPLOAD, 0.5, "read1"),
            op("gather1", GATHER, 0.25, "up1"),
            op("a", COMPUTE, 1.0, "gather0"),
            op("b", COMPUTE, 1.0, "gather1"),
        )
    )
    assert spans(timeline) == {
        "read0": (0, 1, 0),
        "up0": (1, 1.5, 1),
        "gather0": (1.5, 1.75, 1.5),
        "read1": (1, 2, 0),
        "up1": (2, 2.5, 0.5),
        "gather1": (2.5, 2.75, 0.75),
        "a": (1.75, 2.75, 1.75),
        "b": (2.75, 3.75, 0),
    }


def test_an_operation_may_wait_for_one_issued_later_on_another_channel():
    timeline = simulate(program(op("r", REDUCE, 1.0, "g"), op("g", GATHER, 2.0)))
    assert spans(timeline) == {"r": (2, 3, 2), "g": (0, 2, 0)}


def test_exposed_time_is_laid_to_the_channel_waited_for_last():
    played = program(
        op("g", GATHER, 2.0),
        op("r", REDUCE, 1.0),
        op("a", COMPUTE, 1.0, "g", "r"),
        op("r2", REDUCE, 3.0),
        op("b", COMPUTE, 1.0, "r2"),
        op("c", COMPUTE, 1.0, "g"),
    )
    timeline = simulate(played)
    assert exposed_by_channel(played, timeline) == {GATHER: 2.0, REDUCE: 3.0}
    assert timeline.exposed == 5.0
    assert overlap_efficiency(timeline) == pytest.approx(1 - 5 / 6)


def test_nothing_moves():
    timeline = simulate(program(op("a", COMPUTE, 1.0)))
    assert overlap_efficiency(timeline) == 1.0
    assert exposed_by_channel(program(op("a", COMPUTE, 1.0)), timeline) == {}
    assert simulate(program()).events == ()


# ------------------------------------------------------------------------------ memory


def test_transfers_take_memory_when_issued_and_compute_when_it_starts():
    timeline = simulate(
        program(
            op("g0", GATHER, 2.0, takes=(Buffer("g0", 8, Category.GATHERED),)),
            op("g1", GATHER, 1.0, takes=(Buffer("g1", 4, Category.GATHERED),)),
            op(
                "a",
                COMPUTE,
                1.0,
                "g0",
                takes=(Buffer("a", 1, Category.ACTIVATIONS),),
                frees=("g0",),
            ),
            op("b", COMPUTE, 1.0, "g1", frees=("g1", "a")),
            resident=((Category.SHARDS, 100),),
        )
    )
    assert samples(timeline) == [(0, 100), (0, 112), (2, 113), (3, 105), (4, 100)]
    assert timeline.peak == 113
    assert peak_by_category(timeline) == {
        Category.SHARDS: 100,
        Category.GATHERED: 12,
        Category.ACTIVATIONS: 1,
    }


def test_a_moments_height_is_sampled():
    """What an operation of no length holds counts."""
    timeline = simulate(
        program(
            op("a", COMPUTE, 1.0),
            op("b", COMPUTE, 0.0, takes=(Buffer("b", 7, Category.STAGING),), frees=("b",)),
        )
    )
    assert samples(timeline) == [(0, 0), (1, 7), (1, 0)]


def test_memory_returned_and_taken_at_one_moment_is_held_once():
    timeline = simulate(
        program(
            op("a", COMPUTE, 1.0, takes=(Buffer("a", 5, Category.STAGING),), frees=("a",)),
            op("g", GATHER, 1.0, takes=(Buffer("g", 5, Category.GATHERED),)),
            op("b", COMPUTE, 1.0, "g", frees=("g",)),
        )
    )
    assert timeline.peak == 5


def test_freeing_what_is_not_taken_is_refused():
    with pytest.raises(PlanError, match="a frees b, which no operation takes"):
        simulate(program(op("a", COMPUTE, 1.0, frees=("b",))))


def test_a_large_program_is_simulated_quickly():
    problem = large(36_000, contended=False)
    laid = build_program(problem, solve(problem), "x")
    begin = time.perf_counter()
    simulate(laid)
    assert time.perf_counter() - begin < 20
