"""From DeepSpeed's config to the options of ``torch.compile``."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch.distributed as dist
from torch import nn

from zero_compile.config.deepspeed.config import Config, parse, warn
from zero_compile.config.deepspeed.mesh import hybrid_mesh
from zero_compile.config.deepspeed.reading import Source, read
from zero_compile.config.deepspeed.sections import OffloadOptimizer, OffloadParam, ZeroOptimization
from zero_runtime.errors import OptionError, UnsupportedError

#: Sizes that the options have under the same name.
_SAME = (
    "reduce_bucket_size",
    "overlap_comm",
    "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
)

#: Dtypes by DeepSpeed's names.
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

#: What a parameter must know when it is partitioned, before there is a graph.
_OF_PARAMETERS = ("offload_param", "offload_optimizer", "aio", "bf16", "fp16", "mesh")

#: Options that say the same as another one.
_OVERRIDES = {"communication_data_type": "reduce_dtype", "group": "mesh"}


def options_from(config: Source, *, stage: int | None = None) -> dict[str, Any]:
    """Options for ``torch.compile`` from DeepSpeed's config, a path of JSON or a dict.

    Warns once of the keys without effect, and of those that concern the training loop. ``stage`` is
    that of the backend; None where it is not known.

    Raises:
        OptionError: the file or a key in it is wrong, or asks for another stage.
        UnsupportedError: a key asks for what zero_compile does not do.
    """
    parsed = parse(read(config))
    asked = parsed.zero_optimization.stage
    if stage is not None and asked != stage:
        raise OptionError(
            f"DeepSpeed config: zero_optimization.stage is {asked} and the backend zero{stage}: give "
            f'torch.compile backend="zero{asked or stage}"'
            + ("" if asked else f', and the config "stage": {stage}')
        )
    warn(parsed, loop_is_users=True)
    return to_options(parsed, _world_size())


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def options_for_parameters(config: Source) -> dict[str, Any]:
    """Those options from DeepSpeed's config that say where parameters are kept, and in which precision.

    Raises:
        OptionError: the file or a key in it is wrong.
        UnsupportedError: a stage that keeps parameters whole, or what zero_compile does not do.
    """
    parsed = parse(read(config))
    stage = parsed.zero_optimization.given().get("stage", 3)
    if stage != 3:
        raise UnsupportedError(
            f"Init partitions parameters, and the config's zero_optimization says stage {stage}, which keeps "
            "them whole. Set stage 3, or leave Init out (enabled=False)."
        )
    mesh = _mesh(parsed.zero_optimization, _world_size())
    options = {**_precision(parsed), **_offload(parsed), "mesh": mesh}
    return {name: options[name] for name in _OF_PARAMETERS if options.get(name) is not None}


def expanded(options: Mapping[str, Any], *, stage: int | None = None) -> dict[str, Any]:
    """``options`` with what its ``config`` stands for; options given beside it win.

    Raises:
        OptionError, UnsupportedError: as :func:`options_from`.
    """
    given = dict(options)
    if "config" not in given:
        return given
    config = options_from(given.pop("config"), stage=stage)
    for name, same in _OVERRIDES.items():
        if name in given:
            config.pop(same, None)
    return {**config, **given}


def to_options(
    config: Config, world_size: int, *, model: nn.Module | None = None
) -> dict[str, Any]:
    """Options for ``torch.compile``: those that ``config`` gives and no others. Collective.

    The stage is the backend's name, see :func:`backend_of`. ``model`` is needed where leaf modules are
    given by the ends of their names.

    Raises:
        OptionError: a group size that does not divide ``world_size``, or a value that cannot be combined.
        UnsupportedError: a dtype for adding up gradients that is not the model's.
    """
    _check_accumulation_dtype(config)
    zero = config.zero_optimization
    options: dict[str, Any] = {name: zero.given()[name] for name in _SAME if name in zero.given()}
    options.update(_precision(config))
    options.update(_offload(config))
    if config.compile.offload_activation:
        options["offload_activations"] = {"device": "cpu"}
    leaves = _leaf_modules(zero, model)
    if leaves:
        options["leaf_modules"] = leaves
    mesh = _mesh(zero, world_size)
    if mesh is not None:
        options["mesh"] = mesh
    return options


def backend_of(config: Config) -> str:
    """``"zero1"``, ``"zero2"`` or ``"zero3"``.

    Raises:
        UnsupportedError: stage 0, DeepSpeed's default.
    """
    stage = config.zero_optimization.stage
    if stage == 0:
        raise UnsupportedError(
            "DeepSpeed config: zero_optimization.stage is 0, so there is nothing to partition. Choose "
            "stage 1, 2 or 3, or wrap the model in torch.nn.parallel.DistributedDataParallel."
        )
    return f"zero{stage}"


def _precision(config: Config) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if config.bf16.enabled and not config.bf16.bf16_master_weights_and_grads:
        options["bf16"] = True
    if config.fp16.enabled:
        options["fp16"] = True
    reduce_dtype = config.communication_data_type
    if reduce_dtype is not None:
        options["reduce_dtype"] = DTYPES.get(reduce_dtype, reduce_dtype)
    return options


def _check_accumulation_dtype(config: Config) -> None:
    asked = config.data_types.grad_accum_dtype
    if asked is None:
        return
    model = "bfloat16" if config.bf16.enabled else "float16" if config.fp16.enabled else "float32"
    if DTYPES.get(asked, asked) != model:
        raise UnsupportedError(
            f"DeepSpeed config: data_types.grad_accum_dtype = {asked!r}: gradients add up in {model}, the "
            "model's dtype. Leave it out; communication_data_type sets what they are averaged in."
        )


def _offload(config: Config) -> dict[str, Any]:
    """The sections as they were written, old names of them included."""
    zero = config.zero_optimization
    optimizer, param = zero.offload_optimizer, zero.offload_param
    if optimizer is None and zero.cpu_offload:
        optimizer = OffloadOptimizer(device="cpu")
    if param is None and zero.cpu_offload_param:
        param = OffloadParam(device="cpu")
    pinned = zero.cpu_offload_use_pin_memory
    pin = {} if pinned is None else {"pin_memory": pinned}
    options: dict[str, Any] = {}
    if optimizer is not None:
        given = optimizer.given()
        given.pop("convert_grad_on_cpu", None)
        options["offload_optimizer"] = {**pin, **given}
    if param is not None:
        options["offload_param"] = {**pin, **param.given()}
    aio = config.aio.given()
    aio.pop("use_gds", None)
    if aio:
        options["aio"] = aio
    return options


def _leaf_modules(zero: ZeroOptimization, model: nn.Module | None) -> tuple[str, ...]:
    leaf = zero.leaf_module
    suffixed: Iterable[str] = ()
    if leaf.name_suffixes:
        if model is None:
            raise OptionError(
                "DeepSpeed config: leaf_module.name_suffixes needs the model's names: give them in "
                "leaf_module.names, or use zero_compile.initialize"
            )
        suffixed = _ending_in(leaf.name_suffixes, model)
    classes = (name.rpartition(".")[2] for name in leaf.classes)
    return (*classes, *leaf.names, *suffixed)


def _ending_in(suffixes: Iterable[str], model: nn.Module) -> list[str]:
    names = [name for name, _ in model.named_modules()]
    found = []
    for suffix in suffixes:
        matches = [name for name in names if name.endswith(suffix)]
        if not matches:
            raise OptionError(
                f"DeepSpeed config: leaf_module.name_suffixes: no module's name ends in {suffix!r}"
            )
        found += matches
    return found


def _mesh(zero: ZeroOptimization, world_size: int) -> Any:
    if zero.mics_shard_size > 0:
        return hybrid_mesh("mics_shard_size", zero.mics_shard_size, world_size)
    if zero.zero_hpz_partition_size > 1:
        return hybrid_mesh("zero_hpz_partition_size", zero.zero_hpz_partition_size, world_size)
    return None
