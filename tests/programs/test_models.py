"""tools.models: models by import path, by script and by configuration, and clear words for others."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tools.models import Shape, model_maker, presets
from zero_compile.api.preview import preview
from zero_runtime import compat
from zero_runtime.errors import OptionError

SHAPE = Shape(2, 8, torch.float32)
TINY = "n_layer=1,n_embd=32,n_head=2,vocab_size=64"
SCRIPT = """
from dataclasses import dataclass
import torch
from torch import nn

@dataclass
class Config:
    width: int = 4

def all_figures(batch, sequence, dtype):
    return nn.Linear(Config().width, 3, dtype=dtype), (torch.zeros(batch, sequence, 4, dtype=dtype),)

def one_figure(*, batch):
    return nn.Linear(4, 3), {"input": torch.zeros(batch, 4)}

def no_figures():
    return nn.Linear(4, 3), [torch.zeros(5, 4)]

def bare():
    return nn.Linear(4, 3)

def wrong():
    return 7

constant = 3
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "linear.py"
    path.write_text(SCRIPT)
    return path


def test_a_script_takes_the_figures_it_asks_for(script: Path) -> None:
    shape = Shape(2, 8, torch.bfloat16)
    model, args, kwargs = model_maker(f"{script}:all_figures", shape)()
    assert isinstance(model, nn.Linear)
    assert model.weight.dtype is torch.bfloat16
    assert [(a.shape, a.dtype) for a in args] == [((2, 8, 4), torch.bfloat16)]
    assert kwargs == {}
    _, args, kwargs = model_maker(f"{script}:one_figure", shape)()
    assert args == ()
    assert kwargs["input"].shape == (2, 4)
    _, args, kwargs = model_maker(f"{script}:no_figures", shape)()
    assert args[0].shape == (5, 4)


def test_an_import_path(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script.rename(script.with_name("linear_to_import.py"))
    monkeypatch.syspath_prepend(str(script.parent))
    model, args, _ = model_maker("linear_to_import:all_figures", SHAPE)()
    assert isinstance(model, nn.Linear)
    assert args[0].shape == (2, 8, 4)


def test_a_script_does_not_take_the_place_of_a_module(tmp_path: Path) -> None:
    path = tmp_path / "json.py"
    path.write_text(SCRIPT)
    before = sys.modules["json"]
    model_maker(f"{path}:no_figures", SHAPE)()
    assert sys.modules["json"] is before


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "has no callable 'nothing'"),
        ("constant", "has no callable 'constant'"),
        ("bare", "bare gave a model without inputs: return (model, inputs)"),
        ("wrong", "wrong gave int, not a module"),
    ],
)
def test_what_a_script_does_not_give(script: Path, name: str, message: str) -> None:
    with pytest.raises(OptionError) as error:
        model_maker(f"{script}:{name}", SHAPE)()
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("nowhere.at_all:make", "cannot import nowhere.at_all: No module named 'nowhere'"),
        ("nowhere/file.py:make", "there is no file nowhere/file.py"),
        ("gpt2", "'gpt2' names no model: write package.module:callable"),
        (":make", "':make' names no model"),
        ("hf:gpt2,n_layer", "'n_layer' is no override: write name=value, separated by commas"),
        ("hf:gpt2,n_layer=many", "hf:gpt2 does not accept these overrides: "),
        ("hf:no-such-model", "hf:no-such-model is no preset (gpt2, gpt2-xl, llama-3-70b"),
    ],
)
def test_unknown_models(target: str, message: str) -> None:
    with pytest.raises(OptionError) as error:
        model_maker(target, SHAPE)
    assert message in str(error.value)


def test_an_unknown_model_says_where_it_was_looked_for() -> None:
    with pytest.raises(OptionError, match=r"no type of transformers, no folder .* local cache"):
        model_maker("hf:no-such-model", SHAPE)


def test_presets_have_the_sizes_of_their_names() -> None:
    billions = {"gpt2-xl": 1.6, "llama-3-8b": 8.0, "llama-3-70b": 70.6, "mistral-7b": 7.2}
    assert set(billions) < set(presets())
    for name, size in billions.items():
        with compat.fake_tensors():
            model, _, _ = model_maker(f"hf:{name}", Shape(1, 8, torch.bfloat16))()
        total = sum(p.numel() for p in model.parameters())
        assert total / 1e9 == pytest.approx(size, rel=0.03), name
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_overrides_of_a_type_of_transformers() -> None:
    with compat.fake_tensors():
        model, args, kwargs = model_maker(f"hf:gpt2,{TINY}", SHAPE)()
    assert args == ()
    assert kwargs["input_ids"].shape == kwargs["labels"].shape == (2, 8)
    assert model.config.n_layer == 1
    assert model.config.use_cache is False
    assert torch.get_default_dtype() is torch.float32


def test_a_folder_with_a_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 64}'
    )
    with compat.fake_tensors():
        model, _, _ = model_maker(f"hf:{tmp_path},n_layer=1", SHAPE)()
    assert (model.config.n_layer, model.config.n_embd) == (1, 32)


def test_a_model_of_transformers_is_previewed() -> None:
    planned = preview(
        model_maker(f"hf:gpt2,{TINY}", SHAPE), world_size=4, options={"hardware": "h100"}
    )
    assert planned.parameters == 47_584
    assert planned.traffic.total > 0
