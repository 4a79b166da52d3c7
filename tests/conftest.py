"""Fixtures shared by the tests."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

# Read when torch is imported, here and in the ranks: kernels of the tests are compiled without
# optimisation, which takes a third of the time.
os.environ.setdefault("AOT_INDUCTOR_DEBUG_COMPILE", "1")

from graphs import fake_world


@pytest.fixture
def fake_group() -> Iterator[Callable[[int], None]]:
    """Call it with a world size: this process becomes rank 0 of so many until the test ends."""
    with ExitStack() as stack:
        yield lambda world_size: stack.enter_context(fake_world(world_size))
