"""What the planner cannot count it estimates: no program is refused for an operator, a dtype or a size."""

import copy
import logging
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import ranks
from graphs import traced
from training import (
    Run,
    against_unsharded,
    assert_same_training,
    mean_over_ranks,
    mine,
    relative,
    world,
)
from zero_compile.analysis import costs
from zero_compile.analysis.costs import graph_cost
from zero_compile.analysis.sizes import traced_sizes

# ------------------------------------------------------------------------------ formulas


def _cached(x: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(x, torch.cat([k, x], 2), torch.cat([v, x], 2))


def test_a_formula_that_cannot_compare_symbols_counts_at_the_traced_sizes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    inputs = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 4, 8), torch.randn(1, 2, 4, 8)
    with torch.fx.experimental._config.patch(
        use_duck_shape=False
    ):  # keys and values of unlike lengths
        dynamic = make_fx(_cached, tracing_mode="symbolic")(*inputs)
    with caplog.at_level(logging.DEBUG, "zero_compile"):
        formula = graph_cost(dynamic.graph)
    assert formula.at(traced_sizes(dynamic.graph)) == graph_cost(traced(_cached, *inputs).graph)
    lines = [r.message for r in caplog.records if r.name == costs.__name__]
    assert len(lines) == 1
    assert "Cannot count the operations of %_scaled_dot_product" in lines[0]


def test_where_a_formula_fails_an_operator_counts_its_outputs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def formula(*_: Any, **__: Any) -> int:
        raise ValueError("no such shape")

    monkeypatch.setitem(costs.flop_registry, torch.ops.aten.mm, formula)
    gm = traced(torch.mm, torch.randn(3, 4), torch.randn(4, 5))
    assert graph_cost(gm.graph).flops == 15


# ------------------------------------------------------------------------------ programs


@torch.library.custom_op("odd_programs::positive", mutates_args=())
def _positive(x: torch.Tensor) -> torch.Tensor:
    return x[x[:, 0] > 0]


@_positive.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(torch.library.get_ctx().new_dynamic_size(), x.shape[1])


@torch.library.custom_op("odd_programs::fill", mutates_args=("out",))
def _fill(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x + 1)


def _with_custom(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    _fill(x.detach(), out)
    return torch.cat([x * out, _positive(x.detach())])


def _with_while(x: torch.Tensor) -> torch.Tensor:
    count, halved = torch.while_loop(
        lambda n, _: n < 3,
        lambda n, y: (n + 1, y * 0.5),
        (torch.zeros((), dtype=torch.int64), x.detach().clone()),
    )
    return x + halved * count


def _with_scaled_mm(x: torch.Tensor) -> torch.Tensor:
    narrow, one = x.detach().to(torch.float8_e4m3fn), torch.ones(())
    weight = torch.eye(16).to(torch.float8_e4m3fn).t()
    return x + torch._scaled_mm(narrow, weight, one, one, out_dtype=torch.float32)


#: What a model computes between its two linears; row by row, so that the ranks' parts make up the whole.
PROGRAMS: dict[str, Any] = {
    "rows that the data chooses": lambda x: x[(x[:, 0] > 0).nonzero().squeeze(1)],
    "repeated rows": lambda x: x.repeat_interleave((x[:, 0] > 0).long() + 1, 0),
    "custom operators, one with a size of its own": _with_custom,
    "a branch": lambda x: torch.cond(x.abs().sum() > 0, torch.sin, torch.cos, (x,)),
    "a loop": _with_while,
    "complex numbers": lambda x: torch.fft.irfft(torch.fft.rfft(x) * 1j, n=16),
    "float8": _with_scaled_mm,
    "integers and truth values": lambda x: x * (x > 0) + (x.abs() * 9).to(torch.uint16),
    "fake quantisation": lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127),
}


class Odd(nn.Module):
    """Two linears and a program between them."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.program = PROGRAMS[name]
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.program(self.first(x)))


def _train(name: str, options: dict[str, Any]) -> tuple[Run, Run]:
    torch.manual_seed(0)
    batches = [(torch.randn(8, 16),) for _ in range(2)]
    unbacked = {"capture_dynamic_output_shape_ops": True, "capture_scalar_outputs": True}
    with torch._dynamo.config.patch(unbacked):
        plain, sharded = against_unsharded(
            Odd(name),
            batches,
            lambda model, x: model(x).square().sum() / x.shape[0],
            lambda model: torch.optim.SGD(model.parameters(), lr=1e-2),
            fullgraph=True,
            options=options,
        )
    return plain.bare(), sharded.bare()


@pytest.mark.parametrize("name", PROGRAMS)
def test_odd_programs_train_as_unsharded(name: str) -> None:
    for plain, sharded in ranks.run(2, _train, name, {"device_memory": "1GiB"}):
        assert_same_training(plain, sharded)


# ------------------------------------------------------------------------------ generation


def _llama() -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    words = {"vocab_size": 50, "eos_token_id": 2, "pad_token_id": 0, "bos_token_id": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32}
    torch.manual_seed(0)
    return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, **words, **heads, initializer_range=0.3))


_WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "top_k": 20},
    "beams": {"do_sample": False, "num_beams": 2},
}


def _texts(model: Any, words: torch.Tensor, ways: Sequence[str]) -> list[list[int]]:
    """With a cache: of this rank's rows, whose prompts are longer on each rank."""
    prompt, found = mine((words,))[0][:, : 3 + world()[0]], []
    for way in ways:
        torch.manual_seed(1)
        mask, five = torch.ones_like(prompt), {"max_new_tokens": 5, "min_new_tokens": 5}
        found += model.generate(prompt, attention_mask=mask, **five, **_WAYS[way]).tolist()
    return found


def _generate(in_place: bool, ways: Sequence[str]) -> list[tuple[float, float, Any, Any]]:
    plain = _llama()
    model: Any = copy.deepcopy(plain)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
    if in_place:
        model.compile(backend="zero3", dynamic=True)
    else:
        model = torch.compile(model, backend="zero3")
    found = []
    for _ in range(2):
        words = torch.randint(3, 50, (4, 6))
        losses = []
        for each, optimizer, own in zip(
            (plain, model), optimizers, (words, *mine((words,))), strict=True
        ):
            loss = each(input_ids=own, labels=own).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss)
        found.append(
            (
                float(losses[0].detach()),
                mean_over_ranks(losses[1]),
                _texts(plain, words, ways),
                _texts(model, words, ways),
            )
        )
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("in_place", "ways"), [(False, list(_WAYS)), (True, ["greedy", "sampled"])]
)
def test_transformers_generate_between_steps_says_what_it_says_unsharded(
    in_place: bool, ways: list[str]
) -> None:
    for steps in ranks.run(2, _generate, in_place, ways):
        for plain, sharded, expected, said in steps:
            assert relative([plain], [sharded]) < 1e-5
            assert said == expected
