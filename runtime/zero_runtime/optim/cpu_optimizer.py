"""Optimizer steps on flat buckets in host memory, each in one pass over that memory.

What DeepSpeed's CPU optimizer does (Ren et al. 2021, "ZeRO-Offload: Democratizing Billion-Scale
Model Training", section 5): a step reads a bucket's float32 parameter, its state and its gradient,
writes the first two back and, where asked, the new parameter in 16 bits for the device. Formulas
are those of :mod:`torch.optim`. The gradient may be float32, bfloat16 or float16; its factors for
the loss scale and for clipping, and the search for infinities and NaNs, are part of the same pass.

The C++ extension does the work, in the widest instruction set that the CPU has and with
:func:`torch.get_num_threads` threads. Where it is missing plain PyTorch does, a piece of the bucket
at a time. Results are the same bits either way, in every instruction set and for every number of
threads, except that a NaN may change its payload.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor

from zero_runtime.memory import native

__all__ = [
    "AdagradOptions",
    "AdamOptions",
    "Bucket",
    "Check",
    "Isa",
    "LionOptions",
    "SgdOptions",
    "adagrad_step",
    "adam_step",
    "available_isas",
    "has_non_finite",
    "lion_step",
    "sgd_step",
]

Check = Literal["no", "report", "first"]
"""``no``: do not look. ``report``: update, and say whether the gradient had an infinity or a NaN.
``first``: read the gradient twice, and where it has one, leave everything as it was."""

Isa = Literal["avx512", "avx2", "scalar", "torch"]
"""Who computes: a kernel of the extension (``scalar`` is what every CPU runs), or PyTorch."""

_ISA_CODES: Final[dict[Isa, int]] = {"avx512": 2, "avx2": 1, "scalar": 0}
_CHECK_CODES: Final[dict[Check, int]] = {"no": 0, "report": 1, "first": 2}
_HALVES = (torch.bfloat16, torch.float16)
_PIECE = 1 << 16  # elements that plain PyTorch works on at a time


@dataclass(frozen=True, slots=True)
class Bucket:
    """A flat parameter, its gradient, and what turns the one's scale into the other's.

    All tensors are contiguous, on the CPU, of the same shape ``[n]``, and share no memory.
    """

    param: Tensor
    """float32, read and written."""
    grad: Tensor
    """float32, bfloat16 or float16; read only."""
    copy: Tensor | None = None
    """bfloat16 or float16; receives the new parameter, rounded to nearest even."""
    unscale: float = 1.0
    """Times the gradient, first: the inverse of the loss scale."""
    clip: float = 1.0
    """Times the unscaled gradient: the norm allowed over the norm found, at most 1."""


@dataclass(frozen=True, slots=True)
class AdamOptions:
    """Hyper-parameters of :class:`torch.optim.Adam`, or of AdamW; raises ValueError out of range."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    amsgrad: bool = False
    maximize: bool = False
    decoupled_weight_decay: bool = False
    """Whether the parameter decays by itself, as in AdamW, and not through the gradient."""

    def __post_init__(self) -> None:
        _check_not_negative(lr=self.lr, eps=self.eps, weight_decay=self.weight_decay)
        _check_betas(self.betas)


@dataclass(frozen=True, slots=True)
class SgdOptions:
    """Hyper-parameters of :class:`torch.optim.SGD`; raises ValueError where one is out of range."""

    lr: float = 1e-3
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    maximize: bool = False

    def __post_init__(self) -> None:
        _check_not_negative(lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay)
        if self.nesterov and (self.momentum == 0 or self.dampening != 0):
            raise ValueError("nesterov needs a momentum and no dampening")


@dataclass(frozen=True, slots=True)
class AdagradOptions:
    """Hyper-parameters of :class:`torch.optim.Adagrad`; raises ValueError where out of range."""

    lr: float = 1e-2
    lr_decay: float = 0.0
    eps: float = 1e-10
    weight_decay: float = 0.0
    maximize: bool = False

    def __post_init__(self) -> None:
        _check_not_negative(
            lr=self.lr, lr_decay=self.lr_decay, eps=self.eps, weight_decay=self.weight_decay
        )


@dataclass(frozen=True, slots=True)
class LionOptions:
    """Hyper-parameters of Lion; raises ValueError where one is out of range."""

    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0
    maximize: bool = False

    def __post_init__(self) -> None:
        _check_not_negative(lr=self.lr, weight_decay=self.weight_decay)
        _check_betas(self.betas)


class _Step(NamedTuple):
    """One call: what the operator ``host_<algorithm>`` takes after its tensors."""

    algorithm: str
    state: dict[str, Tensor]
    coefficients: list[float]
    l2: float
    maximize: bool


def adam_step(
    bucket: Bucket,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: int,
    options: AdamOptions,
    *,
    max_exp_avg_sq: Tensor | None = None,
    check: Check = "no",
    isa: Isa | None = None,
) -> bool:
    """Take step number `step`, from 1, of Adam or AdamW; return whether `check` found anything.

    Adam is Kingma and Ba 2015 (arXiv:1412.6980, algorithm 1), decoupled decay Loshchilov and Hutter
    2019 (arXiv:1711.05101, algorithm 2), AMSGrad Reddi et al. 2018 (arXiv:1904.09237, algorithm 2);
    ``eps`` is added to the root of the bias-corrected second moment::

        m = beta1 m + (1 - beta1) g             v = beta2 v + (1 - beta2) g^2
        p = p - lr / (1 - beta1^t) m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

    `exp_avg`, `exp_avg_sq` and, for AMSGrad and only then, `max_exp_avg_sq` are float32 of the
    parameter's shape ``[n]``, all zero before the first step, and updated in place. `isa` forces
    one of :func:`available_isas`.

    Raises TypeError for a wrong dtype and ValueError for any other unfit argument, in both cases
    before anything is written.
    """
    if options.amsgrad != (max_exp_avg_sq is not None):
        raise ValueError("max_exp_avg_sq must be given with amsgrad, and only then")
    _check_step(step)
    beta1, beta2 = options.betas
    decoupled = options.decoupled_weight_decay
    state = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    if max_exp_avg_sq is not None:
        state["max_exp_avg_sq"] = max_exp_avg_sq
    coefficients = [
        1 - options.lr * options.weight_decay if decoupled else 1.0,
        1 - beta1,
        beta2,
        1 - beta2,
        (1 - beta2**step) ** 0.5,
        options.eps,
        -(options.lr / (1 - beta1**step)),
    ]
    l2 = 0.0 if decoupled else options.weight_decay
    return _run(_Step("adam", state, coefficients, l2, options.maximize), bucket, check, isa)


def sgd_step(
    bucket: Bucket,
    momentum_buffer: Tensor | None,
    step: int,
    options: SgdOptions,
    *,
    check: Check = "no",
    isa: Isa | None = None,
) -> bool:
    """Take step number `step`, from 1, of SGD; return whether `check` found anything.

    Momentum is that of Sutskever et al. 2013 ("On the importance of initialization and momentum in
    deep learning") as PyTorch modifies it::

        b = g in the first step, then momentum b + (1 - dampening) g
        p = p - lr (g + momentum b  with nesterov, otherwise b)

    `momentum_buffer` is float32 of the parameter's shape ``[n]`` and updated in place; it must be
    given with a momentum, and only then. The first step sets it, whatever it holds. Raises as
    :func:`adam_step` does.
    """
    if (options.momentum != 0) != (momentum_buffer is not None):
        raise ValueError("momentum_buffer must be given with a momentum, and only then")
    _check_step(step)
    state = {} if momentum_buffer is None else {"momentum_buffer": momentum_buffer}
    coefficients = [
        -options.lr,
        options.momentum,
        1 - options.dampening,
        float(step == 1),
        float(options.nesterov),
    ]
    call = _Step("sgd", state, coefficients, options.weight_decay, options.maximize)
    return _run(call, bucket, check, isa)


def adagrad_step(
    bucket: Bucket,
    sum_of_squares: Tensor,
    step: int,
    options: AdagradOptions,
    *,
    check: Check = "no",
    isa: Isa | None = None,
) -> bool:
    """Take step number `step`, from 1, of Adagrad; return whether `check` found anything.

    Duchi et al. 2011 ("Adaptive Subgradient Methods for Online Learning and Stochastic
    Optimization", figure 1 with diagonal matrices)::

        s = s + g^2
        p = p - lr / (1 + (t - 1) lr_decay) g / (sqrt(s) + eps)

    `sum_of_squares` is float32 of the parameter's shape ``[n]``, filled with the initial value
    before the first step, and updated in place. Raises as :func:`adam_step` does.
    """
    _check_step(step)
    coefficients = [-(options.lr / (1 + (step - 1) * options.lr_decay)), options.eps]
    state = {"sum_of_squares": sum_of_squares}
    call = _Step("adagrad", state, coefficients, options.weight_decay, options.maximize)
    return _run(call, bucket, check, isa)


def lion_step(
    bucket: Bucket,
    exp_avg: Tensor,
    options: LionOptions,
    *,
    check: Check = "no",
    isa: Isa | None = None,
) -> bool:
    """Take a step of Lion; return whether `check` found anything.

    Chen et al. 2023 (arXiv:2302.06675, algorithm 2); the sign of zero and of NaN is 0::

        p = (1 - lr weight_decay) p - lr sign(beta1 m + (1 - beta1) g)
        m = beta2 m + (1 - beta2) g

    `exp_avg` is float32 of the parameter's shape ``[n]``, all zero before the first step, and
    updated in place. Raises as :func:`adam_step` does.
    """
    beta1, beta2 = options.betas
    decay = 1 - options.lr * options.weight_decay
    coefficients = [decay, -options.lr, beta1, 1 - beta1, beta2, 1 - beta2]
    call = _Step("lion", {"exp_avg": exp_avg}, coefficients, 0.0, options.maximize)
    return _run(call, bucket, check, isa)


def has_non_finite(grad: Tensor, *, isa: Isa | None = None) -> bool:
    """Return whether `grad` holds an infinity or a NaN.

    `grad` is float32, bfloat16 or float16, contiguous, on the CPU, of shape ``[n]``. Raises
    TypeError for a wrong dtype and ValueError for any other unfit argument.
    """
    _check_tensor("grad", grad, grad.numel(), (torch.float32, *_HALVES))
    chosen = _choose(isa)
    if chosen == "torch":
        return any(not bool(piece.isfinite().all()) for piece in grad.split(_PIECE))
    return bool(torch.ops.zero_native.host_non_finite.default(grad, _ISA_CODES[chosen]))


@functools.cache
def available_isas() -> tuple[Isa, ...]:
    """Return the values of `isa` that work on this machine, the best, which is the default, first."""
    # An extension built from older sources has no such operators.
    if not native.AVAILABLE or not hasattr(torch.ops.zero_native, "host_isas"):
        return ("torch",)
    codes = set(torch.ops.zero_native.host_isas.default())
    return (*(isa for isa, code in _ISA_CODES.items() if code in codes), "torch")


def _run(call: _Step, bucket: Bucket, check: Check, isa: Isa | None) -> bool:
    _check_bucket(bucket, call.state)
    if check not in _CHECK_CODES:
        raise ValueError(f"check is {check!r}, expected one of {', '.join(_CHECK_CODES)}")
    chosen = _choose(isa)
    # The negative of a product is the product with the negative, to the bit.
    clip = -bucket.clip if call.maximize else bucket.clip
    factors = [bucket.unscale, clip, call.l2]
    with torch.no_grad():
        if chosen == "torch":
            return _run_torch(call, bucket, factors, check)
        operator = getattr(torch.ops.zero_native, f"host_{call.algorithm}").default
        found = operator(
            bucket.param,
            bucket.grad,
            list(call.state.values()),
            bucket.copy,
            call.coefficients,
            factors,
            _CHECK_CODES[check],
            _ISA_CODES[chosen],
        )
        return bool(found)


def _choose(isa: Isa | None) -> Isa:
    isas = available_isas()
    if isa is None:
        return isas[0]
    if isa not in isas:
        raise ValueError(f"isa {isa!r} is not available here, only {', '.join(isas)}")
    return isa


# ------------------------------------------------------------------------------ plain PyTorch


def _run_torch(call: _Step, bucket: Bucket, factors: Sequence[float], check: Check) -> bool:
    """Update piece by piece. The kernels' every rounding is an operation of its own here."""
    if check == "first" and has_non_finite(bucket.grad, isa="torch"):
        return True
    unscale, clip, l2 = factors
    update = _UPDATES[call.algorithm]
    found = False
    for start in range(0, bucket.param.numel(), _PIECE):
        here = slice(start, start + _PIECE)
        param = bucket.param.detach()[here]
        grad = bucket.grad.detach()[here].to(torch.float32, copy=True)
        found = found or (check == "report" and not bool(grad.isfinite().all()))
        grad.mul_(unscale).mul_(clip)
        if l2 != 0:
            grad.add_(param * l2)
        update(param, grad, [tensor[here] for tensor in call.state.values()], call.coefficients)
        if bucket.copy is not None:
            bucket.copy[here].copy_(param)
    return found


def _update_adam(p: Tensor, g: Tensor, state: Sequence[Tensor], numbers: Sequence[float]) -> None:
    decay, weight1, beta2, weight2, root_correction, eps, step_size = numbers
    exp_avg, exp_avg_sq = state[:2]
    if abs(weight1) < 0.5:
        exp_avg.add_((g - exp_avg).mul_(weight1))
    else:
        exp_avg.sub_(g).mul_(_in_float32(lambda weight: 1 - weight, weight1)).add_(g)
    exp_avg_sq.mul_(beta2).add_((g * weight2).mul_(g))
    square = exp_avg_sq
    if len(state) == 3:
        square = torch.maximum(state[2], exp_avg_sq, out=state[2])
    denominator = _root(square).div_(root_correction).add_(eps)
    p.mul_(decay).add_((exp_avg * step_size).div_(denominator))


def _update_sgd(p: Tensor, g: Tensor, state: Sequence[Tensor], numbers: Sequence[float]) -> None:
    step_size, momentum, weight, is_first, nesterov = numbers
    for buffer in state:
        if is_first:
            buffer.copy_(g)
        else:
            buffer.mul_(momentum).add_(g * weight)
        g = g + buffer * momentum if nesterov else buffer
    p.add_(g * step_size)


def _update_adagrad(
    p: Tensor, g: Tensor, state: Sequence[Tensor], numbers: Sequence[float]
) -> None:
    step_size, eps = numbers
    total = state[0].add_(g * g)
    p.add_((g * step_size).div_(_root(total).add_(eps)))


def _update_lion(p: Tensor, g: Tensor, state: Sequence[Tensor], numbers: Sequence[float]) -> None:
    decay, step_size, beta1, weight1, beta2, weight2 = numbers
    exp_avg = state[0]
    sign = (exp_avg * beta1).add_(g * weight1).sign_()
    exp_avg.mul_(beta2).add_(g * weight2)
    p.mul_(decay).add_(sign.mul_(step_size))


_UPDATES: Final[dict[str, Callable[..., None]]] = {
    "adam": _update_adam,
    "sgd": _update_sgd,
    "adagrad": _update_adagrad,
    "lion": _update_lion,
}


def _root(square: Tensor) -> Tensor:
    """Return the correctly rounded square root: PyTorch's own in float32 may be one unit off."""
    return square.double().sqrt_().to(torch.float32)


def _in_float32(function: Callable[[Tensor], Tensor], value: float) -> float:
    return function(torch.tensor(value, dtype=torch.float32)).item()


# ------------------------------------------------------------------------------ checks


def _check_bucket(bucket: Bucket, state: dict[str, Tensor]) -> None:
    size = bucket.param.numel()
    _check_tensor("param", bucket.param, size, (torch.float32,))
    _check_tensor("grad", bucket.grad, size, (torch.float32, *_HALVES))
    tensors = {"param": bucket.param, "grad": bucket.grad, **state}
    for name, tensor in state.items():
        _check_tensor(name, tensor, size, (torch.float32,))
    if bucket.copy is not None:
        _check_tensor("copy", bucket.copy, size, _HALVES)
        tensors["copy"] = bucket.copy
    places = sorted((tensor.data_ptr(), name) for name, tensor in tensors.items())
    for (begin, first), (end, second) in itertools.pairwise(places):
        if begin + tensors[first].nbytes > end:
            raise ValueError(f"{first} and {second} share memory")


def _check_tensor(name: str, tensor: Any, size: int, dtypes: Sequence[torch.dtype]) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}, expected a tensor")
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(dtype) for dtype in dtypes)
        raise TypeError(f"{name} has dtype {tensor.dtype}, expected {wanted}")
    if tensor.device.type != "cpu":
        raise ValueError(f"{name} is on {tensor.device}, expected the CPU")
    if tuple(tensor.shape) != (size,):
        raise ValueError(f"{name} has shape {list(tensor.shape)}, expected [{size}]")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} is not contiguous")


def _check_step(step: int) -> None:
    if step < 1:
        raise ValueError(f"step is {step}, expected 1 or more")


def _check_not_negative(**numbers: float) -> None:
    for name, number in numbers.items():
        if not number >= 0:
            raise ValueError(f"{name} is {number}, expected 0 or more")


def _check_betas(betas: tuple[float, float]) -> None:
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas are {betas}, expected two numbers from 0 to below 1")
