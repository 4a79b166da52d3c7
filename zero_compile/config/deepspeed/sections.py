"""The sections of DeepSpeed's JSON, with its names, kinds and defaults. Frozen; one class a section."""

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

Dtype = Literal["fp32", "float32", "bf16", "bfloat16", "fp16", "float16"]


def _whole(value: Any) -> Any:
    """JSON writes counts as 5e8, which is read as a float."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Count = Annotated[int, BeforeValidator(_whole), Field(ge=0)]
Positive = Annotated[int, BeforeValidator(_whole), Field(gt=0)]
Whole = Annotated[int, BeforeValidator(_whole)]
Names = list[str] | tuple[str, ...]


class Section(BaseModel):
    """What all sections have in common."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    def given(self) -> dict[str, Any]:
        """The keys that the user wrote, with their values."""
        return self.model_dump(exclude_unset=True)


class Bf16(Section):
    """``bf16``."""

    enabled: bool = False
    immediate_grad_update: bool = False
    check_grad_overflow: bool = False
    bf16_master_weights_and_grads: bool = False
    bf16_optimizer_states: bool = False


class Fp16(Section):
    """``fp16``. ``loss_scale`` 0 is a dynamic one."""

    enabled: bool = False
    auto_cast: bool = False
    loss_scale: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    initial_scale_power: Count = 16
    loss_scale_window: Positive = 1000
    hysteresis: Positive = 2
    consecutive_hysteresis: bool = False
    min_loss_scale: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    fused_mode: bool = True
    fp16_master_weights_and_grads: bool = False


class TorchAutocast(Section):
    """``torch_autocast``. Without ``dtype`` torch chooses the type."""

    enabled: bool = False
    dtype: Literal["bf16", "bfloat16", "fp16", "float16"] | None = None
    lower_precision_safe_modules: Names | None = None


class DataTypes(Section):
    """``data_types``."""

    grad_accum_dtype: Dtype | None = None


class Optimizer(Section):
    """``optimizer``."""

    type: str | None = None
    params: dict[str, Any] = Field(default_factory=dict)
    legacy_fusion: bool = False


class Scheduler(Section):
    """``scheduler``."""

    type: str | None = None
    params: dict[str, Any] = Field(default_factory=dict)


class OffloadParam(Section):
    """``zero_optimization.offload_param``. Sizes in elements."""

    device: Literal["none", "cpu", "nvme"] = "none"
    nvme_path: str | Path | None = None
    buffer_count: Count = 5
    buffer_size: Count = 10**8
    max_in_cpu: Count = 10**9
    pin_memory: bool = True


class OffloadOptimizer(Section):
    """``zero_optimization.offload_optimizer``."""

    device: Literal["none", "cpu", "nvme"] = "none"
    nvme_path: str | Path | None = None
    buffer_count: Count = 4
    pin_memory: bool = True
    pipeline_read: bool = False
    pipeline_write: bool = False
    fast_init: bool = False
    ratio: float = Field(default=1.0, ge=0, le=1)
    super_offload: bool = False
    convert_grad_on_cpu: bool = True
    cpuadam_cores_perc: float = Field(default=0.8, ge=0, le=1)


class Aio(Section):
    """``aio``. ``block_size`` in bytes."""

    block_size: Positive = 1 << 20
    queue_depth: Positive = 8
    intra_op_parallelism: Positive = 1
    thread_count: Positive = 1
    single_submit: bool = False
    overlap_events: bool = True
    use_gds: bool = False


class LeafModule(Section):
    """``zero_optimization.leaf_module``."""

    classes: Names = ()
    names: Names = ()
    name_suffixes: Names = ()


class ZeroOptimization(Section):
    """``zero_optimization``. Sizes and distances in elements."""

    stage: Literal[0, 1, 2, 3] = 0
    contiguous_gradients: bool = True
    reduce_scatter: bool = True
    reduce_bucket_size: Positive = 5 * 10**8
    use_multi_rank_bucket_allreduce: bool = True
    allgather_partitions: bool = True
    allgather_bucket_size: Count = 5 * 10**8
    overlap_comm: bool | None = None
    load_from_fp32_weights: bool = True
    elastic_checkpoint: bool = False
    sub_group_size: Count = 10**9
    stage3_prefetch_bucket_size: Count = 5 * 10**7
    stage3_param_persistence_threshold: Count = 10**5
    stage3_model_persistence_threshold: Count = sys.maxsize
    stage3_max_live_parameters: Positive = 10**9
    stage3_max_reuse_distance: Count = 10**9
    stage3_gather_16bit_weights_on_model_save: bool = False
    stage3_gather_fp16_weights_on_model_save: bool = False
    stage3_module_granularity_threshold: Count = 0
    stage3_use_all_reduce_for_fetch_params: bool = False
    stage3_allgather_sequential: bool = False
    stage3_partition_stream_chunk_size: Count = 0
    ignore_unused_parameters: bool = True
    legacy_stage1: bool = False
    round_robin_gradients: bool = False
    memory_efficient_linear: bool = True
    pipeline_loading_checkpoint: bool = False
    override_module_apply: bool = True
    log_trace_cache_warnings: bool = False
    enable_sanity_checks: bool = False
    save_muon_momentum_buffer_in_memory: bool = False
    leaf_module: LeafModule = LeafModule()
    zero_hpz_partition_size: Count = 1
    zero_quantized_weights: bool = False
    zero_quantized_nontrainable_weights: bool = False
    zero_quantized_gradients: bool = False
    zeropp_loco_param: dict[str, Any] | None = None
    mics_shard_size: Whole = -1
    mics_hierarchical_params_gather: bool = False
    zenflow: dict[str, Any] | None = None
    offload_param: OffloadParam | None = None
    offload_optimizer: OffloadOptimizer | None = None
    cpu_offload: bool | None = None
    cpu_offload_param: bool | None = None
    cpu_offload_use_pin_memory: bool | None = None


class Compile(Section):
    """``compile``."""

    enabled: bool = False
    backend: str = "inductor"
    kwargs: dict[str, Any] = Field(default_factory=dict)
    deepcompile: bool = False
    free_activation: bool = False
    free_activation_threshold: Count = 10 << 20
    offload_activation: bool = False
    offload_opt_states: bool = False
    double_buffer: bool = True
    symmetric_memory: bool = False
    debug_log: bool = False
    offload_parameters: bool = False
    sync_before_reduce: bool = False
    sync_after_reduce: bool = False
    sync_before_allgather: bool = False
    sync_after_allgather: bool = False
    keep_int_input_tensors: bool = True
    keep_all_input_tensors: bool = False
    passes: Names | None = None


class ActivationCheckpointing(Section):
    """``activation_checkpointing``."""

    partition_activations: bool = False
    cpu_checkpointing: bool = False
    contiguous_memory_optimization: bool = False
    number_checkpoints: Count | None = None
    synchronize_checkpoint_boundary: bool = False
    profile: bool = False


class Checkpoint(Section):
    """``checkpoint``."""

    tag_validation: str = "WARN"
    load_universal: bool = False
    use_node_local_storage: bool = False
    parallel_write: dict[str, Any] = Field(default_factory=dict)
    writer: dict[str, Any] | None = None


class Files(Section):
    """``tensorboard`` and ``csv_monitor``."""

    enabled: bool = False
    output_path: str = ""
    job_name: str = "DeepSpeedJobName"


class Wandb(Section):
    """``wandb``."""

    enabled: bool = False
    group: str | None = None
    team: str | None = None
    project: str = "deepspeed"


class Comet(Section):
    """``comet``."""

    enabled: bool = False
    samples_log_interval: Count = 100
    project: str | None = None
    workspace: str | None = None
    api_key: str | None = None
    experiment_name: str | None = None
    experiment_key: str | None = None
    online: bool | None = None
    mode: str | None = None


class FlopsProfiler(Section):
    """``flops_profiler``."""

    enabled: bool = False
    recompute_fwd_factor: float = 0.0
    profile_step: Count = 1
    module_depth: Whole = -1
    top_modules: Count = 1
    detailed: bool = True
    output_file: str | None = None


class CommsLogger(Section):
    """``comms_logger``."""

    enabled: bool = False
    verbose: bool = False
    prof_all: bool = True
    debug: bool = False
    prof_ops: Names = ()


class Timers(Section):
    """``timers``."""

    throughput: dict[str, Any] = Field(default_factory=dict)
