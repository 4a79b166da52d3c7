"""How much memory model states need, as DeepSpeed estimates it: its names, numbers and tables.

Sources are DeepSpeed's: 16-bit parameters 2 bytes, 16-bit gradients 2, float32 gradients 4, float32
parameters 4, Adam's state 8. Activations are not included. What a step of zero_compile itself needs is
what ``python -m zero_compile.tools.dump_schedule`` shows.
"""

from collections.abc import Iterable

from torch import nn

_GIB = 1 << 30


def estimate_zero2_model_states_mem_needs(
    total_params: float,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """Bytes (on a node's host, on one GPU) at stage 2, P parameters, N GPUs in all, G a node.

    With offload ``P * max(4N, 16) * factor`` and ``2P``; without ``P * 4G * factor`` and ``2P + 18P / N``.
    """
    total_gpus = num_nodes * num_gpus_per_node
    if cpu_offload:
        host = total_params * max(4 * total_gpus, 16)
        gpu = 2 * total_params
    else:
        host = total_params * 4 * num_gpus_per_node
        gpu = 2 * total_params + int(18 * total_params / total_gpus)
    return int(host * additional_buffer_factor), int(gpu)


def estimate_zero3_model_states_mem_needs(
    total_params: float,
    largest_layer_params: float,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int, int]:
    """Bytes (on a node's host, on one GPU, of the largest layer) at stage 3.

    P parameters, L in the largest layer, N GPUs in all, G on each of n nodes. GPU: ``4L``, plus ``2P / N``
    where parameters stay there, or ``18P / N`` without offload. Host: ``18P / n`` (16 where parameters
    stay on the GPU; ``4LG`` without offload), times ``additional_buffer_factor``; without ``zero_init``
    at least the whole model a GPU, ``4PG``.
    """
    layer = 4 * largest_layer_params
    total_gpus = num_nodes * num_gpus_per_node
    whole_models = 4 * num_gpus_per_node  # bytes a parameter, built on every rank of a node
    if cpu_offload:
        state = (18 if cpu_offload_params else 16) / num_nodes
        gpu = 0 if cpu_offload_params else int(2 * total_params / total_gpus)
        host = total_params * (state if zero_init else max(whole_models, state))
    else:
        gpu = int(18 * total_params / total_gpus)
        host = whole_models * (largest_layer_params if zero_init else total_params)
    return int(host * additional_buffer_factor), int(layer + gpu), int(layer)


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print :func:`estimate_zero2_model_states_mem_needs_all_cold` for ``model``, whole on this rank."""
    total, _ = count_parameters(model)
    estimate_zero2_model_states_mem_needs_all_cold(
        total, num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: float,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print a table of what stage 2 needs, with and without offload of the optimizer."""
    _print_title(num_nodes, num_gpus_per_node, f"{int(total_params / 1e6)}M total params.")
    for offload in (True, False):
        host, gpu = estimate_zero2_model_states_mem_needs(
            total_params, num_gpus_per_node, num_nodes, offload, additional_buffer_factor
        )
        _print_row(host, gpu, [f"offload_optimizer={_device(offload)}"])


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print :func:`estimate_zero3_model_states_mem_needs_all_cold` for ``model``, whole on this rank."""
    estimate_zero3_model_states_mem_needs_all_cold(
        *count_parameters(model), num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: float,
    largest_layer_params: float,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print a table of what stage 3 needs, for every kind of offload, with and without ``Init``."""
    _print_title(
        num_nodes,
        num_gpus_per_node,
        f"{int(total_params / 1e6)}M total params, "
        f"{int(largest_layer_params / 1e6)}M largest layer params.",
    )
    for offload, offload_params in ((True, True), (True, False), (False, False)):
        for zero_init in (True, False):
            host, gpu, _ = estimate_zero3_model_states_mem_needs(
                total_params,
                largest_layer_params,
                num_gpus_per_node,
                num_nodes,
                offload,
                offload_params,
                zero_init,
                additional_buffer_factor,
            )
            choices = [
                f"offload_param={_device(offload_params)}",
                f"offload_optimizer={_device(offload)}",
                f"zero_init={int(zero_init)}",
            ]
            _print_row(host, gpu, choices)


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """(of the model, tied ones once; of the module that itself holds most)."""
    total = sum(p.numel() for p in model.parameters())
    layers = (sum(p.numel() for p in m.parameters(recurse=False)) for m in model.modules())
    return total, max(layers, default=0)


def _print_title(num_nodes: int, num_gpus_per_node: int, model: str) -> None:
    nodes = "nodes" if num_nodes > 1 else "node"
    gpus = "GPUs" if num_gpus_per_node > 1 else "GPU"
    print("Estimated memory needed for params, optim states and gradients for a:")
    print(f"HW: Setup with {num_nodes} {nodes}, {num_gpus_per_node} {gpus} per node.")
    print(f"SW: Model with {model}")
    print("  per CPU  |  per GPU |   Options")


def _print_row(host: int, gpu: int, choices: Iterable[str]) -> None:
    print(f" {host / _GIB:7.2f}GB | {gpu / _GIB:6.2f}GB | {', '.join(choices)}")


def _device(offload: bool) -> str:
    return "cpu " if offload else "none"
