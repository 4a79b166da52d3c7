"""Which share of each kind of state lives on which tier: as the user says, or as it fits."""

from collections.abc import Sequence
from typing import NamedTuple

from zero_compile.analysis.resident_memory import Held, gib, resident
from zero_runtime.errors import OptionError
from zero_runtime.ir.placement import ON_DEVICE, Shares
from zero_runtime.ir.plan import StatePolicy, Tier

#: Of a device's memory, what is left to activations, gathered buckets and gradients when state is
#: placed by size: the rest is for what stays.
WORKING_SHARE = 0.3


class Wish(NamedTuple):
    """What the user says. ``ratio`` of the optimizer's state is offloaded; ``max_in_cpu`` elements a rank
    of parameters that go to NVMe stay on the host.
    """

    parameters: Tier = Tier.DEVICE
    optimizer: Tier = Tier.DEVICE
    ratio: float = 1.0
    max_in_cpu: int = 0


class Budgets(NamedTuple):
    """Bytes a rank may use, None where nothing is said; ``nvme``: whether there is a folder; ``decide``:
    whether state may be moved off the device without the user saying which.
    """

    device: int | None = None
    host: int | None = None
    nvme: bool = False
    decide: bool = False


class Placement(NamedTuple):
    """Shares by tier, and the bytes that NVMe then holds on one rank."""

    parameters: Shares = ON_DEVICE
    optimizer: Shares = ON_DEVICE
    nvme_bytes: int = 0


class _Sizes(NamedTuple):
    """Bytes on one rank."""

    parameters: int
    optimizer: int


def place(
    held: Sequence[Held], policy: StatePolicy, world_size: int, wish: Wish, budgets: Budgets
) -> Placement:
    """Where parameters and optimizer state live.

    What the user says is done. Where budgets are given instead, state that the device has no room for
    moves to the host, and what that has no room for to NVMe: optimizer state first, since it is used
    once a step, and parameters twice.

    Raises:
        OptionError: the host's budget is exceeded and there is no folder.
    """
    kept = resident(held, policy, world_size)
    sizes = _Sizes(kept.shards, kept.optimizer)
    parameters, optimizer = _said(held, world_size, wish)
    if budgets.decide and wish.parameters is Tier.DEVICE and wish.optimizer is Tier.DEVICE:
        parameters, optimizer = _fitting(sizes, kept.gradients, budgets)
    elif budgets.host is not None:
        parameters, optimizer = _within_host(sizes, parameters, optimizer, budgets)
    swapped = parameters.nvme * sizes.parameters + optimizer.nvme * sizes.optimizer
    return Placement(parameters, optimizer, int(swapped))


def _said(held: Sequence[Held], world_size: int, wish: Wish) -> tuple[Shares, Shares]:
    parameters = _all_on(wish.parameters)
    elements = -(-sum(p.numel for p in held) // world_size)
    if wish.parameters is Tier.NVME and wish.max_in_cpu and elements:
        share = min(1.0, wish.max_in_cpu / elements)
        parameters = Shares(0.0, share, 1.0 - share)
    optimizer = _all_on(wish.optimizer)
    if wish.optimizer is not Tier.DEVICE:
        kept = 1.0 - wish.ratio
        optimizer = Shares(kept, optimizer.host * wish.ratio, optimizer.nvme * wish.ratio)
    return parameters, optimizer


def _all_on(tier: Tier) -> Shares:
    return Shares(*(float(tier is each) for each in Tier))


def _fitting(sizes: _Sizes, gradients: int, budgets: Budgets) -> tuple[Shares, Shares]:
    """Shares by size: parameters have the first claim on each tier's memory."""
    device = None
    if budgets.device is not None:
        device = max(0, int(budgets.device * (1.0 - WORKING_SHARE)) - gradients)
    of_parameters, device, host = _fill(sizes.parameters, device, budgets.host)
    of_optimizer, device, host = _fill(sizes.optimizer, device, host)
    _refuse_overflow(
        of_parameters.nvme * sizes.parameters + of_optimizer.nvme * sizes.optimizer, budgets
    )
    return of_parameters, of_optimizer


def _fill(size: int, device: int | None, host: int | None) -> tuple[Shares, int | None, int | None]:
    """One kind of state into what is left of the device, then of the host, then NVMe."""
    if not size:
        return ON_DEVICE, device, host
    here = size if device is None else min(size, device)
    there = size - here if host is None else min(size - here, host)
    shares = Shares(here / size, there / size, (size - here - there) / size)
    return shares, _less(device, here), _less(host, there)


def _less(room: int | None, used: int) -> int | None:
    return None if room is None else room - used


def _within_host(
    sizes: _Sizes, parameters: Shares, optimizer: Shares, budgets: Budgets
) -> tuple[Shares, Shares]:
    """What the user sends to the host, as far as the host's budget reaches; the rest to NVMe."""
    assert budgets.host is not None
    room = budgets.host
    placed = []
    for size, shares in ((sizes.parameters, parameters), (sizes.optimizer, optimizer)):
        wanted = int(shares.host * size)
        there = min(wanted, room)
        room -= there
        moved = (wanted - there) / size if size else 0.0
        placed.append(Shares(shares.device, shares.host - moved, shares.nvme + moved))
    _refuse_overflow(sum(s.nvme * n for s, n in zip(placed, sizes, strict=True)), budgets)
    return placed[0], placed[1]


def _refuse_overflow(on_nvme: float, budgets: Budgets) -> None:
    if on_nvme >= 1 and not budgets.nvme:
        raise OptionError(
            f"host_memory of {gib(budgets.host or 0)} is {gib(int(on_nvme))} too small for the state that "
            "goes there: raise it, use more ranks, or give nvme_path for the rest"
        )
