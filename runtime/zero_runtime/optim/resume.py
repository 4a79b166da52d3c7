"""One rank's part of an optimizer's state on its way through files: what goes with it, and how it is taken in.

State travels in ``optimizer.state_dict()``, one part a rank. Which elements those are follows from the layout of
buckets, and the run that loads them may have another; and torch rounds what it loads to the dtype of the
parameter, all but what parameter groups hold. So each group that is saved has a note: the layout of its
parameters, their float32 masters, and once more (the same tensors) what torch would round of their state. It stays
with the group until there is a layout to compare with, at the latest until the next step.
"""

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from zero_runtime import compat
from zero_runtime.errors import UnsupportedError, ZeroError
from zero_runtime.ir.plan import BucketPlan, Slot, TiledPlan
from zero_runtime.module_hook import ModuleHook
from zero_runtime.session import Session, session_of
from zero_runtime.sharding.bucket import Bucket
from zero_runtime.sharding.parameter_state import Entry
from zero_runtime.sharding.tiled_bucket import TiledBucket

#: State of stock optimizers that is one number a parameter, whatever the parameter's shape.
SCALARS = {"step", "mu_product", "eta", "mu"}

#: The key of the note in a parameter group.
_NOTE = "zero3_part"
_MASTER = "float32 master"


class Resume:
    """Writes the notes of one optimizer, and uses up those that it loads."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._settled: list[dict[str, Any]] = []
        """Notes of groups whose state is what it should be. Those of loaded groups are other objects."""
        optimizer.register_state_dict_pre_hook(ModuleHook(_refuse_whole_checkpoints))
        optimizer.register_state_dict_post_hook(ModuleHook(self._save))

    @property
    def pending(self) -> bool:
        """Whether there is state that :meth:`settle` has not seen."""
        state = self._live().state
        return any(
            _NOTE in group or any(state.get(p) for p in group["params"]) for group in self._new()
        )

    def settle(self, *, alone: bool = False) -> list[Entry]:
        """Cut whole state to this rank's part, and take in parts that were loaded. Returns whose state is new.

        Collective where a part was saved in another layout; ``alone``: leave everything for later then.

        Raises:
            ZeroError: a part is of another rank, or of another world size, or of another parameter.
        """
        groups = [group for group in self._new() if all(e.placed for _, _, e in _members(group))]
        parts = {entry: part for group in groups for entry, part in _parts(group)}
        if alone and not all(part.lies_as_saved for part in parts.values()):
            return []
        members = [member for group in groups for member in _members(group)]
        for parameter, _, entry in members:
            state = self._live().state.get(parameter, {})
            if entry in parts:
                parts[entry].take_in(state)
            cut(state, entry)
        for group in groups:
            group[_NOTE] = _whose(next(_members(group))[1])
            self._settled.append(group[_NOTE])
        there = [group.get(_NOTE) for group in self._live().param_groups]
        self._settled = [note for note in self._settled if any(note is t for t in there)]
        return [entry for _, _, entry in members]

    def _new(self) -> Iterator[dict[str, Any]]:
        """Groups of partitioned parameters that are not settled."""
        for group in self._live().param_groups:
            known = any(group.get(_NOTE) is note for note in self._settled)
            if not known and any(True for _ in _members(group)):
                yield group

    def _save(self, _: object, saved: dict[str, Any]) -> None:
        """Put a note with all it holds into each settled group; the others have what they were loaded with."""
        new = list(self._new())
        for group, packed in zip(self._live().param_groups, saved["param_groups"], strict=True):
            if _NOTE in group and not any(group is other for other in new):
                states = [saved["state"].get(number, {}) for number in packed["params"]]
                members = {p: entry for p, _, entry in _members(group)}
                parts = [
                    _part(members[p], state) if p in members else None
                    for p, state in zip(group["params"], states, strict=True)
                ]
                packed[_NOTE] = {**group[_NOTE], "parts": parts}

    def _live(self) -> torch.optim.Optimizer:
        optimizer = self._optimizer()
        assert optimizer is not None
        return optimizer


def cut(state: dict[str, Any], entry: Entry) -> None:
    """State of a whole parameter becomes this rank's part; beside masters it is float32, as they are."""
    bucket, slot = entry.place
    own = (len(bucket.plan.owned(slot, bucket.group.rank)),)
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            continue
        if value.shape == slot.shape != own and name not in SCALARS:
            state[name] = value = bucket.part_of(slot, value).clone()
        if bucket.has_master and value.dtype is bucket.plan.torch_dtype:
            state[name] = value.float()


class _Part(NamedTuple):
    """What was loaded of one parameter."""

    session: Session
    entry: Entry
    parts: list[Any]
    number: int

    @property
    def saved(self) -> Mapping[str, Any]:
        """What the note says of the parameter."""
        saved: Mapping[str, Any] = self.parts[self.number]
        return saved

    @property
    def lies_as_saved(self) -> bool:
        """Whether every rank owns the elements that it saved."""
        return bool(self.saved["layout"] == _layout(*self.entry.place))

    def take_in(self, state: dict[str, Any]) -> None:
        """Replace what torch has loaded into ``state``, and the masters."""
        bucket, slot = self.entry.place
        values = {name: v for name, v in state.items() if isinstance(v, torch.Tensor)}
        if bucket.has_master:
            exact = {n: v for n, v in self.saved["exact"].items() if n in values}
            values |= {name: _unrounded(values[name], v) for name, v in exact.items()}
            values |= self.saved["master"]
        exchanged = {} if self.lies_as_saved else self._exchanged(values)
        values |= exchanged
        master = values.pop(_MASTER, None)
        state.update(values)
        if master is not None:
            bucket.restore_masters(slot, master)
        if exchanged:  # should an exchange after this one fail, this one must not be done again
            self.parts[self.number] = _part(self.entry, state)

    @torch.no_grad()
    def _exchanged(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """This rank's elements out of all ranks' parts."""
        bucket, slot = self.entry.place
        plan = _plan_as_saved(self.saved["layout"], bucket.plan, slot)
        (old,) = plan.slots
        own = (len(plan.owned(old, bucket.group.rank)),)
        parts = {
            n: values[n] for n in sorted(values) if n not in SCALARS and values[n].shape == own
        }
        if not parts:
            return {}
        what = ", ".join(f"{name} in {value.dtype}" for name, value in parts.items())
        self.session.agree(f"an exchange of {what} of {slot.name}, saved in another layout")
        if isinstance(plan, TiledPlan):
            then: Bucket = TiledBucket(plan, bucket.group)
        else:
            then = Bucket(plan, bucket.group)
        gathered = ((name, then.gather_beside(old, value)) for name, value in parts.items())
        return {
            name: bucket.part_of(slot, whole).clone().to(parts[name].device)
            for name, whole in gathered
        }


def _members(group: Mapping[str, Any]) -> Iterator[tuple[nn.Parameter, Session, Entry]]:
    for parameter in group["params"]:
        session = session_of(parameter)
        if session is not None:
            yield parameter, session, session.entry(parameter)


def _parts(group: Mapping[str, Any]) -> Iterator[tuple[Entry, _Part]]:
    """What a group's note, if it has one, says of its parameters."""
    note, members = group.get(_NOTE), {p: (s, e) for p, s, e in _members(group)}
    if note is None:
        return
    _refuse_others(note, _whose(next(iter(members.values()))[0]))
    for number, parameter in enumerate(group["params"]):
        saved = note["parts"][number]
        if saved is not None and parameter in members:
            session, entry = members[parameter]
            shape = tuple(saved["layout"]["shape"])
            if shape != entry.place.slot.shape:
                raise ZeroError(
                    f"the optimizer state loaded for {entry.name} {entry.place.slot.shape} is of "
                    f"{saved['name']} {shape}: load it into an optimizer with the same parameters in the same order"
                )
            yield entry, _Part(session, entry, note["parts"], number)


def _whose(session: Session) -> dict[str, Any]:
    return {"rank": session.group.rank, "world_size": session.group.world_size}


def _refuse_others(note: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    if {key: note[key] for key in ours} != ours:
        raise ZeroError(
            f"this optimizer's state is the part of rank {note['rank']} of {note['world_size']}, "
            f"loaded on rank {ours['rank']} of {ours['world_size']}. Save one optimizer.state_dict() "
            "a rank and load on each rank its own, at the same world size."
        )
    if "parts" not in note:
        raise ZeroError(
            "this optimizer's state does not say which elements it is of: it was not saved by "
            "optimizer.state_dict() of the optimizer that had it. Save that, one a rank."
        )


def _part(entry: Entry, state: Mapping[str, Any]) -> dict[str, Any]:
    """What a note says of one parameter, whose state is ``state``."""
    bucket, slot = entry.place
    rounds = bucket.has_master
    exact = {
        name: value
        for name, value in (state.items() if rounds else ())
        if isinstance(value, torch.Tensor) and value.dtype is not bucket.plan.torch_dtype
    }
    masters = {_MASTER: bucket.exact(slot)} if rounds and bucket.tiered_tensors[1].used else {}
    layout = _layout(bucket, slot)
    return {"name": entry.name, "layout": layout, "master": masters, "exact": exact}


def _layout(bucket: Bucket, slot: Slot) -> dict[str, Any]:
    """Where the elements lie, on every rank, in what any way of saving can hold."""
    plan = bucket.plan
    tiles = {"dim": plan.dim, "sizes": list(plan.sizes)} if isinstance(plan, TiledPlan) else {}
    where = {"offset": slot.offset, "chunk": plan.chunk, **tiles}
    return {"shape": list(slot.shape), "stride": list(slot.stride), **where}


def _plan_as_saved(layout: Mapping[str, Any], plan: BucketPlan, slot: Slot) -> BucketPlan:
    """A bucket of the parameter alone, which lies in it as it did when it was saved."""
    then = replace(slot, offset=layout["offset"], stride=tuple(layout["stride"]))
    lies = (plan.dtype, plan.device, plan.world_size, layout["chunk"], (then,))
    if "sizes" in layout:
        return TiledPlan(*lies, dim=layout["dim"], sizes=tuple(layout["sizes"]))
    return BucketPlan(*lies)


def _unrounded(value: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """``exact`` wherever ``value`` is what torch has made of it, and not another one that a script gave."""
    exact = exact.to(value.device)
    if exact.shape != value.shape:
        return value
    return torch.where(exact.to(value.dtype) == value, exact, value.to(exact.dtype))


def _refuse_whole_checkpoints(*_: object) -> None:
    if compat.called_from("torch.distributed.checkpoint"):
        raise UnsupportedError(
            "torch.distributed.checkpoint takes what optimizer.state_dict() holds for whole parameters, and it is "
            "this rank's part of them. Save the model with it (get_model_state_dict), and the optimizer with "
            "torch.save(optimizer.state_dict(), ...), one file a rank, to be loaded at the same world size."
        )
