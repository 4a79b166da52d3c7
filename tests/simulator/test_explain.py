"""explain: what is said of a bucket is what was decided for it."""

from collections.abc import Sequence

import pytest

from zero_compile.analysis.resident_memory import gib
from zero_compile.scheduler.evaluate import exposed_seconds
from zero_compile.scheduler.feed_reads import solve_fed
from zero_compile.scheduler.problem import Gather, Problem, Reduce, Schedule
from zero_compile.scheduler.solve_starts import solve
from zero_compile.simulator.explain import explain
from zero_compile.simulator.read_back import Scheduled

SIZE = 1 << 25


def scheduled(problem: Problem, starts: Sequence[int] | None = None, shift: int = 10) -> Scheduled:
    """Solved, or with the starts given; nodes are called by their letters."""
    schedule = solve(problem)
    if starts is not None:
        schedule = Schedule(tuple(starts), schedule.reduce_waits)
    nodes = ("", *"bcdefghijk"[: len(problem.compute) - 1])
    return Scheduled(problem, schedule, nodes, shift)


def chain(nodes: int, seconds: float = 0.4, limit: int | None = None) -> Problem:
    gathers = tuple(Gather(k, seconds, SIZE, k, k) for k in range(nodes))
    return Problem((1.0,) * nodes, (0,) * nodes, gathers, limit=limit)


def said(found: Scheduled, bucket: int) -> str:
    return "\n".join(explain(found, bucket))


def test_a_gather_that_is_hidden() -> None:
    lines = explain(scheduled(chain(4)), 2)
    assert lines == [
        "gather of 0.031 GiB: starts before b (forward), on its way from 1400.000 ms to 1800.000 ms, "
        "first used by c (forward) at 2400.000 ms",
        "  not later, because one unit later it would arrive after its first use",
        "  not earlier, because it is hidden as it is, and would hold memory for longer",
        "  stays until c (forward), its last reader",
    ]


def test_the_first_gather_makes_compute_wait() -> None:
    found = said(scheduled(chain(3)), 0)
    assert "starts before the beginning (forward), on its way from 0.000 ms to 400.000 ms" in found
    assert "not later, because it stands at its first use" in found
    assert "not earlier, because nothing runs before" in found


def test_a_gather_that_arrives_late() -> None:
    found = said(scheduled(chain(3, seconds=3.0), (0, 0, 1)), 1)
    assert "it arrives 2000.000 ms after compute is ready for it: compute waits" in found
    assert "not earlier, because nothing runs before" in found


def test_a_gather_that_starts_together_with_the_one_before() -> None:
    found = said(scheduled(chain(4, seconds=3.0), (0, 0, 1, 1)), 3)
    assert "gathers keep the order of their uses and bucket 2 starts here as well" in found


def test_a_gather_behind_another_on_the_channel() -> None:
    problem = Problem(
        (4.0, 1.0, 1.0), (0,) * 3, (Gather(0, 5.0, SIZE, 1, 1), Gather(1, 1.0, SIZE, 2, 2))
    )
    found = said(scheduled(problem, (0, 1)), 1)
    assert "the channel carries bucket 0 until 5000.000 ms" in found


def test_a_gather_held_back_by_memory() -> None:
    found = scheduled(chain(4, seconds=3.0, limit=2 * SIZE))
    assert found.schedule.gather_starts == (0, 0, 1, 2)
    text = said(found, 2)
    assert (
        f"at the beginning (forward) it would take {gib(3 * SIZE)} of {gib(2 * SIZE)}" in text
        or "the channel carries bucket 1" in text
    )
    tight = said(scheduled(chain(4, limit=SIZE)), 2)
    assert f"at b (forward) it would take {gib(2 * SIZE)} of {gib(SIZE)}" in tight


def test_a_gather_that_may_not_start_before_its_release() -> None:
    gathers = (Gather(0, 0.1, SIZE, 0, 1), Gather(0, 0.1, SIZE, 2, 2, earliest=2))
    text = said(scheduled(Problem((1.0,) * 3, (0,) * 3, gathers)), 0)
    assert "its bucket is still in its earlier place" in text
    assert text.count("gather of") == 2


def test_a_kept_bucket() -> None:
    problem = Problem((1.0,) * 4, (0,) * 4, (Gather(3, 0.4, SIZE, 1, 2),))
    text = said(scheduled(problem, shift=2), 3)
    assert "stays until c (backward), kept from forward to backward, which saves gathering" in text


def test_a_reduction() -> None:
    problem = Problem((1.0,) * 3, (0,) * 3, (), (Reduce(5, 0.5, 2 * SIZE, 0, SIZE),))
    (line,) = explain(scheduled(problem, shift=0), 5)
    assert line == (
        "reduction of 0.031 GiB: starts after the beginning (backward), whose unit completes its "
        "gradients, ends at 1500.000 ms, is waited for before c (backward), where it has ended or its "
        "memory is needed"
    )


def test_a_reduction_that_is_waited_for_at_the_end() -> None:
    problem = Problem((1.0,), (0,), (), (Reduce(0, 0.5, SIZE, 0),))
    assert "is waited for at the end" in said(scheduled(problem), 0)


def test_a_shard_on_nvme() -> None:
    gathers = tuple(Gather(k, 0.25, SIZE, k, k, 0, 0.25, 0.5, SIZE // 2) for k in range(5))
    problem = Problem((1.0,) * 5, (0,) * 5, gathers)
    nodes = ("", *"bcde")
    found = Scheduled(problem, solve_fed(problem), nodes, 10)
    _, shard, *_ = explain(found, 3)
    assert shard == (
        f"  its shard of {gib(SIZE // 2)}: read from NVMe from 2250.000 ms to 2750.000 ms, set out before "
        "b (forward), then copied to the device from 2750.000 ms to 3000.000 ms, set out before b (forward)"
    )
    assert explain(found, 0)[1].endswith(": compute waits 750.000 ms for it")
    assert explain(found, 1)[1].endswith(": compute waits 500.000 ms for it")


def test_a_shard_on_the_host() -> None:
    problem = Problem((1.0,), (0,), (Gather(0, 0.25, SIZE, 0, 0, 0, 0.25, 0.0, SIZE),))
    _, shard, *_ = explain(Scheduled(problem, solve_fed(problem), ("",), 1), 0)
    assert shard == (
        f"  its shard of {gib(SIZE)}: copied to the device from 0.000 ms to 250.000 ms, set out before "
        "the beginning (forward): compute waits 250.000 ms for it"
    )


def test_a_reduced_gradient_that_goes_to_the_host() -> None:
    reduction = Reduce(0, 0.5, SIZE, 0, evict=0.25, shard=SIZE // 4)
    problem = Problem((1.0,), (0,), (), (reduction,))
    (line,) = explain(scheduled(problem), 0)
    assert line.endswith("; goes to the host from 1500.000 ms to 1750.000 ms")


def test_a_bucket_that_the_step_does_not_move() -> None:
    assert explain(scheduled(chain(3)), 7) == []


@pytest.mark.parametrize("seconds", [0.1, 0.4, 1.0, 3.0])
@pytest.mark.parametrize("limit", [None, 1, 2, 3])
def test_every_bucket_has_every_reason(seconds: float, limit: int | None) -> None:
    found = scheduled(chain(8, seconds, None if limit is None else limit * SIZE))
    for bucket in range(8):
        head, later, earlier, stays = explain(found, bucket)
        assert head.startswith("gather of ")
        assert later.startswith("  not later, because ")
        assert earlier.startswith("  not earlier, because ")
        assert stays.startswith("  stays until ")
    waiting = sum("compute waits" in said(found, b) or b == 0 for b in range(8))
    if exposed_seconds(found.problem, found.schedule) > seconds + 1e-9 and limit != 1:
        assert waiting > 1
