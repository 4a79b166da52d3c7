"""One of the two ranks that tools/gpu_check_list.py starts on one GPU.

``python -m tools.gpu_check_rank RANK STORE BACKEND DEVICE``. The last line of its output is JSON:
the losses of its half of each batch, or why two ranks cannot meet here.
"""

import json
import sys

import torch
import torch.distributed as dist

from .gpu_check_training import Size, train

WORLD = 2
MET = "the ranks have met"


def meet(device: torch.device) -> None:
    """Send a message around: what two ranks on one GPU must be able to do.

    Gloo carries gathers by messages, NCCL by collectives; raises RuntimeError where it cannot.
    """
    rank = dist.get_rank()
    value = torch.full((4,), float(rank), device=device)
    if dist.get_backend() == "gloo":
        received = torch.zeros(4, device=device)
        works = [dist.isend(value, 1 - rank), dist.irecv(received, 1 - rank)]
        for work in works:
            if work is not None:
                work.wait()
        value = value + received
    else:
        dist.all_reduce(value)
    if value.tolist() != [1.0] * 4:
        raise RuntimeError(f"a message arrived as {value.tolist()}")


def main(rank: int, store: str, backend: str, kind: str) -> None:
    """Join the group, train, and print the losses."""
    device = torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=WORLD)
    meet(device)
    print(MET, flush=True)
    trained = train(Size.on(device), device, part=lambda words: words.chunk(WORLD)[rank])
    print(json.dumps(trained.losses), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:5])
    sys.stdout.flush()
