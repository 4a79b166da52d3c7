"""The pipeline: which pass runs when, as lists a reader can follow from top to bottom."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from torch.fx import GraphModule

from zero_compile.options import Options
from zero_compile.passes.bucket_gathers import bucket_gathers
from zero_compile.passes.bucket_reductions import bucket_reductions
from zero_compile.passes.insert_gathers import insert_gathers
from zero_compile.passes.read_whole_parameters import read_whole_parameters
from zero_compile.passes.regather_in_backward import regather_in_backward
from zero_compile.passes.release_after_last_reader import release_after_last_reader
from zero_compile.passes.schedule_ahead import schedule_ahead
from zero_compile.passes.sink_casts import sink_casts
from zero_compile.verify import verify_bucketed, verify_captured, verify_scheduled
from zero_runtime.plan import BucketPlan, Stage

Pass = Callable[[GraphModule], GraphModule]
Check = Callable[[GraphModule], None]

#: How far ahead each schedule gathers.
DEPTHS = {"on_demand": 0, "one_ahead": 1}


def capture(parameters: Mapping[int, int]) -> list[Pass | Check]:
    """Dynamo's graph, before AOTAutograd. ``parameters``: placeholder position to parameter number."""
    return [
        partial(insert_gathers, parameters=parameters),
        partial(verify_captured, parameters=parameters),
    ]


def partition(stage: Stage = Stage.PARAMETERS) -> list[Pass | Check]:
    """The joint forward and backward graph, before it is cut in two."""
    return [partial(regather_in_backward, derived_too=stage is Stage.PARAMETERS)]


def lower(
    buckets: Sequence[BucketPlan],
    places: Mapping[int, tuple[int, int]],
    options: Options,
    stage: Stage = Stage.PARAMETERS,
) -> list[Pass | Check]:
    """Each forward, backward or inference graph, before Inductor."""
    if stage is not Stage.PARAMETERS:
        return [
            read_whole_parameters,
            partial(bucket_reductions, buckets=buckets, places=places, stage=stage),
            partial(verify_bucketed, buckets=buckets),
            partial(schedule_ahead, depth=0),
            verify_scheduled,
        ]
    bucket_of = {number: bucket for number, (bucket, _) in places.items()}
    return [
        partial(sink_casts, bucket_of=bucket_of),
        partial(bucket_gathers, buckets=buckets, places=places),
        partial(bucket_reductions, buckets=buckets, places=places),
        partial(verify_bucketed, buckets=buckets),
        partial(schedule_ahead, depth=DEPTHS[options.schedule]),
        release_after_last_reader,
        verify_scheduled,
    ]


def run(stages: Sequence[Pass | Check], gm: GraphModule, *, verify: bool = True) -> GraphModule:
    """Apply the stages in order; checks are skipped where ``verify`` is off."""
    for stage in stages:
        if is_check(stage):
            if verify:
                stage(gm)
        else:
            gm = stage(gm) or gm
    return gm


def is_check(stage: Pass | Check) -> bool:
    """Whether a stage only looks."""
    function = stage.func if isinstance(stage, partial) else stage
    return function.__name__.startswith("verify_")
