"""What memory is left for activations and buckets once everything that stays has its place."""

from collections.abc import Iterable
from typing import NamedTuple

from zero_runtime.errors import OptionError
from zero_runtime.ir.plan import Residence, Stage, StatePolicy, Tier, dtype_of


class Held(NamedTuple):
    """One parameter: how many elements, of which dtype, whether it trains, and where its state lives."""

    numel: int
    dtype: str
    trainable: bool
    has_gradient: bool = True
    """Whether its gradient counts here; off where a graph's own memory curve holds it."""
    residence: Residence = Residence()


class Resident(NamedTuple):
    """Bytes of the device of one rank from step to step."""

    shards: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """All three."""
        return self.shards + self.gradients + self.optimizer


#: Adam's two moments, in float32. Optimizers with less state leave more room than planned.
STATE_BYTES = 8


def resident(parameters: Iterable[Held], policy: StatePolicy, world_size: int) -> Resident:
    """What one of ``world_size`` ranks keeps (Rajbhandari et al., ZeRO, 2020, table 1).

    With Adam and 16-bit parameters under float32 masters: 2 + 2 + 12 bytes a parameter, of which
    stage 3 divides all by the ranks, stage 2 the last two, stage 1 the last. Float32 or plain 16-bit
    parameters have no masters. Padding of buckets is not counted, nor what lives on the host or NVMe:
    parameter shards (which only stage 3 has), optimizer state, and gradients where they follow it.
    """
    shards = gradients = state = 0
    for p in parameters:
        size = p.numel * dtype_of(p.dtype).itemsize
        here = _on_device(p.residence, policy.stage)
        shards += size if here.parameters else 0
        if p.trainable:
            gradients += size if p.has_gradient and here.gradients else 0
            state += _state(p, policy) if here.optimizer else 0
    return Resident(
        -(-shards // (world_size if policy.stage is Stage.PARAMETERS else 1)),
        -(-gradients // (world_size if policy.stage >= Stage.GRADIENTS else 1)),
        -(-state // world_size),
    )


class _OnDevice(NamedTuple):
    """What of one parameter lives on the device."""

    parameters: bool
    gradients: bool
    optimizer: bool


def _on_device(residence: Residence, stage: Stage) -> _OnDevice:
    parameters = residence.parameters is Tier.DEVICE or stage is not Stage.PARAMETERS
    optimizer = residence.optimizer is Tier.DEVICE
    return _OnDevice(parameters, optimizer or stage is Stage.OPTIMIZER, optimizer)


def _state(p: Held, policy: StatePolicy) -> int:
    """Optimizers keep their state in the dtype of what they step on."""
    itemsize = dtype_of(p.dtype).itemsize
    master = 4 if policy.master_weights and itemsize == 2 else 0
    moments = STATE_BYTES if master or itemsize >= 4 else 2 * itemsize
    return p.numel * (master + moments)


def left_over(budget: int, kept: Resident) -> int:
    """Bytes of ``budget`` for activations and buckets.

    Raises:
        OptionError: nothing is left; says what takes how much.
    """
    left = budget - kept.total
    if left <= 0:
        raise OptionError(
            f"device_memory of {gib(budget)} does not hold what stays on one rank: parameter shards "
            f"{gib(kept.shards)}, gradient shards {gib(kept.gradients)} and optimizer state "
            f"{gib(kept.optimizer)} take {gib(kept.total)}, {gib(-left)} too much. Use more ranks or "
            "a larger budget."
        )
    return left


def gib(count: int) -> str:
    """Bytes for a message."""
    return f"{count / (1 << 30):.3f} GiB" if count >= 1 << 24 else f"{count:,} bytes"
