"""The part of an optimizer whose state is off the device: updated bucket by bucket, beside the stock step."""

import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch

from zero_runtime.ir.plan import Tier
from zero_runtime.module_hook import ModuleHook
from zero_runtime.offload.memory_tiers import Moving
from zero_runtime.offload.tiered_tensor import TieredTensor
from zero_runtime.optim.bucket_state import (
    BucketOptimizerState,
    KernelState,
    ParameterUpdate,
    StockState,
)
from zero_runtime.optim.cpu_kernels import cpu_kernel_for
from zero_runtime.optim.resume import Resume
from zero_runtime.optim.update_pipeline import Stream, Task
from zero_runtime.session import Session, session_of
from zero_runtime.sharding.bucket import Bucket
from zero_runtime.sharding.parameter_state import Entry
from zero_runtime.sharding.tiled_bucket import Arriving


class Member(NamedTuple):
    """A partitioned parameter of the optimizer."""

    session: Session
    entry: Entry
    group: dict[str, Any]

    @property
    def bucket(self) -> Bucket:
        """Which holds it."""
        return self.entry.place.bucket


class OffloadedOptimizer:
    """One optimizer's buckets off the device. Its user's object keeps the parameter groups, and what state
    is in memory.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, resume: Resume) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._resume = resume
        self._recipe = cpu_kernel_for(optimizer)
        self._members: list[Member] = []
        self._by_bucket: dict[Bucket, list[Member]] = {}
        self._parts: dict[Bucket, BucketOptimizerState] = {}
        self._stream: Stream | None = None
        optimizer.register_state_dict_pre_hook(ModuleHook(self._show))
        optimizer.register_state_dict_post_hook(ModuleHook(self._hide))
        optimizer.register_load_state_dict_post_hook(ModuleHook(self._loaded))

    def meet(self) -> bool:
        """Look which partitioned parameters the optimizer has; whether any of their state is off the device."""
        self._members = [
            Member(session, session.entry(parameter), group)
            for group in self._live().param_groups
            for parameter in group["params"]
            if (session := session_of(parameter)) is not None
        ]
        self._members = [m for m in self._members if m.entry.placed and self.takes(m.bucket)]
        self._by_bucket = {}
        for member in self._members:
            self._by_bucket.setdefault(member.bucket, []).append(member)
        for session in {member.session for member in self._members}:
            session.updates.meet(self)
        return bool(self._members)

    def meet_once(self) -> None:
        """As :meth:`meet`, for an optimizer that has not stepped yet, or not since it loaded state."""
        if not self._members:
            self.meet()
        self.adopt(self._resume.settle())

    def takes(self, bucket: Bucket) -> bool:
        """Whether the bucket is updated here, and not by the stock step."""
        tier = bucket.plan.residence.optimizer
        return tier is Tier.NVME or (tier is Tier.HOST and self.has_kernel(bucket))

    def has_kernel(self, bucket: Bucket) -> bool:
        """Whether a host kernel can update the bucket."""
        stepped = torch.float32 if bucket.has_master else bucket.plan.torch_dtype
        return self._recipe is not None and stepped is torch.float32

    def covers(self, bucket: Bucket) -> bool:
        """Whether every parameter of the bucket is in this optimizer, with its state."""
        mine = {m.entry.place.slot for m in self._of(bucket)}
        return mine == set(bucket.plan.slots) and not self._resume.pending

    # -------------------------------------------------------------- updates

    def update(self) -> None:
        """Update every parameter that was set aside, and wait.

        Raises:
            SwapError: state could not be read or written.
        """
        unscale = _unscale(self._live())
        if unscale is None:
            return
        works: dict[Bucket, list[ParameterUpdate]] = {}
        for member in self._members:
            entry = member.entry
            if entry.set_aside:
                work = self._work(member, member.group, _for_kernel(entry.own_gradient))
                works.setdefault(member.bucket, []).append(work)
        for bucket, of_bucket in works.items():
            self._submit(bucket, of_bucket, unscale)
        self.join()

    def update_now(self, bucket: Bucket, gradient: Moving | Arriving) -> Callable[[], None]:
        """Start updating a whole bucket whose reduced gradient ``[chunk]`` is on its way to the host.

        Hyper-parameters are those of this moment. What is returned waits for this and all earlier updates.
        """
        groups = {id(m.group): dict(m.group) for m in self._of(bucket)}
        own = [(m, bucket.local(m.entry.place.slot, gradient.tensor)) for m in self._of(bucket)]
        works = [self._work(m, groups[id(m.group)], g) for m, g in own]
        self._submit(bucket, works, 1.0, gradient)
        return self._streaming(bucket).join

    def join(self) -> None:
        """Return once all updates are done and written.

        Raises:
            SwapError: one failed.
        """
        if self._stream is not None:
            self._stream.join()

    def _submit(
        self,
        bucket: Bucket,
        works: Sequence[ParameterUpdate],
        unscale: float,
        gradient: Moving | Arriving | None = None,
    ) -> None:
        if not works:
            return
        part = self._part(bucket)
        part.adopt(works)

        def run() -> list[TieredTensor]:
            if gradient is not None:
                gradient.land()
            part.update(works, unscale)
            return [*bucket.tiered_tensors, *part.wanted()]

        self._streaming(bucket).submit(Task([*bucket.step_reads, *part.wanted()], run))

    def _streaming(self, bucket: Bucket) -> Stream:
        if self._stream is None:
            self._stream = Stream(bucket.memory_tiers.offload.sets)
            weakref.finalize(self, self._stream.close)
        return self._stream

    def _part(self, bucket: Bucket) -> BucketOptimizerState:
        if bucket not in self._parts:
            if self._recipe is not None and self.has_kernel(bucket):
                self._parts[bucket] = KernelState(bucket, self._recipe)
            else:
                self._parts[bucket] = StockState(bucket, self._live())
        return self._parts[bucket]

    def _work(
        self, member: Member, group: dict[str, Any], gradient: torch.Tensor
    ) -> ParameterUpdate:
        return ParameterUpdate(member.entry, group, self._state(member), gradient)

    def _state(self, member: Member) -> dict[str, Any]:
        parameter = member.entry.parameter
        assert parameter is not None
        state: dict[str, Any] = self._live().state[parameter]
        return state

    def _of(self, bucket: Bucket) -> list[Member]:
        return self._by_bucket.get(bucket, [])

    def _live(self) -> torch.optim.Optimizer:
        optimizer = self._optimizer()
        assert optimizer is not None
        return optimizer

    # -------------------------------------------------------------- state of one parameter

    def read_state(self, entry: Entry, name: str) -> torch.Tensor | None:
        """A copy of this rank's elements ``[n]`` of one state; None where it is not kept here."""
        self.join()
        part = self._parts.get(entry.place.bucket)
        return None if part is None else part.read(entry, name)

    def write_state(self, entry: Entry, name: str, value: torch.Tensor) -> bool:
        """Replace this rank's elements ``[n]`` of one state; whether it is kept here."""
        self.join()
        part = self._parts.get(entry.place.bucket)
        return part is not None and part.write(entry, name, value)

    # -------------------------------------------------------------- optimizer.state_dict()

    def _show(self, *_: object) -> None:
        """State on NVMe comes into memory, as whole as the rank's part of it is, unless other was loaded."""
        self.join()
        if self._resume.pending:
            return
        for member in self._members:
            if member.bucket in self._parts:
                self._parts[member.bucket].show(member.entry, self._state(member))

    def _hide(self, _: object, saved: dict[str, Any]) -> None:
        """What was shown stays in the saved dictionary only."""
        if self._resume.pending:
            return
        saved["state"] = {key: dict(state) for key, state in saved["state"].items()}
        for member in self._members:
            if member.bucket in self._parts:
                self._parts[member.bucket].hide(member.entry, self._state(member))

    def _loaded(self, *_: object) -> None:
        """Loaded state goes where state is kept, unless ranks have to exchange it first."""
        self.join()
        self.adopt(self._resume.settle(alone=True))

    def adopt(self, entries: Collection[Entry]) -> None:
        """State of these goes where it is kept; what is kept for those that have none is dropped."""
        if not entries:
            return
        self.join()
        self.meet()
        for member in self._members:
            if member.entry in entries:
                self._adopt(member)

    def _adopt(self, member: Member) -> None:
        part, parameter = self._part(member.bucket), member.entry.parameter
        if parameter is not None and self._live().state.get(parameter):
            part.adopt([self._work(member, member.group, torch.empty(0))])
        else:
            part.forget(member.entry)
        for tiered_tensor in part.wanted():
            tiered_tensor.put_away().wait()


def _unscale(optimizer: torch.optim.Optimizer) -> float | None:
    """What gradients count times, where GradScaler leaves that to a fused optimizer; None: skip the step."""
    found, scale = getattr(optimizer, "found_inf", None), getattr(optimizer, "grad_scale", None)
    if found is not None and float(found):
        return None
    return 1.0 if scale is None else 1.0 / float(scale)


def _for_kernel(gradient: torch.Tensor) -> torch.Tensor:
    """A gradient in host memory, in a dtype that kernels read."""
    gradient = gradient.cpu().contiguous()
    known = (torch.float32, torch.bfloat16, torch.float16)
    return gradient if gradient.dtype in known else gradient.float()
