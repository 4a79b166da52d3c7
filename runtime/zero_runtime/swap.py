"""Where scripts import swap files from."""

from zero_runtime.offload.swap_file import AioConfig, SwapFile

__all__ = ["AioConfig", "SwapFile"]
