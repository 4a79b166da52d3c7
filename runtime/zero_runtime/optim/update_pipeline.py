"""Buckets of optimizer state through host memory: one is read, one updated and one written at a time.

Memory is bounded by a number of *sets*: a bucket occupies one from the start of its reads to the end
of its writes. State in host memory needs no transfer and goes through the same code.
"""

import atexit
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from zero_runtime.comm.transports import Transfer
from zero_runtime.offload.tiered_tensor import TieredTensor


class Task(NamedTuple):
    """One bucket: what must be in memory, and what is done with it there.

    ``run`` returns the shelves to put away afterwards.
    """

    wanted: Sequence[TieredTensor]
    run: Callable[[], Sequence[TieredTensor]]


class Stream:
    """Runs tasks in order on a thread of its own, which starts with the first one."""

    def __init__(self, sets: int) -> None:
        self._free = threading.Semaphore(max(2, sets))
        self._most_writing = (max(2, sets) - 1) // 2
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._writing: deque[list[Transfer]] = deque()
        self._idle = threading.Event()
        self._idle.set()
        self._pending = 0
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def submit(self, task: Task) -> None:
        """Start reading what the task wants, once a set is free, and queue it.

        Raises:
            SwapError: an earlier task failed, or the reads cannot start.
        """
        self._free.acquire()
        try:
            self._raise()
            for tiered_tensor in task.wanted:
                tiered_tensor.start_load()
        except BaseException:
            self._free.release()
            raise
        with self._lock:
            self._pending += 1
            self._idle.clear()
        self._start()
        self._tasks.put(task)

    def join(self) -> None:
        """Return once every task is done and everything is written.

        Raises:
            SwapError: a read or a write failed; once.
        """
        self._idle.wait()
        while self._writing:
            self._finish_oldest()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="zero stream", daemon=True)
            self._thread.start()
            # In native code, a thread that outlives the interpreter would end the process by SIGABRT.
            atexit.register(self._end)

    def _end(self) -> None:
        self._tasks.put(None)
        if self._thread is not None:
            self._thread.join()

    def _work(self) -> None:
        while True:
            task = self._tasks.get()
            if task is None:
                return
            self._run(task)
            del task  # what it holds may be a model's last
            with self._lock:
                self._pending -= 1
                if not self._pending:
                    self._idle.set()

    def _run(self, task: Task) -> None:
        """A failed task, and those after a failure, give their set back and change nothing more."""
        try:
            self._raise()
            for tiered_tensor in task.wanted:
                tiered_tensor.read()
            self._writing.append([tiered_tensor.put_away() for tiered_tensor in task.run()])
        except BaseException as error:
            self._error = self._error or error
            self._free.release()
        while len(self._writing) > self._most_writing:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        try:
            for transfer in self._writing.popleft():
                transfer.wait()
        except BaseException as error:
            self._error = self._error or error
        finally:
            self._free.release()

    def close(self) -> None:
        """End the thread after what is queued."""
        atexit.unregister(self._end)
        self._tasks.put(None)
