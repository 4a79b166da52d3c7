"""One Dynamo graph through the pipeline: forward and backward are lowered and scheduled together."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

from torch.fx import GraphModule, Node

from zero_compile import pipeline
from zero_compile.analysis import hardware as profiles
from zero_compile.analysis.costs import saturating_bytes
from zero_compile.analysis.fx_graph import calls, output_node, parameter_number
from zero_compile.analysis.hardware import Hardware
from zero_compile.analysis.resident_memory import Held, Resident, left_over, resident
from zero_compile.capture.captured_graph import Capture
from zero_compile.config.options import Options
from zero_compile.emit_plan import emit_plan
from zero_compile.scheduler.activations import plan_activations
from zero_compile.scheduler.decide_schedule import GraphSchedule, Limits, plan_graph, plan_step
from zero_compile.scheduler.pose_problem import Posed, pose_problem
from zero_compile.scheduler.saved_values import Wanted, candidates
from zero_compile.simulator.read_back import Half, Scheduled, read_graph, read_step
from zero_compile.tiling import TilePolicy, most_bytes
from zero_runtime.errors import PlanError
from zero_runtime.ir import ops
from zero_runtime.ir.placement import Offload
from zero_runtime.ir.plan import Phase, Plan, Residence, Stage, StatePolicy, dtype_name
from zero_runtime.sharding.parameter_state import Entry
from zero_runtime.sharding.sharded_gradient import Place

_Schedule = TypeVar("_Schedule")

#: Runs stages on a graph of which the last argument is the name: ``pipeline.run``, or one that looks on.
Run = Callable[[Sequence[Any], GraphModule, str], GraphModule]


@dataclass(frozen=True)
class Lowered:
    """A graph for Inductor, its plan, and which of its outputs are whose reduced gradients."""

    graph: GraphModule
    plan: Plan
    gradients: Mapping[int, Place]


class Lowering:
    """Runs the passes on the graphs that AOTAutograd makes of one Dynamo graph."""

    def __init__(self, capture: Capture, options: Options, run: Run | None = None) -> None:
        self._capture = capture
        self._options = options
        self._run = run or self._run_quietly
        self.graphs: dict[Phase, GraphModule] = {}
        """The lowered graphs."""
        self.plans: dict[Phase, Plan] = {}
        self.donated: tuple[int, ...] = ()
        """Inputs that the code of the graph compiled last may overwrite."""
        self._schedules: dict[Phase, GraphSchedule] = {}
        self._gradients: dict[Phase, dict[int, Place]] = {}

    def joint(self, gm: GraphModule) -> None:
        """The joint graph, before it is cut: the layout is decided here."""
        self._tile(gm, "joint")
        self._lay_out(gm)
        self._run(pipeline.partition(self._capture.session.stage), gm, "joint")

    def step(self, forward: GraphModule, backward: GraphModule) -> None:
        """The two halves of a joint graph, in place: bucketed, and scheduled as one step."""
        for gm, phase in ((forward, Phase.FORWARD), (backward, Phase.BACKWARD)):
            self._bucket(gm, phase)
        if self._options.offload_activations.device != "none":
            self._offload(forward, backward)
        if self._planned:
            halves = self._posed(forward), self._posed(backward)
            both = self._within(lambda limits: plan_step(*halves, limits))
            self._schedules[Phase.FORWARD], self._schedules[Phase.BACKWARD] = both
        for gm, phase in ((forward, Phase.FORWARD), (backward, Phase.BACKWARD)):
            self._schedule(gm, phase)

    def _offload(self, forward: GraphModule, backward: GraphModule) -> None:
        capture, section = self._capture, self._options.offload_activations
        found = candidates(
            forward.graph,
            backward.graph,
            capture.bucket_plans,
            capture.session.policy,
            self._hardware,
            Wanted(section.tier, section.min_bytes),
        )
        halves = self._posed(forward), self._posed(backward)
        moves = plan_activations(*halves, self._limits_beside_gradients, section.tier, found)
        for gm, phase in ((forward, Phase.FORWARD), (backward, Phase.BACKWARD)):
            self._run(pipeline.activations(phase, moves), gm, str(phase))

    def graph(self, gm: GraphModule, phase: Phase) -> Lowered:
        """A graph that is about to be compiled; lowered here if it never was half of a step."""
        if phase not in self._gradients or calls(gm.graph, ops.gather):
            self._tile(gm, str(phase))
            self._lay_out(gm)
            self._bucket(gm, phase)
            if self._planned:
                posed = self._posed(gm)
                self._schedules[phase] = self._within(lambda limits: plan_graph(posed, limits))
            self._schedule(gm, phase)
        return Lowered(gm, self.plans[phase], self._gradients[phase])

    def _bucket(self, gm: GraphModule, phase: Phase) -> None:
        self._gradients[phase] = _gradient_outputs(gm, self._capture)
        capture = self._capture
        stages = pipeline.bucket(
            capture.bucket_plans,
            capture.places,
            capture.session.stage,
            self._options.stage3_max_reuse_distance,
            capture.tile_buckets,
        )
        self._run(stages, gm, str(phase))

    def scheduled(self) -> Scheduled:
        """What was lowered, as a problem and its schedule: the step, or the one graph there is."""
        halves = {phase: self._half(gm, phase) for phase, gm in self.graphs.items()}
        total = self._limits.total
        if Phase.BACKWARD in halves:
            return read_step(halves[Phase.FORWARD], halves[Phase.BACKWARD], total, self._slots)
        return read_graph(next(iter(halves.values())), total, self._slots)

    def _half(self, gm: GraphModule, phase: Phase) -> Half:
        return Half(gm.graph, self._posed(gm), self._schedules.get(phase, GraphSchedule()))

    @property
    def name(self) -> str:
        """The Dynamo graph's."""
        return self._capture.name

    def _schedule(self, gm: GraphModule, phase: Phase) -> None:
        stages = pipeline.schedule(
            self._options.policy,
            self._schedules.get(phase),
            self._capture.session.stage,
            self._capture.bucket_plans,
            self._slots,
        )
        self._run(stages, gm, str(phase))
        self.graphs[phase], self.plans[phase] = gm, self._plan(gm, phase)

    def _plan(self, gm: GraphModule, phase: Phase) -> Plan:
        return emit_plan(
            gm,
            name=f"{self._capture.name}.{phase}",
            phase=phase,
            world_size=self._capture.session.group.world_size,
            policy=self._options.policy,
            buckets=self._capture.bucket_plans,
            policy_of_state=self._capture.session.policy,
            schedule=self._schedules.get(phase, GraphSchedule()),
        )

    def _tile(self, gm: GraphModule, name: str) -> None:
        if self._capture.session.stage is Stage.PARAMETERS:
            cuts = self._capture.cut(gm, self._tile_policy(gm))
            if cuts:
                self._run(pipeline.tile(cuts), gm, name)

    def _tile_policy(self, gm: GraphModule) -> TilePolicy:
        """As the options say; where they say nothing, by what a memory budget leaves beside the state."""
        options = self._options
        if options.tile_bytes is None and options.device_memory is not None:
            room = left_over(options.device_memory, self.resident)
            return TilePolicy(
                most_bytes(self._capture.uses(gm), room, self._world_size), options.tile_over
            )
        return TilePolicy(options.tile_bytes, options.tile_over)

    def _lay_out(self, gm: GraphModule) -> None:
        saturating = saturating_bytes(self._world_size, self._hardware)
        self._capture.lay_out(gm, replace(self._options.layout, saturating_bytes=saturating))

    def _run_quietly(self, stages: Sequence[Any], gm: GraphModule, name: str) -> GraphModule:
        return pipeline.run(stages, gm, verify=self._options.verify)

    # -------------------------------------------------------------- the planner's view

    @property
    def _planned(self) -> bool:
        return self._options.policy == "planned"

    def _posed(self, gm: GraphModule) -> Posed:
        capture = self._capture
        return pose_problem(gm.graph, capture.bucket_plans, capture.session.policy, self._hardware)

    @cached_property
    def _hardware(self) -> Hardware:
        devices = {
            str(e.parameter.device) for e in self._capture.entries if e.parameter is not None
        }
        return profiles.load(self._options.hardware or profiles.default_for(sorted(devices)))

    @cached_property
    def _limits(self) -> Limits:
        options = self._options
        total = None
        if options.device_memory is not None:
            total = left_over(options.device_memory, self.resident)
        return Limits(
            total,
            gathered=self._as_bytes(options.stage3_max_live_parameters),
            ahead=self._as_bytes(options.stage3_prefetch_bucket_size),
            keep=options.device_memory is not None,
            persistent=self._persistent(),
            slots=self._slots,
            tiles=self._capture.tile_buckets,
        )

    @property
    def _limits_beside_gradients(self) -> Limits:
        """Of a step whose gradients are added to those of an earlier backward."""
        limits = self._limits
        if limits.total is None:
            return limits
        held = [p._replace(has_gradient=True) for p in self._held()]
        earlier = resident(held, self.policy, self._world_size).gradients - self.resident.gradients
        return replace(limits, total=limits.total - earlier)

    def _within(self, plan: Callable[[Limits], _Schedule]) -> _Schedule:
        """A schedule with room for gradients of an earlier backward; without, where memory is too small."""
        try:
            return plan(self._limits_beside_gradients)
        except PlanError:
            return plan(self._limits)

    @property
    def _slots(self) -> int:
        """Shards that have room on the host between NVMe and the device."""
        return self.offload.slots

    @property
    def offload(self) -> Offload:
        """Where the session keeps its state."""
        return self._capture.session.offload

    @property
    def policy(self) -> StatePolicy:
        """How the session keeps its state."""
        return self._capture.session.policy

    @property
    def resident(self) -> Resident:
        """What stays on this rank from step to step."""
        return resident(self._held(), self._capture.session.policy, self._world_size)

    @property
    def _world_size(self) -> int:
        return self._capture.session.group.world_size

    def _held(self) -> list[Held]:
        mine = {id(entry) for entry in self._capture.entries}
        alive = [(e, e.parameter) for e in self._capture.session.entries]
        return [
            Held(
                p.numel(),
                dtype_name(p.dtype),
                p.requires_grad,
                id(e) not in mine,
                self._residence(e),
            )
            for e, p in alive
            if p is not None
        ]

    def _residence(self, entry: Entry) -> Residence:
        """Where the parameter's state lives; until a graph has placed it, where most does."""
        if entry.placed:
            return entry.future_place.bucket.plan.residence
        return self._capture.session.offload.usual

    def _as_bytes(self, elements: int | None) -> int | None:
        """A limit that is given in elements; of several dtypes the widest counts."""
        widest = max((b.plan.torch_dtype.itemsize for b in self._capture.buckets), default=4)
        return None if elements is None else elements * widest

    def _persistent(self) -> frozenset[int]:
        most = self._options.stage3_param_persistence_threshold
        small = (all(s.numel <= most for s in b.plan.slots) for b in self._capture.buckets)
        return frozenset(number for number, is_small in enumerate(small) if is_small)


def _gradient_outputs(gm: GraphModule, capture: Capture) -> dict[int, Place]:
    """Outputs of a backward graph that are reduced gradients, and whose."""
    outputs = output_node(gm.graph).args[0]
    assert isinstance(outputs, list | tuple)
    return {
        position: capture.entries[parameter_number(node)].future_place
        for position, node in enumerate(outputs)
        if isinstance(node, Node) and node.target in (ops.reduce, ops.join)
    }
