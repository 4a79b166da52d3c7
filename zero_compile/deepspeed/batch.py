"""How the three batch sizes of DeepSpeed's config hang together."""

from typing import NamedTuple

from zero_compile.config.deepspeed.config import Config
from zero_runtime.errors import OptionError


class Batch(NamedTuple):
    """Samples: of all ranks for one optimizer step, of one rank for one forward; and forwards a step."""

    train: int
    micro: int
    accumulation: int


def resolve_batch(config: Config, world_size: int) -> Batch:
    """The sizes that ``config`` leaves out, from those it gives: train = micro * accumulation * ranks.

    Raises:
        OptionError: neither the train nor the micro batch size is given, or they do not fit together.
    """
    train, micro = config.train_batch_size, config.train_micro_batch_size_per_gpu
    accumulation = config.gradient_accumulation_steps
    if train is None and micro is None:
        raise OptionError(
            "DeepSpeed config: give train_batch_size or train_micro_batch_size_per_gpu"
        )
    if accumulation is None:
        accumulation = 1 if train is None or micro is None else train // (micro * world_size)
    if micro is None:
        assert train is not None
        micro = train // (accumulation * world_size)
    batch = Batch(train or micro * accumulation * world_size, micro, accumulation)
    if batch.train != micro * accumulation * world_size:
        raise OptionError(_explain(config, batch, world_size))
    return batch


def _explain(config: Config, batch: Batch, world_size: int) -> str:
    names = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    given = [f"{n} {getattr(config, n)}" for n in names if getattr(config, n) is not None]
    ranks = f"{world_size} rank{'s' if world_size > 1 else ''}"
    if len(given) == 2:
        return (
            f"DeepSpeed config: train_batch_size {batch.train} is not {given[0]} * {given[1]} * {ranks} "
            f"= {batch.micro * batch.accumulation * world_size}: correct one of them, or leave one out"
        )
    divisors = " * ".join([*given, ranks])
    return (
        f"DeepSpeed config: train_batch_size {batch.train} is not divisible by {divisors}: choose a "
        "multiple"
    )
