"""Models that are initialised in every way that there is, for tests of building them partitioned."""

from typing import Any

import torch
from torch import nn


class EveryInit(nn.Module):
    """One parameter for each function of ``torch.nn.init``, and some written to by hand."""

    def __init__(self) -> None:
        super().__init__()
        calls: dict[str, tuple[Any, ...]] = {
            "uniform_": (-2.0, 3.0),
            "normal_": (1.0, 0.1),
            "trunc_normal_": (),
            "constant_": (0.5,),
            "ones_": (),
            "zeros_": (),
            "eye_": (),
            "xavier_uniform_": (),
            "xavier_normal_": (),
            "kaiming_uniform_": (),
            "kaiming_normal_": (),
            "orthogonal_": (),
            "sparse_": (0.3,),
        }
        for name, args in calls.items():
            weight = nn.Parameter(torch.empty(6, 9))
            setattr(self, name, weight)
            getattr(nn.init, name)(weight, *args)
        self.dirac_ = nn.Parameter(torch.empty(4, 4, 3))
        nn.init.dirac_(self.dirac_)
        self.scalar = nn.Parameter(torch.randn(()))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.numbers = nn.Parameter(torch.arange(11), requires_grad=False)
        self.complex = nn.Parameter(torch.randn(5, dtype=torch.complex64))
        self.rows = nn.Parameter(torch.randn(8, 4).t())
        self.written = nn.Parameter(torch.empty(7, 5))
        self._write()

    def _write(self) -> None:
        data = self.written.data
        data.normal_()
        data[0] = 4.0
        self.written.data[1] = self.rows.data[0, :5]
        self.written.data[...] *= 2.0
        self.written.data.numpy()[2] = 7.0  # past every version counter
        with torch.no_grad():
            self.written[3:5] = 1.0
            self.written.mul_(0.5)
            self.written += self.scalar
            self.written.view(-1)[::7].zero_()
            self.written.detach().t()[4].copy_(torch.randn(7))
        data[6] = -1.0  # a view that is older than all of that
        self.rows.data = torch.randn(4, 8)
        self.scalar.data.fill_(2.5)


class Mixture(nn.Module):
    """Layers of torch.nn with resets of their own, tied weights, copies of modules."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, width, padding_idx=0)
        layer = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2)
        self.norm = nn.Sequential(nn.Linear(width, 24), nn.GELU(), nn.Linear(24, width))
        self.extra = nn.ParameterList([torch.randn(width), torch.ones(width)])
        self.head = nn.Linear(width, 50, bias=False)
        self.head.weight = self.embed.weight
        self.apply(self._init)
        self.initialised = EveryInit()

    @staticmethod
    def _init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(mean=0.0, std=0.2)
            if module.bias is not None:
                module.bias.data.zero_()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.body(self.embed(tokens)) * self.extra[0] + self.extra[1])
        return self.head(hidden)  # type: ignore[no-any-return]


def gpt2() -> nn.Module:
    """A tiny GPT-2; its head is tied to its embedding."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    return GPT2LMHeadModel(_plain(config))


def llama() -> nn.Module:
    """A tiny Llama, tied too."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=16,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(_plain(config))


def _plain(config: Any) -> Any:
    config.use_cache = False
    config.attn_pdrop = config.embd_pdrop = config.resid_pdrop = 0.0
    return config


MODELS = {"mixture": Mixture, "gpt2": gpt2, "llama": llama}


def make(name: str, seed: int = 3) -> nn.Module:
    """The model, from a random stream that begins at ``seed``."""
    torch.manual_seed(seed)
    return MODELS[name]()


def tokens(rows: int = 4) -> torch.Tensor:
    """Input for any of the models, ``[rows, 8]``."""
    return torch.randint(1, 50, (rows, 8), generator=torch.Generator().manual_seed(0))


def logits(output: Any) -> torch.Tensor:
    """What a model says, whether or not transformers has wrapped it."""
    found: torch.Tensor = getattr(output, "logits", output)
    return found


def differing(plain: nn.Module, partitioned: nn.Module) -> list[str]:
    """Names in the state of either model whose values are not equal, bit for bit. Collective."""
    ours, theirs = partitioned.state_dict(), plain.state_dict()
    assert list(ours) == list(theirs)
    return [
        name
        for name, value in theirs.items()
        if value.dtype is not ours[name].dtype
        or value.stride() != ours[name].stride()
        or not torch.equal(value, ours[name])
    ]
