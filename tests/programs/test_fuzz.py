"""A few random programs, and those that were wrong once."""

import pytest

from fuzz import fuzz, verdict_of
from fuzz_programs import Program, Step


@pytest.mark.slow
def test_random_programs_are_right_or_refused() -> None:
    assert fuzz(9, seed=1)["wrong"] == 0


def _step(**changes: object) -> Step:
    plain = Step(micro=1, late=False, clip=None, to_none=True, twice=False, before="nothing")
    return Step(**{**plain.__dict__, **changes})


def _program(*parts: str, steps: tuple[Step, ...], **changes: object) -> Program:
    plain = Program(
        parts=parts,
        frozen=frozenset(),
        stage=3,
        dtype="float32",
        optimizer="AdamW",
        scaler=False,
        offload="",
        bucket_bytes=None,
        tile_bytes=None,
        schedule="planned",
        mesh=False,
        init=False,
        steps=steps,
        seed=0,
    )
    return Program(**{**plain.__dict__, **changes})


#: Each was wrong once.
FOUND = {
    "a leaf that is frozen, in the middle": _program(
        "experts", "linear", frozen=frozenset({0}), steps=(_step(),) * 2
    ),
    "float16 and a loss scale before any graph has used a parameter, at stage 1": _program(
        "eager", "checkpointed", stage=1, dtype="float16", scaler=True, steps=(_step(clip=0.1),) * 2
    ),
    "weight norm under Init": _program("normed", init=True, steps=(_step(),) * 2),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_was_wrong_once_is_right(name: str) -> None:
    assert verdict_of(FOUND[name], 2) == "right"
