"""In which order the host issues gathers, and the reads and fetches that bring their shards.

At each position reads come as soon as they have a slot, so that they are under way before a gather
makes the host wait; the gather that a shard was read for gives its slot back when it starts. Fetches
come after the gathers, which give device memory back. A bucket is on its way once at a time. Whatever
has not been issued when its gather is due comes right before it: the host then waits for all of it.
"""

from collections.abc import Iterator
from enum import Enum, auto
from typing import NamedTuple

from zero_compile.scheduler.problem import Problem, Schedule


class Kind(Enum):
    """What sets out."""

    READ = auto()
    """A shard, from NVMe to the host."""
    FETCH = auto()
    """A shard, from the host to the device."""
    GATHER = auto()
    """The parts of all ranks."""


class Issue(NamedTuple):
    """One of these, for the gather of that index."""

    kind: Kind
    gather: int


def issue_order(problem: Problem, schedule: Schedule) -> list[list[Issue]]:
    """What the host issues at each position, from 0 to the end included."""
    host = _Host(problem, schedule)
    return [list(host.at(k)) for k in range(len(problem.compute) + 1)]


def gathered_before(problem: Problem) -> list[int]:
    """For each gather, the gather of the same bucket before it; -1 where there is none."""
    last: dict[int, int] = {}
    before = []
    for i, gather in enumerate(problem.gathers):
        before.append(last.get(gather.bucket, -1))
        last[gather.bucket] = i
    return before


class _Host:
    """What has been issued so far: counts into the problem's reads, fetches and gathers."""

    def __init__(self, problem: Problem, schedule: Schedule) -> None:
        self._problem = problem
        self._schedule = schedule
        self._before = gathered_before(problem)
        self._turn = {i: turn for turn, i in enumerate(problem.read)}
        self._reads = self._fetches = self._gathers = self._returned = 0

    def at(self, k: int) -> Iterator[Issue]:
        """The rest of what is due up to position ``k``."""
        starts = self._schedule.gather_starts
        yield from self._due_reads(k)
        while self._gathers < len(starts) and starts[self._gathers] <= k:
            i = self._gathers
            yield from self._own(i)
            yield Issue(Kind.GATHER, i)
            self._gathers += 1
            self._returned += i in self._turn
            yield from self._due_reads(k)
        yield from self._due_fetches(k)

    def _due_reads(self, k: int) -> Iterator[Issue]:
        reads = self._problem.read
        while self._reads < len(reads) and self._may_read(reads[self._reads], k):
            yield self._read()

    def _due_fetches(self, k: int) -> Iterator[Issue]:
        fetches = self._problem.fetched
        while self._fetches < len(fetches) and self._may_fetch(fetches[self._fetches], k):
            yield self._fetch()

    def _own(self, i: int) -> Iterator[Issue]:
        """Those before it are out: they belong to gathers that have started."""
        reads, fetches = self._problem.read, self._problem.fetched
        if self._reads < len(reads) and reads[self._reads] == i:
            yield self._read()
        if self._fetches < len(fetches) and fetches[self._fetches] == i:
            yield self._fetch()

    def _read(self) -> Issue:
        self._reads += 1
        return Issue(Kind.READ, self._problem.read[self._reads - 1])

    def _fetch(self) -> Issue:
        self._fetches += 1
        return Issue(Kind.FETCH, self._problem.fetched[self._fetches - 1])

    def _may_read(self, i: int, k: int) -> bool:
        free = self._reads - self._returned < self._problem.slots
        return free and self._schedule.read_start(i) <= k and self._before[i] < self._gathers

    def _may_fetch(self, i: int, k: int) -> bool:
        on_host = i not in self._turn or self._turn[i] < self._reads
        return on_host and self._schedule.fetch_start(i) <= k and self._before[i] < self._gathers
