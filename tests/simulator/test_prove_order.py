"""prove: every kind of fault is found and told with operations and buffer; sound programs pass."""

import time

import pytest
from test_simulate import COMPUTE, GATHER, READ, REDUCE, UPLOAD, op, program
from test_solve_starts import large

from offloaded import layers
from zero_compile.scheduler.feed_reads import solve_fed
from zero_compile.scheduler.solve_starts import solve
from zero_compile.simulator.build_program import build_program
from zero_compile.simulator.program import Buffer, Op, Program
from zero_compile.simulator.prove_order import prove_order
from zero_compile.simulator.simulate import simulate
from zero_runtime.errors import PlanError
from zero_runtime.ir.timeline import Category


def takes(*names: str) -> dict[str, tuple[Buffer, ...]]:
    return {"takes": tuple(Buffer(name, 1, Category.GATHERED) for name in names)}


def gather(name: str = "g", *after: str, **fields) -> Op:
    return op(name, GATHER, 1.0, *after, **{**takes("w"), "writes": ("w",), **fields})


def reader(name: str = "a", *after: str, **fields) -> Op:
    return op(name, COMPUTE, 1.0, *after, **{"reads": ("w",), "frees": ("w",), **fields})


def faults(*ops: Op) -> list[str]:
    with pytest.raises(PlanError) as error:
        prove_order(program(*ops))
    first, *rest = str(error.value).splitlines()
    assert first.startswith("program x has ")
    return [line.strip() for line in rest]


# ------------------------------------------------------------------------------ sound


def test_a_gather_waited_for_is_sound():
    prove_order(program(gather(), reader("a", "g")))


def test_a_wait_serves_those_behind_it():
    prove_order(program(gather(), op("a", COMPUTE, 1.0, "g"), reader("b")))


def test_a_transfer_follows_compute_issued_earlier():
    prove_order(
        program(
            op("a", COMPUTE, 1.0, **takes("x"), writes=("x",)),
            op("r", REDUCE, 1.0, reads=("x",), frees=("x",)),
        )
    )


def test_transfers_may_nest():
    prove_order(
        program(
            op("read", READ, 1.0, **takes("host"), writes=("host",)),
            op("up", UPLOAD, 1.0, "read", **takes("part"), reads=("host",), writes=("part",)),
            gather("g", "up", reads=("part",), frees=("part",)),
            reader("a", "g", frees=("w", "host")),
        )
    )


def test_nothing_is_sound():
    prove_order(Program("x", 1, ()))


# ------------------------------------------------------------------------------ each fault


def test_read_before_it_is_ready():
    assert faults(gather(), reader("a")) == [
        "a uses w, which g may not have taken yet",
        "a reads w, which g may not have written yet",
        "a frees w while g may still use it",
    ]


def test_read_before_it_is_written():
    assert faults(
        op("t", COMPUTE, 1.0, **takes("w")),
        reader("a", frees=()),
        op("b", COMPUTE, 1.0, writes=("w",), frees=("w",)),
    ) == ["a reads w, which b may not have written yet"]


def test_overwritten_while_it_is_read():
    assert faults(
        op("t", COMPUTE, 1.0, **takes("w"), writes=("w",)),
        op("r", REDUCE, 1.0, reads=("w",)),
        op("b", COMPUTE, 1.0, writes=("w",)),
        op("c", COMPUTE, 1.0, "r", frees=("w",)),
    ) == ["b overwrites w while r may still read it"]


def test_overwritten_while_it_is_written():
    assert faults(
        op("t", COMPUTE, 1.0, **takes("w")),
        op("r", REDUCE, 1.0, writes=("w",)),
        op("g", GATHER, 1.0, writes=("w",)),
        op("c", COMPUTE, 1.0, "r", "g", frees=("w",)),
    ) == ["g overwrites w while r may still write it"]


def test_freed_while_it_is_read():
    assert faults(
        op("t", COMPUTE, 1.0, **takes("w"), writes=("w",)),
        op("r", REDUCE, 1.0, reads=("w",)),
        op("b", COMPUTE, 1.0, frees=("w",)),
    ) == ["b frees w while r may still use it"]


def test_used_after_it_is_freed():
    assert faults(gather(), reader("a", "g"), op("b", COMPUTE, 1.0, reads=("w",))) == [
        "b uses w, which a has freed before"
    ]


def test_never_freed():
    assert faults(gather(), reader("a", "g", frees=())) == ["w, taken by g, is never freed"]


def test_freed_twice():
    assert faults(gather(), reader("a", "g"), op("b", COMPUTE, 1.0, frees=("w",))) == [
        "w is freed more than once, by a and b"
    ]


def test_never_taken():
    assert faults(reader("a")) == ["w is used by a, but no operation takes it"]


def test_taken_twice():
    assert faults(gather(), gather("h"), reader("a", "h")) == [
        "w is taken more than once, by g and h"
    ]


# ------------------------------------------------------------------------------ deadlocks


def test_waiting_for_what_is_not_there():
    assert faults(op("a", COMPUTE, 1.0, "b")) == ["a waits for b, which is not in the program"]


def test_waiting_for_what_the_same_channel_runs_later():
    assert faults(op("a", COMPUTE, 1.0, "b"), op("b", COMPUTE, 1.0)) == [
        "a waits for b, which the compute channel runs later: deadlock"
    ]


def test_waiting_for_itself():
    assert faults(op("a", COMPUTE, 1.0, "a")) == [
        "a waits for a, which the compute channel runs as the same operation: deadlock"
    ]


def test_names_used_twice():
    assert faults(op("a", COMPUTE, 1.0), op("a", GATHER, 1.0)) == ["2 operations are named a"]


def test_a_cycle_across_channels():
    """The gather is issued after the compute operation that waits for it."""
    ops = op("a", COMPUTE, 1.0, "g"), op("g", GATHER, 1.0)
    assert faults(*ops) == ["deadlock: a waits for g waits for a"]
    with pytest.raises(PlanError, match="deadlock: a waits for g waits for a"):
        simulate(program(*ops))


def test_a_cycle_through_the_order_of_channels():
    (fault,) = faults(
        op("g", GATHER, 1.0, "r2"),
        op("g2", GATHER, 1.0),
        op("r", REDUCE, 1.0, "g2"),
        op("r2", REDUCE, 1.0),
    )
    assert fault.count("waits for") == 4
    assert {"g", "g2", "r", "r2"} <= set(fault.split())


# ------------------------------------------------------------------------------ the report


def test_all_faults_are_listed_up_to_a_number():
    ops = [op(f"a{i}", COMPUTE, 1.0, reads=(f"w{i}",)) for i in range(25)]
    found = faults(*ops)
    assert len(found) == 21
    assert found[-1] == "and 5 more"


@pytest.mark.parametrize("contended", [False, True])
def test_a_large_program_is_proved_quickly(contended):
    problem = large(9_000, contended)
    laid = build_program(problem, solve(problem), "x")
    begin = time.perf_counter()
    prove_order(laid)
    assert time.perf_counter() - begin < 20


@pytest.mark.parametrize("offload", [False, True])
def test_dropping_any_wait_from_a_sound_program_is_found(offload):
    problem = layers(12, read=0.5, slots=2) if offload else large(60, contended=True)
    laid = build_program(problem, solve_fed(problem), "x")
    prove_order(laid)
    waiting = [i for i, found in enumerate(laid.ops) if found.after]
    assert len(waiting) > 8
    for i in waiting:
        eager = op(
            laid.ops[i].name,
            laid.ops[i].channel,
            1.0,
            reads=laid.ops[i].reads,
            writes=laid.ops[i].writes,
            takes=laid.ops[i].takes,
            frees=laid.ops[i].frees,
        )
        with pytest.raises(PlanError, match=r"may not have written yet|may still use it"):
            prove_order(Program("x", 1, (*laid.ops[:i], eager, *laid.ops[i + 1 :])))
