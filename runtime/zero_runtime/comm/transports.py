"""Which collective carries a gather or a reduction: one small class a backend, one interface.

Every transfer is started and finished later; start order is the plan's, on every rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zero_runtime import compat
from zero_runtime.comm.consistency import Agreement, NoAgreement, agreement_for, digest_of
from zero_runtime.comm.patience import WAITS
from zero_runtime.errors import GroupError
from zero_runtime.memory import native

#: Point-to-point messages carry tags from here on, two a bucket, so that a message never meets a receive of
#: the user's own, of another bucket, or of the other channel: ranks need not start them in one order.
_TAGS = 0x5A000000


class Transfer(Protocol):
    """Something in flight."""

    def wait(self) -> None:
        """Return once the destination may be read on the current stream."""


class Transport(Protocol):
    """Moves flat buckets between the ranks of one group."""

    def all_gather(self, gathered: torch.Tensor, own: torch.Tensor) -> Transfer:
        """Start filling ``gathered`` ``[world * chunk]``; ``own`` is this rank's part of it, filled already."""

    def reduce_scatter(self, packed: torch.Tensor, shard: torch.Tensor) -> Transfer:
        """Start averaging every rank's ``packed`` ``[world * chunk]``; this rank's part lands in ``shard``."""


class Done:
    """A transfer that needed no time."""

    def wait(self) -> None:
        """Nothing to wait for."""


@dataclass(frozen=True)
class Several:
    """Transfers that are waited for together."""

    transfers: Sequence[Transfer]

    def wait(self) -> None:
        """Return once all of them are complete; the first error is raised after that."""
        errors = []
        for transfer in self.transfers:
            try:
                transfer.wait()
            except BaseException as error:  # the others still write to memory
                errors.append(error)
        if errors:
            raise errors[0]


@dataclass
class _PeerToPeer:
    """Messages in flight, and what is left to do once they have arrived."""

    bucket: int
    works: list[dist.Work] = field(default_factory=list)

    def wait(self) -> None:
        with WAITS.over(lambda: f"bucket {self.bucket}'s messages from other ranks"):
            for work in self.works:
                work.wait()


@dataclass
class _PeerReduction(_PeerToPeer):
    """Also holds what it sends, which must outlive the messages."""

    packed: torch.Tensor = field(kw_only=True)
    received: torch.Tensor = field(kw_only=True)
    shard: torch.Tensor = field(kw_only=True)

    def wait(self) -> None:
        super().wait()
        if self.shard.numel():
            ranks = self.received.numel() // self.shard.numel()
            native.sum_chunks(self.received, 1.0 / ranks, self.shard)


@dataclass(frozen=True)
class GlooTransport:
    """Gloo's own gather and reduce-scatter send more, or copy more, than is needed.

    Direct messages into place move each byte once; gloo emulates reduce_scatter by an all_reduce,
    which moves twice what is needed.
    """

    group: dist.ProcessGroup
    bucket: int = 0
    """The serial number of the bucket it moves."""

    def all_gather(self, gathered: torch.Tensor, own: torch.Tensor) -> Transfer:
        parts = gathered.chunk(self.group.size())
        transfer = _PeerToPeer(self.bucket)
        for to, source in _ring(self.group):
            transfer.works += self._receive(parts[source], source, self._tag(0))
            transfer.works += self._send(own, to, self._tag(0))
        return transfer

    def reduce_scatter(self, packed: torch.Tensor, shard: torch.Tensor) -> Transfer:
        received = native.take(packed.nbytes).view(packed.dtype)
        outgoing, incoming = packed.chunk(self.group.size()), received.chunk(self.group.size())
        transfer = _PeerReduction(self.bucket, packed=packed, received=received, shard=shard)
        for to, source in _ring(self.group):
            transfer.works += self._receive(incoming[source], source, self._tag(1))
            transfer.works += self._send(outgoing[to], to, self._tag(1))
        incoming[self.group.rank()].copy_(outgoing[self.group.rank()])
        return transfer

    def _tag(self, channel: int) -> int:
        return _TAGS + 2 * self.bucket + channel

    def _send(self, tensor: torch.Tensor, rank: int, tag: int) -> list[dist.Work]:
        work = dist.isend(tensor, group=self.group, group_dst=rank, tag=tag)
        return [work] if work is not None else []

    def _receive(self, tensor: torch.Tensor, rank: int, tag: int) -> list[dist.Work]:
        work = dist.irecv(tensor, group=self.group, group_src=rank, tag=tag)
        return [work] if work is not None else []


@dataclass(frozen=True)
class NativeTransport:
    """A backend whose own collectives are good (NCCL), or that only pretends to have any (fake)."""

    group: dist.ProcessGroup

    def all_gather(self, gathered: torch.Tensor, own: torch.Tensor) -> Transfer:
        work: Transfer = compat.all_gather_single(gathered, own, group=self.group, async_op=True)
        return work

    def reduce_scatter(self, packed: torch.Tensor, shard: torch.Tensor) -> Transfer:
        part = shard if shard.dtype is packed.dtype else shard.to(packed.dtype)
        work: Transfer = compat.reduce_scatter_single(
            part, packed, op=dist.ReduceOp.AVG, group=self.group, async_op=True
        )
        return work if part is shard else _ThenCast(work, part, shard)


@dataclass
class _ThenCast:
    """A transfer whose result is wanted in another dtype."""

    transfer: Transfer
    part: torch.Tensor
    shard: torch.Tensor

    def wait(self) -> None:
        self.transfer.wait()
        self.shard.copy_(self.part)


@dataclass(frozen=True)
class SoloTransport:
    """One rank: its shard is the whole bucket."""

    def all_gather(self, gathered: torch.Tensor, own: torch.Tensor) -> Transfer:
        return Done()

    def reduce_scatter(self, packed: torch.Tensor, shard: torch.Tensor) -> Transfer:
        if packed is not shard:
            shard.copy_(packed)
        return Done()


@dataclass
class _ThenReplicas:
    """A reduction within the group, completed over the groups that hold copies of the same shards."""

    transfer: Transfer
    shard: torch.Tensor
    replicas: dist.ProcessGroup

    def wait(self) -> None:
        self.transfer.wait()
        dist.all_reduce(self.shard, group=self.replicas)
        self.shard.div_(self.replicas.size())


@dataclass
class _Averaging:
    works: list[Any]
    value: torch.Tensor
    into: torch.Tensor
    group: "Group"

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        if self.group.replicas is not None:
            dist.all_reduce(self.value, group=self.group.replicas)
        if self.group.data_ranks > 1:
            self.value.div_(self.group.data_ranks)
        if self.into is not self.value:
            self.into.copy_(self.value)


@dataclass(frozen=True)
class Group:
    """The ranks that share a model's state, and how bytes move between them.

    ``replicas`` joins the ranks that hold the same shard in other groups (hybrid sharding, as MiCS
    and HSDP have it): gradients are averaged over both.
    """

    process_group: dist.ProcessGroup | None
    rank: int
    world_size: int
    agreement: Agreement = field(default_factory=NoAgreement, compare=False)
    replicas: dist.ProcessGroup | None = None

    @property
    def data_ranks(self) -> int:
        """Ranks over which gradients are averaged, replicas included."""
        return self.world_size * (self.replicas.size() if self.replicas is not None else 1)

    def transport(self, device: torch.device, bucket: int = 0) -> Transport:
        """What serves tensors of ``device`` best, for the bucket of this serial number."""
        if self.process_group is None or self.world_size == 1:
            return SoloTransport()
        if compat.backend_name(self.process_group, device) == "gloo":
            return GlooTransport(self.process_group, bucket)
        return NativeTransport(self.process_group)

    def reduction(
        self, transport: Transport, packed: torch.Tensor, shard: torch.Tensor
    ) -> Transfer:
        """Start averaging ``packed`` into ``shard`` over all ranks that train the model."""
        transfer = transport.reduce_scatter(packed, shard)
        if self.replicas is None:
            return transfer
        return _ThenReplicas(transfer, shard, self.replicas)

    def averaging(self, value: torch.Tensor, *, into: torch.Tensor) -> Transfer:
        """Start averaging ``value`` over all ranks that train the model; the mean lands in ``into``."""
        works = []
        if self.process_group is not None and self.world_size > 1:
            works.append(dist.all_reduce(value, group=self.process_group, async_op=True))
        return _Averaging(works, value, into, self)

    def agree(self, what: str) -> None:
        """Compare with the other ranks that ``what`` is what comes next.

        Raises:
            DivergenceError: they are about to do something else.
        """
        self.agreement.check(digest_of([what]), lambda: [what], new=False)

    def average(self, value: torch.Tensor, what: str) -> torch.Tensor:
        """The mean of ``value`` over all ranks that train the model, in place and returned."""
        self.sum(value, what)
        if self.replicas is not None:
            dist.all_reduce(value, group=self.replicas)
        return value.div_(self.data_ranks)

    def refuse_stranger(self, rank: int, device: torch.device) -> None:
        """Raise unless the rank (of the default group) trains the model. Collective over replicas.

        Raises:
            GroupError: on every rank.
        """
        if self.process_group is None:
            return
        here = dist.get_process_group_ranks(self.process_group)
        if self.replicas is None and rank not in here:
            raise GroupError(f"rank {rank} does not share this model: its ranks are {here}")
        if self.replicas is not None:
            self.agree(f"a search for rank {rank}")
            self._replica_of(rank in here, device)

    def any(self, flags: torch.Tensor, what: str) -> torch.Tensor:
        """Which of the integer ``flags`` any rank that trains the model has set, in place and returned."""
        self.max(flags, what)
        if self.replicas is not None:
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.replicas)
        return flags

    def broadcast(self, value: torch.Tensor, source: int, what: str) -> torch.Tensor:
        """``value`` as the rank ``source`` (of the default group) has it, in place and returned.

        Raises:
            GroupError: no such rank trains the model.
        """
        if self.process_group is None:
            return value
        self.refuse_stranger(source, value.device)
        here = dist.get_process_group_ranks(self.process_group)
        self.agree(f"{what} from rank {source}")
        if source in here:
            dist.broadcast(value, src=source, group=self.process_group)
        if self.replicas is not None:
            first = self._replica_of(source in here, value.device)
            dist.broadcast(value, group_src=first, group=self.replicas)
        return value

    def _replica_of(self, ours: bool, device: torch.device) -> int:
        """Which of the replicas says ``ours``; every rank calls it."""
        assert self.replicas is not None
        found = torch.tensor([self.replicas.rank() if ours else -1], device=device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.replicas)
        if int(found) < 0:
            raise GroupError("no rank of that number shares this model")
        return int(found)

    def sum(self, value: torch.Tensor, what: str) -> torch.Tensor:
        """The sum of ``value`` over the ranks, in place and returned; ``what`` it is, for messages."""
        return self._all_reduce(value, dist.ReduceOp.SUM, what)

    def max(self, value: torch.Tensor, what: str) -> torch.Tensor:
        """The maximum of ``value`` over the ranks, in place and returned."""
        return self._all_reduce(value, dist.ReduceOp.MAX, what)

    def min(self, value: torch.Tensor, what: str) -> torch.Tensor:
        """The minimum of ``value`` over the ranks, in place and returned."""
        return self._all_reduce(value, dist.ReduceOp.MIN, what)

    def _all_reduce(
        self, value: torch.Tensor, op: dist.ReduceOp.RedOpType, what: str
    ) -> torch.Tensor:
        if self.process_group is not None:
            self.agree(what)
            with WAITS.over(lambda: f"other ranks, in {what}"):
                dist.all_reduce(value, op=op, group=self.process_group)
        return value


#: One rank and nobody else.
ALONE = Group(None, 0, 1)


def current_group() -> Group:
    """The default process group, or one rank alone where the script is not distributed.

    Raises:
        GroupError: torchrun started several ranks and no process group was initialised.
    """
    if not dist.is_available() or not dist.is_initialized():
        _refuse_uninitialised()
        return ALONE
    process_group = dist.group.WORLD
    assert process_group is not None
    return group_over(process_group)


def group_over(
    process_group: dist.ProcessGroup, replicas: dist.ProcessGroup | None = None
) -> Group:
    """Shard over ``process_group``; ``replicas`` joins equal shards of several such groups."""
    agreement = agreement_for([process_group, *([replicas] if replicas is not None else [])])
    return Group(process_group, process_group.rank(), process_group.size(), agreement, replicas)


def group_of_mesh(mesh: DeviceMesh) -> Group:
    """Shard over a one-dimensional mesh; of two dimensions replicate over the first, shard over the second.

    Raises:
        GroupError: the mesh has more dimensions, or this rank is not in it.
    """
    if mesh.get_coordinate() is None:
        raise GroupError(f"this rank is not part of the device mesh {mesh}")
    if mesh.ndim > 2:
        raise GroupError(
            f"a mesh of {mesh.ndim} dimensions: zero3 shards over one, and replicates over one more. "
            "Pass the sub-mesh of those, such as mesh['replicate', 'shard']."
        )
    replicas = mesh.get_group(0) if mesh.ndim == 2 and mesh.size(0) > 1 else None
    return group_over(mesh.get_group(mesh.ndim - 1), replicas)


def _refuse_uninitialised() -> None:
    ranks = compat.launched_world_size()
    if ranks > 1:
        raise GroupError(
            f"WORLD_SIZE is {ranks} but torch.distributed is not initialised, so there is nobody to "
            "share the model with. Call torch.distributed.init_process_group() before the model's "
            "first forward, or start the script without torchrun to train on one process."
        )


def _ring(group: dist.ProcessGroup) -> list[tuple[int, int]]:
    """Peers in the order that keeps every link busy once: (send to, receive from)."""
    rank, size = group.rank(), group.size()
    return [((rank + hop) % size, (rank - hop) % size) for hop in range(1, size)]
