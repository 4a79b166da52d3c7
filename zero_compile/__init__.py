"""ZeRO-3 as a compiler pass: ``torch.compile(model, backend="zero3")``.

A training script needs nothing from here; the backends are found by name. What this package
offers on top looks at a compiled model (what it holds, and the plans it runs), and is the way in for
programs written for DeepSpeed: ``initialize`` and the estimates of memory.
"""

from zero_compile.api.estimate import MemoryEstimate, estimate_memory
from zero_compile.api.gathered_parameters import GatheredParameters
from zero_compile.api.no_sync import no_sync
from zero_compile.api.report import MemoryReport, memory_report, plans, timelines
from zero_compile.capture.captured_graph import partition
from zero_compile.construction.init import Init
from zero_compile.construction.materialize import materialize
from zero_compile.deepspeed.access import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
)
from zero_compile.deepspeed.estimate import (
    estimate_zero2_model_states_mem_needs,
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
    estimate_zero3_model_states_mem_needs,
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
)
from zero_compile.deepspeed.external import (
    register_external_parameter,
    unregister_external_parameter,
)
from zero_compile.deepspeed.initialize import initialize
from zero_compile.deepspeed.tiled_linear import TiledLinear, TiledLinearReturnBias

__all__ = [
    "GatheredParameters",
    "Init",
    "MemoryEstimate",
    "MemoryReport",
    "TiledLinear",
    "TiledLinearReturnBias",
    "estimate_memory",
    "estimate_zero2_model_states_mem_needs",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
    "estimate_zero3_model_states_mem_needs",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
    "initialize",
    "materialize",
    "memory_report",
    "no_sync",
    "partition",
    "plans",
    "register_external_parameter",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "timelines",
    "unregister_external_parameter",
]
