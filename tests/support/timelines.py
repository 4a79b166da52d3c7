"""Timelines for tests and screenshots: a small model of a training step, played on serial channels."""

import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from zero_runtime.ir.plan import Channel
from zero_runtime.ir.timeline import Category, Event, Sample, Source, Timeline

MIB = 2**20

#: What one layer costs: seconds on each channel, and bytes.
COMPUTE, GATHER, REDUCE, LOAD, STORE = 6e-3, 6.8e-3, 7e-3, 2e-3, 1.5e-3
WHOLE, SHARD, ACTIVATION = 384 * MIB, 48 * MIB, 160 * MIB


@dataclass
class Player:
    """Channels that run one event after another, and memory that changes on the way."""

    jitter: random.Random | None = None
    events: list[Event] = field(default_factory=list)
    free: dict[Channel, float] = field(default_factory=lambda: defaultdict(float))
    changes: dict[float, Counter[Category]] = field(default_factory=lambda: defaultdict(Counter))

    def run(self, event: Event, ready: float = 0.0) -> float:
        """Place ``event`` (its ``end`` is how long it takes) when its channel is free and all is ready."""
        free = self.free[event.channel]
        start = max(free, ready)
        takes = event.end * (self.jitter.uniform(0.9, 1.35) if self.jitter else 1.0)
        stall = start - free if event.channel is Channel.COMPUTE else 0.0
        self.events.append(replace(event, start=start, end=start + takes, stall=stall))
        self.free[event.channel] = start + takes
        return start + takes

    def holds(self, category: Category, count: int, since: float, until: float) -> None:
        self.changes[since][category] += count
        self.changes[until][category] -= count

    def memory(self, resident: dict[Category, int]) -> Iterator[Sample]:
        held = Counter(resident)
        for time in sorted({0.0, *self.changes}):
            held.update(self.changes[time])
            yield Sample(time, dict(held))


def layer_event(kind: str, channel: Channel, phase: str, layer: int, takes: float) -> Event:
    bucket = None if channel is Channel.COMPUTE else layer
    count = {Channel.COMPUTE: 0, Channel.ALL_GATHER: WHOLE, Channel.REDUCE_SCATTER: WHOLE}
    bytes_moved = count.get(channel, SHARD)
    name = f"layers.{layer}.{kind}"
    node = f"{'linear' if phase == 'forward' else 'mm'}_{layer}"
    return Event(name, channel, 0.0, takes, phase, bucket, bytes_moved, node=node)


def play(player: Player, order: list[int], phase: str, ahead: int, ends: list[float]) -> None:
    """One pass over the layers; ``ends`` are those of compute so far and bound the prefetch."""
    forward, unit = phase == "forward", COMPUTE if phase == "forward" else 2 * COMPUTE
    for layer in order:
        gate = ends[-ahead - 1] if len(ends) > ahead else 0.0
        load = layer_event("load", Channel.HOST_TO_DEVICE, phase, layer, LOAD)
        loaded = player.run(load, gate)
        gather = layer_event("gather", Channel.ALL_GATHER, phase, layer, GATHER)
        gathered = player.run(gather, loaded)
        name = "forward" if forward else "backward"
        end = player.run(layer_event(name, Channel.COMPUTE, phase, layer, unit), gathered)
        player.holds(Category.GATHERED, WHOLE, player.events[-2].start, end)
        player.holds(Category.STAGING, SHARD, player.events[-3].start, gathered)
        ends.append(end)
        if not forward:
            reduce_and_store(player, layer, end)


def reduce_and_store(player: Player, layer: int, since: float) -> None:
    reduce = layer_event("reduce", Channel.REDUCE_SCATTER, "backward", layer, REDUCE)
    reduced = player.run(reduce, since)
    player.holds(Category.REDUCING, 2 * WHOLE, since, reduced)
    store = layer_event("store", Channel.DEVICE_TO_HOST, "backward", layer, STORE)
    stored = player.run(store, reduced)
    player.holds(Category.GRADIENTS, SHARD, reduced, stored)


def hold_activations(player: Player, layers: int) -> None:
    ends = {e.name: e.end for e in player.events if e.channel is Channel.COMPUTE}
    for layer in range(layers):
        until = ends[f"layers.{layer}.backward"]
        player.holds(Category.ACTIVATIONS, ACTIVATION, ends[f"layers.{layer}.forward"], until)


def demo(
    layers: int = 8, ahead: int = 1, jitter: int | None = None, name: str = "step", budget: int = 0
) -> Timeline:
    """A forward and backward pass of ``layers`` layers: three events a layer, and five on the way back.

    ``ahead`` layers are gathered before they are needed; ``jitter`` seeds what makes it "measured";
    ``budget`` is in bytes, 0 for one that is just enough.
    """
    player, ends = Player(None if jitter is None else random.Random(jitter)), list[float]()
    play(player, list(range(layers)), "forward", ahead, ends)
    play(player, list(reversed(range(layers))), "backward", ahead, ends)
    hold_activations(player, layers)
    resident = {Category.SHARDS: layers * SHARD, Category.OPTIMIZER: 2 * layers * SHARD}
    memory = tuple(player.memory(resident))
    source = Source.PREDICTED if jitter is None else Source.MEASURED
    enough = -(-max(sample.total for sample in memory) // (256 * MIB)) * 256 * MIB
    return Timeline(name, source, 8, tuple(player.events), memory, budget or enough)
