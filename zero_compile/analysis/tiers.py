"""What a bucket's residence means for a graph: what is moved between device, host and NVMe, and how much."""

import torch

from zero_runtime.ir.plan import BucketPlan, Stage, Tier


def is_fetched(bucket: BucketPlan) -> bool:
    """Whether its shards lie off the device, so that each gather needs one brought there first."""
    return bucket.residence.parameters is not Tier.DEVICE


def is_read(bucket: BucketPlan) -> bool:
    """Whether its shards lie on NVMe, from where they come by way of the host."""
    return bucket.residence.parameters is Tier.NVME


def is_evicted(bucket: BucketPlan, stage: Stage) -> bool:
    """Whether its reduced gradients go to the host. At stage 1 they are whole, and stay."""
    return stage is not Stage.OPTIMIZER and bucket.residence.optimizer is not Tier.DEVICE


def shard_bytes(bucket: BucketPlan) -> int:
    """Bytes of one rank's shard as it is stored: what moves between tiers."""
    return bucket.chunk * bucket.torch_dtype.itemsize


def gathered_in_place(bucket: BucketPlan, dtype: torch.dtype) -> bool:
    """Whether one rank's fetched shard is the bucket gathered in ``dtype``: nothing is copied."""
    return bucket.world_size == 1 and dtype is bucket.torch_dtype
