"""Put reductions off while gradients accumulate."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from zero_compile.report import sessions


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Backwards inside keep whole local gradients; the first backward outside reduces them all.

    Saves communication for memory: each rank then holds a whole gradient of the model. ``p.grad``
    stays as it was until the reduction, so the last backward before a step belongs outside, as with
    DistributedDataParallel. A step reduces what is still waiting.

    Raises:
        ZeroError: the model has not run yet, so nothing of it is partitioned.
    """
    owners = sessions(model)
    before = [session.synchronise for session in owners]
    for session in owners:
        session.synchronise = False
    try:
        yield
    finally:
        for session, value in zip(owners, before, strict=True):
            session.synchronise = value
