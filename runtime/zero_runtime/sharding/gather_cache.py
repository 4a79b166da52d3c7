"""Gathered buckets that outlive a graph: kept for the next one, or started for it ahead of time."""

from collections.abc import Iterator

import torch

from zero_runtime.sharding.bucket import Bucket, Flight


class GatherCache:
    """Flights by bucket and dtype. Valid until a parameter changes: then :meth:`drop` them."""

    def __init__(self) -> None:
        self._flights: dict[tuple[Bucket, torch.dtype], Flight] = {}

    def __contains__(self, key: object) -> bool:
        return key in self._flights

    def __iter__(self) -> Iterator[tuple[Bucket, torch.dtype]]:
        return iter(self._flights)

    def put(self, bucket: Bucket, dtype: torch.dtype, flight: Flight) -> None:
        """Hold a flight for whoever gathers the bucket next."""
        self._flights[bucket, dtype] = flight

    def take(self, bucket: Bucket, dtype: torch.dtype) -> Flight | None:
        """The flight, which is then the caller's; None if there is none."""
        return self._flights.pop((bucket, dtype), None)

    def drop(self) -> None:
        """Values are about to change: wait for what is on its way, and forget everything."""
        for flight in self._flights.values():
            flight.land()
        self._flights.clear()
