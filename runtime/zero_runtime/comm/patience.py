"""Says in the log that a rank has waited long, for whom and where: the backend's own limit may be far off."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

#: Seconds of waiting after which a rank says so.
LIMIT = 20.0


class _Wait(NamedTuple):
    since: float
    say: Callable[[], str]


class _Watch:
    """One thread a process looks at what the others wait for: a wait costs nothing but its entry."""

    def __init__(self) -> None:
        self._waits: dict[object, _Wait] = {}
        self._thread: threading.Thread | None = None

    @contextmanager
    def over(self, say: Callable[[], str]) -> Iterator[None]:
        """Watch the block; ``say`` completes the sentence "waiting for ..."."""
        key = object()
        self._waits[key] = _Wait(time.monotonic(), say)
        if self._thread is None or not self._thread.is_alive():  # it does not survive a fork
            self._thread = threading.Thread(target=self._look, name="zero3 waits", daemon=True)
            self._thread.start()
        try:
            yield
        finally:
            self._waits.pop(key, None)

    def _look(self) -> None:
        while True:
            time.sleep(min(1.0, LIMIT / 4))
            self._speak_up()

    def _speak_up(self) -> None:
        """A function of its own, so that no wait, nor the buffers it is for, outlives it in a variable."""
        for key, wait in list(self._waits.items()):
            waited = time.monotonic() - wait.since
            if waited > LIMIT and self._waits.pop(key, None) is not None:
                log = logging.getLogger("zero_runtime")
                log.warning("zero3 has been waiting for %.0f s for %s", waited, wait.say())


WAITS = _Watch()
