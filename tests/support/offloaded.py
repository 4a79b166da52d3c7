"""Scheduling problems whose shards lie on the host or on NVMe, for tests of the planner."""

import random
from dataclasses import replace

from zero_compile.scheduler.problem import Gather, Problem, Reduce


def offloaded(rng: random.Random, problem: Problem) -> Problem:
    """The problem with its buckets on tiers at random; some are gathered twice.

    Times are multiples of 1/8, so that sums are exact whatever their order.
    """
    tiers: dict[int, tuple[float, float, int, bool]] = {}
    gathers: list[Gather] = []
    for gather in problem.gathers:
        past = [g for g in gathers if g.last < gather.first]
        again = rng.choice(past) if past and rng.random() < 0.3 else None
        bucket = again.bucket if again else gather.bucket
        latest = max((g.last for g in gathers if g.bucket == bucket), default=-1)
        if latest >= gather.first:
            bucket, latest = gather.bucket, -1
        fetch, read, shard, in_place = tiers.setdefault(bucket, _tier(rng, gather))
        gathers.append(
            replace(
                gather,
                bucket=bucket,
                earliest=max(gather.earliest, latest + 1),
                fetch=fetch,
                read=read,
                shard=shard,
                in_place=in_place,
            )
        )
    reductions = tuple(_evicted(rng, r) for r in problem.reductions)
    return replace(problem, gathers=tuple(gathers), reductions=reductions, slots=rng.randint(1, 4))


def _tier(rng: random.Random, gather: Gather) -> tuple[float, float, int, bool]:
    where = rng.choice(["device", "host", "nvme", "nvme"])
    if where == "device":
        return 0.0, 0.0, 0, False
    read = rng.randint(1, 24) / 8 if where == "nvme" else 0.0
    in_place = rng.random() < 0.2
    return rng.randint(1, 16) / 8, read, gather.bytes if in_place else rng.randint(0, 3), in_place


def _evicted(rng: random.Random, reduction: Reduce) -> Reduce:
    if rng.random() < 0.5:
        return reduction
    shard = rng.randint(0, reduction.bytes)
    return replace(reduction, evict=rng.randint(1, 16) / 8, shard=shard)


def layers(
    count: int,
    *,
    compute: float = 1.0,
    gather: float = 0.25,
    fetch: float = 0.25,
    read: float = 0.0,
    slots: int = 5,
    limit: int | None = None,
) -> Problem:
    """A bucket of four bytes a layer, used by one node; the shards are a byte each."""
    gathers = tuple(Gather(k, gather, 4, k, k, 0, fetch, read, 1) for k in range(count))
    return Problem((compute,) * count, (0,) * count, gathers, limit=limit, slots=slots)
