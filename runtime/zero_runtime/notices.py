"""Warnings about what code outside the graphs does: once for each of its lines."""

import sys
import warnings
from types import FrameType

#: Lines that were warned about. A session keeps them: Python's own record is lost whenever a filter changes.
Lines = set[tuple[str, int]]


def warn_once(known: Lines, message: str) -> None:
    """Warn at the line of the user's that led here, unless it is among ``known``."""
    place = _user_line(sys._getframe(1))
    if place is None or place in known:
        return
    known.add(place)
    warnings.warn_explicit(message, UserWarning, *place)


def _user_line(frame: FrameType | None) -> tuple[str, int] | None:
    """The innermost line that is neither torch's nor ours; None where it asks for the model's whole state."""
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.split(".")[0] not in ("torch", "zero_runtime", "zero_compile"):
            return frame.f_code.co_filename, frame.f_lineno
        if frame.f_code.co_name in ("state_dict", "load_state_dict"):
            return None
        frame = frame.f_back
    return "<unknown>", 0
