"""The C++ tests of the swap engine, with the sanitizers that the compiler here has."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMPILER = os.environ.get("CXX", "g++")

#: Targets of the Makefile, and the compiler's name for what they check.
SANITIZERS = {"asan": "address,undefined", "tsan": "thread"}


def why_not(sanitizer: str, folder: Path) -> str | None:
    """Whether a program with the sanitizer compiles and starts; None where it does."""
    if shutil.which("make") is None or shutil.which(COMPILER) is None:
        return f"there is no make or no {COMPILER}"
    source, program = folder / "empty.cpp", folder / "empty"
    source.write_text("int main() { return 0; }\n")
    compile_it = [COMPILER, f"-fsanitize={sanitizer}", str(source), "-o", str(program)]
    for command in (compile_it, [str(program)]):
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        if done.returncode:
            return f"{COMPILER} has no working {sanitizer} sanitizer: {done.stderr.strip()}"
    return None


@pytest.mark.slow
@pytest.mark.parametrize("target", SANITIZERS)
def test_the_swap_engine_is_clean(target: str, tmp_path: Path) -> None:
    reason = why_not(SANITIZERS[target], tmp_path)
    if reason is not None:
        pytest.skip(reason)
    alone = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(
        ["make", target, f"CHECKED={tmp_path}", f"CXX={COMPILER}"],
        cwd=ROOT,
        env=alone,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-10_000:]
    assert done.stdout.endswith("all is well\n")
    assert not list(tmp_path.glob("*.swap"))
