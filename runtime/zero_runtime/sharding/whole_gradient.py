"""A gathered copy of a partitioned gradient, for code that reads it whole: what it writes is refused.

``p.grad[0]`` and ``p.grad.view(-1)`` look at a copy. Writing to it would change nothing, in silence.
"""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from zero_runtime import compat
from zero_runtime.compat import pytree
from zero_runtime.errors import UnsupportedError
from zero_runtime.memory.buffers import aliases


class WholeGradient(torch.Tensor):
    """A tensor in ordinary memory that refuses to be written to; ``plain`` is the same memory, unguarded."""

    plain: torch.Tensor

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    def numpy(self, *, force: bool = False) -> Any:
        """As :meth:`torch.Tensor.numpy`, of an array that cannot be written to."""
        array = self.plain.numpy(force=force)
        array.flags.writeable = False
        return array

    def tolist(self) -> Any:
        """As :meth:`torch.Tensor.tolist`."""
        return self.plain.tolist()

    def __format__(self, spec: str) -> str:
        return format(self.plain, spec)

    def __dlpack__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: nobody would see what is written there.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            "a copy of a partitioned gradient, gathered to be read, is not shared with other libraries: take "
            "p.grad.full_tensor(), on every rank"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.plain.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain.__reduce_ex__(protocol)

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return str(self.plain.__repr__(**kwargs))

    @classmethod
    @compat.outside_dynamo
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return on_copies(func, args, kwargs or {}, lambda x: x.plain, cls)


def read_only(plain: torch.Tensor) -> WholeGradient:
    """``plain``, to be read."""
    whole = plain.as_subclass(WholeGradient)
    whole.plain = plain
    return whole


def on_copies(
    func: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    copy: Callable[[Any], torch.Tensor],
    kind: type[torch.Tensor],
) -> Any:
    """The operation on a plain ``copy`` of each operand of a ``kind``. What it returns of them is read only.

    Raises:
        UnsupportedError: it would write to one of the copies.
    """
    if any(isinstance(x, kind) for x in written(func, args, kwargs)):
        raise UnsupportedError(
            f"{func} writes to a copy of a partitioned gradient, gathered to be read: the gradient would not "
            "change. Write to all of it, element by element (p.grad.copy_(whole), p.grad.mul_(mask)), or to "
            "p.grad.local, this rank's elements."
        )
    copies: list[torch.Tensor] = []

    def plain(operand: Any) -> Any:
        if not isinstance(operand, kind):
            return operand
        copies.append(copy(operand))
        return copies[-1]

    result = func(*pytree.tree_map(plain, args), **pytree.tree_map(plain, kwargs))
    guard = lambda x: read_only(x) if any(aliases(c, x) for c in copies) else x  # noqa: E731
    return pytree.tree_map(guard, result)


def written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that the operation writes to, in place or as ``out``."""
    targets = [
        args[number] if number < len(args) else kwargs.get(argument.name)
        for number, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return [x for x in pytree.tree_leaves(targets) if isinstance(x, torch.Tensor)]
