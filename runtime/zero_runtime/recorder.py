"""Records when the steps of a plan really ran, in the format in which the planner predicts them.

The clock is the host's. On an accelerator it is read after everything queued there is done, which
makes the run slower and its parts true. A transfer that had arrived before it was waited for is shown
as ending where the wait began: when exactly it arrived is not known.
"""

import time
from collections import defaultdict
from typing import Protocol

import torch

from zero_runtime.ir.plan import OF_SAVED, Channel, Phase, Plan, Step, StepKind
from zero_runtime.ir.timeline import Category, Event, Sample, Source, Timeline

_CHANNELS = {
    StepKind.ALL_GATHER_START: (Channel.ALL_GATHER, Category.GATHERED),
    StepKind.REDUCE_SCATTER_START: (Channel.REDUCE_SCATTER, Category.REDUCING),
    StepKind.OFFLOAD_START: (Channel.DEVICE_TO_HOST, Category.ACTIVATIONS),
    StepKind.RELOAD_START: (Channel.HOST_TO_DEVICE, Category.ACTIVATIONS),
}


class Observer(Protocol):
    """Is told of what an executor does. Buckets, and saved tensors, go by their number in its plan."""

    def begin(self, plan: Plan) -> None:
        """A graph begins."""

    def started(self, kind: StepKind, bucket: int, held: int) -> None:
        """A transfer started; ``held`` bytes it holds until it is released or waited for."""

    def waits(self) -> None:
        """Compute is about to wait."""

    def arrived(self, start: StepKind, bucket: int) -> None:
        """The transfer that began with ``start`` is complete."""

    def released(self, bucket: int) -> None:
        """A gathered bucket is free."""

    def end(self) -> None:
        """The graph is done."""


class Silent:
    """Listens to nothing."""

    def begin(self, plan: Plan) -> None:
        """Nothing."""

    def started(self, kind: StepKind, bucket: int, held: int) -> None:
        """Nothing."""

    def waits(self) -> None:
        """Nothing."""

    def arrived(self, start: StepKind, bucket: int) -> None:
        """Nothing."""

    def released(self, bucket: int) -> None:
        """Nothing."""

    def end(self) -> None:
        """Nothing."""


class Recorder:
    """Keeps the timeline of the last step: every graph since the forward that followed a backward."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._clear()

    def _clear(self) -> None:
        self._events: list[Event] = []
        self._samples: list[Sample] = []
        self._under_way: dict[tuple[StepKind, str], tuple[float, Phase]] = {}
        self._held: dict[tuple[StepKind, str], int] = {}
        self._phases: list[Phase] = []
        self._origin = self._mark = 0.0
        self._stall = 0.0
        self._plan: Plan | None = None

    def begin(self, plan: Plan) -> None:
        """A graph begins; a forward after a backward begins a new step."""
        fresh = not self._phases or (
            plan.phase is Phase.FORWARD and self._phases[-1] is not Phase.FORWARD
        )
        now = _now(plan)
        if fresh:
            self._clear()
            self._origin = now
        self._plan, self._mark = plan, now
        self._phases.append(plan.phase)

    def started(self, kind: StepKind, bucket: int, held: int) -> None:
        """What ran since the last step was compute; the transfer is under way."""
        now = self._computed()
        assert self._plan is not None
        key = (kind, _key(self._plan, kind, bucket))
        self._under_way.setdefault(key, (now, self._plan.phase))
        if kind not in OF_SAVED:
            self._held[key] = held
        self._sample(now)

    def waits(self) -> None:
        """What ran since the last step was compute."""
        self._computed()

    def arrived(self, start: StepKind, bucket: int) -> None:
        """The time since :meth:`waits` was a stall."""
        assert self._plan is not None
        now, key = _now(self._plan), (start, _key(self._plan, start, bucket))
        waited = now - self._mark
        began, phase = self._under_way.pop(key, (self._mark, self._plan.phase))
        end = now if waited > 50e-6 else max(began, self._mark)
        step = next(s for s in self._plan.steps if (s.kind, s.bucket) == (start, bucket))
        self._events.append(self._transfer(step, began, end, phase))
        self._stall += waited
        self._mark = now
        if start is StepKind.REDUCE_SCATTER_START:
            self._held.pop(key, None)
        self._sample(now)

    def released(self, bucket: int) -> None:
        """What ran since the last step was compute; the bucket's memory is free."""
        now = self._computed()
        assert self._plan is not None
        gathered = StepKind.ALL_GATHER_START
        self._held.pop((gathered, _key(self._plan, gathered, bucket)), None)
        self._sample(now)

    def end(self) -> None:
        """The rest of the graph was compute."""
        self._computed()

    def timeline(self, name: str) -> Timeline:
        """The step recorded last, or as much of it as has run."""
        events = sorted(self._events, key=lambda e: e.start)
        samples = tuple(self._samples) or (Sample(0.0, {}),)
        return Timeline(name, Source.MEASURED, self._world_size, tuple(events), samples)

    def _computed(self) -> float:
        """Everything since the last mark, as one event of compute."""
        assert self._plan is not None
        now = _now(self._plan)
        if now > self._mark:
            begin, end = self._mark - self._origin, now - self._origin
            phase, stall = str(self._plan.phase), self._stall
            name = f"compute {len(self._events)}"
            self._events.append(Event(name, Channel.COMPUTE, begin, end, phase, stall=stall))
            self._stall = 0.0
        self._mark = now
        return now

    def _transfer(self, step: Step, began: float, end: float, phase: Phase) -> Event:
        assert self._plan is not None
        of_saved = step.kind in OF_SAVED
        return Event(
            self._plan.saved[step.bucket].name if of_saved else self._named(step.bucket),
            _CHANNELS[step.kind][0],
            began - self._origin,
            end - self._origin,
            str(phase),
            None if of_saved else step.bucket,
            step.bytes,
            node=step.before,
        )

    def _named(self, bucket: int) -> str:
        assert self._plan is not None
        slots = self._plan.buckets[bucket].slots
        others = f" and {len(slots) - 1} more" if len(slots) > 1 else ""
        return f"{slots[0].name}{others}"

    def _sample(self, now: float) -> None:
        held: dict[Category, int] = defaultdict(int)
        for (kind, _), size in self._held.items():
            held[_CHANNELS[kind][1]] += size
        self._samples.append(Sample(now - self._origin, dict(held)))


def _key(plan: Plan, kind: StepKind, number: int) -> str:
    """What tells a bucket from the others in every plan of a model: its first parameter.

    A saved tensor is told by its name, within the one graph that moves it.
    """
    return plan.saved[number].name if kind in OF_SAVED else plan.buckets[number].slots[0].name


def _now(plan: Plan) -> float:
    if any(not bucket.device.startswith("cpu") for bucket in plan.buckets):
        torch.accelerator.synchronize()
    return time.perf_counter()
