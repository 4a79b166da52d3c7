"""Sizes as users write them."""

import re

from zero_runtime.errors import OptionError

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


_BINARY = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", re.IGNORECASE)


def parse_bytes(text: str | int) -> int:
    """``"24GiB"``, ``"1.5 GB"``, ``"512MiB"`` or a number of bytes, as bytes.

    Raises:
        OptionError: it is none of these, or not positive.
    """
    match = _SIZE.fullmatch(str(text))
    if match is None or isinstance(text, bool):
        raise OptionError(f"{text!r} is not a size: write bytes as a number, or as in '24GiB'")
    number, unit, binary = match.groups()
    size = int(float(number) * (_BINARY if binary else _UNITS)[unit.lower()])
    if size <= 0:
        raise OptionError(f"{text!r} is not a size: it must be more than nothing")
    return size
