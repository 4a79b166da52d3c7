"""Norms of partitioned gradients that wait to be completed over the ranks together."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from zero_runtime import compat
from zero_runtime.comm.transports import Group
from zero_runtime.compat import pytree

aten = torch.ops.aten


class PendingNorm(torch.Tensor):
    """Norms of gradients before they are completed over the ranks.

    ``clip_grad_norm_`` takes one norm a parameter, stacks them and takes the norm of the stack.
    Held back until then, all of it costs one collective. ``powers`` holds this rank's share:
    sums of ``|x|**order`` (for infinite orders the extreme itself).
    """

    powers: torch.Tensor
    order: float
    group: Group
    names: tuple[str, ...]

    @staticmethod
    def __new__(
        cls, powers: torch.Tensor, order: float, group: Group, names: tuple[str, ...]
    ) -> "PendingNorm":
        wrapper: PendingNorm = torch.Tensor._make_wrapper_subclass(
            cls, powers.shape, dtype=powers.dtype, device=powers.device
        )
        wrapper.powers, wrapper.order, wrapper.group, wrapper.names = powers, order, group, names
        return wrapper

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PendingNorm(order={self.order}, shape={tuple(self.shape)})"

    def complete(self) -> torch.Tensor:
        """The norms over all ranks, a plain tensor. Collective."""
        some = " to ".join(dict.fromkeys((self.names[0], self.names[-1])))
        what = f"the {self.order:g}-norm of {len(self.names)} gradients ({some})"
        return _root(_over_ranks(self.powers.clone(), self.order, self.group, what), self.order)

    @classmethod
    @compat.outside_dynamo
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is aten.stack.default and _alike(args[0]):
            first: PendingNorm = args[0][0]
            names = tuple(name for n in args[0] for name in n.names)
            powers = torch.stack([n.powers for n in args[0]])
            return PendingNorm(powers, first.order, first.group, names)
        if func is aten.linalg_vector_norm.default and _same_order(args):
            norms: PendingNorm = args[0]
            powers = norms.powers.amax() if math.isinf(norms.order) else norms.powers.sum()
            return PendingNorm(powers, norms.order, norms.group, norms.names).complete()
        if func is aten.detach.default or (
            func is aten._to_copy.default and not changes(args[0], kwargs)
        ):
            return args[0]
        complete = lambda x: x.complete() if isinstance(x, PendingNorm) else x  # noqa: E731
        return func(*pytree.tree_map(complete, args), **pytree.tree_map(complete, kwargs))


def _alike(norms: Sequence[Any]) -> bool:
    """Whether all can be completed at once: norms of one kind over the same ranks."""
    return all(
        isinstance(n, PendingNorm) and (n.order, n.group) == (norms[0].order, norms[0].group)
        for n in norms
    )


def _same_order(args: Sequence[Any]) -> bool:
    order = args[1] if len(args) > 1 else 2.0
    return isinstance(args[0], PendingNorm) and len(args) <= 2 and float(order) == args[0].order


def _over_ranks(powers: torch.Tensor, order: float, group: Group, what: str) -> torch.Tensor:
    if math.isinf(order):
        return group.max(powers, what) if order > 0 else group.min(powers, what)
    return group.sum(powers, what)


def _root(powers: torch.Tensor, order: float) -> torch.Tensor:
    if math.isinf(order) or order in (0.0, 1.0):
        return powers
    return powers.pow(1.0 / order)


def powers_of(local: torch.Tensor, order: float) -> torch.Tensor:
    """This rank's share of a norm: what is added up over the ranks, or of which the extreme is taken."""
    if math.isinf(order):
        if local.numel() == 0:
            return local.new_full((), 0.0 if order > 0 else math.inf)
        return local.abs().amax() if order > 0 else local.abs().amin()
    if order == 0:
        return (local != 0).sum().to(local.dtype)
    norm: torch.Tensor = torch.linalg.vector_norm(local, order)
    return norm if order == 1 else norm.pow(order)


def changes(tensor: torch.Tensor, kwargs: dict[str, Any]) -> bool:
    """Whether an operation with these arguments gives another dtype or device than the tensor's."""
    dtype, device = kwargs.get("dtype"), kwargs.get("device")
    return (dtype not in (None, tensor.dtype)) or (
        device is not None and torch.device(device) != tensor.device
    )
