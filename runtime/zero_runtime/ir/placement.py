"""What is kept off the device, and where: policy that the compiler decides and the runtime follows."""

from dataclasses import dataclass, field
from typing import NamedTuple

from zero_runtime.ir.plan import Residence, Tier
from zero_runtime.offload.swap_file import AioConfig


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


class _Dealer:
    """Hands out tiers so that after any number of buckets each has about its share of the elements."""

    def __init__(self, shares: Shares) -> None:
        self._shares = dict(zip(Tier, shares, strict=True))
        self._dealt = dict.fromkeys(Tier, 0)

    def deal(self, numel: int) -> Tier:
        """The tier that lags most behind its share once ``numel`` more elements are dealt."""
        total = sum(self._dealt.values()) + numel
        tier = max(Tier, key=lambda t: self._shares[t] * total - self._dealt[t])
        self._dealt[tier] += numel
        return tier


class Residences:
    """Decides where each bucket's state lives, in the order of the buckets, which all ranks share."""

    def __init__(self, offload: Offload) -> None:
        self._parameters = _Dealer(offload.parameters)
        self._optimizer = _Dealer(offload.optimizer)

    def of(self, numel: int, trainable: bool) -> Residence:
        """Of the next bucket, with ``numel`` elements a rank; frozen ones have no optimizer state."""
        optimizer = self._optimizer.deal(numel) if trainable else Tier.DEVICE
        return Residence(self._parameters.deal(numel), optimizer)
