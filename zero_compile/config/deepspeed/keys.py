"""Every key of DeepSpeed's JSON and what becomes of it: one table for checks, notices and the docs."""

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import NamedTuple


class Verdict(StrEnum):
    """What becomes of a key."""

    HONOURED = "honoured"
    """It becomes an option of ``torch.compile``."""
    LOOP = "honoured by initialize"
    """It concerns the training loop, which belongs to the user without ``zero_compile.initialize``."""
    NOTED = "no effect"
    """Accepted; one notice says why nothing has to be done."""
    REFUSED = "refused"
    """An error, unless the value is DeepSpeed's default, which turns the feature off."""


class Key(NamedTuple):
    """``key`` with dots between sections; ``text`` says what it becomes, or why it does nothing."""

    key: str
    verdict: Verdict
    text: str


def _section(name: str, rows: Mapping[str, tuple[Verdict, str]]) -> tuple[Key, ...]:
    prefix = f"{name}." if name else ""
    return tuple(Key(prefix + key, verdict, text) for key, (verdict, text) in rows.items())


def _alike(name: str, verdict: Verdict, text: str, *keys: str) -> tuple[Key, ...]:
    return tuple(Key(f"{name}.{key}", verdict, text) for key in keys)


_HONOURED, _LOOP, _NOTED, _REFUSED = (
    Verdict.HONOURED,
    Verdict.LOOP,
    Verdict.NOTED,
    Verdict.REFUSED,
)

_PLANNED = "the planner places every transfer from the graph"
_BUCKETS = "buckets are laid out from the graph"
_CHECKPOINTS = "save model.state_dict(), and optimizer.state_dict() in one file a rank"
_LOG = "log what you need in your loop: engine.global_steps, get_lr(), get_global_grad_norm()"
_DEEPCOMPILE = "the model is compiled in any case, by passes of zero_compile's own"
_QUANTISED = "gathers and reductions are exact; narrow them with communication_data_type or bf16"
_LEGACY = "a legacy of older versions"

_TOP = _section(
    "",
    {
        "train_batch_size": (_LOOP, "micro batch * accumulation steps * ranks; checked"),
        "train_micro_batch_size_per_gpu": (_LOOP, "the batch size of the returned data loader"),
        "gradient_accumulation_steps": (_LOOP, "backward divides the loss, or its gradient, by it"),
        "gradient_clipping": (_LOOP, "the norm to which step() clips gradients; 0 does not clip"),
        "steps_per_print": (_LOOP, "rank 0 prints steps, skipped steps and rates this often"),
        "dataloader_drop_last": (_LOOP, "drop the last, incomplete batch"),
        "communication_data_type": (_HONOURED, "option reduce_dtype"),
        "seq_parallel_comm_data_type": (_NOTED, "there is no sequence parallelism here"),
        "prescale_gradients": (
            _NOTED,
            "gradients are averaged; reduce in float32 against overflow",
        ),
        "gradient_predivide_factor": (
            _NOTED,
            "gradients are averaged; reduce in float32 against overflow",
        ),
        "gradient_allreduce_op": (_REFUSED, "gradients are averaged, as with `mean`"),
        "sparse_gradients": (_REFUSED, "gradients move dense: build embeddings with sparse=False"),
        "zero_allow_untested_optimizer": (
            _NOTED,
            "any optimizer whose update is elementwise works, others are refused",
        ),
        "zero_force_ds_cpu_optimizer": (_NOTED, "offload works with torch's own optimizers"),
        "wall_clock_breakdown": (_NOTED, "option record keeps a step's timeline"),
        "memory_breakdown": (_NOTED, "zero_compile.memory_report(engine.module) gives bytes"),
        "dump_state": (_NOTED, "zero_compile.plans(engine.module) shows what is planned"),
        "disable_allgather": (_NOTED, _PLANNED),
        "graph_harvesting": (_NOTED, "the whole step is compiled"),
        "vocabulary_size": (_NOTED, "it only served a warning"),
        "log_level": (_NOTED, "zero_compile warns through Python's warnings"),
        "use_data_before_expert_parallelism": (_REFUSED, "there is no expert parallelism here"),
        "sequence_parallel_size": (_REFUSED, "there is no sequence parallelism here"),
    },
)

_PRECISION = (
    *_section(
        "bf16",
        {
            "enabled": (_HONOURED, "option bf16; initialize casts the model"),
            "immediate_grad_update": (_NOTED, "gradients are reduced while backward runs"),
            "check_grad_overflow": (_LOOP, "a step with infinite or NaN gradients is skipped"),
            "bf16_master_weights_and_grads": (
                _HONOURED,
                "no float32 masters; together with bf16_optimizer_states only",
            ),
            "bf16_optimizer_states": (_HONOURED, "as bf16_master_weights_and_grads"),
        },
    ),
    *_section(
        "fp16",
        {
            "enabled": (_HONOURED, "option fp16; initialize casts the model and scales losses"),
            "auto_cast": (_LOOP, "forward casts float32 inputs to float16"),
            "loss_scale": (_LOOP, "a fixed loss scale; 0 is a dynamic one"),
            "initial_scale_power": (_LOOP, "the dynamic scale begins at 2 to this power"),
            "loss_scale_window": (_LOOP, "steps without overflow before the scale doubles"),
            "hysteresis": (_LOOP, "the overflow, counted from 1, that halves the scale"),
            "consecutive_hysteresis": (_LOOP, "every step without overflow restores hysteresis"),
            "min_loss_scale": (_LOOP, "an overflow at this scale is an error"),
            "fused_mode": (_NOTED, _LEGACY),
            "fp16_master_weights_and_grads": (_REFUSED, "masters of float16 models are float32"),
        },
    ),
    *_section(
        "torch_autocast",
        {
            "enabled": (_LOOP, "forward runs under torch.autocast"),
            "dtype": (_LOOP, "the type of autocast: bfloat16 or float16"),
            "lower_precision_safe_modules": (
                _NOTED,
                "torch.autocast's own lists of operations decide",
            ),
        },
    ),
    *_section(
        "data_types",
        {
            "grad_accum_dtype": (
                _NOTED,
                "gradients add up in the model's dtype; another is refused",
            )
        },
    ),
    Key("amp", _REFUSED, "apex is not supported: use bf16, fp16 or torch_autocast"),
)

_OPTIMIZER = (
    *_section(
        "optimizer",
        {
            "type": (
                _LOOP,
                "Adam, AdamW, Adagrad, SGD, Lion, or an elementwise one of torch.optim",
            ),
            "params": (_LOOP, "the optimizer's arguments, by DeepSpeed's names and defaults"),
            "legacy_fusion": (_NOTED, "the optimizer steps on flat shards"),
        },
    ),
    *_section(
        "scheduler",
        {
            "type": (_LOOP, "WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle or LRRangeTest"),
            "params": (_LOOP, "the schedule's arguments, by DeepSpeed's names and defaults"),
        },
    ),
)

_ZERO = _section(
    "zero_optimization",
    {
        "stage": (_HONOURED, "1, 2 and 3 are the backends zero1, zero2, zero3; 0 is refused"),
        "contiguous_gradients": (_NOTED, "gradients are packed into one buffer a bucket"),
        "reduce_scatter": (_NOTED, "gradients are reduce-scattered at stages 2 and 3"),
        "reduce_bucket_size": (_HONOURED, "option reduce_bucket_size, in elements"),
        "use_multi_rank_bucket_allreduce": (_NOTED, _BUCKETS),
        "allgather_partitions": (_NOTED, "updated parameters are gathered, a bucket at a time"),
        "allgather_bucket_size": (_NOTED, f"{_BUCKETS}; option bucket_bytes sets their size"),
        "overlap_comm": (_HONOURED, "option overlap_comm"),
        "load_from_fp32_weights": (_NOTED, _CHECKPOINTS),
        "elastic_checkpoint": (_NOTED, _CHECKPOINTS),
        "sub_group_size": (_NOTED, "the optimizer steps on one shard a bucket"),
        "stage3_prefetch_bucket_size": (_HONOURED, "option of this name, in elements"),
        "stage3_param_persistence_threshold": (_HONOURED, "option of this name, in elements"),
        "stage3_model_persistence_threshold": (
            _NOTED,
            "small parameters stay from forward to backward only",
        ),
        "stage3_max_live_parameters": (_HONOURED, "option of this name, in elements"),
        "stage3_max_reuse_distance": (_HONOURED, "option of this name, in elements"),
        "stage3_gather_16bit_weights_on_model_save": (
            _NOTED,
            "state_dict() and save_16bit_model() always give whole parameters",
        ),
        "stage3_gather_fp16_weights_on_model_save": (
            _NOTED,
            "deprecated: stage3_gather_16bit_weights_on_model_save",
        ),
        "stage3_module_granularity_threshold": (_NOTED, _BUCKETS),
        "stage3_use_all_reduce_for_fetch_params": (_NOTED, _PLANNED),
        "stage3_allgather_sequential": (_NOTED, f"{_PLANNED}; gathered buckets are not copied"),
        "stage3_partition_stream_chunk_size": (_NOTED, "parameters are partitioned one by one"),
        "ignore_unused_parameters": (_NOTED, "parameters that get no gradient are left alone"),
        "legacy_stage1": (_REFUSED, "there is one stage 1"),
        "round_robin_gradients": (_NOTED, "each gradient goes to its own shard directly"),
        "memory_efficient_linear": (_NOTED, "AOTAutograd decides what is kept for backward"),
        "pipeline_loading_checkpoint": (_NOTED, _CHECKPOINTS),
        "override_module_apply": (_NOTED, "modules are never patched"),
        "log_trace_cache_warnings": (_NOTED, "there is no trace: the order is compiled in"),
        "enable_sanity_checks": (_NOTED, "option verify checks every graph and is on"),
        "save_muon_momentum_buffer_in_memory": (_NOTED, "Muon is not supported"),
        "zero_hpz_partition_size": (
            _HONOURED,
            "option mesh: everything is sharded over so many ranks and replicated over the rest, "
            "optimizer state too, which hpZ shards over all ranks",
        ),
        "zero_quantized_weights": (_REFUSED, _QUANTISED),
        "zero_quantized_nontrainable_weights": (_REFUSED, _QUANTISED),
        "zero_quantized_gradients": (_REFUSED, _QUANTISED),
        "zeropp_loco_param": (_REFUSED, _QUANTISED),
        "mics_shard_size": (
            _HONOURED,
            "option mesh: sharded over so many ranks, replicated over the rest",
        ),
        "mics_hierarchical_params_gather": (_NOTED, "gathers stay within the shard group"),
        "zenflow": (_REFUSED, "every step updates every element"),
        "cpu_offload": (_HONOURED, "deprecated: offload_optimizer with device cpu"),
        "cpu_offload_param": (_HONOURED, "deprecated: offload_param with device cpu"),
        "cpu_offload_use_pin_memory": (_HONOURED, "deprecated: pin_memory of both"),
    },
)

_LEAF = _section(
    "zero_optimization.leaf_module",
    {
        "classes": (_HONOURED, "option leaf_modules; of a dotted name the last part counts"),
        "names": (_HONOURED, "option leaf_modules"),
        "name_suffixes": (_HONOURED, "option leaf_modules; with initialize only"),
    },
)

_PASSED = "passed on as written"

_OFFLOAD = (
    *_alike(
        "zero_optimization.offload_param",
        _HONOURED,
        f"option offload_param, {_PASSED}",
        "device",
        "nvme_path",
        "buffer_count",
        "buffer_size",
        "max_in_cpu",
        "pin_memory",
    ),
    *_alike(
        "zero_optimization.offload_optimizer",
        _HONOURED,
        f"option offload_optimizer, {_PASSED}",
        "device",
        "nvme_path",
        "buffer_count",
        "pin_memory",
        "pipeline_read",
        "pipeline_write",
        "fast_init",
        "ratio",
        "super_offload",
        "cpuadam_cores_perc",
    ),
    Key(
        "zero_optimization.offload_optimizer.convert_grad_on_cpu",
        _NOTED,
        "gradients are widened where the optimizer steps",
    ),
    *_alike(
        "aio",
        _HONOURED,
        f"option aio, {_PASSED}",
        "block_size",
        "queue_depth",
        "thread_count",
        "single_submit",
        "overlap_events",
    ),
    Key("aio.intra_op_parallelism", _HONOURED, "thread_count of option aio, before that key"),
    Key("aio.use_gds", _NOTED, "what is read from NVMe passes through host memory"),
)

_COMPILE = (
    *_alike(
        "compile",
        _NOTED,
        _DEEPCOMPILE,
        "enabled",
        "deepcompile",
        "free_activation",
        "free_activation_threshold",
        "double_buffer",
        "symmetric_memory",
        "debug_log",
        "sync_before_reduce",
        "sync_after_reduce",
        "sync_before_allgather",
        "sync_after_allgather",
        "keep_int_input_tensors",
        "keep_all_input_tensors",
        "passes",
    ),
    *_section(
        "compile",
        {
            "backend": (
                _REFUSED,
                "the backend is zero1, zero2 or zero3; Inductor compiles the rest",
            ),
            "kwargs": (_REFUSED, "give Inductor's options in option inductor"),
            "offload_activation": (_HONOURED, "option offload_activations, to the host"),
            "offload_opt_states": (_REFUSED, "use zero_optimization.offload_optimizer"),
            "offload_parameters": (_REFUSED, "use zero_optimization.offload_param"),
        },
    ),
)

_CHECKPOINTING = _alike(
    "activation_checkpointing",
    _NOTED,
    "it acts on models that call deepspeed.checkpointing: call torch.utils.checkpoint",
    "partition_activations",
    "cpu_checkpointing",
    "contiguous_memory_optimization",
    "number_checkpoints",
    "synchronize_checkpoint_boundary",
    "profile",
)

_TOOL = "python -m zero_compile.tools.dump_schedule shows times and bytes"

_MONITORS = (
    *_alike("tensorboard", _NOTED, _LOG, "enabled", "output_path", "job_name"),
    *_alike("csv_monitor", _NOTED, _LOG, "enabled", "output_path", "job_name"),
    *_alike("wandb", _NOTED, _LOG, "enabled", "group", "team", "project"),
    *_alike(
        "comet",
        _NOTED,
        _LOG,
        "enabled",
        "samples_log_interval",
        "project",
        "workspace",
        "api_key",
        "experiment_name",
        "experiment_key",
        "online",
        "mode",
    ),
    *_alike(
        "flops_profiler",
        _NOTED,
        _TOOL,
        "enabled",
        "recompute_fwd_factor",
        "profile_step",
        "module_depth",
        "top_modules",
        "detailed",
        "output_file",
    ),
    *_alike("comms_logger", _NOTED, _TOOL, "enabled", "verbose", "prof_all", "debug", "prof_ops"),
    *_alike("timers", _NOTED, _TOOL, "throughput"),
)

_CHECKPOINT = _section(
    "checkpoint",
    {
        "tag_validation": (_NOTED, _CHECKPOINTS),
        "load_universal": (_REFUSED, f"{_CHECKPOINTS}, to load at as many ranks"),
        "use_node_local_storage": (_NOTED, _CHECKPOINTS),
        "parallel_write": (_NOTED, _CHECKPOINTS),
        "writer": (_NOTED, _CHECKPOINTS),
    },
)

_WHOLE_SECTIONS = _section(
    "",
    {
        "elasticity": (_REFUSED, "restart with another number of ranks instead"),
        "autotuning": (
            _REFUSED,
            "python -m zero_compile.tools.dump_schedule --largest-batch finds what fits",
        ),
        "hybrid_engine": (_REFUSED, "the compiled model also runs under no_grad"),
        "pipeline": (_REFUSED, "there is no pipeline parallelism here"),
        "tensor_parallel": (_REFUSED, "there is no tensor parallelism here"),
        "expert_parallel": (_REFUSED, "there is no expert parallelism here; see leaf_module"),
        "sparse_attention": (_REFUSED, "use attention of torch, such as flex_attention"),
        "data_efficiency": (_REFUSED, "choose the data in your data loader"),
        "curriculum_learning": (_REFUSED, "choose the data in your data loader"),
        "progressive_layer_drop": (_REFUSED, "drop layers in the model"),
        "eigenvalue": (_REFUSED, "it serves quantised training, which is not supported"),
        "compression_training": (_REFUSED, "compress the model before training it"),
        "quantize_training": (_REFUSED, "quantised training is not supported"),
        "weight_quantization": (_REFUSED, "it serves inference"),
        "nebula": (_REFUSED, _CHECKPOINTS),
        "datastates_ckpt": (_REFUSED, _CHECKPOINTS),
    },
)

KEYS: tuple[Key, ...] = (
    *_TOP,
    *_PRECISION,
    *_OPTIMIZER,
    *_ZERO,
    *_LEAF,
    *_OFFLOAD,
    *_COMPILE,
    *_CHECKPOINTING,
    *_MONITORS,
    *_CHECKPOINT,
    *_WHOLE_SECTIONS,
)

BY_NAME: Mapping[str, Key] = {key.key: key for key in KEYS}


def _names_by_section() -> dict[str, set[str]]:
    children: dict[str, set[str]] = {"": set()}
    for row in KEYS:
        section = ""
        for part in row.key.split("."):
            children.setdefault(section, set()).add(part)
            section = f"{section}.{part}" if section else part
    return children


_CHILDREN = _names_by_section()


def names_in(section: str) -> frozenset[str]:
    """Names that may stand in a section (``""``: the whole config); none for what is not a section."""
    return frozenset(_CHILDREN.get(section, ()))


def table() -> str:
    """The table of docs/deepspeed.md, in Markdown."""
    return "\n".join(_rows()) + "\n"


def _rows() -> Iterator[str]:
    yield "| Key | What happens | How, or why |"
    yield "|---|---|---|"
    for key, verdict, text in KEYS:
        yield f"| `{key}` | {verdict} | {text} |"
