"""A solved problem as a program that can be simulated, proved and shown."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from zero_compile.scheduler.issue import Issue, Kind, issue_order
from zero_compile.scheduler.problem import Problem, Schedule
from zero_compile.simulator.program import Buffer, Op, Program
from zero_runtime.ir.plan import Channel
from zero_runtime.ir.timeline import Category

T = TypeVar("T")


class _Piece(NamedTuple):
    """Bytes of live memory held from node ``first`` to node ``last``."""

    bytes: int
    first: int
    last: int


def build_program(
    problem: Problem,
    schedule: Schedule,
    name: str,
    phase: str = "forward",
    *,
    world_size: int = 1,
    nodes: Sequence[str] = (),
) -> Program:
    """The program that ``schedule`` describes; its simulation agrees with ``planner.evaluate``.

    ``nodes`` names the compute nodes for a reader. Names of operations and buffers begin with
    ``phase``, so that programs of several phases can be joined. A wait for reductions is a compute
    operation of no length: it returns their memory before node and gathers behind it. So is the wait
    for a shard before its gather, which puts the shard into the gathered memory, and the wait at the
    end for what is on its way to the host. Staging slots are buffers of no bytes of the device.
    """
    layer = _Layer(problem, schedule, phase, nodes)
    ops = [op for k in range(len(problem.compute) + 1) for op in layer.at(k)]
    return Program(name, world_size, tuple(ops), budget=problem.limit)


class _Layer:
    """Makes the operations of each position."""

    def __init__(
        self, problem: Problem, schedule: Schedule, phase: str, nodes: Sequence[str]
    ) -> None:
        self._problem = problem
        self._phase = phase
        self._nodes = nodes
        gathers, reductions = problem.gathers, problem.reductions
        self._issues = issue_order(problem, schedule)
        self._used = _at(gathers, lambda gather: gather.first)
        self._released = _at(gathers, lambda gather: gather.last)
        self._ready = _at(reductions, lambda reduction: reduction.ready + 1)
        self._due = _at(schedule.reduce_waits, lambda wait: wait)
        self._pieces = _pieces(problem.live)
        self._growing = _at(self._pieces, lambda piece: piece.first)
        self._shrinking = _at(self._pieces, lambda piece: piece.last)

    def at(self, k: int) -> Iterator[Op]:
        """The operations of position ``k`` in issue order, its compute node last."""
        due, ready = self._due.get(k, ()), self._ready.get(k, ())
        # The channel is serial: whoever waits first loses no time, and has the memory back sooner.
        yield from self._wait("wait", k, [j for j in due if j not in ready])
        yield from (self._reduce(j) for j in ready)
        yield from self._wait("late_wait", k, [j for j in due if j in ready])
        yield from (self._evict(j, k) for j in due if self._problem.reductions[j].evict)
        for issue in self._issues[k]:
            yield from self._issue(issue)
        if k < len(self._problem.compute):
            yield self._node(k)
        else:
            yield from self._evicted(k)

    def _name(self, kind: str, index: int) -> str:
        return f"{self._phase}.{kind}.{index}"

    def _shown(self, k: int) -> str:
        return self._nodes[k] if k < len(self._nodes) else ""

    def _issue(self, issue: Issue) -> Iterator[Op]:
        i = issue.gather
        gather = self._problem.gathers[i]
        if issue.kind is Kind.READ:
            yield self._read(i)
        elif issue.kind is Kind.FETCH:
            yield self._fetch(i)
        else:
            if gather.fetch:
                yield self._shard(i)
            yield self._gather(i)

    def _read(self, i: int) -> Op:
        gather, name = self._problem.gathers[i], self._name("read", i)
        return Op(
            name,
            Channel.NVME_READ,
            gather.read,
            self._phase,
            takes=(Buffer(name, 0, Category.STAGING),),
            writes=(name,),
            bucket=gather.bucket,
            bytes=gather.shard,
            node=self._shown(gather.first),
        )

    def _fetch(self, i: int) -> Op:
        gather, name = self._problem.gathers[i], self._name("fetch", i)
        read = (self._name("read", i),) if gather.read else ()
        return Op(
            name,
            Channel.HOST_TO_DEVICE,
            gather.fetch,
            self._phase,
            after=read,
            takes=(Buffer(name, gather.shard, Category.STAGING),),
            reads=read,
            writes=(name,),
            bucket=gather.bucket,
            bytes=gather.shard,
            node=self._shown(gather.first),
        )

    def _shard(self, i: int) -> Op:
        """The wait for a gather's shard; where the shard is copied, it and its copy are held at once."""
        gather, fetch = self._problem.gathers[i], self._name("fetch", i)
        slot = (self._name("read", i),) if gather.read else ()
        copied = () if gather.in_place else (self._gathered(i),)
        return Op(
            self._name("shard", i),
            Channel.COMPUTE,
            0.0,
            self._phase,
            after=(fetch,),
            takes=copied,
            frees=(fetch, *slot),
            reads=(fetch,),
            writes=tuple(buffer.name for buffer in copied),
            node=self._shown(gather.first),
        )

    def _gathered(self, i: int) -> Buffer:
        size = self._problem.gathers[i].bytes
        return Buffer(self._name("all_gather", i), size, Category.GATHERED)

    def _gather(self, i: int) -> Op:
        gather, name = self._problem.gathers[i], self._name("all_gather", i)
        taken = gather.fetch and not gather.in_place
        return Op(
            name,
            Channel.ALL_GATHER,
            gather.seconds,
            self._phase,
            takes=() if taken else (self._gathered(i),),
            writes=(name,),
            bucket=gather.bucket,
            bytes=gather.bytes,
            node=self._shown(gather.first),
        )

    def _reduce(self, j: int) -> Op:
        reduction, name = self._problem.reductions[j], self._name("reduce_scatter", j)
        return Op(
            name,
            Channel.REDUCE_SCATTER,
            reduction.seconds,
            self._phase,
            takes=(Buffer(name, reduction.bytes, Category.REDUCING),),
            writes=(name,),
            bucket=reduction.bucket,
            bytes=reduction.moved or reduction.bytes,
            node=self._shown(reduction.ready),
        )

    def _wait(self, kind: str, k: int, reductions: Sequence[int]) -> Iterator[Op]:
        if reductions:
            due = tuple(self._name("reduce_scatter", j) for j in reductions)
            name, node = self._name(kind, k), self._shown(k)
            yield Op(name, Channel.COMPUTE, 0.0, self._phase, due, (), due, due, node=node)

    def _evict(self, j: int, k: int) -> Op:
        reduction, name = self._problem.reductions[j], self._name("evict", j)
        return Op(
            name,
            Channel.DEVICE_TO_HOST,
            reduction.evict,
            self._phase,
            takes=(Buffer(name, reduction.shard, Category.GRADIENTS),),
            frees=(name,),
            writes=(name,),
            bucket=reduction.bucket,
            bytes=reduction.shard,
            node=self._shown(k),
        )

    def _evicted(self, k: int) -> Iterator[Op]:
        """The channel is serial: the last one to arrive is the last one sent."""
        sent = [j for at in sorted(self._due) for j in self._due[at]]
        evicted = [self._name("evict", j) for j in sent if self._problem.reductions[j].evict]
        if evicted:
            name = self._name("evicted", k)
            yield Op(name, Channel.COMPUTE, 0.0, self._phase, (evicted[-1],), node=self._shown(k))

    def _node(self, k: int) -> Op:
        live = [self._name("live", p) for p in self._growing.get(k, ())]
        dead = [self._name("live", p) for p in self._shrinking.get(k, ())]
        arriving = [self._name("all_gather", i) for i in self._used.get(k, ())]
        leaving = [self._name("all_gather", i) for i in self._released.get(k, ())]
        sizes = [self._pieces[p].bytes for p in self._growing.get(k, ())]
        return Op(
            self._name("node", k),
            Channel.COMPUTE,
            self._problem.compute[k],
            self._phase,
            after=tuple(arriving),
            takes=tuple(map(_activations, live, sizes)),
            frees=(*leaving, *dead),
            reads=tuple(dict.fromkeys((*arriving, *leaving, *dead))),
            writes=tuple(live),
            node=self._shown(k),
        )


def _activations(name: str, size: int) -> Buffer:
    return Buffer(name, size, Category.ACTIVATIONS)


def _at(things: Sequence[T], position: Callable[[T], int]) -> dict[int, list[int]]:
    """Indices of ``things`` by position."""
    found: dict[int, list[int]] = defaultdict(list)
    for index, thing in enumerate(things):
        found[position(thing)].append(index)
    return found


def _pieces(live: Sequence[int]) -> list[_Piece]:
    """Live memory cut into buffers: what grows last shrinks first."""
    pieces: list[_Piece] = []
    held: list[tuple[int, int]] = []
    total = 0
    for k, wanted in enumerate([*live, 0]):
        while total > wanted:
            size, first = held.pop()
            cut = min(size, total - wanted)
            pieces.append(_Piece(cut, first, k - 1))
            if cut < size:
                held.append((size - cut, first))
            total -= cut
        if total < wanted:
            held.append((wanted - total, k))
            total = wanted
    return pieces
