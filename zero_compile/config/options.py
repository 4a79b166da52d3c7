"""``torch.compile(..., options={...})``: what may stand there, checked."""

import difflib
from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zero_compile.bucketing import LayoutPolicy
from zero_compile.config.deepspeed.convert import expanded
from zero_compile.config.sections import (
    OffloadActivations,
    OffloadOptimizer,
    OffloadParam,
    precision_section,
    refuse_empty,
)
from zero_compile.config.sizes import parse_bytes
from zero_runtime.errors import OptionError
from zero_runtime.ir.aio import AioConfig

#: DeepSpeed's names of options that have another here.
ALIASES = {"communication_data_type": "reduce_dtype"}


#: Options that count elements, by DeepSpeed's names.
_ELEMENTS = (
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold",
    "reduce_bucket_size",
)


class Options(BaseModel):
    """How a zero backend compiles. Frozen; every field has a default that needs no thought."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    bucket_bytes: int | None = Field(default=None, gt=0)
    """Gathered bytes one collective should move; a larger parameter gets a bucket of its own.

    None: a sixteenth of what the graph gathers, at least 1 MiB and at most 16 MiB.
    """

    schedule: Literal["planned", "one_ahead", "on_demand", "all_first"] = "planned"
    """``planned`` starts each gather as late as still hides it, within the memory limits, by the cost
    model. ``one_ahead`` gathers the next bucket while one is used; ``on_demand`` saves that memory too.
    ``all_first`` gathers everything at the beginning of each graph: for comparison.
    """

    device_memory: int | None = Field(default=None, gt=0)
    """Bytes (or as in ``"24GiB"``) that one rank may use. What is left beside parameters, gradients and
    optimizer state limits activations and gathered buckets, and keeps buckets for backward.
    """

    hardware: str | None = None
    """A hardware profile for the cost model, by name or file; None: that of the parameters' device."""

    stage3_max_live_parameters: int | None = Field(default=None, gt=0)
    """The most elements of parameters gathered at once. DeepSpeed's name, as are the following."""

    stage3_max_reuse_distance: int = Field(default=10**9, ge=0)
    """A bucket is released, and gathered again, where more elements than these are gathered for other
    buckets between two of its uses.
    """

    stage3_prefetch_bucket_size: int | None = Field(default=None, ge=0)
    """The most elements gathered ahead of their use, beside the next bucket."""

    stage3_param_persistence_threshold: int = Field(default=0, ge=0)
    """Parameters of at most so many elements get buckets of their own, kept from forward to backward."""

    reduce_bucket_size: int | None = Field(default=None, gt=0)
    """The most elements of a bucket, as far as parameters are not larger themselves."""

    tile_bytes: int | None = Field(default=None, gt=0)
    """Gathered bytes (or as in ``"64MiB"``) above which the weight of a linear or embedding is moved in
    tiles of at most so many: each is gathered, used, reduced and released alone, in forward and backward.

    None: only weights that ``device_memory`` has no room for.
    """

    tile_over: Literal["rows", "columns", "planner"] = "planner"
    """Which dimension of such a weight is cut: its rows (outputs) or columns (inputs). ``planner``: rows,
    unless there are too few.
    """

    overlap_comm: bool = True
    """Off: each transfer starts where it is needed, as with ``schedule="on_demand"``."""

    verify: bool = True
    """Check every graph after every stage; a failure is an error at compile time."""

    group: Any = None
    """The process group to shard over; None: the default group."""

    mesh: Any = None
    """A DeviceMesh instead: one dimension to shard over, or (replicate, shard)."""

    bf16: bool = False
    """The model is bfloat16; optimizers step on float32 master copies of its shards.

    DeepSpeed's section ``{"enabled": True}`` means the same.
    """

    fp16: bool = False
    """The same for a float16 model, whose losses want ``torch.amp.GradScaler``.

    DeepSpeed's section means the same; its loss scale belongs to the scaler, which a warning spells out.
    """

    reduce_dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        default=None, validation_alias=AliasChoices("reduce_dtype", "communication_data_type")
    )
    """What gradients are averaged in; None: their own dtype. DeepSpeed's ``communication_data_type``, with
    its ``fp32``, ``bf16`` and ``fp16``, means the same.
    """

    leaf_modules: tuple[Any, ...] | list[Any] = ()
    """Modules gathered whole before their forward, so that ranks may take different ways inside: classes,
    class names, or names within the model. One alone need not stand in a list."""

    offload_param: OffloadParam = OffloadParam()
    """Where parameter shards live between their uses; DeepSpeed's section, as the next one."""

    offload_optimizer: OffloadOptimizer = OffloadOptimizer()
    """Where optimizer state lives; the optimizer then steps on the host."""

    offload_activations: OffloadActivations = OffloadActivations()
    """Where what forward saves for backward is in between: as much of it as moves unnoticed, or with
    ``device_memory`` as much as has to. True: ``{"device": "cpu"}``."""

    host_memory: int | None = Field(default=None, gt=0)
    """Bytes (or as in ``"64GiB"``) of host memory that one rank may use. With ``device_memory``, and no
    section that says otherwise, state that the device has no room for goes there, and then to NVMe.
    """

    nvme_path: str | tuple[str, ...] | list[str] | None = None
    """Folders on local disks for what goes to NVMe; several share every tensor."""

    aio: AioConfig = AioConfig()
    """How swap files are read and written; DeepSpeed's section."""

    update_in_backward: Any = False
    """Step each offloaded bucket as soon as backward has reduced its gradient, which is then never whole in
    memory. For loops that do nothing with gradients between ``backward()`` and ``step()``: True, from
    the second step on, or the optimizer itself, from the first.
    """

    record: bool = False
    """Keep the real timeline of the last step: ``zero_compile.timelines(model)``."""

    inductor: dict[str, Any] = Field(default_factory=dict)
    """Inductor's own config options for the rest of the graph."""

    @field_validator("bf16", "fp16", mode="before")
    @classmethod
    def _section(cls, value: Any, info: ValidationInfo) -> Any:
        return (
            precision_section(str(info.field_name), value) if isinstance(value, Mapping) else value
        )

    @field_validator("offload_activations", mode="before")
    @classmethod
    def _switch(cls, value: Any) -> Any:
        return {"device": "cpu" if value else "none"} if isinstance(value, bool) else value

    @field_validator("aio", mode="before")
    @classmethod
    def _aio(cls, value: Any) -> Any:
        return AioConfig.from_mapping(value) if isinstance(value, Mapping) else value

    @field_validator("update_in_backward")
    @classmethod
    def _optimizer(cls, value: Any) -> Any:
        if not isinstance(value, bool | torch.optim.Optimizer):
            raise ValueError(f"expected True, False or an optimizer, got {value!r}")
        return value

    @field_validator("nvme_path")
    @classmethod
    def _folders(cls, value: Any) -> Any:
        return refuse_empty(value)

    @field_validator("device_memory", "host_memory", "tile_bytes", mode="before")
    @classmethod
    def _size(cls, value: Any) -> Any:
        return parse_bytes(value) if isinstance(value, str) else value

    @field_validator(*_ELEMENTS, mode="before")
    @classmethod
    def _whole(cls, value: Any) -> Any:
        """DeepSpeed's configs write 1e9 and 5e8, which are read as floats."""
        return int(value) if isinstance(value, float) and value.is_integer() else value

    @field_validator("reduce_dtype", mode="before")
    @classmethod
    def _dtype(cls, value: Any) -> Any:
        return _DTYPES.get(value, value) if isinstance(value, str) else value

    @field_validator("leaf_modules", mode="before")
    @classmethod
    def _one_leaf(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str | type) else value

    @property
    def layout(self) -> LayoutPolicy:
        """How parameters share buckets."""
        return LayoutPolicy(
            self.bucket_bytes, self.reduce_bucket_size, self.stage3_param_persistence_threshold
        )

    @property
    def policy(self) -> str:
        """The schedule in force."""
        return self.schedule if self.overlap_comm else "on_demand"


_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "bfp16": "bfloat16", "fp16": "float16"}


def parse(options: Mapping[str, Any] | None, *, stage: int | None = None) -> Options:
    """Options from what the user wrote, for a backend of ``stage``; None: of any.

    Raises:
        OptionError: an unknown name (the nearest valid one is named) or a value of the wrong kind.
    """
    if options is not None and not isinstance(options, Mapping):
        raise OptionError(f"options: expected a dict of names and values, got {options!r}")
    given = expanded(options or {}, stage=stage)
    for name in given:
        if name not in Options.model_fields and name not in ALIASES:
            raise OptionError(_unknown(name))
    for name, ours in ALIASES.items():
        if name in given and ours in given:
            raise OptionError(f"options {ours!r} and {name!r} mean the same: give one of them")
    try:
        return _checked(Options(**given))
    except ValidationError as error:
        raise OptionError(_complaint(error)) from None


#: Options that are sections of keys.
_SECTIONS: dict[str, type[BaseModel]] = {
    "offload_param": OffloadParam,
    "offload_optimizer": OffloadOptimizer,
    "offload_activations": OffloadActivations,
}


def _complaint(error: ValidationError) -> str:
    first = error.errors()[0]
    name = ".".join(str(part) for part in first["loc"])
    if first["type"] == "value_error":  # one of ours: it says what it got
        return f"option {name!r}: {first['ctx']['error']}"
    section = _SECTIONS.get(str(first["loc"][0]))
    if section is not None and first["type"] == "extra_forbidden":
        known = sorted(section.model_fields)
        hint = _meant(str(first["loc"][-1]), known)
        return f"unknown key {name!r}.{hint} Valid keys: {', '.join(known)}."
    if section is not None and len(first["loc"]) == 1:
        return (
            f'option {name!r}: expected a section like {{"device": "cpu"}}, got {first["input"]!r}'
        )
    return f"option {name!r}: {first['msg']} (got {first['input']!r})"


def _checked(options: Options) -> Options:
    if options.group is not None and options.mesh is not None:
        raise OptionError("options 'group' and 'mesh' say the same thing twice: give one of them")
    for leaf in options.leaf_modules:
        if not isinstance(leaf, str) and not (
            isinstance(leaf, type) and issubclass(leaf, nn.Module)
        ):
            raise OptionError(
                f"option 'leaf_modules': expected module classes or names, got {leaf!r}"
            )
    kinds = (("group", dist.ProcessGroup), ("mesh", DeviceMesh))
    for name, kind in kinds:
        value = getattr(options, name)
        if value is not None and not isinstance(value, kind):
            raise OptionError(f"option {name!r}: expected a {kind.__name__}, got {value!r}")
    return options


def _unknown(name: object) -> str:
    known = sorted([*Options.model_fields, "config"])
    if not isinstance(name, str):
        return f"names of options are strings, got {name!r}. Valid options: {', '.join(known)}."
    return f"unknown option {name!r}.{_meant(name, known)} Valid options: {', '.join(known)}."


def _meant(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    return f" Did you mean {near[0]!r}?" if near else ""
