"""The pipeline: which pass runs when, as lists a reader can follow from top to bottom."""

from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial

from torch.fx import GraphModule

from zero_compile.passes.bucket_gathers import bucket_gathers
from zero_compile.passes.bucket_reductions import bucket_reductions
from zero_compile.passes.evict_gradients import evict_gradients
from zero_compile.passes.insert_fetches import insert_fetches
from zero_compile.passes.insert_gathers import insert_gathers
from zero_compile.passes.offload_activations import offload_activations
from zero_compile.passes.read_whole_parameters import read_whole_parameters
from zero_compile.passes.regather_in_backward import regather_in_backward
from zero_compile.passes.release_after_last_reader import release_after_last_reader
from zero_compile.passes.reload_activations import reload_activations
from zero_compile.passes.schedule_ahead import schedule_ahead
from zero_compile.passes.schedule_planned import schedule_planned
from zero_compile.passes.sink_casts import sink_casts
from zero_compile.passes.split_distant_uses import split_distant_uses
from zero_compile.passes.tile_cross_entropy import tile_cross_entropy
from zero_compile.passes.tile_linears import tile_linears
from zero_compile.scheduler.activations import Move
from zero_compile.scheduler.decide_schedule import GraphSchedule
from zero_compile.scheduler.problem import STAGING_SLOTS
from zero_compile.tiling import Cut
from zero_compile.verify import (
    verify_bucketed,
    verify_captured,
    verify_moved,
    verify_scheduled,
    verify_tiled,
)
from zero_runtime import compat
from zero_runtime.ir.plan import BucketPlan, Phase, Stage

Pass = Callable[[GraphModule], GraphModule]
Check = Callable[[GraphModule], None]

#: How far ahead the schedules without a planner gather.
DEPTHS = {"on_demand": 0, "one_ahead": 1, "all_first": 1 << 30}


def capture(parameters: Mapping[int, int]) -> list[Pass | Check]:
    """Dynamo's graph, before AOTAutograd. ``parameters``: placeholder position to parameter number."""
    return [
        partial(insert_gathers, parameters=parameters),
        partial(verify_captured, parameters=parameters),
    ]


def tile(cuts: Mapping[int, Cut]) -> list[Pass | Check]:
    """A graph with logical gathers that moves some parameters in tiles: ``cuts``, by parameter number."""
    return [
        partial(tile_linears, cuts=cuts),
        tile_cross_entropy,
        partial(verify_tiled, cuts=cuts),
    ]


def partition(stage: Stage = Stage.PARAMETERS) -> list[Pass | Check]:
    """The joint forward and backward graph, before it is cut in two."""
    return [partial(regather_in_backward, derived_too=stage is Stage.PARAMETERS)]


def bucket(
    buckets: Sequence[BucketPlan],
    places: Mapping[int, tuple[int, int]],
    stage: Stage = Stage.PARAMETERS,
    reuse_distance: int = 10**9,
    tiles: Set[int] = frozenset(),
) -> list[Pass | Check]:
    """Each forward, backward or inference graph: gathers and reductions become those of buckets.

    ``tiles`` are the buckets that hold one tile of a parameter each.
    """
    if stage is not Stage.PARAMETERS:
        return [
            read_whole_parameters,
            partial(bucket_reductions, buckets=buckets, places=places, stage=stage),
            partial(verify_bucketed, buckets=buckets),
        ]
    bucket_of = {number: bucket for number, (bucket, _) in places.items()}
    return [
        partial(sink_casts, bucket_of=bucket_of),
        partial(bucket_gathers, buckets=buckets, places=places),
        partial(bucket_reductions, buckets=buckets, places=places),
        partial(verify_bucketed, buckets=buckets, tiles=tiles),
        partial(split_distant_uses, buckets=buckets, distance=reuse_distance, tiles=tiles),
    ]


def activations(phase: Phase, moves: Sequence[Move]) -> list[Pass | Check]:
    """The two halves of a step, bucketed: saved tensors are off the device in between."""
    move = offload_activations if phase is Phase.FORWARD else reload_activations
    return [partial(move, moves=moves), verify_moved]


def schedule(
    policy: str,
    decided: GraphSchedule | None = None,
    stage: Stage = Stage.PARAMETERS,
    buckets: Sequence[BucketPlan] = (),
    slots: int = STAGING_SLOTS,
) -> list[Pass | Check]:
    """The same graphs, before Inductor: when each transfer starts, and what is released.

    ``buckets`` may be left out where everything lives on the device.
    """
    order: Pass = (
        partial(schedule_planned, schedule=decided)
        if decided is not None
        else partial(schedule_ahead, depth=DEPTHS[policy])
    )
    evict = partial(evict_gradients, buckets=buckets, stage=stage)
    if stage is not Stage.PARAMETERS:
        return [order, evict, verify_scheduled]
    depth = DEPTHS.get(policy, 0)
    given = decided or GraphSchedule()
    return [
        order,
        partial(insert_fetches, buckets=buckets, schedule=decided, depth=depth, slots=slots),
        evict,
        release_after_last_reader,
        partial(verify_scheduled, gather_cache=given.carried_out, sent=set(given.sent)),
    ]


def run(stages: Sequence[Pass | Check], gm: GraphModule, *, verify: bool = True) -> GraphModule:
    """Apply the stages in order; checks are skipped where ``verify`` is off."""
    for stage in stages:
        if is_check(stage):
            if verify:
                stage(gm)
        else:
            gm = stage(gm) or gm
    compat.forget_mutation_regions(gm.graph)
    gm.recompile()
    return gm


def is_check(stage: Pass | Check) -> bool:
    """Whether a stage only looks."""
    function = stage.func if isinstance(stage, partial) else stage
    return function.__name__.startswith("verify_")
