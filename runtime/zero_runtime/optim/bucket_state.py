"""One bucket's optimizer state off the device, and its update: by a host kernel, or by the stock step."""

import inspect
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from zero_runtime.ir.plan import Slot, Tier
from zero_runtime.offload.tiered_tensor import TieredTensor
from zero_runtime.optim import cpu_optimizer as host
from zero_runtime.optim.cpu_kernels import CpuKernel
from zero_runtime.sharding.bucket import Bucket
from zero_runtime.sharding.parameter_state import Entry


@dataclass(frozen=True)
class ParameterUpdate:
    """One parameter's part in an update: its hyper-parameters, its ``optimizer.state[p]``, its gradient."""

    entry: Entry
    group: dict[str, Any]
    state: dict[str, Any]
    gradient: torch.Tensor
    """This rank's elements ``[n]``, in host memory."""

    @property
    def slot(self) -> Slot:
        """Where the elements lie in the bucket."""
        return self.entry.place.slot


class BucketOptimizerState(Protocol):
    """The state of one bucket in one optimizer."""

    def adopt(self, works: Sequence[ParameterUpdate]) -> None:
        """Take over state that is in ``optimizer.state``: made before, or loaded."""

    def forget(self, entry: Entry) -> None:
        """Begin anew with one parameter, as if it had never been stepped."""

    def wanted(self) -> list[TieredTensor]:
        """What an update needs in memory, beside the parameters."""

    def update(self, works: Sequence[ParameterUpdate], unscale: float) -> None:
        """The update, in place; gradients count times ``unscale``."""

    def read(self, entry: Entry, name: str) -> torch.Tensor | None:
        """A copy of this rank's elements ``[n]`` of one parameter's state; None where there is none."""

    def write(self, entry: Entry, name: str, value: torch.Tensor) -> bool:
        """Replace them; whether there are any."""

    def show(self, entry: Entry, state: dict[str, Any]) -> None:
        """Put one parameter's whole state into ``optimizer.state``."""

    def hide(self, entry: Entry, state: dict[str, Any]) -> None:
        """The inverse, for state that is not in memory."""


#: Parts in the order in which they are made: several optimizers may have state of one bucket.
_numbers = itertools.count()


class _Span(NamedTuple):
    """Elements ``start`` to ``stop`` of the shard that one kernel call updates."""

    start: int
    stop: int
    gradient: torch.Tensor
    step: int
    group: dict[str, Any]


class KernelState:
    """Flat float32 state of the whole bucket, updated by one kernel call a run of like parameters."""

    def __init__(self, bucket: Bucket, recipe: CpuKernel) -> None:
        self._bucket = bucket
        self._recipe = recipe
        self._number = next(_numbers)
        self._tiered_tensors: dict[str, TieredTensor] = {}
        self._steps: dict[Slot, int] = {}
        self._shown: dict[tuple[Slot, str], torch.Tensor] = {}
        self._away = bucket.plan.residence.optimizer is Tier.NVME

    def adopt(self, works: Sequence[ParameterUpdate]) -> None:
        """Values found in ``optimizer.state`` that are not ours go into the flat state."""
        for work in works:
            if self._recipe.counts:
                count = work.state.setdefault("step", torch.tensor(0.0))
                self._steps[work.slot] = int(count)
            for name in self._recipe.states(work.group):
                fresh = name not in self._tiered_tensors
                tiered_tensor = self._tiered_tensor(name)
                if fresh and self._recipe.initial(work.group):
                    tiered_tensor.edit().fill_(self._recipe.initial(work.group))
                self._adopt(work, name, tiered_tensor)

    def forget(self, entry: Entry) -> None:
        """Its part of the flat state is as at first."""
        slot = entry.place.slot
        self._steps.pop(slot, None)
        for name, tiered_tensor in self._tiered_tensors.items():
            self._shown.pop((slot, name), None)
            self._bucket.local(slot, tiered_tensor.edit()).zero_()

    def _adopt(self, work: ParameterUpdate, name: str, tiered_tensor: TieredTensor) -> None:
        key, value = (work.slot, name), work.state.get(name)
        if value is not None and value is not self._shown.get(key):
            self._bucket.local(work.slot, tiered_tensor.edit()).copy_(value.reshape(-1))
            if not self._recipe.counts:  # there is state, so there was a step
                self._steps[work.slot] = max(1, self._steps.get(work.slot, 0))
        if self._away:
            work.state.pop(name, None)
        elif value is None or value is not self._shown.get(key):
            own = self._bucket.local(work.slot, tiered_tensor.read())
            work.state[name] = self._shown[key] = own

    def _tiered_tensor(self, name: str) -> TieredTensor:
        if name not in self._tiered_tensors:
            plan = self._bucket.plan
            self._tiered_tensors[name] = TieredTensor(
                self._bucket.memory_tiers,
                self._bucket.name_of(f"{name} ({self._number})"),
                plan.chunk,
                torch.float32,
                self._bucket.device,
                plan.residence.optimizer,
            )
        return self._tiered_tensors[name]

    def wanted(self) -> list[TieredTensor]:
        """All of the state."""
        return list(self._tiered_tensors.values())

    def update(self, works: Sequence[ParameterUpdate], unscale: float) -> None:
        """Parameters, state and the 16-bit copy in one pass."""
        bucket = self._bucket
        stepped = bucket.open_step()
        flats = {name: tiered_tensor.edit() for name, tiered_tensor in self._tiered_tensors.items()}
        rounded = self._rounded(works)
        for span in self._spans(works):
            here = slice(span.start, span.stop)
            copy = None if rounded is None else rounded[here]
            names = self._recipe.states(span.group)
            states = {name: flats[name][here] for name in names}
            self._recipe.update(
                host.Bucket(stepped[here], span.gradient, copy, unscale),
                states,
                span.step,
                span.group,
            )
        if rounded is not None:
            bucket.take_rounded(rounded)
        bucket.close_step(rounded=rounded is not None)

    def _rounded(self, works: Sequence[ParameterUpdate]) -> torch.Tensor | None:
        """Where the kernel puts the 16-bit parameters; None where it does not write all of them."""
        plan, rank = self._bucket.plan, self._bucket.group.rank
        own = {slot for slot in plan.slots if len(plan.owned(slot, rank))}
        given = {work.slot for work in works if len(work.gradient)}
        if not self._bucket.has_master or not own or given != own:
            return None
        return self._bucket.room_for_rounded()

    def _spans(self, works: Sequence[ParameterUpdate]) -> Iterator[_Span]:
        """Neighbours that take the same step with gradients that lie as they do are one span."""
        order = {slot: number for number, slot in enumerate(self._bucket.plan.slots)}
        open_span: _Span | None = None
        last = -2
        for work in sorted(works, key=lambda w: order[w.slot]):
            span = self._span(work)
            if span.start == span.stop:  # no element of it is this rank's
                continue
            joined = _join(open_span, span) if order[work.slot] == last + 1 else None
            if joined is None and open_span is not None:
                yield open_span
            open_span, last = joined or span, order[work.slot]
        if open_span is not None:
            yield open_span

    def _span(self, work: ParameterUpdate) -> _Span:
        owned = self._bucket.plan.owned(work.slot, self._bucket.group.rank)
        step = self._steps[work.slot] = self._steps.get(work.slot, 0) + 1
        if self._recipe.counts:
            work.state["step"].fill_(step)
        return _Span(owned.start, owned.stop, work.gradient, step, work.group)

    def read(self, entry: Entry, name: str) -> torch.Tensor | None:
        """The parameter's part of the flat state."""
        tiered_tensor = self._tiered_tensors.get(name)
        if tiered_tensor is None or not self._steps.get(entry.place.slot):
            return None
        return _copy_of(self._bucket.local(entry.place.slot, tiered_tensor.read()), tiered_tensor)

    def write(self, entry: Entry, name: str, value: torch.Tensor) -> bool:
        """Into the flat state, of which what is shown is a view."""
        tiered_tensor = self._tiered_tensors.get(name)
        if tiered_tensor is not None:
            self._bucket.local(entry.place.slot, tiered_tensor.edit()).copy_(value)
            tiered_tensor.put_away().wait()
        return tiered_tensor is not None

    def show(self, entry: Entry, state: dict[str, Any]) -> None:
        """Copies of what is on NVMe; the rest is there already, as views of the flat state."""
        slot = entry.place.slot
        if not self._steps.get(slot):  # it was never stepped
            return
        for name, tiered_tensor in self._tiered_tensors.items() if self._away else ():
            state[name] = self._bucket.local(slot, tiered_tensor.read()).clone()
            tiered_tensor.put_away().wait()

    def hide(self, entry: Entry, state: dict[str, Any]) -> None:
        """Drop the copies; NVMe has the values."""
        for name in self._tiered_tensors if self._away else ():
            state.pop(name, None)


def _join(before: _Span | None, span: _Span) -> _Span | None:
    """One span of both, if one kernel call can update them and what lies between them."""
    if before is None or before.group is not span.group or before.step != span.step:
        return None
    first, second = before.gradient, span.gradient
    same = first.dtype is second.dtype and (
        first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    )
    apart = second.storage_offset() - first.storage_offset()
    if not same or apart != span.start - before.start:
        return None
    gradient = first.as_strided((span.stop - before.start,), (1,))
    return _Span(before.start, span.stop, gradient, span.step, span.group)


def _copy_of(values: torch.Tensor, tiered_tensor: TieredTensor) -> torch.Tensor:
    """What was read, once the shelf's memory may go."""
    copy = values.clone()
    tiered_tensor.put_away().wait()
    return copy


def _only(group: dict[str, Any], members: set[int]) -> dict[str, Any]:
    """A parameter group without the parameters that are not among ``members``."""
    return {**group, "params": [p for p in group["params"] if id(p) in members]}


class StockState:
    """State on NVMe of an optimizer without a kernel: its own ``step`` runs on one bucket at a time."""

    def __init__(self, bucket: Bucket, optimizer: torch.optim.Optimizer) -> None:
        self._number = next(_numbers)
        self._bucket = bucket
        self._step: Callable[[torch.optim.Optimizer], object] = inspect.unwrap(type(optimizer).step)
        self._optimizer = weakref.ref(optimizer)
        self._tiered_tensors: dict[tuple[Slot, str], TieredTensor] = {}

    def adopt(self, works: Sequence[ParameterUpdate]) -> None:
        """State found in ``optimizer.state`` goes onto shelves; it comes back for the update."""
        for work in works:
            self._keep(work.entry, work.state)

    def forget(self, entry: Entry) -> None:
        """Give up its shelves."""
        for key in [key for key in self._tiered_tensors if key[0] is entry.place.slot]:
            self._tiered_tensors.pop(key).discard()

    def _keep(self, entry: Entry, state: dict[str, Any]) -> None:
        slot, bucket = entry.place.slot, self._bucket
        own = (len(bucket.plan.owned(slot, bucket.group.rank)),)
        for name, value in list(state.items()):
            if isinstance(value, torch.Tensor) and value.shape == own and name != "step":
                tiered_tensor = self._tiered_tensors.get((slot, name)) or self._tiered_tensor(
                    slot, name, value
                )
                if value.data_ptr() != tiered_tensor.edit().data_ptr():
                    tiered_tensor.edit().copy_(value)
                del state[name]

    def _tiered_tensor(self, slot: Slot, name: str, value: torch.Tensor) -> TieredTensor:
        where = self._bucket.name_of(f"{name} ({self._number}) of {slot.name}")
        memory_tiers, device = self._bucket.memory_tiers, self._bucket.device
        tiered_tensor = TieredTensor(
            memory_tiers, where, value.numel(), value.dtype, device, Tier.NVME
        )
        self._tiered_tensors[slot, name] = tiered_tensor
        return tiered_tensor

    def wanted(self) -> list[TieredTensor]:
        """All of the state."""
        return list(self._tiered_tensors.values())

    def update(self, works: Sequence[ParameterUpdate], unscale: float) -> None:
        """The stock step, on this bucket's parameters alone."""
        for work in works:
            self._bring(work.entry, work.state)
            work.entry.step_now()
        with torch.no_grad():
            self._run({id(work.entry.parameter) for work in works})
        for work in works:
            work.entry.stepped()
            self._keep(work.entry, work.state)
        self._bucket.close_step()

    def _run(self, members: set[int]) -> None:
        optimizer = self._optimizer()
        assert optimizer is not None
        groups = optimizer.param_groups
        optimizer.param_groups = [_only(group, members) for group in groups]
        try:
            self._step(optimizer)
        finally:
            optimizer.param_groups = groups

    def _bring(self, entry: Entry, state: dict[str, Any]) -> None:
        for (slot, name), tiered_tensor in self._tiered_tensors.items():
            if slot is entry.place.slot:
                state[name] = tiered_tensor.edit()

    def read(self, entry: Entry, name: str) -> torch.Tensor | None:
        """From the state's shelf."""
        tiered_tensor = self._tiered_tensors.get((entry.place.slot, name))
        return None if tiered_tensor is None else _copy_of(tiered_tensor.read(), tiered_tensor)

    def write(self, entry: Entry, name: str, value: torch.Tensor) -> bool:
        """Onto the state's shelf."""
        tiered_tensor = self._tiered_tensors.get((entry.place.slot, name))
        if tiered_tensor is not None:
            tiered_tensor.edit().copy_(value)
            tiered_tensor.put_away().wait()
        return tiered_tensor is not None

    def show(self, entry: Entry, state: dict[str, Any]) -> None:
        """Copies of what is on NVMe."""
        for (slot, name), tiered_tensor in self._tiered_tensors.items():
            if slot is entry.place.slot:
                state[name] = tiered_tensor.read().clone()
                tiered_tensor.put_away().wait()

    def hide(self, entry: Entry, state: dict[str, Any]) -> None:
        """Drop the copies."""
        for slot, name in self._tiered_tensors:
            if slot is entry.place.slot:
                state.pop(name, None)
