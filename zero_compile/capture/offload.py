"""DeepSpeed's sections ``offload_param`` and ``offload_optimizer``, and what else says what leaves the device."""

import os
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from zero_compile.analysis.resident_memory import Held
from zero_compile.scheduler.placement import Budgets, Wish, place
from zero_runtime.errors import OptionError, SwapError
from zero_runtime.ir.placement import Offload
from zero_runtime.ir.plan import Policy, Stage, Tier
from zero_runtime.offload.scratch import open_scratch

if TYPE_CHECKING:
    from zero_compile.config.options import Options

_TIERS = {"none": Tier.DEVICE, "cpu": Tier.HOST, "nvme": Tier.NVME}
_COUNTS = ("buffer_size", "max_in_cpu")


class Section(BaseModel):
    """What all sections have in common."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    device: Literal["none", "cpu", "nvme"] = "none"
    """Where the section's subject is between its uses."""

    nvme_path: str | tuple[str, ...] | list[str] | None = None
    """A folder, or several that share every tensor, for ``"nvme"``; each rank needs one on a local disk."""

    pin_memory: bool = True
    """Whether host memory is pinned, where there is a GPU."""

    @field_validator("nvme_path")
    @classmethod
    def _named(cls, value: Any) -> Any:
        return refuse_empty(value)

    @property
    def tier(self) -> Tier:
        """``device``, as the runtime calls it."""
        return _TIERS[self.device]

    @property
    def folders(self) -> tuple[str, ...]:
        """``nvme_path``, however it was written."""
        return folders_of(self.nvme_path)


class OffloadParam(Section):
    """Where parameter shards live: at stage 3 only."""

    buffer_count: int = Field(default=5, ge=1)
    """The most shards in host memory on their way from NVMe."""

    buffer_size: int | None = Field(default=None, ge=1)
    """Taken for compatibility: buffers have exactly the size of what they hold."""

    max_in_cpu: int = Field(default=0, ge=0)
    """Of parameters on NVMe, the elements a rank that stay in host memory all the same."""

    @field_validator(*_COUNTS, mode="before")
    @classmethod
    def _whole(cls, value: Any) -> Any:
        return int(value) if isinstance(value, float) and value.is_integer() else value


class OffloadOptimizer(Section):
    """Where optimizer state, and reduced gradients, live; the optimizer then works on the host."""

    buffer_count: int = Field(default=4, ge=1)
    """The most buckets of optimizer state in host memory on their way from NVMe and back; two at least."""

    pipeline_read: bool = False
    """Taken for compatibility: reads always overlap updates."""

    pipeline_write: bool = False
    """Taken for compatibility: writes always overlap updates."""

    fast_init: bool = False
    """Taken for compatibility: optimizer state is born where it lives."""

    ratio: float = Field(default=1.0, ge=0.0, le=1.0)
    """The share that is offloaded; the rest stays on the device."""

    super_offload: bool = False
    """Refused where it is on: a mode for one kind of machine."""

    cpuadam_cores_perc: float = Field(default=0.8, gt=0.0, le=1.0)
    """Taken for compatibility: updates use ``torch.get_num_threads()`` threads."""

    @field_validator("ratio", "cpuadam_cores_perc", mode="before")
    @classmethod
    def _float(cls, value: Any) -> Any:
        return float(value) if type(value) is int else value

    @field_validator("super_offload")
    @classmethod
    def _refuse(cls, value: bool) -> bool:
        if value:
            raise ValueError(
                "super_offload is not supported; update_in_backward overlaps updates with backward"
            )
        return value


class OffloadActivations(Section):
    """Where tensors that forward saves for backward are in between."""

    min_bytes: int = Field(default=1 << 20, ge=0)
    """Smaller ones stay."""

    @field_validator("min_bytes", mode="before")
    @classmethod
    def _whole(cls, value: Any) -> Any:
        return int(value) if isinstance(value, float) and value.is_integer() else value


def folders_of(path: Any) -> tuple[str, ...]:
    """``nvme_path`` as a tuple of folders."""
    return (path,) if isinstance(path, str) else tuple(path or ())


def refuse_empty(path: Any) -> Any:
    """``nvme_path``, where every folder in it has a name: none would be the working directory.

    Raises:
        ValueError: one has not.
    """
    if path is not None and not all(folders_of(path) or ("",)):
        raise ValueError(f"expected a folder, or a list of folders, got {path!r}")
    return path


def refuse_folders(options: "Options") -> None:
    """Refuse folders in which no swap file can be made here, by making one in each.

    Raises:
        OptionError: names the folder, and says what is wrong with it.
    """
    for folder in folders_for(options):
        try:
            os.close(open_scratch(folder, "zero").descriptor)
        except SwapError as error:
            raise OptionError(
                f"nvme_path {folder!r}: {os.strerror(error.errno or 0)}. Name a folder on a local disk that "
                "exists and in which this process may make files."
            ) from error


def check_offload(options: "Options", stage: Stage) -> None:
    """Refuse what does not go together.

    Raises:
        OptionError: says which options, and what to do.
    """
    if options.offload_param.device != "none" and stage is not Stage.PARAMETERS:
        raise OptionError(
            f'offload_param needs backend="zero3": at stage {int(stage)} parameters stay whole on every '
            "device. Use zero3, or leave offload_param out."
        )
    for name in ("offload_param", "offload_optimizer", "offload_activations"):
        section: Section = getattr(options, name)
        if section.device == "nvme" and not folders_for(options):
            raise OptionError(
                f"{name} says device 'nvme' and no folder: give nvme_path, in the section or beside it"
            )
        if section.device != "nvme" and section.nvme_path is not None:
            raise OptionError(
                f"{name} has an nvme_path and device {section.device!r}: say device 'nvme', or leave the "
                "path out"
            )
    if (
        options.update_in_backward
        and options.offload_optimizer.device == "none"
        and not _budgeted(options)
    ):
        raise OptionError(
            "update_in_backward is for optimizers whose state is off the device: give offload_optimizer too"
        )


def refuse_budgets(options: "Options") -> None:
    """Refuse to place state by the size of a model that is not built yet.

    Raises:
        OptionError: says what to give instead.
    """
    sections = (options.offload_param.device, options.offload_optimizer.device)
    if _budgeted(options) and sections == ("none", "none"):
        raise OptionError(
            "host_memory and nvme_path without sections place state by the model's size, which is not "
            "known while it is built: say where state lives with offload_param and offload_optimizer"
        )
    if options.offload_param.max_in_cpu:
        warnings.warn(
            "offload_param: max_in_cpu needs the size of the model, which is not known while it is built: "
            "all parameters go to NVMe",
            stacklevel=2,
        )


def _budgeted(options: "Options") -> bool:
    return options.host_memory is not None or options.nvme_path is not None


def folders_for(options: "Options") -> tuple[str, ...]:
    """Where swap files go: each folder that any option names, once."""
    named = (
        *options.offload_optimizer.folders,
        *options.offload_param.folders,
        *options.offload_activations.folders,
        *folders_of(options.nvme_path),
    )
    return tuple(dict.fromkeys(named))


def offload_of(
    options: "Options", held: Iterable[Held], policy: Policy, world_size: int
) -> Offload:
    """Where a model with the parameters ``held`` keeps its state, as the options say or as it fits.

    Raises:
        OptionError: it fits nowhere, or the options contradict each other.
    """
    check_offload(options, policy.stage)
    parameters, optimizer = options.offload_param, options.offload_optimizer
    pinned = (s.pin_memory for s in (parameters, optimizer, options.offload_activations))
    folders = folders_for(options)
    wish = Wish(parameters.tier, optimizer.tier, optimizer.ratio, parameters.max_in_cpu)
    budgets = Budgets(options.device_memory, options.host_memory, bool(folders), _budgeted(options))
    placed = place(list(held), policy, world_size, wish, budgets)
    return Offload(
        placed.parameters,
        placed.optimizer,
        folders,
        placed.nvme_bytes,
        parameters.buffer_count,
        optimizer.buffer_count,
        all(pinned),
        bool(options.update_in_backward),
        options.aio,
    )
