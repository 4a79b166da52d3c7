"""``initialize``: a model, a config, and what trains them together, under DeepSpeed's names."""

import os
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from zero_compile.capture.captured_graph import partition
from zero_compile.config.deepspeed.config import Config, parse, warn
from zero_compile.config.deepspeed.convert import backend_of, to_options
from zero_compile.config.deepspeed.reading import Source, read
from zero_compile.deepspeed.batch import resolve_batch
from zero_compile.deepspeed.engine import Engine
from zero_compile.deepspeed.loader import Seat, make_loader
from zero_compile.deepspeed.optimizers import make_optimizer, make_scheduler
from zero_runtime.errors import OptionError, UnsupportedError
from zero_runtime.optim.step_hooks import refuse_unless_elementwise


class Initialized(NamedTuple):
    """What ``initialize`` returns; ``training_dataloader`` is None without ``training_data``."""

    engine: Engine
    optimizer: torch.optim.Optimizer | None
    training_dataloader: Any
    lr_scheduler: Any


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int | None = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Source | None = None,
    mesh_param: tuple[int, int] | None = None,
    config_params: Source | None = None,
) -> Initialized:
    """Everything that ``deepspeed.initialize`` returns for the same arguments, in the same order.

    Collective. The model moves to this rank's device and to the config's precision, rank 0's weights go
    to all, and it is compiled for the config's stage. An optimizer or a schedule that is passed, or a
    function that makes one, goes before the config's section. ``model_parameters`` (or parameter groups)
    are what the config's optimizer trains; by default all of the model that require gradients.
    ``args.deepspeed_config`` and ``config_params`` are other ways to give ``config``, a path or a dict.
    ``distributed_port`` is not needed: torchrun's environment says where ranks meet.

    Raises:
        OptionError: an argument is missing or given twice, or the config is wrong.
        UnsupportedError: the config, ``mpu`` or ``mesh_param`` asks for what zero_compile does not do.
        GroupError: several ranks were launched and ``dist_init_required`` forbids a process group.
    """
    if model is None:
        raise OptionError("initialize: give model=, an nn.Module")
    source = _source(args, config, config_params)
    _join(dist_init_required)
    ranks = _ranks(mpu, mesh_param)
    settings = parse(_with_precision_of(model, read(source)))
    warn(settings)
    batch = resolve_batch(settings, ranks.seat.world_size)
    backend = backend_of(settings)
    _place(model, settings, ranks.group)
    options = to_options(settings, ranks.seat.world_size, model=model)
    if mpu is not None:
        options["group"] = ranks.group
    if "leaf_modules" in options:
        partition(model, options, stage=settings.zero_optimization.stage)
    trained = _optimizer(settings, optimizer, _trained(model, model_parameters))
    schedule = _schedule(settings, lr_scheduler, trained)
    compiled = torch.compile(model, backend=backend, options=options)
    engine = Engine(
        model, compiled, settings, batch, ranks.seat, optimizer=trained, lr_scheduler=schedule
    )
    loader = None
    if training_data is not None:
        drop_last = settings.dataloader_drop_last
        loader = make_loader(
            training_data, ranks.seat, batch.micro, collate_fn=collate_fn, drop_last=drop_last
        )
    return Initialized(engine, trained, loader, schedule)


# ------------------------------------------------------------------------------ config


def _source(args: Any, config: Source | None, config_params: Source | None) -> Source:
    ways = {
        "config": config,
        "config_params": config_params,
        "args.deepspeed_config": getattr(args, "deepspeed_config", None),
    }
    given = {name: value for name, value in ways.items() if value is not None}
    if len(given) != 1:
        what = " and ".join(given) + " are given" if given else "none is given"
        raise OptionError(
            f"initialize: one of {', '.join(ways)} is the DeepSpeed config, a path or a dict; {what}"
        )
    return next(iter(given.values()))


def _with_precision_of(model: nn.Module, config: Any) -> dict[str, Any]:
    """``"enabled": "auto"`` of bf16 and fp16 is what the model is in already."""
    filled = dict(config)
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        section = filled.get(name)
        if isinstance(section, dict) and section.get("enabled") == "auto":
            filled[name] = {**section, "enabled": dtypes == {dtype}}
    return filled


# ------------------------------------------------------------------------------ ranks


class _Ranks(NamedTuple):
    """Who shares the model and the data; ``group`` None: the default group, or one rank alone."""

    seat: Seat
    group: dist.ProcessGroup | None


def _join(required: bool | None) -> None:
    """Make the process group that torchrun's environment describes, unless there is one."""
    if dist.is_initialized() or required is False or "RANK" not in os.environ:
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(_local_device())
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")


def _local_device() -> int:
    return int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()


def _ranks(mpu: Any, mesh_param: tuple[int, int] | None) -> _Ranks:
    if mesh_param is not None and mesh_param[1] != 1:
        raise UnsupportedError(
            f"initialize: mesh_param {mesh_param}: there is no sequence parallelism here"
        )
    if mpu is None:
        seat = Seat(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else Seat(0, 1)
        return _Ranks(seat, None)
    size = (
        mpu.get_model_parallel_world_size() if hasattr(mpu, "get_model_parallel_world_size") else 1
    )
    if size != 1:
        raise UnsupportedError(
            f"initialize: mpu splits the model over {size} ranks, whose gradient norms would have to be "
            "completed. Shard it over all ranks instead, without mpu."
        )
    seat = Seat(mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size())
    return _Ranks(seat, mpu.get_data_parallel_group())


# ------------------------------------------------------------------------------ model, optimizer


def _place(model: nn.Module, settings: Config, group: dist.ProcessGroup | None) -> None:
    """To the device, to the precision, and equal on all ranks."""
    if torch.cuda.is_available():
        model.to(torch.device("cuda", _local_device()))
    if settings.bf16.enabled:
        model.bfloat16()
    elif settings.fp16.enabled:
        model.half()
    if not dist.is_initialized():
        return
    for tensor in chain(model.parameters(), model.buffers()):
        if not tensor.is_meta:
            dist.broadcast(tensor.detach(), group=group, group_src=0)


def _trained(model: nn.Module, given: Iterable[Any] | None) -> list[Any]:
    return list(given) if given is not None else [p for p in model.parameters() if p.requires_grad]


def _optimizer(settings: Config, given: Any, parameters: list[Any]) -> torch.optim.Optimizer | None:
    if given is None:
        if settings.optimizer.type is None:
            return None
        return make_optimizer(settings.optimizer, parameters)
    made = given if isinstance(given, torch.optim.Optimizer) else given(parameters)
    if not isinstance(made, torch.optim.Optimizer):
        raise OptionError(f"initialize: optimizer= is a torch.optim.Optimizer, got {made!r}")
    refuse_unless_elementwise(made)
    return made


def _schedule(settings: Config, given: Any, optimizer: torch.optim.Optimizer | None) -> Any:
    if given is not None:
        is_factory = callable(given) and not hasattr(given, "step")
        return given(optimizer) if is_factory else given
    if settings.scheduler.type is None or optimizer is None:
        return None
    return make_scheduler(settings.scheduler, optimizer)
