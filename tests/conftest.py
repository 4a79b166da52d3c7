"""Fixtures shared by the tests."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

# Read when torch is imported, here and in the ranks: kernels of the tests are compiled without
# optimisation, which takes a third of the time.
os.environ.setdefault("AOT_INDUCTOR_DEBUG_COMPILE", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # no processes that compile ahead

import torch
from torch._inductor import config as inductor

from graphs import fake_world


@pytest.fixture(autouse=True)
def kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compiled code calls torch's own kernels, here and in the ranks: Inductor's take seconds to compile.

    Tests and files marked ``generated_kernels`` have Inductor's.
    """
    torch._dynamo.reset()  # what other tests compiled counts towards its limits
    generated = request.node.get_closest_marker("generated_kernels") is not None
    with inductor.patch(fallback_by_default=not generated):
        yield


@pytest.fixture
def fake_group() -> Iterator[Callable[[int], None]]:
    """Call it with a world size: this process becomes rank 0 of so many until the test ends."""
    with ExitStack() as stack:
        yield lambda world_size: stack.enter_context(fake_world(world_size))
