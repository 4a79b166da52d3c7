"""The watch over waits: it says who is waited for, and keeps nothing of a wait that is over."""

import gc
import time
import weakref
from unittest import mock

from zero_runtime.comm import patience


class Buffers:
    """Stands for what a message in flight holds."""

    def __str__(self) -> str:
        return "a message"


def test_nothing_of_a_finished_wait_is_kept() -> None:
    buffers = Buffers()
    alive = weakref.ref(buffers)
    with mock.patch.object(patience, "LIMIT", 0.4):
        with patience._Watch().over(lambda buffers=buffers: str(buffers)):  # type: ignore[misc]
            time.sleep(0.35)  # three looks at it, and none that speaks up
        del buffers
        gc.collect()
        assert alive() is None
