"""Models by name: an import path, a script, or ``hf:`` and a configuration of transformers."""

import difflib
import importlib
import importlib.util
import json
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from zero_compile.api.preview import MakeModel
from zero_runtime.errors import OptionError

_PRESETS = Path(__file__).with_name("presets.json")


@dataclass(frozen=True)
class Shape:
    """What is trained on: ``batch`` sequences of ``sequence`` tokens a rank, parameters of ``dtype``."""

    batch: int
    sequence: int
    dtype: torch.dtype


def model_maker(target: str, shape: Shape) -> MakeModel:
    """What builds the model that ``target`` names, with inputs of ``shape``.

    ``hf:NAME`` is a preset of this tool, a type of transformers with overrides
    (``hf:llama,num_hidden_layers=2``), a folder with a config.json, or a model in the local cache.
    ``package.module:callable`` and ``path/to/file.py:callable`` give a model, or a model and its
    inputs; the callable may take ``batch``, ``sequence`` and ``dtype``.

    Raises:
        OptionError: there is no such model; says what was looked for and where.
    """
    if target.startswith("hf:"):
        return _transformer(target.removeprefix("hf:"), shape)
    path, _, name = target.rpartition(":")
    if not path:
        raise OptionError(
            f"{target!r} names no model: write package.module:callable, path/to/file.py:callable or "
            f"hf:NAME (presets: {', '.join(presets())})"
        )
    made = getattr(_module(path), name, None)
    if not callable(made):
        raise OptionError(f"{path} has no callable {name!r}")
    return _called(made, shape)


def presets() -> list[str]:
    """Configurations that ship with this tool."""
    return sorted(json.loads(_PRESETS.read_text()))


# ------------------------------------------------------------------------------ transformers


def _transformer(name: str, shape: Shape) -> MakeModel:
    config = _config(name)

    def make() -> tuple[nn.Module, Sequence[Any], Mapping[str, Any]]:
        import transformers

        config.use_cache = False
        before = torch.get_default_dtype()
        torch.set_default_dtype(shape.dtype)
        try:
            build: Any = transformers.AutoModelForCausalLM.from_config
            model = build(config, dtype=shape.dtype)
        finally:
            torch.set_default_dtype(before)
        ids = torch.zeros(shape.batch, shape.sequence, dtype=torch.long)
        return model, (), {"input_ids": ids, "labels": ids}

    return make


def _config(name: str) -> Any:
    try:
        import transformers
    except ImportError:
        raise OptionError("hf: models need transformers: pip install transformers") from None
    kind, *overrides = name.split(",")
    given = json.loads(_PRESETS.read_text()).get(kind)
    if given is not None:
        return _of_type(transformers, {**given, **_overrides(overrides)})
    if kind in transformers.CONFIG_MAPPING:
        return _of_type(transformers, {"model_type": kind, **_overrides(overrides)})
    try:
        config = transformers.AutoConfig.from_pretrained(kind, local_files_only=True)
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise OptionError(
            f"hf:{kind} is no preset ({', '.join(presets())}), no type of transformers, no folder with a "
            f"config.json, and not in the local cache: {first}"
        ) from None
    for key, value in _overrides(overrides).items():
        setattr(config, key, value)
    return config


def _of_type(transformers: Any, settings: Mapping[str, Any]) -> Any:
    settings = dict(settings)
    kind = settings.pop("model_type")
    known = transformers.CONFIG_MAPPING[kind]()
    for name in settings:
        if not hasattr(known, name):
            near = difflib.get_close_matches(name, vars(known), n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise OptionError(f"hf:{kind} has no setting {name!r}.{hint}")
    try:
        return transformers.CONFIG_MAPPING[kind](**settings)
    except Exception as error:  # each type of configuration checks its values in its own way
        reason = " ".join(str(error).split())
        raise OptionError(f"hf:{kind} does not accept these overrides: {reason}") from None


def _overrides(pairs: Sequence[str]) -> dict[str, Any]:
    found = {}
    for pair in pairs:
        key, sign, value = pair.partition("=")
        if not sign:
            raise OptionError(f"{pair!r} is no override: write name=value, separated by commas")
        try:
            found[key] = json.loads(value)
        except json.JSONDecodeError:
            found[key] = value
    return found


# ------------------------------------------------------------------------------ code


def _module(path: str) -> ModuleType:
    if not path.endswith(".py"):
        try:
            return importlib.import_module(path)
        except ImportError as error:
            raise OptionError(f"cannot import {path}: {error}") from None
    file = Path(path)
    if not file.is_file():
        raise OptionError(f"there is no file {path}")
    # A name of its own: a script may be called like a module that is imported already.
    spec = importlib.util.spec_from_file_location(f"script_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _called(made: Callable[..., Any], shape: Shape) -> MakeModel:
    def make() -> tuple[nn.Module, Sequence[Any], Mapping[str, Any]]:
        try:
            result = made(**_accepted(made, shape))
        except Exception as error:  # a user's code, of which nothing is known
            where = traceback.extract_tb(error.__traceback__)[-1]
            raise OptionError(
                f"{made.__name__} raised {type(error).__name__}: {error} ({where.filename}, line {where.lineno})"
            ) from error
        model, inputs = result if isinstance(result, tuple) else (result, None)
        if not isinstance(model, nn.Module):
            raise OptionError(f"{made.__name__} gave {type(model).__name__}, not a module")
        if isinstance(inputs, Mapping):
            return model, (), inputs
        if inputs is None:
            raise OptionError(
                f"{made.__name__} gave a model without inputs: return (model, inputs), inputs a tuple of "
                "arguments or a dict of them by name"
            )
        return model, tuple(inputs), {}

    return make


def _accepted(made: Callable[..., Any], shape: Shape) -> dict[str, Any]:
    """Those of the shape's figures that the callable takes."""
    code = getattr(made, "__code__", None)
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount] if code else ()
    return {n: getattr(shape, n) for n in ("batch", "sequence", "dtype") if n in names}
