"""Where scripts import swap files from."""

from zero_runtime.ir.aio import AioConfig
from zero_runtime.offload.swap_file import SwapFile

__all__ = ["AioConfig", "SwapFile"]
