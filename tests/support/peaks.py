"""What torch's CPU allocator hands out, recorded by the profiler."""

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def peak_of(step: Callable[[], None]) -> int:
    """The most bytes that the step has allocated and not freed."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = profiler.profiler.kineto_results.events()
    changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    held = peak = 0
    for _, change in sorted(changes, key=lambda c: c[0]):
        held += change
        peak = max(peak, held)
    return peak
