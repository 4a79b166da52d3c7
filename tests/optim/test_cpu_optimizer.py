"""Tests of zero_runtime.optim.cpu_optimizer: every kernel against torch.optim, and against each other."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch

from zero_runtime.memory import native
from zero_runtime.optim import cpu_optimizer
from zero_runtime.optim.cpu_optimizer import (
    AdagradOptions,
    AdamOptions,
    Bucket,
    Check,
    Isa,
    LionOptions,
    SgdOptions,
    adagrad_step,
    adam_step,
    available_isas,
    has_non_finite,
    lion_step,
    sgd_step,
)

Options = AdamOptions | SgdOptions | AdagradOptions | LionOptions

SIZES = [0, 1, 15, 16, 17, 1023, 1025, 100_003]
STEPS = 10
ISAS: list[Isa] = ["avx512", "avx2", "scalar", "torch"]
HALVES = [torch.bfloat16, torch.float16]
DTYPES = [torch.float32, *HALVES]

VARIANTS: dict[str, Options] = {
    "adam": AdamOptions(),
    "adam-decay": AdamOptions(weight_decay=0.1),
    "adam-amsgrad": AdamOptions(amsgrad=True, betas=(0.9, 0.5)),
    "adam-maximize": AdamOptions(maximize=True, weight_decay=0.1),
    "adam-low-betas": AdamOptions(lr=0.1, betas=(0.3, 0.8), eps=1e-3),
    "adamw": AdamOptions(weight_decay=0.01, decoupled_weight_decay=True),
    "adamw-all": AdamOptions(
        lr=0.05,
        betas=(0.5, 0.9),
        weight_decay=0.3,
        amsgrad=True,
        maximize=True,
        decoupled_weight_decay=True,
    ),
    "sgd": SgdOptions(lr=0.1),
    "sgd-decay": SgdOptions(lr=0.1, weight_decay=0.1, maximize=True),
    "sgd-momentum": SgdOptions(lr=0.1, momentum=0.9),
    "sgd-dampening": SgdOptions(lr=0.1, momentum=0.7, dampening=0.4, weight_decay=0.1),
    "sgd-nesterov": SgdOptions(lr=0.1, momentum=0.9, nesterov=True, maximize=True),
    "adagrad": AdagradOptions(),
    "adagrad-all": AdagradOptions(lr=0.1, lr_decay=0.1, eps=1e-3, weight_decay=0.1, maximize=True),
    "lion": LionOptions(),
    "lion-all": LionOptions(lr=0.01, betas=(0.6, 0.8), weight_decay=0.1, maximize=True),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors gain nothing from threads, and on a busy machine lose much."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Isa:
    """Each way of computing that this machine has, in turn."""
    chosen: Isa = request.param
    if chosen not in available_isas():
        pytest.skip(f"{chosen} is not available here")
    return chosen


@dataclass
class Run:
    """A bucket, its state, and its hyper-parameters under way."""

    options: Options
    param: torch.Tensor
    state: list[torch.Tensor]
    steps: int = 0

    def step(self, grad: torch.Tensor, isa: Isa | None = None, **rest: Any) -> bool:
        """Take the next step; `rest` may hold what a bucket and a step take besides."""
        self.steps += 1
        how = {name: rest.pop(name) for name in ("check",) if name in rest}
        return self.call(Bucket(self.param, grad, **rest), {**how, "isa": isa})

    def call(self, bucket: Bucket, how: dict[str, Any]) -> bool:
        options, state = self.options, self.state
        if isinstance(options, AdamOptions):
            largest = state[2] if options.amsgrad else None
            how["max_exp_avg_sq"] = largest
            return adam_step(bucket, state[0], state[1], self.steps, options, **how)
        if isinstance(options, SgdOptions):
            buffer = state[0] if options.momentum else None
            return sgd_step(bucket, buffer, self.steps, options, **how)
        if isinstance(options, AdagradOptions):
            return adagrad_step(bucket, state[0], self.steps, options, **how)
        return lion_step(bucket, state[0], options, **how)

    def tensors(self) -> list[torch.Tensor]:
        return [self.param, *self.state]


def start(options: Options, size: int) -> Run:
    param = torch.randn(size, generator=torch.Generator().manual_seed(size))
    return Run(options, param, [torch.zeros(size) for _ in range(3)])


@functools.cache
def gradients(size: int, dtype: torch.dtype = torch.float32, count: int = STEPS) -> torch.Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(1)).to(dtype)


class ReferenceLion(torch.optim.Optimizer):
    """Lion as its authors publish it for PyTorch (github.com/google/automl, lion_pytorch.py)."""

    def __init__(self, params: Sequence[torch.Tensor], **defaults: Any) -> None:
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                grad = -p.grad if group["maximize"] else p.grad
                exp_avg = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                update = exp_avg * beta1 + grad * (1 - beta1)
                p.add_(update.sign_(), alpha=-group["lr"])
                exp_avg.mul_(beta2).add_(grad, alpha=1 - beta2)


def reference(options: Options, param: torch.Tensor) -> torch.optim.Optimizer:
    """Return the single-tensor optimizer that `options` describe."""
    numbers = {name: getattr(options, name) for name in options.__slots__}
    kinds = {
        AdamOptions: torch.optim.Adam,
        SgdOptions: torch.optim.SGD,
        AdagradOptions: torch.optim.Adagrad,
    }
    if isinstance(options, LionOptions):
        return ReferenceLion([param], **numbers)
    return kinds[type(options)]([param], foreach=False, fused=False, **numbers)


class Expected(NamedTuple):
    """Where torch.optim ends; `scale` is the largest magnitude each parameter had on the way."""

    param: torch.Tensor
    state: list[torch.Tensor]
    scale: torch.Tensor


@functools.cache
def train_reference(name: str, size: int) -> Expected:
    options = VARIANTS[name]
    own = torch.nn.Parameter(start(options, size).param)
    optimizer = reference(options, own)
    scale = own.detach().abs()
    for grad in gradients(size):
        own.grad = grad.clone()
        optimizer.step()
        scale = torch.maximum(scale, own.detach().abs())
    return Expected(own.detach(), state_of(options, optimizer.state[own]), scale)


def state_of(options: Options, state: dict[str, Any]) -> list[torch.Tensor]:
    names = {
        AdamOptions: ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"],
        SgdOptions: ["momentum_buffer"],
        AdagradOptions: ["sum"],
        LionOptions: ["exp_avg"],
    }
    return [state[name] for name in names[type(options)] if state.get(name) is not None]


def assert_close(actual: torch.Tensor, expected: torch.Tensor, scale: torch.Tensor) -> None:
    """Within 1e-6 of the scale, which differs from the result where a sum cancels."""
    error = (actual - expected).abs()
    assert bool((error <= 1e-6 * scale).all()), f"off by {(error / scale).max()}"


def assert_same(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


# ------------------------------------------------------------------------------ formulas


@pytest.mark.parametrize("name", VARIANTS)
def test_ten_steps_are_those_of_torch(isa: Isa, name: str) -> None:
    for size in SIZES:
        run, expected = start(VARIANTS[name], size), train_reference(name, size)
        for grad in gradients(size):
            assert not run.step(grad, isa)
        assert_close(run.param, expected.param, expected.scale)
        for one, other in zip(run.state, expected.state, strict=False):
            # Averages of gradients whose numbers are near 1.
            assert_close(one, other, other.abs().clamp_min(0.5))


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_ways_of_computing_agree_to_the_bit(name: str, dtype: torch.dtype) -> None:
    size, outcomes = 70_001, []
    for isa in available_isas():
        run, copy = start(VARIANTS[name], size), torch.empty(size, dtype=torch.bfloat16)
        for grad in gradients(size, dtype, count=3):
            run.step(grad, isa, copy=copy, unscale=1 / 3, clip=0.7)
        outcomes.append([*run.tensors(), copy])
    for outcome in outcomes[1:]:
        assert_same(outcome, outcomes[0])


@pytest.mark.parametrize("threads", [2, 3, 5])
def test_threads_do_not_change_the_result(isa: Isa, threads: int) -> None:
    size = 5 * 65536 + 77
    run, whole = start(AdamOptions(), size), start(AdamOptions(), size)
    grad = gradients(size, count=1)[0]
    whole.step(grad, isa)
    torch.set_num_threads(threads)
    run.step(grad, isa)
    assert_same(run.tensors(), whole.tensors())
    bad = grad.clone()
    bad[-1] = torch.nan
    assert has_non_finite(bad, isa=isa)
    assert run.step(bad, isa, check="report")


def test_a_part_of_a_bucket_can_be_updated_alone(isa: Isa) -> None:
    grad = gradients(1000, count=1)[0]
    run, whole = start(AdamOptions(), 1000), start(AdamOptions(), 1000)
    whole.step(grad, isa)
    for part in (slice(0, 333), slice(333, 1000)):
        views = [tensor[part] for tensor in run.state]
        Run(run.options, run.param[part], views).step(grad[part], isa)
    assert_same(run.tensors(), whole.tensors())


def test_parameters_that_require_gradients_are_updated(isa: Isa) -> None:
    param = torch.nn.Parameter(torch.ones(4))
    sgd_step(Bucket(param, torch.ones(4)), None, 1, SgdOptions(lr=0.5), isa=isa)
    assert param.tolist() == [0.5] * 4
    assert param.is_leaf


# ------------------------------------------------------------------------------ gradients


@pytest.mark.parametrize("name", ["adamw-all", "sgd-nesterov", "adagrad-all", "lion-all"])
@pytest.mark.parametrize("dtype", HALVES)
def test_gradients_in_16_bits_are_widened(isa: Isa, name: str, dtype: torch.dtype) -> None:
    for size in SIZES:
        run, wide = start(VARIANTS[name], size), start(VARIANTS[name], size)
        for grad in gradients(size, dtype, count=3):
            run.step(grad, isa)
            wide.step(grad.float(), isa)
        assert_same(run.tensors(), wide.tensors())


@pytest.mark.parametrize("dtype", HALVES)
def test_every_16_bit_gradient_is_read_exactly(isa: Isa, dtype: torch.dtype) -> None:
    grad = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
    grad = grad[grad.isfinite()]
    param = torch.zeros(grad.numel())
    sgd_step(Bucket(param, grad), None, 1, SgdOptions(lr=1.0), isa=isa)
    assert torch.equal(param, -grad.float())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["adam-maximize", "sgd-momentum", "adagrad-all", "lion"])
def test_factors_are_those_of_a_gradient_scaled_first(
    isa: Isa, name: str, dtype: torch.dtype
) -> None:
    run, scaled = start(VARIANTS[name], 2_049), start(VARIANTS[name], 2_049)
    for grad in gradients(2_049, dtype, count=3):
        run.step(grad, isa, unscale=1 / 1023, clip=0.3)
        scaled.step(grad.float() * (1 / 1023) * 0.3, isa)
    assert_same(run.tensors(), scaled.tensors())


# ------------------------------------------------------------------------------ the finite check


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_bad_element_is_found_anywhere(isa: Isa, dtype: torch.dtype, bad: float) -> None:
    for size in SIZES[1:-1]:
        for place in {0, size // 2, size - 1}:
            grad = gradients(size, dtype, count=1)[0].clone()
            assert not has_non_finite(grad, isa=isa)
            grad[place] = bad
            assert has_non_finite(grad, isa=isa)
            assert start(SgdOptions(), size).step(grad, isa, check="report")


@pytest.mark.parametrize("name", ["adam-amsgrad", "sgd-momentum", "adagrad", "lion"])
def test_a_check_first_leaves_everything_as_it_was(isa: Isa, name: str) -> None:
    run, copy = start(VARIANTS[name], 100_003), torch.ones(100_003, dtype=torch.float16)
    grad = gradients(100_003, count=1)[0].clone()
    assert not run.step(grad, isa, check="first", copy=copy)
    before = [tensor.clone() for tensor in (*run.tensors(), copy)]
    grad[77_777] = torch.inf
    assert run.step(grad, isa, check="first", copy=copy)
    assert_same([*run.tensors(), copy], before)


@pytest.mark.parametrize("check", ["no", "report"])
def test_without_a_check_first_the_update_is_made(isa: Isa, check: Check) -> None:
    grad = torch.tensor([1.0, torch.nan, torch.inf])
    param = torch.zeros(3)
    found = sgd_step(Bucket(param, grad), None, 1, SgdOptions(lr=1.0), check=check, isa=isa)
    assert found == (check == "report")
    assert param[0] == -1
    assert param[1].isnan()
    assert param[2] == -torch.inf


def test_the_largest_finite_numbers_pass_the_check(isa: Isa) -> None:
    for dtype in DTYPES:
        grad = torch.full((100,), torch.finfo(dtype).max, dtype=dtype)
        assert not has_non_finite(grad, isa=isa)
        # Factors may overflow afterwards: what is checked is the gradient as given.
        assert not start(SgdOptions(), 100).step(grad, isa, check="report", unscale=1e38)


def test_amsgrad_keeps_nan(isa: Isa) -> None:
    options = AdamOptions(amsgrad=True)
    run = Run(options, torch.zeros(40), [torch.zeros(40) for _ in range(3)])
    run.step(torch.full((40,), torch.nan), isa)
    run.state[1].fill_(1)
    run.step(torch.ones(40), isa)
    assert bool(run.state[2].isnan().all())


# ------------------------------------------------------------------------------ copies


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", ["adamw", "sgd", "adagrad", "lion"])
def test_copies_are_the_parameter_rounded(isa: Isa, name: str, dtype: torch.dtype) -> None:
    for size in SIZES:
        run, copy = start(VARIANTS[name], size), torch.empty(size, dtype=dtype)
        for grad in gradients(size, count=2):
            run.step(grad, isa, copy=copy)
            assert_same([copy], [run.param.to(dtype)])


@pytest.mark.parametrize("dtype", HALVES)
def test_numbers_of_all_magnitudes_are_rounded_alike(isa: Isa, dtype: torch.dtype) -> None:
    bits = torch.randint(-(2**31), 2**31, (99_999,), generator=torch.Generator().manual_seed(0))
    param = bits.to(torch.int32).view(torch.float32)
    param = param[~param.isnan()]
    # Halfway between two numbers of 16 bits, and overflow.
    ties = torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-11, 1 + 3 * 2.0**-11, 65520.0])
    param = torch.cat([param, ties, -ties, torch.tensor([2.0**-25, 3 * 2.0**-25, 3.4e38])])
    copy = torch.empty(param.numel(), dtype=dtype)
    bucket = Bucket(param, torch.zeros_like(param), copy)
    sgd_step(bucket, None, 1, SgdOptions(lr=0.0), isa=isa)
    assert_same([copy], [param.to(dtype)])


# ------------------------------------------------------------------------------ errors


def good() -> Bucket:
    return Bucket(torch.ones(8), torch.ones(8), torch.ones(8, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"param": torch.ones(8).double()}, TypeError, "param has dtype torch.float64, expected"),
        ({"grad": torch.ones(8).int()}, TypeError, "grad has .*float32 or .*bfloat16 or .*float16"),
        ({"copy": torch.ones(8)}, TypeError, "copy has dtype torch.float32"),
        ({"grad": [1.0]}, TypeError, "grad is a list, expected a tensor"),
        ({"grad": torch.ones(7)}, ValueError, r"grad has shape \[7\], expected \[8\]"),
        ({"param": torch.ones(2, 4)}, ValueError, r"param has shape \[2, 4\], expected \[8\]"),
        ({"grad": torch.ones(16)[::2]}, ValueError, "grad is not contiguous"),
        ({"grad": torch.ones(8, device="meta")}, ValueError, "grad is on meta, expected the CPU"),
    ],
)
def test_unfit_tensors_are_named(
    isa: Isa, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    bucket, state = replace(good(), **changes), [torch.ones(8), torch.ones(8)]
    with pytest.raises(error, match=message):
        adam_step(bucket, *state, 1, AdamOptions(), isa=isa)
    assert all(bool((tensor == 1).all()) for tensor in state)


def test_unfit_state_is_named(isa: Isa) -> None:
    for tensor, error in ((torch.ones(8).half(), TypeError), (torch.ones(9), ValueError)):
        with pytest.raises(error, match="exp_avg_sq has"):
            adam_step(good(), torch.ones(8), tensor, 1, AdamOptions(), isa=isa)
    bucket = good()
    with pytest.raises(ValueError, match="share memory"):
        lion_step(bucket, bucket.param, LionOptions(), isa=isa)
    shared = torch.ones(12)
    with pytest.raises(ValueError, match="exp_avg and exp_avg_sq share memory"):
        adam_step(good(), shared[:8], shared[4:], 1, AdamOptions(), isa=isa)


def test_state_is_given_where_it_is_used_and_only_there() -> None:
    ones = torch.ones(8)
    with pytest.raises(ValueError, match="max_exp_avg_sq must be given with amsgrad"):
        adam_step(good(), ones, ones.clone(), 1, AdamOptions(amsgrad=True))
    with pytest.raises(ValueError, match="and only then"):
        adam_step(good(), ones, ones.clone(), 1, AdamOptions(), max_exp_avg_sq=ones.clone())
    with pytest.raises(ValueError, match="momentum_buffer must be given with a momentum"):
        sgd_step(good(), None, 1, SgdOptions(momentum=0.9))
    with pytest.raises(ValueError, match="and only then"):
        sgd_step(good(), ones, 1, SgdOptions())


def test_unknown_words_and_steps_are_refused() -> None:
    wrong: Any = "perhaps"
    with pytest.raises(ValueError, match="check is 'perhaps', expected one of no, report, first"):
        lion_step(good(), torch.ones(8), LionOptions(), check=wrong)
    with pytest.raises(ValueError, match=r"isa 'perhaps' is not available here, only .*torch"):
        lion_step(good(), torch.ones(8), LionOptions(), isa=wrong)
    with pytest.raises(ValueError, match="step is 0, expected 1 or more"):
        adagrad_step(good(), torch.ones(8), 0, AdagradOptions())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AdamOptions(lr=-1), "lr is -1, expected 0 or more"),
        (lambda: AdamOptions(eps=float("nan")), "eps is nan"),
        (lambda: AdamOptions(betas=(0.9, 1.0)), r"betas are \(0.9, 1.0\)"),
        (lambda: SgdOptions(momentum=-0.1), "momentum is -0.1"),
        (lambda: SgdOptions(nesterov=True), "nesterov needs a momentum and no dampening"),
        (lambda: SgdOptions(momentum=0.9, dampening=0.1, nesterov=True), "nesterov needs"),
        (lambda: AdagradOptions(lr_decay=-1), "lr_decay is -1"),
        (lambda: LionOptions(weight_decay=-1), "weight_decay is -1"),
        (lambda: LionOptions(betas=(-0.1, 0.9)), "betas are"),
    ],
)
def test_hyper_parameters_out_of_range_are_refused(
    make: Callable[[], Options], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_without_the_extension_pytorch_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "AVAILABLE", False)
    available_isas.cache_clear()
    try:
        assert cpu_optimizer.available_isas() == ("torch",)
        param = torch.zeros(3)
        sgd_step(Bucket(param, torch.ones(3)), None, 1, SgdOptions(lr=1.0))
        assert param.tolist() == [-1.0] * 3
    finally:
        available_isas.cache_clear()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"param": torch.ones(8).double()}, "host_adam: param has dtype Double, expected float32"),
        ({"grad": torch.ones(8).int()}, "host_adam: grad has dtype Int, expected float32, "),
        ({"grad": torch.ones(9)}, "host_adam: grad has 9 elements, expected 8"),
        ({"state": [torch.ones(8)]}, "host_adam: 1 state tensors, expected 2 to 3"),
        ({"state": [torch.ones(8), torch.ones(16)[::2]]}, "host_adam: state 1 is not contiguous"),
        ({"copy": torch.ones(8)}, "host_adam: copy has dtype Float, expected bfloat16 or float16"),
        ({"coefficients": [1.0]}, "host_adam: 1 coefficients, expected 7"),
        ({"factors": [1.0]}, "host_adam: 1 factors, expected 3"),
        ({"check": 3}, "host_adam: check is 3"),
        ({"isa": 7}, "instruction set 7 is not available"),
    ],
)
def test_operators_check_their_arguments(changes: dict[str, Any], message: str) -> None:
    pytest.importorskip("zero_runtime._native")
    arguments = {
        "param": torch.ones(8),
        "grad": torch.ones(8),
        "state": [torch.ones(8), torch.ones(8)],
        "copy": None,
        "coefficients": [1.0] * 7,
        "factors": [1.0, 1.0, 0.0],
        "check": 0,
        "isa": -1,
    }
    with pytest.raises(RuntimeError, match=message):
        torch.ops.zero_native.host_adam(*{**arguments, **changes}.values())
