"""`python -m bench.host_adam`: one pass of AdamW over host memory against torch's fused kernel, and DeepSpeed's.

In float32 both read and write 28 bytes a parameter. With 16-bit gradients in and parameters out torch
needs a cast before and one after; the host kernel does both in its one pass.
"""

import importlib.util
import statistics
import time
from collections.abc import Callable
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from zero_runtime.optim import cpu_optimizer as host

Work = Callable[[], Any]


def contenders(numel: int) -> dict[str, Work]:
    """What is timed, by name: each takes one step."""
    param, moment, square = (torch.zeros(numel) for _ in range(3))
    grad = torch.full((numel,), 1e-3)
    half, copy = grad.bfloat16(), torch.empty(numel, dtype=torch.bfloat16)
    wide = torch.empty(numel)
    options = host.AdamOptions(decoupled_weight_decay=True, weight_decay=0.01)
    theirs = torch.nn.Parameter(torch.zeros(numel))
    fused = torch.optim.AdamW([theirs], fused=True)

    def torch_float32() -> None:
        theirs.grad = grad
        fused.step()

    def torch_bfloat16() -> None:
        theirs.grad = wide.copy_(half)
        fused.step()
        copy.copy_(theirs.detach())

    def ours(bucket: host.Bucket) -> Work:
        return lambda: host.adam_step(bucket, moment, square, 1, options)

    found: dict[str, Work] = {
        "torch fused, float32": torch_float32,
        "ours, float32": ours(host.Bucket(param, grad)),
        "cast, torch fused, cast": torch_bfloat16,
        "ours, bfloat16 in and out": ours(host.Bucket(param, half, copy)),
    }
    deepspeed = _deepspeed(numel, grad)
    return {**found, "DeepSpeed CPUAdam, float32": deepspeed} if deepspeed else found


def _deepspeed(numel: int, grad: torch.Tensor) -> Work | None:
    """DeepSpeed's kernel, where it is installed and builds."""
    if importlib.util.find_spec("deepspeed") is None:
        return None
    from deepspeed.ops.adam import DeepSpeedCPUAdam  # type: ignore[import-not-found]

    parameter = torch.nn.Parameter(torch.zeros(numel))
    try:
        optimizer = DeepSpeedCPUAdam([parameter], weight_decay=0.01)
    except Exception as error:
        Console(stderr=True).print(f"DeepSpeed's CPUAdam does not build here: {error}")
        return None
    parameter.grad = grad
    return optimizer.step  # type: ignore[no-any-return]


#: Each of ours, and what it is compared with.
AGAINST = {
    "ours, float32": "torch fused, float32",
    "ours, bfloat16 in and out": "cast, torch fused, cast",
}


def main(
    numel: Annotated[int, typer.Option(help="parameters")] = 1 << 25,
    rounds: Annotated[int, typer.Option(help="interleaved")] = 15,
    threads: Annotated[int, typer.Option(help="0: as torch is set")] = 0,
) -> None:
    """Time them in turn, and print a table."""
    if threads:
        torch.set_num_threads(threads)
    work = contenders(numel)
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(rounds + 1):
        for name, step in work.items():
            began = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - began)
    table = Table("AdamW", "ms", "ns a parameter", "times as fast")
    for name, taken in seconds.items():
        median = statistics.median(taken[1:])
        other = seconds.get(AGAINST.get(name, ""))
        faster = ""
        if other is not None:
            pairs = zip(other[1:], taken[1:], strict=True)
            faster = f"{statistics.median(b / a for b, a in pairs):.2f}"
        table.add_row(name, f"{median * 1e3:.1f}", f"{median / numel * 1e9:.2f}", faster)
    Console().print(f"{numel / 1e6:.0f}M parameters, {torch.get_num_threads()} threads")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
