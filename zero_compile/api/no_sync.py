"""Put reductions off while gradients accumulate."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from zero_compile.api.report import sessions
from zero_runtime.session import Session, session_of
from zero_runtime.sharding.put_off import putting_off


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Backwards inside keep whole local gradients; the first backward outside reduces them all.

    Saves communication for memory: each rank then holds a whole gradient of the model. Until then
    ``p.grad`` stands for it; whatever reads or changes one, clipping say, reduces that one first, so call
    it on every rank. A step reduces what is still put off. May begin before the model's first forward.

    Raises:
        ZeroError: at the end, if nothing of the model is partitioned even then.
    """
    before = {session: session.synchronise for session in _owners(model)}
    for session in before:
        session.synchronise = False
    try:
        with putting_off(model):
            yield
    finally:
        for session in {*before, *_owners(model)}:
            session.synchronise = before.get(session, True)
    sessions(model)


def _owners(model: nn.Module) -> set[Session]:
    return {session for p in model.parameters() if (session := session_of(p)) is not None}
