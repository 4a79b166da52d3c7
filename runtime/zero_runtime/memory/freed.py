"""Memory that was freed says so when somebody reads it, instead of ending the process.

Code in C++ does not ask ``__torch_function__``: a scripted function, an extension's kernel or a transform of
``torch.func`` given a partitioned parameter reads its storage, where nothing is. On the CPU such a storage
raises, if the extension is there that was built against this version of PyTorch.
"""

import importlib
import os
from typing import Any

import torch


def _load() -> Any:
    if os.environ.get("ZERO_RUNTIME_NO_NATIVE") == "1":
        return None
    try:
        found = importlib.import_module("zero_runtime._freed")
    except ImportError:
        return None
    return found if torch.__version__.split("+")[0] == found.TORCH else None


_module = _load()

#: Whether reads of freed memory raise.
AVAILABLE = _module is not None


def refuse_reads(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Have whoever reads the empty storage of ``tensor`` be told that parameter ``name`` is partitioned.

    Returns ``tensor``.
    """
    if _module is not None and tensor.device.type == "cpu":
        extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        nbytes = extent * tensor.element_size() if tensor.numel() else 0
        _module.refuse(tensor.untyped_storage()._cdata, nbytes, advice(name))
    return tensor


def advice(name: str) -> str:
    """What to say of a read of the freed memory of parameter ``name``."""
    return (
        f"{name} is partitioned and has no memory of its own, and code that reads memory itself (a scripted "
        "function, a kernel of an extension, a transform of torch.func, data_ptr()) was given the parameter. "
        "Give it parameter.view_as(parameter), which is gathered and has its gradient averaged; or name "
        "the module in the option 'leaf_modules', or wrap the code in zero_compile.GatheredParameters."
    )
