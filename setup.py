"""Builds the C++ extension where it can be built; the metadata is in pyproject.toml.

The package works without the extension, so neither a missing compiler nor a failed build stops an
install.  PyTorch must be importable while building: pip needs --no-build-isolation.
"""

import glob
import platform
import subprocess
import sys
from typing import Any

from setuptools import setup  # type: ignore[import-untyped]
from setuptools.errors import BaseError, CompileError, LinkError  # type: ignore[import-untyped]

# The module uses nothing but PyTorch's stable ABI of this version and Python's limited API: one
# binary serves all later versions of both.
TORCH_ABI = "0x020b000000000000"  # 2.11
PYTHON_ABI = "cp310"

BUILD_ERRORS = (
    BaseError,
    CompileError,
    LinkError,
    OSError,
    RuntimeError,
    subprocess.SubprocessError,
)

COMPILE_FLAGS = [
    f"-DTORCH_TARGET_VERSION={TORCH_ABI}",
    "-std=c++17",
    "-O3",
    "-g0",
    "-fvisibility=hidden",
    # A fused multiply-add rounds once where PyTorch rounds twice.
    "-ffp-contract=off",
    # Nothing reads the floating-point flags, and keeping them exact stops vectorisation.
    "-fno-trapping-math",
    # Nor does anything read errno after a square root, which stops it as well.
    "-fno-math-errno",
    # Threads of the C++ library, where they are not part of the C library.
    "-pthread",
]


def notice(reason: object) -> None:
    """Say on stderr that the package goes without its extension, and why."""
    print(
        f"zero_runtime: installing without the C++ extension ({reason}).\n"
        "zero_runtime: everything works, packing and summing are slower.",
        file=sys.stderr,
    )


def extension_arguments() -> dict[str, Any]:
    """Return setup()'s arguments for the extension, none where it cannot be built."""
    if platform.system() == "Windows":
        notice("it needs a POSIX system")
        return {}
    try:
        from torch.utils.cpp_extension import BuildExtension, CppExtension
    except ImportError as error:
        notice(f"PyTorch cannot be imported: {error}; try --no-build-isolation")
        return {}

    class OptionalBuild(BuildExtension):
        extensions: list[Any]

        def build_extensions(self) -> None:
            try:
                super().build_extensions()
            except BUILD_ERRORS as error:
                notice(error)
                self.extensions = []

    native = CppExtension(  # type: ignore[no-untyped-call]
        "zero_runtime._native",
        sorted(glob.glob("csrc/*.cpp")),
        depends=sorted(glob.glob("csrc/*.h")),
        extra_compile_args={"cxx": COMPILE_FLAGS},
        py_limited_api=True,
    )
    return {
        "ext_modules": [native],
        # Without ninja the sources keep their relative paths, which error messages quote.
        "cmdclass": {"build_ext": OptionalBuild.with_options(use_ninja=False)},  # type: ignore[no-untyped-call]
        "options": {"bdist_wheel": {"py_limited_api": PYTHON_ABI}},
    }


setup(**extension_arguments())
