"""The Dynamo backends: ``torch.compile(model, backend="zero3")``.

Dynamo hands over a graph and its real inputs. Parameters among them are claimed by a session,
the graph goes through :mod:`zero_compile.pipeline` on both sides of AOTAutograd, Inductor
compiles what is left, and the parameters are partitioned last, when everything was traced.
"""

import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch.fx import GraphModule

from zero_compile import pipeline
from zero_compile.capture.captured_graph import Capture
from zero_compile.capture.checks import refuse_torch_version
from zero_compile.capture.offload import refuse_folders
from zero_compile.capture.uncompiled import refuse_unseen
from zero_compile.config.options import parse
from zero_compile.lowering import Lowered, Lowering
from zero_runtime import compat
from zero_runtime.errors import PlanError
from zero_runtime.executor import Executor
from zero_runtime.ir.plan import Phase, Stage
from zero_runtime.optim.step_hooks import HOOKS


def zero3(gm: GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
    """Compile a Dynamo graph with its parameters, gradients and optimizer state partitioned.

    Raises:
        OptionError: ``options`` holds an unknown name or a wrong value.
        GroupError: several ranks were launched and no process group was initialised.
        UnsupportedError: the graph does something that cannot be right on partitioned parameters.
    """
    return _compile(gm, example_inputs, Stage.PARAMETERS, **kwargs)


def zero2(gm: GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
    """As :func:`zero3`, with gradients and optimizer state partitioned; parameters stay whole."""
    return _compile(gm, example_inputs, Stage.GRADIENTS, **kwargs)


def zero1(gm: GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
    """As :func:`zero3`, with only the optimizer's state partitioned."""
    return _compile(gm, example_inputs, Stage.OPTIMIZER, **kwargs)


def _compile(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    stage: Stage,
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Any:
    refuse_torch_version()
    settings = parse(options, stage=int(stage))
    refuse_folders(settings)
    patches = {**compat.mode_patches(mode), **compat.PLANNED_ORDER, **settings.inductor}
    capture = Capture.of(gm, example_inputs, settings, stage)
    if not capture.entries:
        return compat.compile_fx(gm, example_inputs, config_patches=patches)
    pipeline.run(pipeline.capture(capture.parameters), gm, verify=settings.verify)
    if settings.record:
        capture.session.record()
    lowering = Lowering(capture, settings)
    compiled = compat.compile_fx(
        gm,
        example_inputs,
        inner_compile=GraphCompiler(capture, lowering),
        config_patches={**patches, "custom_partitioner_fn": JointPartitioner(lowering)},
    )
    capture.session.partition()
    return capture.bound(compiled)


BACKENDS = (zero1, zero2, zero3)

# When a script names one of our backends this module is loaded, and optimizers are watched from then
# on: the only place that meets a model of which Dynamo compiles nothing.
HOOKS.install(partial(refuse_unseen, backends=BACKENDS))


class JointPartitioner(compat.CustomPartitionerFn):
    """Cuts the joint graph so that backward gathers again, and lowers both halves together.

    Inductor keeps its config, and so this object, for longer than it compiles: longer than the model may live.
    The lowering is the caller's, who must keep it until the graph is compiled.
    """

    def __init__(self, lowering: Lowering) -> None:
        self._lowering = weakref.ref(lowering)

    def __deepcopy__(self, memo: dict[int, Any]) -> "JointPartitioner":
        """Inductor copies its config for cache keys; what this one holds is live and has no copy."""
        return self

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        """Inductor also pickles its config for cache keys: this one stands there by its name."""
        return str, (self.uuid(),)

    def uuid(self) -> str:
        """Names this partitioner in Inductor's cache keys; the graphs themselves hold the rest.

        But for one thing: code that may overwrite saved tensors is not the code of a backward that
        keeps them, and Inductor's keys do not tell the two apart.
        """
        lowering = self._live()
        donated = ",".join(map(str, lowering.donated))
        return f"zero_compile.JointPartitioner.{int(lowering.policy.stage)}.{donated}"

    def __call__(self, gm: GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Any:
        lowering = self._live()
        lowering.joint(gm)
        halves = compat.min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
        lowering.step(*halves)
        return halves

    def _live(self) -> Lowering:
        lowering = self._lowering()
        if lowering is None:
            raise PlanError(
                "Inductor asks for the partition of a graph that was compiled before. Please report it."
            )
        return lowering


class GraphCompiler:
    """Inductor's inner compile with our passes before it. One a Dynamo graph, called for each phase."""

    def __init__(self, capture: Capture, lowering: Lowering) -> None:
        self._capture = capture
        self._lowering = lowering

    def __call__(self, gm: GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Executor:
        capture = self._capture
        lowered = self._lowering.graph(gm, phase_of(kwargs))
        capture.session.plans.append(lowered.plan)
        self._lowering.donated = compat.donated_inputs()
        run = self.compile(lowered, example_inputs, compat.without_cudagraphs(kwargs))
        return Executor(capture.session, lowered.plan, capture.buckets, run, lowered.gradients)

    def compile(
        self, lowered: Lowered, example_inputs: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """What runs the lowered graph: Inductor's code."""
        return compat.compile_fx_inner(lowered.graph, example_inputs, **kwargs)


def phase_of(kwargs: Mapping[str, Any]) -> Phase:
    """Which graph Inductor is asked to compile."""
    if kwargs.get("is_backward"):
        return Phase.BACKWARD
    return Phase.INFERENCE if kwargs.get("is_inference") else Phase.FORWARD
