"""Which saved tensors could leave the device between forward and backward, and what that would take."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch.fx import Graph, Node

from zero_compile.analysis.costs import Role, kernels_before, role, transfer_seconds
from zero_compile.analysis.fx_graph import is_view, last_touches, output_node, positions
from zero_compile.analysis.hardware import Hardware
from zero_compile.analysis.liveness import Liveness, Origin, Storage
from zero_compile.scheduler.activations import Candidate
from zero_compile.scheduler.pose_problem import MARGIN
from zero_runtime.ir.plan import BucketPlan, Channel, StatePolicy, Tier
from zero_runtime.ir.strides import dense_stride
from zero_runtime.ir.timeline import Category


class Wanted(NamedTuple):
    """Tensors of at least ``min_bytes`` go to ``tier``."""

    tier: Tier
    min_bytes: int


def candidates(
    forward: Graph,
    backward: Graph,
    buckets: Sequence[BucketPlan],
    policy: StatePolicy,
    hardware: Hardware,
    wanted: Wanted,
) -> list[Candidate]:
    """Tensors of a step's two bucketed graphs that may leave, in the order of forward's outputs.

    Left out is what is small or of symbolic size, and whatever shares its memory: with an input or a
    parameter, with what the user gets, with another saved tensor. So is what has gaps or is not where
    the parameters are, and images that lie in an order which Inductor will choose (it does so for
    those of convolutions that are not channels-last already).
    """
    storages = Liveness.of(forward, buckets, policy).storages
    alone = {s.name: s for s in storages if _is_the_graphs(s)}
    inputs = {node.name: node for node in backward.find_nodes(op="placeholder")}
    devices = {torch.device(bucket.device).type for bucket in buckets}
    leaves, returns = _Forward(forward, alone), _Backward(backward, kernels_before(backward))
    shift = leaves.units
    found = []
    for node, storage in leaves.saved():
        value = node.meta["val"]
        if node.name not in inputs or not inputs[node.name].users:
            continue
        if not _may_move(value, wanted.min_bytes, devices) or leaves.is_laid_out_later(value):
            continue
        ready, last = leaves.span(node, storage)
        first = shift + returns.needed(inputs[node.name])
        size = value.numel() * value.dtype.itemsize
        found.append(
            Candidate(node.name, size, ready, last, first, *_costs(size, wanted, hardware))
        )
    return found


def _costs(size: int, wanted: Wanted, hardware: Hardware) -> Iterator[float]:
    """Seconds to the host, from the host, to NVMe, from NVMe."""
    ways = [Channel.DEVICE_TO_HOST, Channel.HOST_TO_DEVICE]
    if wanted.tier is Tier.NVME:
        ways += [Channel.NVME_WRITE, Channel.NVME_READ]
    return (MARGIN * transfer_seconds(way, size, hardware) for way in ways)


def _is_the_graphs(storage: Storage) -> bool:
    mine = storage.origin is Origin.VALUE and storage.category is Category.ACTIVATIONS
    return mine and storage.output


def _may_move(value: torch.Tensor, min_bytes: int, devices: set[str]) -> bool:
    if value.layout is not torch.strided or value.is_complex() or value.device.type not in devices:
        return False
    sizes = (*value.shape, *value.stride(), value.storage_offset())
    if not all(isinstance(size, int) for size in sizes):
        return False
    nbytes = value.numel() * value.dtype.itemsize
    return nbytes >= max(1, min_bytes) and dense_stride(value) == value.stride()


class _Forward:
    """What a forward graph saves. ``storages`` are those of its own results, by name."""

    def __init__(self, graph: Graph, storages: Mapping[str, Storage]) -> None:
        self._nodes = {node.name: node for node in graph.nodes}
        self._storages = storages
        self._order = positions(graph)
        self._touches = last_touches(graph)
        self._before = kernels_before(graph)
        self._output = output_node(graph)
        outputs = self._output.args[0]
        assert isinstance(outputs, list | tuple)
        self._outputs = Counter(node for node in outputs if isinstance(node, Node))
        self._convolves = any(n.target is torch.ops.aten.convolution.default for n in self._order)
        self.units = max(1, sum(role(node) is Role.KERNEL for node in self._order))

    def saved(self) -> Iterator[tuple[Node, Storage]]:
        """Outputs that lie in memory of their own, and that memory."""
        owner = {v: s for s in self._storages.values() for v in s.values if v in self._nodes}
        within = Counter(owner[n.name].name for n in self._outputs.elements() if n.name in owner)
        for node in self._outputs:
            storage = owner.get(node.name)
            if storage is not None and within[storage.name] == 1 and self._is_made(storage):
                yield node, storage

    def _is_made(self, storage: Storage) -> bool:
        """Whether the graph computes it: no input, and no copy that Inductor may leave out."""
        base = self._nodes[storage.name]
        return base.op == "call_function" and not is_view(base)

    def span(self, node: Node, storage: Storage) -> tuple[int, int]:
        """The position from which on the tensor may set out, and the last unit that touches it."""
        values = [self._nodes[name] for name in storage.values if name in self._nodes]
        users = {u for value in values for u in value.users if u is not self._output}
        readers = {self._touches[u] for u in users}
        made = max(self._touches[values[0]], node, key=self._order.__getitem__)
        last = max([made, *readers], key=self._order.__getitem__)
        ready = self._unit(made) + 1
        return ready, max(ready - 1, self._unit(last))

    def _unit(self, node: Node) -> int:
        return max(0, self._before[node] - (role(node) is not Role.KERNEL))

    def is_laid_out_later(self, value: torch.Tensor) -> bool:
        """Whether Inductor may give it another memory order than it was traced with."""
        orders = {4: torch.channels_last, 5: torch.channels_last_3d}
        if not self._convolves or value.dim() not in orders:
            return False
        return not value.is_contiguous(memory_format=orders[value.dim()])


class _Backward:
    """What a backward graph reads."""

    def __init__(self, graph: Graph, before: Mapping[Node, int]) -> None:
        self._order = positions(graph)
        self._before = before
        self._last = max(0, sum(role(node) is Role.KERNEL for node in graph.nodes) - 1)

    def needed(self, placeholder: Node) -> int:
        """The unit before which an input must be there."""
        first = min(placeholder.users, key=self._order.__getitem__)
        return min(self._before[first], self._last)
