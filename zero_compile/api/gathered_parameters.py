"""``GatheredParameters``: partitioned parameters whole, for code that is not compiled."""

from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist
from torch import nn

from zero_runtime.eager.unshard import Unsharded
from zero_runtime.errors import OptionError

Parameters = nn.Parameter | nn.Module | Iterable[Any]


class GatheredParameters:
    """Inside the block each of ``params`` is whole: ``p.data``, in-place operations, all as ever.

    ``params`` is a parameter, a module (all its parameters), or an iterable of both. What the rank
    ``modifier_rank`` (of the default process group) has changed at the end is kept, on every rank.
    Without a ``modifier_rank`` nothing may be changed: that is an error, and is undone. An exception
    inside leaves everything as it was. Blocks may be nested. Enter and leave the block on every rank of
    the group that shares the model: both are collective, but for leaving by an exception.

    ``fwd_module`` is taken for compatibility: other modules may use the parameters in any case. With
    ``enabled`` off the block does nothing.

    Raises:
        OptionError: ``params`` holds something else, or there is no such rank.
        GroupError: on entering: the rank ``modifier_rank`` does not share a parameter.
        ZeroError: on leaving, on every rank: one has changed a parameter without a ``modifier_rank``.
    """

    def __init__(
        self,
        params: Parameters,
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        _check(modifier_rank, fwd_module)
        self._parameters = _flat(params) if enabled else []
        self._source = modifier_rank
        self._open: list[Unsharded] = []

    def __enter__(self) -> Self:
        holding = Unsharded(self._parameters, self._source)
        holding.open()
        self._open.append(holding)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        holding = self._open.pop()
        if kind is None:
            holding.close()
        else:
            holding.abandon()


def _check(modifier_rank: object, fwd_module: object) -> None:
    whole = isinstance(modifier_rank, int) and not isinstance(modifier_rank, bool)
    if modifier_rank is not None and not whole:
        raise OptionError(f"modifier_rank: expected the number of a rank, got {modifier_rank!r}")
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if isinstance(modifier_rank, int) and modifier_rank not in range(ranks):
        raise OptionError(f"modifier_rank: there is no rank {modifier_rank} among {ranks}")
    if fwd_module is not None and not isinstance(fwd_module, nn.Module):
        raise OptionError(f"fwd_module: expected a module, got {fwd_module!r}")


def _flat(params: Any) -> list[nn.Parameter]:
    if isinstance(params, nn.Parameter):
        return [params]
    if isinstance(params, nn.Module):
        return list(params.parameters())
    if not isinstance(params, Iterable) or isinstance(params, str | bytes):
        raise OptionError(
            f"params: expected parameters or modules, got {type(params).__name__} {params!r}"
        )
    return list(dict.fromkeys(p for member in params for p in _flat_member(member)))


def _flat_member(member: Any) -> list[nn.Parameter]:
    if not isinstance(member, nn.Parameter | nn.Module):
        raise OptionError(f"params: expected parameters or modules, got {type(member).__name__}")
    return _flat(member)
