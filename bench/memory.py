"""A process's peak resident memory, over its whole life or since a reset."""

import contextlib
import resource
from pathlib import Path

PROC = Path("/proc/self")


def reset_peak() -> bool:
    """Start a new peak; False where the kernel does not allow it (some containers)."""
    with contextlib.suppress(OSError):
        (PROC / "clear_refs").write_text("5")
        return True
    return False


def peak_bytes() -> int:
    with contextlib.suppress(OSError):
        for line in (PROC / "status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def resident_bytes() -> int:
    """What the process holds now."""
    pages = int((PROC / "statm").read_text().split()[1])
    return pages * resource.getpagesize()
