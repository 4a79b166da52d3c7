"""DeepSpeed's engine: forward, backward and step of a compiled model under DeepSpeed's names."""

import math
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from zero_compile.api.no_sync import no_sync
from zero_compile.config.deepspeed.config import Config
from zero_compile.config.deepspeed.convert import DTYPES
from zero_compile.deepspeed.batch import Batch
from zero_compile.deepspeed.loader import Seat
from zero_compile.deepspeed.scaling import LossScale
from zero_runtime import compat
from zero_runtime.errors import UnsupportedError, ZeroError


class Engine:
    """What ``initialize`` returns. Called like the model; what it lacks, it asks the model for.

    One optimizer step takes ``gradient_accumulation_steps()`` rounds of forward, :meth:`backward` (or the
    loss's own) and :meth:`step`. It is no ``nn.Module``: names of parameters in ``state_dict()`` are the model's.
    """

    def __init__(
        self,
        module: nn.Module,
        compiled: Any,
        config: Config,
        batch: Batch,
        seat: Seat,
        *,
        optimizer: torch.optim.Optimizer | None,
        lr_scheduler: Any,
    ) -> None:
        self.module = module
        self.optimizer = optimizer
        self.lr_scheduler: LRScheduler | Any = lr_scheduler
        self.device = next((p.device for p in module.parameters()), torch.device("cpu"))
        self.global_rank, self.world_size = seat
        self.global_steps = 0
        """Optimizer steps, skipped ones included."""
        self.global_samples = 0
        self.micro_steps = 0
        self.skipped_steps = 0
        self._compiled = compiled
        self._config = config
        self._batch = batch
        self._loss_scale = LossScale(config.fp16, self.device.type) if config.fp16.enabled else None
        self._boundary: bool | None = None
        self._in_backward = self._scaled = False
        self._applied = False
        self._norm: torch.Tensor | None = None

    # -------------------------------------------------------------- the loop

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The compiled model's output, under torch.autocast if the config has it."""
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As a call."""
        if self._config.fp16.enabled and self._config.fp16.auto_cast:
            args, kwargs = compat.pytree.tree_map(_halved, (args, kwargs))
        with self._autocast():
            output = self._compiled(*args, **kwargs)
        if self._batch.accumulation > 1 or self._loss_scale is not None:
            for value in compat.pytree.tree_leaves(output):
                if isinstance(value, torch.Tensor) and value.requires_grad and not value.is_leaf:
                    value.register_hook(self._averaged)
        return output

    def _averaged(self, gradient: torch.Tensor) -> torch.Tensor:
        """An output's gradient, which in a backward that is not ours is not divided yet."""
        if self._in_backward:
            return gradient
        if self._loss_scale is not None and not self._scaled:
            raise ZeroError(
                "loss.backward() of a float16 engine: the loss is not scaled. Use engine.backward(loss), or "
                "engine.scale(loss).backward()"
            )
        return gradient / self._batch.accumulation

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss as its own ``backward()`` needs it: times the loss scale; only float16 has one."""
        self._scaled = True
        return loss if self._loss_scale is None else self._loss_scale.scale(loss.float())

    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> torch.Tensor:
        """Add the loss's gradients to those of the step, averaged over ranks and accumulation steps.

        ``loss`` is this rank's mean over its micro batch, a tensor of one element. Returns it as float32,
        divided by the accumulation steps (not with ``scale_wrt_gas=False``).
        """
        loss = loss.float()
        if scale_wrt_gas:
            loss = loss / self._batch.accumulation
        scaled = loss if self._loss_scale is None else self._loss_scale.scale(loss)
        self._in_backward = True
        try:
            scaled.backward(retain_graph=retain_graph)
        finally:
            self._in_backward = False
        return loss

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """At an accumulation boundary: clip, step, clear gradients, step the schedule. Else count.

        Raises:
            ZeroError: the engine has no optimizer, or float16 overflows at the smallest loss scale.
        """
        self._applied = self._scaled = False
        if self.is_gradient_accumulation_boundary():
            self._update(lr_kwargs or {})
        self.micro_steps += 1

    def _update(self, lr_kwargs: dict[str, Any]) -> None:
        optimizer = self._trained_by()
        if self._loss_scale is not None:
            self._loss_scale.unscale(optimizer)
        self._norm = self._clip(optimizer)
        self._applied = self._stepped(optimizer)
        optimizer.zero_grad()
        if self._applied and self.lr_scheduler is not None:
            self.lr_scheduler.step(**lr_kwargs)
        self.skipped_steps += not self._applied
        self.global_steps += 1
        self.global_samples += self._batch.train
        self._report()

    def _clip(self, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if self._config.gradient_clipping:
            nn.utils.clip_grads_with_norm_(parameters, self._config.gradient_clipping, norm)
        return norm

    def _stepped(self, optimizer: torch.optim.Optimizer) -> bool:
        if self._loss_scale is not None:
            return self._loss_scale.step(optimizer)
        checked = self._config.bf16.enabled and self._config.bf16.check_grad_overflow
        if checked and not math.isfinite(float(self._norm or 0.0)):
            return False
        optimizer.step()
        return True

    def _trained_by(self) -> torch.optim.Optimizer:
        if self.optimizer is None:
            raise ZeroError(
                "this engine has no optimizer: give initialize an optimizer, or the config a section "
                '"optimizer"'
            )
        return self.optimizer

    def _autocast(self) -> AbstractContextManager[Any]:
        section = self._config.torch_autocast
        if not section.enabled:
            return nullcontext()
        name = None if section.dtype is None else DTYPES.get(section.dtype, section.dtype)
        dtype: torch.dtype | None = None if name is None else getattr(torch, name)
        return torch.autocast(self.device.type, dtype=dtype)

    def _report(self) -> None:
        every = self._config.steps_per_print
        if every and self.global_rank == 0 and self.global_steps % every == 0:
            print(
                f"step={self.global_steps}, skipped={self.skipped_steps}, lr={self.get_lr()}, "
                f"mom={self.get_mom()}"
            )

    # -------------------------------------------------------------- accumulation

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next :meth:`step` updates parameters."""
        if self._boundary is not None:
            return self._boundary
        return (self.micro_steps + 1) % self._batch.accumulation == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Decide from now on instead of counting whether :meth:`step` updates parameters."""
        self._boundary = is_boundary

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside keep whole local gradients, which the first one outside reduces too.

        Works at every stage, see :func:`zero_compile.no_sync`.
        """
        with no_sync(self.module):
            yield

    # -------------------------------------------------------------- what it knows

    def train_batch_size(self) -> int:
        """Samples of all ranks in one optimizer step."""
        return self._batch.train

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of one rank in one forward."""
        return self._batch.micro

    def gradient_accumulation_steps(self) -> int:
        """Forwards in one optimizer step."""
        return self._batch.accumulation

    def zero_optimization_stage(self) -> int:
        """1, 2 or 3."""
        return self._config.zero_optimization.stage

    def gradient_clipping(self) -> float:
        """The norm that gradients are clipped to; 0: they are not."""
        return self._config.gradient_clipping

    def fp16_enabled(self) -> bool:
        """Whether the model is float16."""
        return self._config.fp16.enabled

    def bfloat16_enabled(self) -> bool:
        """Whether the model is bfloat16."""
        return self._config.bf16.enabled

    def get_lr(self) -> list[float]:
        """The rate of each parameter group."""
        return [float(group["lr"]) for group in self._trained_by().param_groups]

    def get_mom(self) -> list[Any]:
        """``betas``, or ``momentum``, of each parameter group; 0 where it has neither."""
        groups = self._trained_by().param_groups
        return [group.get("betas", group.get("momentum", 0.0)) for group in groups]

    def get_global_grad_norm(self) -> float | None:
        """The norm of all gradients of the last step, before clipping; None before the first."""
        return None if self._norm is None else float(self._norm)

    def was_step_applied(self) -> bool:
        """Whether the last :meth:`step` updated parameters."""
        return self._applied

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied by before backward; 1 but for float16."""
        return 1.0 if self._loss_scale is None else self._loss_scale.value

    # -------------------------------------------------------------- the model

    def train(self, mode: bool = True) -> "Engine":
        """As ``nn.Module.train``."""
        self.module.train(mode)
        return self

    def eval(self) -> "Engine":
        """As ``nn.Module.eval``."""
        return self.train(False)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The model's parameters."""
        return self.module.parameters(recurse)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients gathered so far."""
        self.module.zero_grad(set_to_none)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Whole parameters and buffers by the model's names. Collective."""
        return self.module.state_dict(*args, **kwargs)

    def module_state_dict(self) -> dict[str, Any]:
        """As :meth:`state_dict`."""
        return self.state_dict()

    def load_state_dict(self, state: dict[str, Any], strict: bool = True) -> Any:
        """Load whole parameters and buffers, the same on every rank."""
        return self.module.load_state_dict(state, strict)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the model is compiled already. DeepCompile's users call it; a warning says so."""
        warnings.warn("engine.compile(): the model is compiled already", stacklevel=2)

    def save_16bit_model(
        self, save_dir: str | Path, save_filename: str = "pytorch_model.bin"
    ) -> bool:
        """Write ``state_dict()`` on rank 0 with ``torch.save``. Collective."""
        state = self.state_dict()
        if self.global_rank == 0:
            Path(save_dir).mkdir(parents=True, exist_ok=True)
            torch.save(state, Path(save_dir) / save_filename)
        return True

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Not there.

        Raises:
            UnsupportedError: says what to use instead.
        """
        raise UnsupportedError(_NO_CHECKPOINTS.format("save_checkpoint", "save"))

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Not there.

        Raises:
            UnsupportedError: says what to use instead.
        """
        raise UnsupportedError(_NO_CHECKPOINTS.format("load_checkpoint", "load"))

    def __getattr__(self, name: str) -> Any:
        if name == "module":  # not there yet: without this, looking for it would never end
            raise AttributeError(name)
        return getattr(self.module, name)


_NO_CHECKPOINTS = (
    "engine.{0} is not supported: use torch.{1} with engine.module.state_dict(), which is whole, and, one "
    "file a rank, engine.optimizer.state_dict()"
)


def _halved(value: Any) -> Any:
    wide = isinstance(value, torch.Tensor) and value.dtype is torch.float32
    return value.half() if wide else value
