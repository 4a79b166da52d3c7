"""What is kept off the device, and where: policy that the compiler decides and the runtime follows."""

from dataclasses import dataclass, field
from typing import NamedTuple

from zero_runtime.ir.aio import AioConfig
from zero_runtime.ir.plan import Residence, Tier


class Shares(NamedTuple):
    """Parts of one kind of state by tier; they add up to 1."""

    device: float = 1.0
    host: float = 0.0
    nvme: float = 0.0


ON_DEVICE = Shares()


@dataclass(frozen=True)
class Offload:
    """Where a session keeps its state.

    ``folders`` hold swap files, striped; ``nvme_bytes`` is what they are expected to hold together.
    ``slots`` parameter shards at most are in host memory on their way from NVMe, ``sets`` buckets of
    optimizer state at most on their way from it and back.
    """

    parameters: Shares = ON_DEVICE
    optimizer: Shares = ON_DEVICE
    folders: tuple[str, ...] = ()
    nvme_bytes: int = 0
    slots: int = 5
    sets: int = 4
    pinned: bool = True
    in_backward: bool = False
    """Whether a bucket is updated as soon as backward has reduced its gradient."""
    aio: AioConfig = field(default_factory=AioConfig)
    sized: bool = True
    """Whether the size of the model was known; if not, shares do not follow from it."""

    @property
    def what(self) -> str:
        """In words, for comparison: shares by size may differ between the parts of one model."""
        tiers = {
            "parameters": self.parameters,
            "optimizer state": self.optimizer,
        }
        named = [
            f"{kind} on {tier}"
            for kind, shares in tiers.items()
            for tier, share in zip(("host", "nvme"), shares[1:], strict=True)
            if share
        ]
        late = ", updated in backward" if self.in_backward else ""
        return (", ".join(named) or "nothing") + late

    @property
    def usual(self) -> Residence:
        """Where most of a bucket's state lives, whichever it is."""
        tiers = list(Tier)
        return Residence(
            tiers[self.parameters.index(max(self.parameters))],
            tiers[self.optimizer.index(max(self.optimizer))],
        )

    @property
    def active(self) -> bool:
        """Whether anything leaves the device."""
        return self.parameters != ON_DEVICE or self.optimizer != ON_DEVICE
