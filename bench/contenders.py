"""The contenders: how each makes one training step of the same model.

The model, data, AdamW settings and threads are the same for all; what differs is written here.
"""

import importlib
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from bench.model import build
from bench.settings import Settings

Step = Callable[[Tensor, Tensor], Tensor]


class Contender(NamedTuple):
    name: str
    what: str
    prepare: Callable[[Settings], Step]
    single: bool = False  # one process, without a process group, takes the whole global batch
    package: str = "torch"  # what has to be installed


def stock_step(model: Any, settings: Settings, *, autocast: bool = True) -> Step:
    """The loop everybody writes; all contenders but DeepSpeed are trained by it."""
    optimizer = settings.adamw(model.parameters())

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast and settings.dtype == "bf16"):
            loss: Tensor = model(tokens, targets)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def compiled(settings: Settings, backend: str, **options: Any) -> Step:
    model = build(settings.size, settings.seq)
    return stock_step(torch.compile(model, backend=backend, options=options or None), settings)


def zero3(settings: Settings) -> Step:
    return compiled(settings, settings.backend)


def one_ahead(settings: Settings) -> Step:
    return compiled(settings, settings.backend, schedule="one_ahead")


def all_first(settings: Settings) -> Step:
    return compiled(settings, settings.backend, schedule="all_first")


def inductor(settings: Settings) -> Step:
    return compiled(settings, "inductor")


def fsdp2(settings: Settings) -> Step:
    model = build(settings.size, settings.seq)
    # FSDP2 casts by its own policy, also what autocast would leave in float32.
    policy = MixedPrecisionPolicy()
    if settings.dtype == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        block.compile()
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return stock_step(model, settings, autocast=False)


def ddp(settings: Settings) -> Step:
    model = nn.parallel.DistributedDataParallel(build(settings.size, settings.seq))
    return stock_step(torch.compile(model), settings)


def deepspeed_config(settings: Settings) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": settings.batch,
        "zero_optimization": {"stage": 3},
        "bf16": {"enabled": settings.dtype == "bf16"},
        # Let it keep the optimizer that all the others use.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }


def deepspeed(settings: Settings) -> Step:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    library = importlib.import_module("deepspeed")  # only where it is installed
    library.init_distributed("gloo")
    model = build(settings.size, settings.seq)
    optimizer = settings.adamw(model.parameters())
    engine, *_ = library.initialize(
        model=model, optimizer=optimizer, config=deepspeed_config(settings)
    )

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


ZERO3 = "zero3"
REFERENCE = "inductor"

CONTENDERS = {
    contender.name: contender
    for contender in (
        Contender(ZERO3, 'torch.compile(model, backend="zero3")', zero3),
        Contender("one-ahead", "zero3 gathering one bucket ahead, unplanned", one_ahead),
        Contender("all-first", "zero3 gathering everything first", all_first),
        Contender(REFERENCE, "torch.compile in one process, whole batch", inductor, single=True),
        Contender("fsdp2", "fully_shard and compile per block", fsdp2),
        Contender("ddp", "DistributedDataParallel + torch.compile", ddp),
        Contender("deepspeed", "DeepSpeed ZeRO-3, eager", deepspeed, package="deepspeed"),
    )
}
