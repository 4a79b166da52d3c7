"""Where scripts import Lion from."""

from zero_runtime.optim.lion import Lion

__all__ = ["Lion"]
