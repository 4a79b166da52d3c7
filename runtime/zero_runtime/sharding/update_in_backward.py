"""Updates inside backward: a bucket is stepped as soon as its gradient is reduced.

Such a gradient is consumed on arrival and never whole in memory. That is right only where a script
does nothing with gradients between backward and ``step()``, so it is asked for, and what a script does
all the same is refused when it does it.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

from zero_runtime.ir.plan import Slot
from zero_runtime.offload.memory_tiers import Moving
from zero_runtime.sharding.bucket import Bucket
from zero_runtime.sharding.tiled_bucket import Arriving


class Updater(Protocol):
    """An optimizer whose state is off the device."""

    def meet_once(self) -> None:
        """Look which partitioned parameters it has, unless that is known."""

    def has_kernel(self, bucket: Bucket) -> bool:
        """Whether it may run beside backward."""

    def covers(self, bucket: Bucket) -> bool:
        """Whether it has all of the bucket's parameters."""

    def update_now(self, bucket: Bucket, gradient: Moving | Arriving) -> Callable[[], None]:
        """Start the bucket's update. What is returned waits for it."""


class BackwardUpdates:
    """Which buckets of a session are updated in backward, and which were since the last step."""

    def __init__(self, wanted: bool) -> None:
        self._wanted = wanted
        self._forwards: Counter[Bucket] = Counter()
        self._done: set[Bucket] = set()
        # They hold their parameters, and so whatever lives as long as the model: this session too.
        self._updaters: weakref.WeakSet[Updater] = weakref.WeakSet()
        self._running: dict[Callable[[], None], None] = {}

    def meet(self, updater: Updater) -> None:
        """An optimizer that may update. Idempotent."""
        if self._wanted:
            self._updaters.add(updater)

    def expect(self, buckets: Sequence[Bucket]) -> None:
        """A forward uses ``buckets``: used by two, a bucket's gradient is complete at the step only."""
        if self._wanted:
            self._forwards.update(buckets)
            for updater in self._updaters:
                updater.meet_once()

    def take(self, bucket: Bucket, slots: Sequence[Slot], gradient: Moving | Arriving) -> bool:
        """Whether the bucket's update has begun, with a gradient of all its ``slots``."""
        if self._forwards[bucket] != 1 or set(slots) != set(bucket.plan.slots):
            return False
        for updater in self._updaters:
            if updater.has_kernel(bucket) and updater.covers(bucket):
                self._running[updater.update_now(bucket, gradient)] = None
                self._done.add(bucket)
                return True
        return False

    def has(self, bucket: Bucket) -> bool:
        """Whether the bucket was updated since the last step."""
        return bucket in self._done

    def finish(self) -> None:
        """Wait for all updates.

        Raises:
            SwapError: one failed.
        """
        while self._running:
            wait, _ = self._running.popitem()
            wait()

    def reset(self) -> None:
        """The script's ``step()`` is over."""
        self._forwards.clear()
        self._done.clear()
