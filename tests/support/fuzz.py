"""Run random programs on one to three ranks: ``python tests/support/fuzz.py --programs 3000``.

Prints how many were right, refused and wrong, each wrong one as data to run again, and fails if any was.
"""

import argparse
import os
import sys
import time
from collections import Counter

os.environ.setdefault("AOT_INDUCTOR_DEBUG_COMPILE", "1")

from torch._inductor import config as inductor

import ranks
from fuzz_programs import Program, drawn, run


def verdict_of(program: Program, world_size: int) -> str:
    """``right``, ``refused: why``, or ``wrong: how``; ranks must agree."""
    try:
        said = set(ranks.run(world_size, run, program, seconds=120))
    except AssertionError as error:
        lines = [x for x in str(error).splitlines() if x.strip()]
        return f"wrong: {lines[-1]}"
    if said == {"right"}:
        return "right"
    if "right" in said:
        return f"wrong: refused on some ranks only: {said}"
    return f"refused: {min(said)}"


def fuzz(count: int, seed: int, seconds: float = float("inf")) -> Counter[str]:
    """Verdicts of ``count`` programs, or of as many as fit the time."""
    verdicts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    began = time.monotonic()
    with inductor.patch(fallback_by_default=True):
        for number, program in enumerate(drawn(count, seed)):
            if time.monotonic() - began > seconds:
                break
            world_size = 1 + number % 3
            verdict = verdict_of(program, world_size)
            verdicts[verdict.split(":")[0]] += 1
            if verdict.startswith("refused"):
                reasons[verdict[:160]] += 1
            if verdict.startswith("wrong"):
                print(f"{verdict}\n  on {world_size} ranks: {program}", flush=True)
    for reason, times in reasons.most_common():
        print(f"{times} x {reason}")
    print(dict(verdicts), f"in {time.monotonic() - began:.0f} s")
    return verdicts


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    given = parser.parse_args()
    return int(fuzz(given.programs, given.seed, given.seconds)["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
