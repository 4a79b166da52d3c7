"""Read a DeepSpeed config from where the user keeps it."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zero_runtime.errors import OptionError

#: A file of JSON, or what stands in one.
Source = str | os.PathLike[str] | Mapping[str, Any]


def read(source: Source) -> Mapping[str, Any]:
    """The config of a path, or ``source`` itself.

    Raises:
        OptionError: the file cannot be read, is no JSON object, or gives a key twice; names path, and
            line and column where the JSON is wrong.
    """
    if isinstance(source, Mapping):
        return source
    if not isinstance(source, str | os.PathLike):
        raise OptionError(f"DeepSpeed config: expected a path or a dict, got {source!r}")
    path = Path(source)
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"DeepSpeed config: cannot read {path}: {error}") from None
    return _decoded(text, path)


def _decoded(text: str, path: Path) -> Mapping[str, Any]:
    try:
        value = json.loads(text, object_pairs_hook=_once)
    except json.JSONDecodeError as error:
        raise OptionError(
            f"DeepSpeed config: {path}, line {error.lineno}, column {error.colno}: {error.msg}"
        ) from None
    except _TwiceError as error:
        raise OptionError(f"DeepSpeed config: {path}: key {error} is given twice") from None
    if not isinstance(value, dict):
        raise OptionError(f"DeepSpeed config: {path} holds a {type(value).__name__}, not an object")
    return value


class _TwiceError(ValueError):
    """An object with two members of one name, of which JSON keeps the last."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise _TwiceError(repr(name))
        found[name] = value
    return found
