"""DeepSpeed's whole JSON, checked against the table of :mod:`zero_compile.config.deepspeed.keys`."""

import difflib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from zero_compile.config.deepspeed import sections
from zero_compile.config.deepspeed.keys import BY_NAME, Key, Verdict, names_in
from zero_compile.config.deepspeed.sections import Count, Positive, Section
from zero_runtime.errors import OptionError, UnsupportedError

#: A section that is refused as a whole, or absent.
Refused = dict[str, Any] | None


class Config(Section):
    """DeepSpeed's config. Every field has DeepSpeed's default, None where DeepSpeed computes it."""

    train_batch_size: Positive | None = None
    train_micro_batch_size_per_gpu: Positive | None = None
    gradient_accumulation_steps: Positive | None = None
    gradient_clipping: float = Field(default=0.0, ge=0)
    steps_per_print: Positive | None = None
    dataloader_drop_last: bool = False
    communication_data_type: sections.Dtype | None = None
    seq_parallel_comm_data_type: sections.Dtype = "fp32"
    prescale_gradients: bool = False
    gradient_predivide_factor: float = 1.0
    gradient_allreduce_op: str = "mean"
    sparse_gradients: bool = False
    zero_allow_untested_optimizer: bool = False
    zero_force_ds_cpu_optimizer: bool = True
    wall_clock_breakdown: bool = False
    memory_breakdown: bool = False
    dump_state: bool = False
    disable_allgather: bool = False
    graph_harvesting: bool = False
    vocabulary_size: Count | None = None
    log_level: str | None = None
    use_data_before_expert_parallelism: bool = False
    sequence_parallel_size: Positive = 1
    bf16: sections.Bf16 = sections.Bf16()
    fp16: sections.Fp16 = sections.Fp16()
    torch_autocast: sections.TorchAutocast = sections.TorchAutocast()
    data_types: sections.DataTypes = sections.DataTypes()
    amp: Refused = None
    optimizer: sections.Optimizer = sections.Optimizer()
    scheduler: sections.Scheduler = sections.Scheduler()
    zero_optimization: sections.ZeroOptimization = sections.ZeroOptimization()
    aio: sections.Aio = sections.Aio()
    compile: sections.Compile = sections.Compile()
    activation_checkpointing: sections.ActivationCheckpointing = sections.ActivationCheckpointing()
    tensorboard: sections.Files = sections.Files()
    csv_monitor: sections.Files = sections.Files()
    wandb: sections.Wandb = sections.Wandb()
    comet: sections.Comet = sections.Comet()
    flops_profiler: sections.FlopsProfiler = sections.FlopsProfiler()
    comms_logger: sections.CommsLogger = sections.CommsLogger()
    timers: sections.Timers = sections.Timers()
    checkpoint: sections.Checkpoint = sections.Checkpoint()
    elasticity: Refused = None
    autotuning: Refused = None
    hybrid_engine: Refused = None
    pipeline: Refused = None
    tensor_parallel: Refused = None
    expert_parallel: Refused = None
    sparse_attention: Refused = None
    data_efficiency: Refused = None
    curriculum_learning: Refused = None
    progressive_layer_drop: Refused = None
    eigenvalue: Refused = None
    compression_training: Refused = None
    quantize_training: Refused = None
    weight_quantization: Refused = None
    nebula: Refused = None
    datastates_ckpt: Refused = None


def parse(config: Mapping[str, Any]) -> Config:
    """What the user wrote, checked. Values ``"auto"`` count as not given.

    Raises:
        OptionError: an unknown key at any level (the nearest valid one is named), a value of the wrong
            kind, or sections that contradict each other.
        UnsupportedError: a key asks for what zero_compile does not do; the message says why.
    """
    given = _renamed(_without_auto(config))
    _refuse_unknown(given)
    try:
        parsed = Config(**given)
    except ValidationError as error:
        raise OptionError(_complaint(error)) from None
    for key, value in _leaves(given):
        if key.verdict is Verdict.REFUSED and not _is_off(key.key, value):
            raise UnsupportedError(f"DeepSpeed config: {key.key} = {value!r}: {key.text}")
    _refuse_contradictions(parsed)
    return parsed


def notices(config: Config, *, loop_is_users: bool = False) -> str:
    """One text on all keys that do nothing, with the reason for each; empty if there are none.

    With ``loop_is_users`` it goes on with those that only ``zero_compile.initialize`` honours.
    """
    given = [key for key, _ in _leaves(_enabled_only(config.given()))]
    noted = [key for key in given if key.verdict is Verdict.NOTED]
    loop = [key for key in given if key.verdict is Verdict.LOOP and loop_is_users]
    return "\n".join(
        [
            *_listed("These keys of the DeepSpeed config have no effect, and need none:", noted),
            *_listed(
                "These belong to the training loop, which is yours here; zero_compile.initialize "
                "honours them:",
                loop,
            ),
        ]
    )


def warn(config: Config, *, loop_is_users: bool = False, stacklevel: int = 2) -> None:
    """Give the notices as one warning, if there are any."""
    text = notices(config, loop_is_users=loop_is_users)
    if text:
        warnings.warn(text, UserWarning, stacklevel=stacklevel + 1)


def _listed(title: str, keys: list[Key]) -> list[str]:
    return [title, *(f"  {key.key}: {key.text}" for key in keys)] if keys else []


# ------------------------------------------------------------------------------ what was written


def _without_auto(value: Any) -> Any:
    """Transformers writes ``"auto"`` where it would fill in a value; null means the default too."""
    if not isinstance(value, Mapping):
        return value
    return {name: _without_auto(v) for name, v in value.items() if not _is_absent(v)}


def _is_absent(value: Any) -> bool:
    return value is None or (isinstance(value, str) and value == "auto")


def _renamed(given: dict[str, Any]) -> dict[str, Any]:
    """Without names of older versions, as far as they are other names for the same."""
    if "bfloat16" in given and "bf16" not in given:
        given["bf16"] = given.pop("bfloat16")
    return given


def _leaves(given: Mapping[str, Any], section: str = "") -> Iterator[tuple[Key, Any]]:
    """Rows of the table that ``given`` holds a value for, with the value."""
    for name, value in given.items():
        path = f"{section}.{name}" if section else str(name)
        if path in BY_NAME:
            yield BY_NAME[path], value
        elif isinstance(value, Mapping):
            yield from _leaves(value, path)


def _enabled_only(given: dict[str, Any]) -> dict[str, Any]:
    """Without sections that are switched off: what they say besides does not matter."""
    return {
        name: value
        for name, value in given.items()
        if not (isinstance(value, Mapping) and value.get("enabled") is False)
    }


# ------------------------------------------------------------------------------ refusals


def _refuse_unknown(given: Mapping[str, Any], section: str = "") -> None:
    known = names_in(section)
    for name, value in given.items():
        path = f"{section}.{name}" if section else str(name)
        if name not in known:
            raise OptionError(_unknown(str(name), section))
        if not names_in(path):
            continue
        if not isinstance(value, Mapping):
            raise OptionError(
                f"DeepSpeed config: {path} is a section with keys of its own, got {value!r}"
            )
        _refuse_unknown(value, path)


def _unknown(name: str, section: str) -> str:
    where = f" in section {section}" if section else ""
    known = sorted(names_in(section))
    elsewhere = sorted(key for key in BY_NAME if key.rpartition(".")[2] == name)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    if 0 < len(elsewhere) <= 3:
        hint = f" It belongs to {' or '.join(key.rpartition('.')[0] or 'the top' for key in elsewhere)}."
    else:
        hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"DeepSpeed config: unknown key {name!r}{where}.{hint} Valid keys: {', '.join(known)}."


def _is_off(path: str, value: Any) -> bool:
    """Whether a key that is refused has the value with which DeepSpeed leaves the feature off."""
    if isinstance(value, Mapping):
        return not value or value.get("enabled") is False
    return bool(value == _default(path))


def _default(path: str) -> Any:
    *parents, name = path.split(".")
    section: type[BaseModel] = Config
    for parent in parents:
        section = type(section.model_fields[parent].get_default())
    return section.model_fields[name].get_default(call_default_factory=True)


def _refuse_contradictions(config: Config) -> None:
    bf16, fp16, autocast = config.bf16, config.fp16, config.torch_autocast
    on = [
        name
        for name, section in (("bf16", bf16), ("fp16", fp16), ("torch_autocast", autocast))
        if section.enabled
    ]
    if len(on) > 1:
        raise OptionError(
            f"DeepSpeed config: {' and '.join(on)} are both enabled: choose one precision"
        )
    if bf16.bf16_master_weights_and_grads != bf16.bf16_optimizer_states:
        raise UnsupportedError(
            "DeepSpeed config: bf16.bf16_master_weights_and_grads and bf16.bf16_optimizer_states must "
            "be the same: optimizer state has the dtype of what the optimizer steps on"
        )
    zero = config.zero_optimization
    if zero.zero_hpz_partition_size > 1 and zero.mics_shard_size > 0:
        raise OptionError(
            "DeepSpeed config: zero_hpz_partition_size and mics_shard_size both say over how many "
            "ranks to shard: give one of them"
        )


def _complaint(error: ValidationError) -> str:
    first = error.errors()[0]
    path = ".".join(str(part) for part in first["loc"] if part in _PARTS)
    return f"DeepSpeed config: {path}: {first['msg']} (got {first['input']!r})"


_PARTS = {part for key in BY_NAME for part in key.split(".")}
