"""Where each bucket lives, dealt out by the shares of what is offloaded."""

from zero_runtime.ir.placement import Offload, Shares
from zero_runtime.ir.plan import Residence, Tier


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
