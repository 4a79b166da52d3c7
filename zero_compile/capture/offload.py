"""What leaves the device, and where to: the options' sections checked, and a model's state placed by them."""

import os
import warnings
from collections.abc import Iterable

from zero_compile.analysis.resident_memory import Held
from zero_compile.config.options import Options
from zero_compile.config.sections import Section, folders_of
from zero_compile.scheduler.placement import Budgets, Wish, place
from zero_runtime.errors import OptionError, SwapError
from zero_runtime.ir.placement import Offload
from zero_runtime.ir.plan import Stage, StatePolicy
from zero_runtime.offload.scratch import open_scratch


def refuse_folders(options: Options) -> None:
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


def check_offload(options: Options, stage: Stage) -> None:
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


def refuse_budgets(options: Options) -> None:
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


def _budgeted(options: Options) -> bool:
    return options.host_memory is not None or options.nvme_path is not None


def folders_for(options: Options) -> tuple[str, ...]:
    """Where swap files go: each folder that any option names, once."""
    named = (
        *options.offload_optimizer.folders,
        *options.offload_param.folders,
        *options.offload_activations.folders,
        *folders_of(options.nvme_path),
    )
    return tuple(dict.fromkeys(named))


def offload_of(
    options: Options, held: Iterable[Held], policy: StatePolicy, world_size: int
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
