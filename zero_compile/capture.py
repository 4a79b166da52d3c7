"""One Dynamo graph on its way through the compiler: its parameters, their session and buckets."""

import re
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.fx import GraphModule, Node

from zero_compile.fx_graph import calls, parameter_number, positions
from zero_compile.layout import Use, group_uses, plan_bucket
from zero_compile.passes.sink_casts import narrow_dtype
from zero_runtime import ops
from zero_runtime.bucket import Bucket
from zero_runtime.collectives import current_group
from zero_runtime.plan import BucketPlan
from zero_runtime.session import Entry, Session, session_of


class Capture:
    """Parameters are numbered in the order of the graph's inputs, buckets in the order of first use."""

    def __init__(
        self, session: Session, parameters: dict[int, int], entries: Sequence[Entry], name: str
    ) -> None:
        self.session = session
        self.name = name
        self.parameters = parameters
        """Input position to parameter number."""
        self.entries = entries
        """By parameter number."""
        self.buckets: list[Bucket] = []
        self.places: dict[int, tuple[int, int]] = {}
        """Parameter number to (bucket, slot)."""

    @staticmethod
    def of(gm: GraphModule, example_inputs: Sequence[Any]) -> "Capture":
        """Claim the parameters among a Dynamo graph's inputs."""
        found = [(i, p) for i, p in enumerate(example_inputs) if isinstance(p, nn.Parameter)]
        owners = (session_of(p) for _, p in found)
        session = next((s for s in owners if s is not None), None) or Session(current_group())
        names = [_name(node) for node in gm.graph.find_nodes(op="placeholder")]
        entries = [(session_of(p) or session).claim(names[i], p) for i, p in found]
        parameters = {position: number for number, (position, _) in enumerate(found)}
        return Capture(session, parameters, entries, f"graph{len(session.plans)}")

    @property
    def bucket_plans(self) -> list[BucketPlan]:
        """The plans of the graph's buckets."""
        return [bucket.plan for bucket in self.buckets]

    def lay_out(self, gm: GraphModule, bucket_bytes: int | None) -> None:
        """Give every parameter that the graph gathers a bucket, and number the buckets. Idempotent."""
        gathers = [g for g in _by_first_use(gm) if parameter_number(g) not in self.places]
        fresh = [g for g in gathers if not self.entries[parameter_number(g)].placed]
        for group in group_uses([self._use(g) for g in fresh], bucket_bytes):
            bucket = Bucket(plan_bucket(group, self.session.group.world_size), self.session.group)
            self.session.adopt(bucket, [self.entries[use.number] for use in group])
        for gather in gathers:
            self._number(parameter_number(gather))

    def _number(self, parameter: int) -> None:
        bucket, slot = self.entries[parameter].place
        if bucket not in self.buckets:
            self.buckets.append(bucket)
        self.places[parameter] = (self.buckets.index(bucket), bucket.plan.slots.index(slot))

    def _use(self, gather: Node) -> Use:
        number = parameter_number(gather)
        entry = self.entries[number]
        parameter = entry.parameter
        assert parameter is not None
        return Use(
            number,
            entry.name,
            tuple(parameter.shape),
            parameter.stride(),
            parameter.numel(),
            parameter.dtype,
            narrow_dtype(gather) or parameter.dtype,
            parameter.device,
            parameter.requires_grad,
        )


def _by_first_use(gm: GraphModule) -> list[Node]:
    order = positions(gm.graph)
    first = lambda g: min((order[u] for u in g.users), default=order[g])  # noqa: E731
    return sorted(calls(gm.graph, ops.gather), key=first)


def _name(placeholder: Node) -> str:
    """``L['self']._modules['up']._parameters['weight']`` as ``up.weight``."""
    argument = placeholder.meta.get("grapharg")
    source = getattr(argument, "source", None) or getattr(placeholder, "_dynamo_source", None)
    if source is None:
        return placeholder.name
    text = source.name if isinstance(source.name, str) else source.name()
    parts = re.findall(r"_(?:modules|parameters)\['([^']+)'\]", text)
    return ".".join(parts) or text
