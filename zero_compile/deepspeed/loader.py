"""The data loader that ``initialize`` makes of a dataset."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from zero_runtime.errors import UnsupportedError


class Seat(NamedTuple):
    """This rank's number among the ranks that share the data."""

    rank: int
    world_size: int


def make_loader(
    dataset: Dataset[Any],
    seat: Seat,
    micro_batch: int,
    *,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    drop_last: bool = False,
) -> DataLoader[Any]:
    """Batches of ``micro_batch`` samples, each sample on one rank, in an order all ranks agree on.

    As with DeepSpeed the order is the same in every epoch unless ``loader.sampler.set_epoch(n)`` is called.

    Raises:
        UnsupportedError: ``dataset`` cannot be indexed, so nobody can say which rank takes which sample.
    """
    if isinstance(dataset, IterableDataset):
        raise UnsupportedError(
            f"training_data: {type(dataset).__name__} is iterable only. Split it over the ranks yourself "
            "and wrap it in a torch.utils.data.DataLoader; initialize needs no training_data."
        )
    sampler: DistributedSampler[Any] = DistributedSampler(
        dataset, num_replicas=seat.world_size, rank=seat.rank
    )
    return DataLoader(
        dataset,
        batch_size=micro_batch,
        sampler=sampler,
        collate_fn=collate_fn,
        drop_last=drop_last,
        pin_memory=torch.cuda.is_available(),
    )
