"""Leaf modules: gathered whole before their forward, whatever inside them a rank then uses.

For modules whose ranks may take different ways, such as experts chosen by a rank's own tokens. Inside
a leaf no collective runs: all its parameters are gathered when its forward begins, released when it
ends, gathered again when its backward begins, and all their gradients are reduced when that ends.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from zero_runtime import compat
from zero_runtime.compat import pytree
from zero_runtime.ir.plan import Stage
from zero_runtime.module_hook import ModuleHook
from zero_runtime.session import Session
from zero_runtime.sharding.bucket import Bucket
from zero_runtime.sharding.parameter_state import Entry


class _Use(NamedTuple):
    """One place at which a module inside the leaf holds a parameter."""

    module: nn.Module
    key: str
    parameter: nn.Parameter


class _Lent(NamedTuple):
    """What autograd saves instead of a view of gathered memory: where to find it again."""

    bucket: Bucket
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class _Visit:
    """One forward through a leaf, and its backward."""

    def __init__(self, name: str, session: Session, entries: Sequence[Entry]) -> None:
        self._name = name
        self.session = session
        self.entries = entries
        self._buckets = list(dict.fromkeys(e.place.bucket for e in entries))
        self._memory: dict[Bucket, torch.Tensor] = {}

    def open(self) -> list[torch.Tensor]:
        """Every parameter whole, in the order of the entries: views of the gathered buckets. Collective."""
        self.gather()
        return [
            e.place.bucket.whole(e.place.slot, self._memory[e.place.bucket]) for e in self.entries
        ]

    def gather(self) -> None:
        """Hold the buckets whole. Collective."""
        if self.session.stage is not Stage.PARAMETERS:
            self.session.finish_refresh()
            self._memory = {bucket: bucket.flat for bucket in self._buckets}
            return
        gathered = self.session.gather_buckets(self._buckets, f"leaf module {self._name}")
        self._memory = dict(zip(self._buckets, gathered, strict=True))

    def release(self) -> None:
        """Let the buckets go."""
        self._memory.clear()

    def lend(self, saved: torch.Tensor) -> Any:
        """Autograd saves ``saved``: keep its place only, where it lies in gathered memory."""
        for bucket, memory in self._memory.items():
            if memory.untyped_storage().data_ptr() == saved.untyped_storage().data_ptr():
                offset = int(saved.storage_offset())
                return _Lent(bucket, saved.dtype, tuple(saved.shape), saved.stride(), offset)
        return saved

    def find(self, saved: Any) -> torch.Tensor:
        """The inverse of :meth:`lend`, in backward."""
        if not isinstance(saved, _Lent):
            tensor: torch.Tensor = saved
            return tensor
        memory = self._memory[saved.bucket]
        return memory.view(saved.dtype).as_strided(saved.size, saved.stride, saved.offset)

    def reduce(self, gradients: Sequence[torch.Tensor | None]) -> Iterator[torch.Tensor | None]:
        """The mean of each gradient over the ranks; None where no rank has one. Collective.

        An expert that had tokens on other ranks only counts as zero here.
        """
        what = f"leaf module {self._name}"
        used = self.session.anywhere([g is not None for g in gradients], what)
        pairs = [(e, g) for e, g, u in zip(self.entries, gradients, used, strict=True) if u]
        whole = [_zeros(e) if g is None else g for e, g in pairs]
        averaged = iter(self.session.average_buckets([e for e, _ in pairs], whole, what))
        return (next(averaged) if u else None for u in used)


def _zeros(entry: Entry) -> torch.Tensor:
    bucket, slot = entry.place
    return torch.zeros((), dtype=bucket.plan.torch_dtype, device=bucket.device).expand(slot.shape)


class _Open(torch.autograd.Function):
    """Parameters become whole; in backward their gradients are reduced, all at once.

    ``trains`` requires a gradient, so that backward comes here also where all parameters are frozen: what
    the leaf has saved lies in gathered memory then too.
    """

    @staticmethod
    def forward(
        ctx: Any, visit: _Visit, trains: torch.Tensor, *parameters: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.visit = visit
        ctx.needed = ctx.needs_input_grad[2:]
        ctx.set_materialize_grads(False)  # an expert without tokens has no gradient, not zeros
        whole = visit.open()
        frozen = [w for w, needed in zip(whole, ctx.needed, strict=True) if not needed]
        ctx.mark_non_differentiable(*frozen)
        return (torch.zeros(()), *whole)

    @staticmethod
    @compat.outside_dynamo
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        visit: _Visit = ctx.visit
        visit.release()
        if not any(ctx.needed):
            return (None, None, *(None for _ in ctx.needed))
        trained = [
            (g, e) for g, e, n in zip(gradients[1:], visit.entries, ctx.needed, strict=True) if n
        ]
        part = _Visit(visit._name, visit.session, [e for _, e in trained])
        reduced = part.reduce([g for g, _ in trained])
        return (None, None, *(next(reduced) if needed else None for needed in ctx.needed))


class _Close(torch.autograd.Function):
    """Ties a leaf's results to its opening, so that every rank's backward passes through both."""

    @staticmethod
    def forward(ctx: Any, visit: _Visit, token: torch.Tensor, *results: Any) -> tuple[Any, ...]:
        ctx.visit = visit
        return tuple(r.view_as(r) for r in results)

    @staticmethod
    @compat.outside_dynamo
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        ctx.visit.gather()
        return (None, torch.zeros(()), *gradients)


class Leaf:
    """The hooks of one leaf module."""

    def __init__(self, name: str, module: nn.Module, session: Session) -> None:
        self._name = name
        self._session = session
        self._open: list[tuple[_Visit, torch.Tensor, list[_Use], Any]] = []
        module.register_forward_pre_hook(ModuleHook(self._before))
        module.register_forward_hook(ModuleHook(self._after), always_call=True)

    def _before(self, module: nn.Module, args: Any) -> None:
        uses = [u for u in _uses(module) if self._session.owns(u.parameter)]
        parameters = list(dict.fromkeys(u.parameter for u in uses))
        entries = [self._session.entry(p) for p in parameters]
        visit = _Visit(self._name, self._session, entries)
        trains = torch.zeros((), requires_grad=True)
        token, *whole = _Open.apply(visit, trains, *parameters)  # type: ignore[no-untyped-call]
        by_parameter = dict(zip(map(id, parameters), whole, strict=True))
        for use in uses:
            use.module._parameters[use.key] = by_parameter[id(use.parameter)]
        hooks = torch.autograd.graph.saved_tensors_hooks(visit.lend, visit.find)
        hooks.__enter__()
        self._open.append((visit, token, uses, hooks))

    def _after(self, module: nn.Module, args: Any, results: Any) -> Any:
        if not self._open:
            return results  # the gather itself failed; its error is under way
        visit, token, uses, hooks = self._open.pop()
        hooks.__exit__()
        for use in uses:
            use.module._parameters[use.key] = use.parameter
        visit.release()
        return _tied(visit, token, results) if token.requires_grad else results


def _uses(module: nn.Module) -> list[_Use]:
    return [
        _Use(owner, key, parameter)
        for owner in module.modules()
        for key, parameter in owner._parameters.items()
        if parameter is not None
    ]


def _tied(visit: _Visit, token: torch.Tensor, results: Any) -> Any:
    leaves, structure = pytree.tree_flatten(results)
    grad = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor) and x.requires_grad]
    if not grad:
        return results
    close: Any = _Close.apply
    for i, tied in zip(grad, close(visit, token, *(leaves[i] for i in grad)), strict=True):
        leaves[i] = tied
    return pytree.tree_unflatten(leaves, structure)
