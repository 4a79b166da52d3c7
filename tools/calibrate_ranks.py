"""One of the two ranks that tools/calibrate.py starts; apart from it, to import nothing but torch.

``python -m tools.calibrate_ranks RANK STORE BYTES THREADS DEVICE``; rank 0 prints two times in seconds,
of the fastest all-gather of a tiny buffer and of one of so many bytes.
"""

import json
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

TINY = 64  # bytes
AT_MOST = 200

_collectives: Any = dist  # the newer name first: the older one warns where both exist
all_gather = getattr(_collectives, "all_gather_single", None) or dist.all_gather_into_tensor


def gather_seconds(nbytes: int, times: int, device: torch.device) -> float:
    """The fastest of so many all-gathers; both ranks must agree on how many there are."""
    whole = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    part = torch.ones(nbytes // 2, dtype=torch.uint8, device=device)
    best = float("inf")
    for _ in range(times):
        dist.barrier()
        start = time.perf_counter()
        all_gather(whole, part)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best


def main(rank: int, store: str, nbytes: int, threads: int, kind: str) -> None:
    """Join the group of two, gather, and print what rank 0 saw."""
    torch.set_num_threads(threads)
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo", init_method=f"file://{store}", rank=rank, world_size=2
    )
    times = [gather_seconds(TINY, AT_MOST, device), gather_seconds(nbytes, 10, device)]
    if rank == 0:
        print(json.dumps(times))
    dist.destroy_process_group()


if __name__ == "__main__":
    given = sys.argv[1:]
    main(int(given[0]), given[1], int(given[2]), int(given[3]), given[4])
