"""Builds the extensions that can be built; the metadata is in pyproject.toml.

There is one in C++, and one for CUDA where PyTorch was built for it and CUDA's compiler is found.
The package works without either, so neither a missing compiler nor a failed build stops an install,
or the other extension.  PyTorch must be importable while building: pip needs --no-build-isolation.
"""

import glob
import os
import platform
import shutil
import subprocess
import sys
from typing import Any

from setuptools import setup  # type: ignore[import-untyped]
from setuptools.errors import BaseError, CompileError, LinkError  # type: ignore[import-untyped]

# The modules use nothing but PyTorch's stable ABI of this version and Python's limited API: one
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


# Declares what the stable ABI has for CUDA: its current stream.
CUDA_FLAGS = ["-DUSE_CUDA"]

NATIVE = "zero_runtime._native"
CUDA = "zero_runtime._cuda"
FREED = "zero_runtime._freed"
#: What each is called, and what its absence costs.
EXTENSIONS = {
    NATIVE: ("C++", "packing and summing are slower"),
    CUDA: ("CUDA", "pinned memory is rounded up to powers of two"),
    FREED: ("storage", "C++ code that reads a partitioned parameter ends the process"),
}


def notice(reason: object, extension: str = NATIVE) -> None:
    """Say on stderr that the package goes without an extension, and why."""
    name, cost = EXTENSIONS[extension]
    print(
        f"zero_runtime: installing without the {name} extension ({reason}).\n"
        f"zero_runtime: everything works, {cost}.",
        file=sys.stderr,
    )


def is_toolkit(folder: str) -> bool:
    """Return whether CUDA's compiler and headers are there."""
    parts = ("bin/nvcc", "include/cuda_runtime_api.h")
    return all(os.path.exists(os.path.join(folder, part)) for part in parts)


def find_toolkit() -> str | None:
    """Return the folder of CUDA's toolkit: PyTorch only looks beside the nvcc in PATH."""
    nvcc = os.path.realpath(shutil.which("nvcc") or "nvcc")
    given = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    places = given or [os.path.dirname(os.path.dirname(nvcc)), "/usr/local/cuda"]
    return next(filter(is_toolkit, places), None)


def native_extension() -> Any:
    """Return the C++ extension, which uses PyTorch's stable ABI and nothing else."""
    from torch.utils.cpp_extension import CppExtension

    return CppExtension(  # type: ignore[no-untyped-call]
        NATIVE,
        sorted(glob.glob("csrc/*.cpp")),
        depends=sorted(glob.glob("csrc/*.h")),
        extra_compile_args={"cxx": COMPILE_FLAGS},
        py_limited_api=True,
    )


def freed_extension() -> Any:
    """Return the extension that needs more than the stable ABI, and is used beside this PyTorch only."""
    from torch.utils.cpp_extension import CppExtension

    return CppExtension(  # type: ignore[no-untyped-call]
        FREED,
        ["csrc/storage/freed.cpp"],
        extra_compile_args={"cxx": ["-std=c++20", "-O2", "-g0"]},
        py_limited_api=True,
    )


def cuda_extensions() -> list[Any]:
    """Return the extension that also uses CUDA's runtime, in a list; none where CUDA is missing."""
    import torch
    from torch.utils.cpp_extension import CUDA_HOME, CUDAExtension

    if torch.version.cuda is None:
        return []  # nothing is missing: PyTorch cannot use a GPU either
    if CUDA_HOME is None or not is_toolkit(CUDA_HOME):
        notice("CUDA's toolkit was not found; set CUDA_HOME to where it is", CUDA)
        return []
    extension = CUDAExtension(  # type: ignore[no-untyped-call]
        CUDA,
        sorted(glob.glob("csrc/cuda/*.cpp")),
        depends=sorted(glob.glob("csrc/cuda/*.h")),
        extra_compile_args={"cxx": COMPILE_FLAGS + CUDA_FLAGS},
        py_limited_api=True,
    )
    return [extension]


def extension_arguments() -> dict[str, Any]:
    """Return setup()'s arguments for the extensions, none where nothing can be built."""
    if platform.system() == "Windows":
        notice("it needs a POSIX system")
        return {}
    toolkit = find_toolkit()
    if toolkit is not None:
        os.environ["CUDA_HOME"] = toolkit  # read when the next line is run
    try:
        from torch.utils.cpp_extension import BuildExtension
    except ImportError as error:
        notice(f"PyTorch cannot be imported: {error}; try --no-build-isolation")
        return {}

    class OptionalBuild(BuildExtension):
        extensions: list[Any]

        def build_extensions(self) -> None:
            self.failed: list[str] = []
            try:
                super().build_extensions()
            except BUILD_ERRORS as error:
                notice(error)
                self.extensions = []
            self.extensions = [each for each in self.extensions if each.name not in self.failed]

        def build_extension(self, ext: Any) -> None:
            try:
                super().build_extension(ext)
            except BUILD_ERRORS as error:
                notice(error, ext.name)
                self.failed.append(ext.name)

    return {
        "ext_modules": [native_extension(), freed_extension(), *cuda_extensions()],
        # Without ninja the sources keep their relative paths, which error messages quote.
        "cmdclass": {"build_ext": OptionalBuild.with_options(use_ninja=False)},  # type: ignore[no-untyped-call]
        "options": {"bdist_wheel": {"py_limited_api": PYTHON_ABI}},
    }


setup(**extension_arguments())
