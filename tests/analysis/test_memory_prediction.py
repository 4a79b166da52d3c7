"""The predicted memory of a training step against what the allocator hands out, on five models.

One process on a fake process group of two: values are garbage, memory is real. Everything a step
allocates goes through torch's CPU allocator here, whose every allocation the profiler records.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import nn
from torch.fx import GraphModule

import zero_compile
from graphs import copy_of
from peaks import peak_of
from zero_compile.analysis.liveness import Liveness
from zero_runtime import compat
from zero_runtime.comm import transports
from zero_runtime.ir.timeline import Category
from zero_runtime.sharding import bucket
from zoo_plain import ConvNet

pytestmark = pytest.mark.generated_kernels

WORDS, WIDTH, LENGTH, ROWS = 512, 128, 128, 4
#: What the prediction is about: values, gathered parameters, and gradients that are whole.
COMPUTED = (Category.ACTIVATIONS, Category.GATHERED, Category.GRADIENTS)


# ------------------------------------------------------------------------------ models


class Case(NamedTuple):
    """A module that returns its loss, what it is called with, and how: sizes left open, bfloat16 autocast."""

    model: nn.Module
    inputs: tuple[torch.Tensor, ...]
    dynamic: bool | None = None
    autocast: bool = False


class Own(nn.Module):
    """A transformers model; returns its own loss alone."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.inner(input_ids=words, labels=words).loss
        return loss


class Mlp(nn.Module):
    """A chain of linears."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean()


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        heads = [t.unflatten(-1, (4, -1)).transpose(1, 2) for t in parts]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """A block between an embedding and logits of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.block = Block()
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.block(self.embedding(words)))
        return F.cross_entropy(logits.flatten(0, 1), words.flatten())


def _words() -> tuple[torch.Tensor, ...]:
    return (torch.randint(5, WORDS, (ROWS, LENGTH)),)


def _sizes(config: Any, **sizes: Any) -> Any:
    shared = {"vocab_size": WORDS, "hidden_size": WIDTH, "num_hidden_layers": 1}
    return config(**shared, num_attention_heads=4, max_position_embeddings=LENGTH, **sizes)


def _mlp() -> Case:
    return Case(Mlp(), (torch.randn(4096, 256),))


def _gpt() -> Case:
    return Case(Gpt(), _words())


def _llama() -> Case:
    config = _sizes(hf.LlamaConfig, intermediate_size=344, num_key_value_heads=2, use_cache=False)
    return Case(Own(hf.LlamaForCausalLM(config)), _words())


def _bert() -> Case:
    config = _sizes(hf.BertConfig, intermediate_size=512, attention_probs_dropout_prob=0.0)
    return Case(Own(hf.BertForMaskedLM(config)), _words())


def _convnet() -> Case:
    return Case(ConvNet(), (torch.randn(32, 3, 64, 64), torch.randint(0, 10, (32,))))


def _convnet_of_one_image() -> Case:
    return Case(ConvNet(), (torch.randn(1, 3, 64, 64), torch.randint(0, 10, (1,))))


def _dynamic_mlp() -> Case:
    return _mlp()._replace(dynamic=True)


def _dynamic_gpt() -> Case:
    return _gpt()._replace(dynamic=True)


def _dynamic_llama() -> Case:
    return _llama()._replace(dynamic=True)


def _dynamic_convnet() -> Case:
    return _convnet()._replace(dynamic=True)


def _autocast_mlp() -> Case:
    return _mlp()._replace(autocast=True)


# ------------------------------------------------------------------------------ measuring


class Allocations:
    """Directs flat buffers to torch's allocator: those of gathers, or all of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.everything = False
        self._gathering = False
        self._flat, self._start = bucket.flat_buffer, bucket.Bucket.start_gather
        monkeypatch.setattr(bucket, "flat_buffer", self._buffer)
        monkeypatch.setattr(bucket.Bucket, "start_gather", lambda *a: self._gather(*a))
        monkeypatch.setattr(transports.NativeTransport, "reduce_scatter", _hold_until_the_wait)

    def _buffer(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if self.everything or self._gathering:
            return torch.empty(numel, dtype=dtype, device=device)
        return self._flat(numel, dtype, device)

    def _gather(self, own: bucket.Bucket, dtype: torch.dtype) -> bucket.Flight:
        self._gathering = True
        try:
            return self._start(own, dtype)
        finally:
            self._gathering = False


def _hold_until_the_wait(_: Any, packed: torch.Tensor, shard: torch.Tensor) -> Any:
    """A reduction's memory as a real transport has it: the fake group would drop it at once."""
    received = bucket.flat_buffer(packed.numel(), packed.dtype, packed.device)
    return transports._PeerReduction(0, packed=packed, received=received, shard=shard)


class Found(NamedTuple):
    """Bytes at the peak of a step, and the step's predicted liveness."""

    computed: int
    everything: int
    step: Liveness


def _run(case: Case, monkeypatch: pytest.MonkeyPatch) -> Found:
    graphs: list[GraphModule] = []
    compile_inner = compat.compile_fx_inner

    def spy(gm: GraphModule, *args: Any, **kwargs: Any) -> Any:
        graphs.append(copy_of(gm))
        return compile_inner(gm, *args, **kwargs)

    monkeypatch.setattr(compat, "compile_fx_inner", spy)
    allocations = Allocations(monkeypatch)
    options = {"bucket_bytes": 1 << 18}
    compiled = torch.compile(case.model, backend="zero3", options=options, dynamic=case.dynamic)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
            loss = compiled(*case.inputs)
        loss.backward()

    peaks = []
    for everything in (False, True):
        allocations.everything = everything
        step()  # compile, or let go of what was allocated elsewhere
        case.model.zero_grad()
        peaks.append(peak_of(step))
        case.model.zero_grad()
    plans = zero_compile.plans(case.model)
    forward, backward = (
        Liveness.of(gm.graph, plan.buckets, kept=set(plan.kept))
        for gm, plan in zip(graphs, plans, strict=True)
    )
    return Found(*peaks, Liveness.step(forward, backward).evaluate())


def _without_shards(step: Liveness) -> Liveness:
    """Reduced gradients aside: they are counted with everything."""
    kept = [s for s in step.storages if "reduce_scatter_wait" not in s.name]
    return Liveness(step.names, tuple(kept), step.dependencies)


STATIC = (_mlp, _gpt, _llama, _bert, _convnet, _convnet_of_one_image)
DYNAMIC = (_dynamic_mlp, _dynamic_gpt, _dynamic_llama, _dynamic_convnet)
AUTOCAST = (_autocast_mlp,)


@pytest.mark.parametrize("make", [*STATIC, *DYNAMIC, *AUTOCAST], ids=lambda f: f.__name__)
def test_the_predicted_peak_is_the_measured_one(
    make: Callable[[], Case],
    fake_group: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    fake_group(2)
    found = _run(make(), monkeypatch)
    computed = _without_shards(found.step).peak(COMPUTED)
    everything = found.step.peak()
    print(
        f"{make.__name__}: {computed.bytes} predicted, {found.computed} measured at {computed.node}"
    )
    print(f"  with reductions: {everything.bytes} predicted, {found.everything} measured")
    most = 1.1 if make is _bert else 1.05  # predicted too high, see docs/scheduling.md
    assert 0.95 * found.computed <= computed.bytes <= most * found.computed
    assert 0.95 * found.everything <= everything.bytes <= most * found.everything
