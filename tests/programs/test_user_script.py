"""A script that imports nothing of ours, and what it is told when something is wrong."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn

ROOT = Path(__file__).parents[2]

SCRIPT = """
    import torch
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    step = torch.compile(model, backend="zero3")
    for _ in range(2):
        step(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    print("held", sum(p.untyped_storage().nbytes() for p in model.parameters()))
"""


def _run(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_a_script_without_any_import_of_ours_trains_partitioned() -> None:
    done = _run(SCRIPT)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "held 0\n"


def test_without_the_extension_it_works_with_one_notice() -> None:
    missing = 'import sys; sys.modules["zero_runtime._native"] = None\n'
    done = _run(missing + textwrap.dedent(SCRIPT))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "held 0\n"
    assert done.stderr.count("C++ extension") == 1, done.stderr


def test_several_ranks_without_a_process_group_are_told_what_to_call() -> None:
    done = _run(SCRIPT, WORLD_SIZE="2", RANK="0")
    assert done.returncode != 0
    assert "torch.distributed.init_process_group()" in done.stderr
    assert "without torchrun" in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bucket_byte": 5}, "unknown option 'bucket_byte'. Did you mean 'bucket_bytes'?"),
        ({"scedule": "one_ahead"}, "Did you mean 'schedule'"),
        ({"schedule": "never"}, "'schedule'.*one_ahead"),
        ({"bucket_bytes": "16MB"}, "'bucket_bytes'.*integer"),
        ({"bucket_bytes": 0}, "'bucket_bytes'.*greater than 0"),
    ],
)
def test_a_wrong_option_is_named_with_what_would_be_right(
    options: dict[str, object], message: str
) -> None:
    with pytest.raises(Exception, match=message):
        torch.compile(nn.Linear(2, 2), backend="zero3", options=options)(torch.ones(1, 2))


def test_the_mode_of_torch_compile_is_passed_on() -> None:
    model = nn.Linear(2, 2)
    compiled = torch.compile(model, backend="zero3", mode="max-autotune-no-cudagraphs")
    assert compiled(torch.ones(1, 2)).shape == (1, 2)
    assert sum(p.untyped_storage().nbytes() for p in model.parameters()) == 0


def test_a_model_without_parameters_compiles_plainly() -> None:
    assert torch.compile(nn.ReLU(), backend="zero3")(torch.tensor([-1.0, 2.0])).tolist() == [
        0.0,
        2.0,
    ]


def test_entry_points_are_installed() -> None:
    names = torch._dynamo.list_backends(exclude_tags=())
    assert {"zero1", "zero2", "zero3"} <= set(names)
