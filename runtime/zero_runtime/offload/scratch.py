"""Files that have no name: nobody else can open them, and they go with the process, killed or not."""

import errno
import os
import secrets
from typing import NamedTuple

from zero_runtime.errors import SwapError


class Scratch(NamedTuple):
    """An empty file, open for reading and writing; whoever asked for it closes it."""

    descriptor: int
    path: str
    """What it was called for a moment: messages, and tools that list open files, call it so."""


def open_scratch(folder: str | os.PathLike[str], name: str) -> Scratch:
    """Make a file in `folder` whose name begins with `name`, and take its name away.

    The name cannot be guessed and must be new (O_EXCL), so that no file, link or pipe that somebody put
    there is ever opened, written to or removed.

    Raises:
        SwapError: `folder` is no folder, or no file can be made in it.
    """
    path = os.path.join(os.path.abspath(folder), f"{name}-{secrets.token_hex(8)}.swap")
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.unlink(path)
        except BaseException:
            os.close(descriptor)
            raise
    except OSError as error:
        code = error.errno or errno.EIO
        reason = f"cannot create swap file {path}: {os.strerror(code)}"
        raise SwapError(code, reason) from error
    return Scratch(descriptor, path)
