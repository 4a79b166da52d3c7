"""What memory the tensors of this process hold."""

import gc
from collections.abc import Callable

import torch


def live_storages(wanted: Callable[[torch.Tensor], bool]) -> dict[int, int]:
    """Address to bytes of the storages of all live tensors that are ``wanted``."""
    found = {}
    for each in gc.get_objects():
        if issubclass(type(each), torch.Tensor) and wanted(each):
            storage = each.untyped_storage()
            try:
                found[storage.data_ptr()] = storage.nbytes()
            except RuntimeError:  # a fake tensor, or a partitioned parameter's freed memory
                continue
    return found
