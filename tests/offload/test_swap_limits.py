"""Swap files where something is not permitted: each fallback is chosen, named, and moves data."""

import errno
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from swaps import run, skip_without_io_uring, time_limit

NOBODY = 65534

#: Numbers of system calls, which are the same on all newer architectures but for `seccomp`.
SETUP, ENTER, REGISTER = 425, 426, 427
SECCOMP_CALL = {"x86_64": 317, "aarch64": 277}

#: Runs first in every script: all imports, so that what is forbidden later is not needed for them.
COMMON = """
import ctypes, errno, os, resource, sys
import torch
from zero_runtime.memory import native
from zero_runtime.errors import SwapError
from zero_runtime.swap import AioConfig, SwapFile

def round_trip(file):
    sizes = (1, 4096, 100_003, 3 << 20)
    sent = [torch.randint(0, 256, (n + 1,), dtype=torch.uint8)[n % 2:][:n] for n in sizes]
    got = [torch.zeros(n, dtype=torch.uint8) for n in sizes]
    for i, n in enumerate(sizes):
        file.allocate(str(i), n)
        file.write(str(i), sent[i])
        file.read(str(i), got[i])
    file.drain()
    assert all(map(torch.equal, sent, got))

def check(folder, **options):
    with SwapFile(folder, 8 << 20, **options) as file:
        round_trip(file)
        print(file.mode)
"""

#: Makes system calls fail in the whole process, by a filter of the kernel. A classic BPF program:
#: load the number, return ERRNO for each of `calls`, ALLOW otherwise.
FORBID = f"""
def forbid(code, *calls):
    class Step(ctypes.Structure):
        _fields_ = [("code", ctypes.c_ushort), ("yes", ctypes.c_ubyte), ("no", ctypes.c_ubyte),
                    ("value", ctypes.c_uint)]
    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("steps", ctypes.POINTER(Step))]
    steps = [Step(0x20, 0, 0, 0)]
    steps += [Step(0x15, len(calls) - i, 0, call) for i, call in enumerate(calls)]
    steps += [Step(0x06, 0, 0, 0x7FFF0000), Step(0x06, 0, 0, 0x00050000 | code)]
    program = Program(len(steps), (Step * len(steps))(*steps))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    by_filter, in_all_threads = 1, 1
    assert libc.syscall({SECCOMP_CALL.get(platform.machine())}, by_filter, in_all_threads,
                        ctypes.byref(program)) == 0, ctypes.get_errno()
"""

#: Gives up what root may, and the right to pin more than 8 MiB.
UNPRIVILEGED = f"""
resource.setrlimit(resource.RLIMIT_MEMLOCK, (8 << 20, 8 << 20))
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid({NOBODY})
    os.setuid({NOBODY})
"""

needs_seccomp = pytest.mark.skipif(
    platform.system() != "Linux" or platform.machine() not in SECCOMP_CALL,
    reason="there is no filter of system calls, or its number is not known",
)


@pytest.fixture(autouse=True)
def _limited() -> Iterator[None]:
    with time_limit(300):
        yield


@pytest.fixture
def io_uring(tmp_path: Path) -> None:
    pytest.importorskip("zero_runtime._native")
    skip_without_io_uring(tmp_path)


@pytest.fixture
def anyones() -> Iterator[Path]:
    """A folder of an unprivileged user, in one that he can reach."""
    folder = Path(tempfile.mkdtemp(prefix="swap-test-"))
    if os.geteuid() == 0:
        os.chown(folder, NOBODY, NOBODY)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.usefixtures("io_uring")
def test_an_unprivileged_user_with_8_mib_to_pin(anyones: Path) -> None:
    """Registered buffers count against the limit; where they exceed it, all else stays."""
    hard = run("import resource; print(resource.getrlimit(resource.RLIMIT_MEMLOCK)[1])")
    if 0 <= int(hard) < 8 << 20:
        pytest.skip(f"no more than {hard.strip()} bytes may be pinned here")
    modes = run(
        COMMON
        + UNPRIVILEGED
        + f"""
check({str(anyones)!r})
check({str(anyones)!r}, slots=16)
held = [SwapFile({str(anyones)!r}, 1 << 20, name=str(i)) for i in range(3)]
print(held[-1].mode)
round_trip(SwapFile({str(anyones)!r}, 8 << 20, name="last"))
"""
    ).splitlines()
    assert all(mode.startswith("io_uring, ") for mode in modes)
    if "O_DIRECT, " not in modes[0]:
        pytest.skip(f"no buffers are registered here: {modes[0]}")
    plain = f"plain buffers (registering them: {os.strerror(errno.ENOMEM)})"
    assert modes == [
        "io_uring, O_DIRECT, registered buffers",
        f"io_uring, O_DIRECT, {plain}",
        f"io_uring, O_DIRECT, {plain}",
    ]
    assert not list(anyones.iterdir())


@needs_seccomp
@pytest.mark.usefixtures("io_uring")
@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS], ids=["forbidden", "unknown"])
def test_threads_where_io_uring_is_not_permitted(tmp_path: Path, code: int) -> None:
    modes = run(
        COMMON
        + FORBID
        + f"""
forbid({code}, {SETUP}, {ENTER}, {REGISTER})
check({str(tmp_path)!r})
try:
    check({str(tmp_path)!r}, backend="io_uring")
except SwapError as error:
    assert error.errno == errno.ENOTSUP
    print(error.strerror)
check({str(tmp_path)!r}, direct=False)
"""
    ).splitlines()
    reason = f"io_uring: {os.strerror(code)}"
    assert modes[0].startswith(f"threads ({reason}), ")
    assert modes[1].startswith(f"swap file {tmp_path}/zero-")
    assert modes[1].endswith(f" was to use io_uring: {reason}")
    assert modes[2] == f"threads ({reason}), buffered (as asked for)"
    assert not list(tmp_path.iterdir())


@needs_seccomp
@pytest.mark.usefixtures("io_uring")
def test_plain_buffers_where_registering_is_not_permitted(tmp_path: Path) -> None:
    mode = run(COMMON + FORBID + f"forbid(errno.EPERM, {REGISTER})\ncheck({str(tmp_path)!r})")
    if "O_DIRECT, " not in mode:
        pytest.skip(f"no buffers are registered here: {mode}")
    reason = os.strerror(errno.EPERM)
    assert mode == f"io_uring, O_DIRECT, plain buffers (registering them: {reason})\n"


@needs_seccomp
@pytest.mark.usefixtures("io_uring")
def test_a_ring_that_is_forbidden_later_fails_what_is_started(tmp_path: Path) -> None:
    """Nothing hangs: each operation fails with the kernel's reason, and the file closes."""
    printed = run(
        COMMON
        + FORBID
        + f"""
with SwapFile({str(tmp_path)!r}, 8 << 20) as file:
    round_trip(file)
    forbid(errno.EPERM, {ENTER})
    for number in range(3):
        try:
            file.write("3", torch.zeros(3 << 20, dtype=torch.uint8)).wait()
        except SwapError as error:
            print(error.errno, error.strerror)
"""
    ).splitlines()
    text = f"tensor '3': cannot write {3 << 20} bytes at offset "
    # The call in which the thread waited when the filter came may still succeed, once.
    assert len(printed) >= 2
    for line in printed:
        assert line.startswith(f"{errno.EPERM} {text}")
        assert line.endswith(os.strerror(errno.EPERM))
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="there is no tmpfs")
@pytest.mark.parametrize("native", [True, False])
def test_tmpfs_is_not_asked_for_o_direct(native: bool) -> None:
    if native:
        pytest.importorskip("zero_runtime._native")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        mode = run(COMMON + f"check({folder!r}, native={native})").strip()
        assert os.listdir(folder) == []
    assert mode.endswith(", buffered (tmpfs is memory)")
    assert mode.startswith(("io_uring", "threads") if native else "Python threads")


@pytest.mark.parametrize("environment", ["ZERO_RUNTIME_NO_NATIVE", "a missing module"])
def test_threads_of_python_without_the_extension(tmp_path: Path, environment: str) -> None:
    missing = 'import sys; sys.modules["zero_runtime._native"] = None\n'
    switched_off = environment.startswith("ZERO")
    script = ("" if switched_off else missing) + COMMON + f"check({str(tmp_path)!r})"
    mode = run(script, **({environment: "1"} if switched_off else {}))
    assert mode.startswith("Python threads, ")
