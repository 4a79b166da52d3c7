"""Tiny random models of many architectures, for comparisons of partitioned and unsharded training.

Everything is built from configuration classes in code; nothing is downloaded. No model draws random
numbers in its forward, and every row of a batch has as many valid labels as any other, so that the
mean of the ranks' losses is the loss of the whole batch. Where it cannot be (batch statistics, a
contrastive loss) the entry says ``same_rows``: every rank is given the whole batch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import transformers as hf
from torch import nn

Inputs = dict[str, torch.Tensor]
Loss = Callable[[Any, Inputs], torch.Tensor]

VOCABULARY, LENGTH, HIDDEN, LAYERS, HEADS, PIXELS, CLASSES = 100, 8, 16, 2, 4, 32, 10
IMAGE_TOKEN = 99
FIRST_WORD = 5  # below are padding and other special tokens


class Turn(NamedTuple):
    """One optimizer of a step: what it trains, and the loss."""

    parameters: Callable[[Any], list[nn.Parameter]]
    loss: Loss


def _compile(model: nn.Module, backend: str) -> Any:
    return torch.compile(model, backend=backend)


def _loss(model: Any, batch: Inputs) -> torch.Tensor:
    """The model computes its own loss, from the labels."""
    loss: torch.Tensor = model(**batch).loss
    return loss


def _all_parameters(model: nn.Module) -> list[nn.Parameter]:
    return list(model.parameters())


@dataclass(frozen=True)
class Entry:
    """One architecture."""

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[torch.Generator, int], Inputs]
    loss: Loss = _loss
    same_rows: bool = False
    """Every rank gets the whole batch: the loss of a batch is not the mean of its parts' losses."""
    bf16: bool = True
    """Whether the model runs under bfloat16 autocast at all."""
    turns: tuple[Turn, ...] = ()
    compile: Callable[[nn.Module, str], Any] = _compile

    @property
    def all_turns(self) -> tuple[Turn, ...]:
        """What one step consists of: without ``turns``, one over all parameters."""
        return self.turns or (Turn(_all_parameters, self.loss),)


# ------------------------------------------------------------------------------ batches


def _words(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randint(FIRST_WORD, IMAGE_TOKEN, shape, generator=generator)


def _text(generator: torch.Generator, rows: int) -> Inputs:
    return {
        "input_ids": _words(generator, rows, LENGTH),
        "attention_mask": torch.ones(rows, LENGTH, dtype=torch.long),
        "labels": _words(generator, rows, LENGTH),
    }


def _unmasked(generator: torch.Generator, rows: int) -> Inputs:
    ids = _words(generator, rows, LENGTH)
    return {"input_ids": ids, "labels": ids.clone()}


def _pixels(generator: torch.Generator, rows: int) -> torch.Tensor:
    return torch.randn(rows, 3, PIXELS, PIXELS, generator=generator)


def _images(generator: torch.Generator, rows: int) -> Inputs:
    labels = torch.randint(CLASSES, (rows,), generator=generator)
    return {"pixel_values": _pixels(generator, rows), "labels": labels}


def _spectrograms(generator: torch.Generator, rows: int) -> Inputs:
    return {
        "input_features": torch.randn(rows, 8, 4 * LENGTH, generator=generator),
        "labels": _words(generator, rows, LENGTH),
    }


def _waves(generator: torch.Generator, rows: int) -> Inputs:
    return {
        "input_values": torch.randn(rows, 400, generator=generator),
        "labels": _words(generator, rows, LENGTH // 2),
    }


def _pairs(generator: torch.Generator, rows: int) -> Inputs:
    return {
        "pixel_values": _pixels(generator, rows),
        "input_ids": _words(generator, rows, LENGTH),
        "attention_mask": torch.ones(rows, LENGTH, dtype=torch.long),
    }


def _captions(generator: torch.Generator, rows: int) -> Inputs:
    """Four image tokens, one for each patch, then words; only the words have labels."""
    text = _text(generator, rows)
    text["input_ids"][:, :4] = IMAGE_TOKEN
    text["labels"][:, :4] = -100
    return {"pixel_values": _pixels(generator, rows), **text}


def _captioned(generator: torch.Generator, rows: int) -> Inputs:
    return {"pixel_values": _pixels(generator, rows), **_text(generator, rows)}


# ------------------------------------------------------------------------------ transformers


def _adjusted(config: Any) -> Any:
    """Without dropout, and with weights large enough that every layer gets a gradient worth comparing."""
    for name, value in list(vars(config).items()):
        if isinstance(value, hf.PreTrainedConfig):
            _adjusted(value)
        elif "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
        elif name in ("initializer_range", "init_std"):
            setattr(config, name, 0.2)
    return config


def _hf(model: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    """A maker of ``transformers`` model ``model`` in train mode, without any dropout."""

    def make() -> nn.Module:
        made = getattr(hf, config)(**settings)
        built: nn.Module = getattr(hf, model)(_adjusted(made))
        return built.float().train()

    return make


_DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 4 * LENGTH,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = dict(**_DECODER, num_key_value_heads=2)
_EXPERTS = dict(**_GROUPED, num_experts=4, num_experts_per_tok=2)
_ENCODER = {k: v for k, v in _DECODER.items() if k != "use_cache"}
_VISION = {
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "image_size": PIXELS,
    "patch_size": PIXELS // 2,
}
_SEQUENCES = {
    "vocab_size": VOCABULARY,
    "d_model": HIDDEN,
    "encoder_layers": LAYERS,
    "decoder_layers": LAYERS,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": 2 * HIDDEN,
    "decoder_ffn_dim": 2 * HIDDEN,
    "max_position_embeddings": 4 * LENGTH,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
_TEXT_OF_PAIR = {**_ENCODER, "projection_dim": HIDDEN}

_DECODERS = [
    Entry(
        "gpt2",
        _hf(
            "GPT2LMHeadModel",
            "GPT2Config",
            vocab_size=VOCABULARY,
            n_embd=HIDDEN,
            n_layer=LAYERS,
            n_head=HEADS,
            n_positions=4 * LENGTH,
            use_cache=False,
            bos_token_id=1,
            eos_token_id=2,
        ),
        _text,
    ),
    Entry("llama", _hf("LlamaForCausalLM", "LlamaConfig", **_GROUPED), _text),
    Entry(
        "qwen3",
        _hf("Qwen3ForCausalLM", "Qwen3Config", **_GROUPED, head_dim=4, tie_word_embeddings=True),
        _text,
    ),
    Entry(
        "gemma2",
        _hf("Gemma2ForCausalLM", "Gemma2Config", **_GROUPED, head_dim=4, sliding_window=4),
        _text,
    ),
    Entry("mistral", _hf("MistralForCausalLM", "MistralConfig", **_GROUPED), _text),
    Entry("phi", _hf("PhiForCausalLM", "PhiConfig", **_DECODER), _text),
    Entry(
        "opt",
        _hf(
            "OPTForCausalLM",
            "OPTConfig",
            vocab_size=VOCABULARY,
            hidden_size=HIDDEN,
            word_embed_proj_dim=HIDDEN // 2,
            ffn_dim=2 * HIDDEN,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            max_position_embeddings=4 * LENGTH,
            use_cache=False,
        ),
        _text,
    ),
    Entry("gpt_neox", _hf("GPTNeoXForCausalLM", "GPTNeoXConfig", **_DECODER), _text),
    Entry("falcon", _hf("FalconForCausalLM", "FalconConfig", **_DECODER), _text),
]

_ENCODERS = [
    Entry("bert", _hf("BertForMaskedLM", "BertConfig", **_ENCODER), _text),
    Entry("roberta", _hf("RobertaForMaskedLM", "RobertaConfig", **_ENCODER), _text),
    Entry(
        "distilbert",
        _hf(
            "DistilBertForMaskedLM",
            "DistilBertConfig",
            vocab_size=VOCABULARY,
            dim=HIDDEN,
            hidden_dim=2 * HIDDEN,
            n_layers=LAYERS,
            n_heads=HEADS,
            max_position_embeddings=4 * LENGTH,
        ),
        _text,
    ),
    Entry(
        "electra",
        _hf("ElectraForMaskedLM", "ElectraConfig", **_ENCODER, embedding_size=HIDDEN // 2),
        _text,
    ),
    Entry(
        "deberta",
        _hf(
            "DebertaForMaskedLM",
            "DebertaConfig",
            **_ENCODER,
            relative_attention=True,
            pos_att_type=["c2p", "p2c"],
        ),
        _text,
        bf16=False,  # its own code masks with a number that bfloat16 cannot hold
    ),
]

_ENCODER_DECODERS = [
    Entry(
        "t5",
        _hf(
            "T5ForConditionalGeneration",
            "T5Config",
            vocab_size=VOCABULARY,
            d_model=HIDDEN,
            d_kv=4,
            d_ff=2 * HIDDEN,
            num_layers=LAYERS,
            num_heads=HEADS,
            use_cache=False,
            decoder_start_token_id=0,
        ),
        _text,
    ),
    Entry("bart", _hf("BartForConditionalGeneration", "BartConfig", **_SEQUENCES), _text),
    Entry("pegasus", _hf("PegasusForConditionalGeneration", "PegasusConfig", **_SEQUENCES), _text),
]

_MIXTURES = [
    Entry(
        "mixtral",
        _hf("MixtralForCausalLM", "MixtralConfig", **_GROUPED, num_local_experts=4),
        _text,
    ),
    Entry(
        "qwen3_moe",
        _hf(
            "Qwen3MoeForCausalLM",
            "Qwen3MoeConfig",
            **_EXPERTS,
            moe_intermediate_size=HIDDEN,
            head_dim=4,
        ),
        _text,
    ),
    Entry("olmoe", _hf("OlmoeForCausalLM", "OlmoeConfig", **_EXPERTS), _text),
]

_STATE_SPACES = [
    Entry(
        "mamba",
        _hf(
            "MambaForCausalLM",
            "MambaConfig",
            vocab_size=VOCABULARY,
            hidden_size=HIDDEN,
            state_size=4,
            num_hidden_layers=LAYERS,
            use_cache=False,
        ),
        _unmasked,
    ),
    Entry(
        "mamba2",
        _hf(
            "Mamba2ForCausalLM",
            "Mamba2Config",
            vocab_size=VOCABULARY,
            hidden_size=HIDDEN,
            state_size=8,
            num_heads=4,
            head_dim=8,
            n_groups=1,
            chunk_size=4,
            num_hidden_layers=LAYERS,
            use_cache=False,
        ),
        _unmasked,
    ),
]

_VISIONS = [
    Entry(
        "vit",
        _hf("ViTForImageClassification", "ViTConfig", **_VISION, num_labels=CLASSES),
        _images,
    ),
    Entry(
        "convnext",
        _hf(
            "ConvNextForImageClassification",
            "ConvNextConfig",
            hidden_sizes=[8, 16, 16, 32],
            depths=[1, 1, 1, 1],
            num_labels=CLASSES,
        ),
        _images,
    ),
    Entry(
        "swin",
        _hf(
            "SwinForImageClassification",
            "SwinConfig",
            image_size=PIXELS,
            patch_size=4,
            embed_dim=HIDDEN,
            depths=[2, 1],
            num_heads=[2, 4],
            window_size=4,
            num_labels=CLASSES,
        ),
        _images,
    ),
    Entry(
        "resnet",
        _hf(
            "ResNetForImageClassification",
            "ResNetConfig",
            embedding_size=8,
            hidden_sizes=[16, 32],
            depths=[1, 1],
            num_labels=CLASSES,
        ),
        _images,
        same_rows=True,
    ),
]

_SPEECH = [
    Entry(
        "whisper",
        _hf(
            "WhisperForConditionalGeneration",
            "WhisperConfig",
            **{k: v for k, v in _SEQUENCES.items() if k != "max_position_embeddings"},
            num_mel_bins=8,
            max_source_positions=2 * LENGTH,
            max_target_positions=4 * LENGTH,
        ),
        _spectrograms,
    ),
    Entry(
        "wav2vec2",
        _hf(
            "Wav2Vec2ForCTC",
            "Wav2Vec2Config",
            vocab_size=VOCABULARY,
            hidden_size=HIDDEN,
            intermediate_size=2 * HIDDEN,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            conv_dim=(8, 8),
            conv_kernel=(8, 4),
            conv_stride=(4, 4),
            num_feat_extract_layers=2,
            num_conv_pos_embeddings=4,
            num_conv_pos_embedding_groups=2,
            apply_spec_augment=False,
            ctc_loss_reduction="mean",
        ),
        _waves,
    ),
]


def _clip_loss(model: Any, batch: Inputs) -> torch.Tensor:
    loss: torch.Tensor = model(**batch, return_loss=True).loss
    return loss


_MULTIMODAL = [
    Entry(
        "clip",
        _hf(
            "CLIPModel",
            "CLIPConfig",
            text_config=_TEXT_OF_PAIR,
            vision_config={**_VISION, "projection_dim": HIDDEN},
            projection_dim=HIDDEN,
        ),
        _pairs,
        loss=_clip_loss,
        same_rows=True,
    ),
    Entry(
        "llava",
        _hf(
            "LlavaForConditionalGeneration",
            "LlavaConfig",
            vision_config={**_VISION, "model_type": "clip_vision_model"},
            text_config={**_GROUPED, "model_type": "llama"},
            image_token_index=IMAGE_TOKEN,
        ),
        _captions,
    ),
    Entry(
        "blip",
        _hf(
            "BlipForConditionalGeneration",
            "BlipConfig",
            text_config={**_TEXT_OF_PAIR, "label_smoothing": 0.0},
            vision_config=_VISION,
            projection_dim=HIDDEN,
        ),
        _captioned,
    ),
]

TRANSFORMERS = [
    *_DECODERS,
    *_ENCODERS,
    *_ENCODER_DECODERS,
    *_MIXTURES,
    *_STATE_SPACES,
    *_VISIONS,
    *_SPEECH,
    *_MULTIMODAL,
]
