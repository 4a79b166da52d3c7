"""What is checked on a GPU. Each check is a function that returns what it found, in words.

It raises AssertionError where something is wrong, and :class:`NotHere` where this machine cannot do
what is to be checked.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from zero_compile.api.preview import preview
from zero_runtime.memory import native
from zero_runtime.offload.host_copies import Pool, cuda_extension, transfers_for
from zero_runtime.optim import cpu_optimizer
from zero_runtime.optim.cpu_optimizer import AdamOptions, Bucket, adam_step

from .gpu_check_rank import MET, WORLD
from .gpu_check_training import TOLERANCE, Size, batches, difference, make, train

ROOT = Path(__file__).parent.parent
MIB = 1 << 20


class NotHere(Exception):  # noqa: N818
    """This machine cannot do what is to be checked; the message says why."""


@dataclass(frozen=True)
class Check:
    """One check, by name."""

    name: str
    run: Callable[[torch.device], str]
    alone: bool = False
    """Whether it measures speed, and so must not share the machine with other checks."""


# ------------------------------------------------------------------------------ what is there


def extensions(device: torch.device) -> str:
    """Both extensions were built and load."""
    assert native.AVAILABLE, "the C++ extension was not built, or does not load"
    if cuda_extension():
        return "C++ and CUDA"
    if device.type != "cuda" or not _has_toolkit():
        raise NotHere("without CUDA's toolkit there is only the C++ extension")
    raise AssertionError("the CUDA extension was not built, or does not load")


def _has_toolkit() -> bool:
    home = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    return shutil.which("nvcc") is not None or (home / "bin" / "nvcc").exists()


def transfer_tests(device: torch.device) -> str:
    """tests/offload/test_host_copies.py, with what it does on a GPU only."""
    if device.type != "cuda":
        raise NotHere("needs a GPU")
    command = [sys.executable, "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider"]
    done = _run([*command, "tests/offload/test_host_copies.py"])
    lines = done.stdout.strip().splitlines()
    summary = lines[-1] if lines else "no output"
    assert done.returncode == 0, f"{summary}\n{done.stdout[-4000:]}{done.stderr[-1000:]}"
    return summary


# ------------------------------------------------------------------------------ training


def training(device: torch.device) -> str:
    """One rank learns what the unsharded compiled model learns."""
    plain = train(Size.on(device), device, partitioned=False)
    return _same(plain.losses, train(Size.on(device), device).losses)


def memory(device: torch.device) -> str:
    """What is held, and the most that is held, are what the plan and the preview say."""
    size, half = Size.on(device), torch.bfloat16
    found = train(size, device, dtype=half)
    report = found.report
    assert report is not None
    assert report.gathered_peak <= report.gathered_planned, (
        f"{_mb(report.gathered_peak)} were gathered at once, planned {_mb(report.gathered_planned)}"
    )
    said = preview(
        lambda: (make(size, device, half), (batches(size, device)[0],), {}), world_size=1
    )
    gathered = f"gathered {_mb(report.gathered_peak)} of {_mb(report.gathered_planned)} planned"
    if device.type != "cuda":
        return f"{gathered}, {_mb(said.peak)} predicted in all"
    state = report.parameters + report.optimizer
    assert abs(found.held - state) <= 0.05 * state + 2 * MIB, (
        f"{_mb(found.held)} are held between steps, parameters and optimizer state are {_mb(state)}"
    )
    assert found.peak <= 1.1 * said.peak + 8 * MIB, (
        f"the step's peak is {_mb(found.peak)}, predicted were {_mb(said.peak)}"
    )
    return (
        f"{gathered}; held {_mb(found.held)}, state {_mb(state)}; "
        f"peak {_mb(found.peak)}, predicted {_mb(said.peak)}"
    )


def two_ranks(device: torch.device) -> str:
    """Two ranks on the one GPU learn what the unsharded compiled model learns."""
    reasons = []
    for backend in ("nccl", "gloo") if device.type == "cuda" else ("gloo",):
        try:
            losses = _losses_of_ranks(backend, device)
        except NotHere as reason:
            reasons.append(f"{backend}: {reason}")
            continue
        plain = train(Size.on(device), device, partitioned=False)
        return f"{backend}, {_same(plain.losses, losses)}"
    raise NotHere("two ranks cannot meet on one GPU: " + "; ".join(reasons))


def _losses_of_ranks(backend: str, device: torch.device) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        arguments = [f"{folder}/store", backend, device.type]
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", f"{__package__}.gpu_check_rank", str(rank), *arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd=ROOT,
                env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
            )
            for rank in range(WORLD)
        ]
        try:
            ends = [rank.communicate(timeout=120) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    for rank, (output, errors) in zip(ranks, ends, strict=True):
        if rank.returncode != 0:
            last = (errors.strip().splitlines() or [f"exit status {rank.returncode}"])[-1]
            if MET not in output:
                raise NotHere(last)
            raise AssertionError(f"{backend}: {last}\n{errors[-4000:]}")
    each = [json.loads(output.strip().splitlines()[-1]) for output, _ in ends]
    return [mean(losses) for losses in zip(*each, strict=True)]


# ------------------------------------------------------------------------------ offloading


def offloaded(
    device: torch.device, *, sections: Mapping[str, str], saved: int, folder: Path | None = None
) -> str:
    """Training with ``sections`` (name to device) learns the same, and ``saved`` bytes an element less
    are held on the GPU."""
    with tempfile.TemporaryDirectory(prefix="zero-nvme-", dir=folder) as path:
        options = {
            name: {"device": place, **({"nvme_path": path} if place == "nvme" else {})}
            for name, place in sections.items()
        }
        base = train(Size.on(device), device)
        found = train(Size.on(device), device, options=options)
    same = _same(base.losses, found.losses)
    if device.type != "cuda":
        return same
    less, expected = base.held - found.held, saved * found.parameters
    assert less >= 0.8 * expected, (
        f"{_mb(found.held)} are held on the GPU with {options}, {_mb(base.held)} without: "
        f"expected {_mb(expected)} less"
    )
    return f"{same}; held {_mb(found.held)} on the GPU, {_mb(base.held)} without"


# ------------------------------------------------------------------------------ speed


def bandwidth(device: torch.device) -> str:
    """Pinned memory is copied at least as fast as pageable memory, and while the GPU computes."""
    if device.type != "cuda":
        raise NotHere("needs a GPU")
    count = 64 * MIB
    there = torch.ones(count, device=device)
    rates = {
        (name, way): _rate(Pool(pinned).take(count, torch.float32).zero_(), there, way)
        for name, pinned in (("pinned", True), ("pageable", False))
        for way in ("to_device", "to_host")
    }
    said = ", ".join(f"{name} {way} {rate:.1f} GB/s" for (name, way), rate in rates.items())
    for way in ("to_device", "to_host"):
        assert rates["pinned", way] >= rates["pageable", way], f"pinned is slower: {said}"
    return f"{said}; {_overlap(there)}"


def _rate(host: torch.Tensor, there: torch.Tensor, way: str) -> float:
    transfers = transfers_for(there.device)
    tensors = (host, there) if way == "to_device" else (there, host)

    def copy() -> None:
        getattr(transfers, way)(*tensors).wait_on_host()

    return host.nbytes / _best_seconds(copy) / 1e9


def _overlap(there: torch.Tensor) -> str:
    """A copy beside matrix products takes less time than one after the other."""
    host = Pool(True).take(there.numel(), torch.float32)
    transfers = transfers_for(there.device)
    matrix = torch.randn(4096, 4096, device=there.device)

    def compute() -> None:
        for _ in range(12):
            torch.mm(matrix, matrix)

    def copy() -> None:
        transfers.to_host(there, host).wait_on_host()

    def both() -> None:
        started = transfers.to_host(there, host)
        compute()
        started.wait_on_host()

    alone, beside = [_best_seconds(f) for f in (compute, copy)], _best_seconds(both)
    said = f"{beside * 1e3:.1f} ms beside computing, {sum(alone) * 1e3:.1f} ms one by one"
    assert beside <= sum(alone) - 0.5 * min(alone), f"copies do not overlap with computing: {said}"
    return said


def host_optimizer_speed(_: torch.device) -> str:
    """AdamW on the host gives torch's parameters, in no more time than torch takes."""
    count, steps = 1 << 23, 5
    values = [torch.randn(count, generator=torch.Generator().manual_seed(n)) for n in range(2)]
    param, grad = values
    theirs = torch.nn.Parameter(param.clone())
    theirs.grad = grad
    optimizer = torch.optim.AdamW([theirs], lr=1e-3, weight_decay=0.01)
    options = AdamOptions(lr=1e-3, weight_decay=0.01, decoupled_weight_decay=True)
    bucket, first, second = Bucket(param, grad), torch.zeros(count), torch.zeros(count)
    times = [
        (
            _seconds(partial(adam_step, bucket, first, second, step, options)),
            _seconds(optimizer.step),
        )
        for step in range(1, steps + 1)
    ]
    torch.testing.assert_close(param, theirs.detach(), rtol=1e-5, atol=1e-6)
    here, torchs = (min(each) for each in zip(*times, strict=True))
    said = f"{here * 1e3:.1f} ms ({cpu_optimizer.available_isas()[0]}), torch {torchs * 1e3:.1f} ms"
    assert here <= torchs, f"slower than torch: {said}"
    return said


def _seconds(act: Callable[[], object]) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def _best_seconds(act: Callable[[], None], times: int = 5) -> float:
    """The least time of one call, all of the GPU's work included; the first is a rehearsal."""

    def whole() -> None:
        act()
        torch.cuda.synchronize()

    whole()
    return min(_seconds(whole) for _ in range(times))


# ------------------------------------------------------------------------------ the list


def _same(expected: Sequence[float], found: Sequence[float]) -> str:
    off = difference(list(expected), list(found))
    losses = f"losses {', '.join(f'{x:.5f}' for x in found)}"
    assert off <= TOLERANCE, f"{losses}, expected {', '.join(f'{x:.5f}' for x in expected)}"
    assert found[-1] < found[0], f"{losses}: nothing was learnt"
    return f"loss {found[0]:.4f} to {found[-1]:.4f}, off by {off:.1e}"


def _mb(count: float) -> str:
    return f"{count / 1e6:.1f} MB"


def _run(command: Sequence[str], **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, **more)


# float32: 4 bytes of parameter, 8 of AdamW's state.
CHECKS = (
    Check("extensions", extensions),
    Check("training", training),
    Check("memory", memory),
    Check("two-ranks", two_ranks),
    Check(
        "offload-optimizer-cpu",
        partial(offloaded, sections={"offload_optimizer": "cpu"}, saved=8),
    ),
    Check(
        "offload-param-cpu",
        partial(offloaded, sections={"offload_optimizer": "cpu", "offload_param": "cpu"}, saved=12),
    ),
    Check(
        "offload-nvme",
        partial(
            offloaded, sections={"offload_optimizer": "nvme", "offload_param": "nvme"}, saved=12
        ),
    ),
    Check("transfer-tests", transfer_tests),
    Check("bandwidth", bandwidth, alone=True),
    Check("host-optimizer", host_optimizer_speed, alone=True),
)
