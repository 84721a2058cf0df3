"""Checks requirements of vLLM's CUDA build besides packages. Needs only the standard library,
because `make gpu-install` runs it before it creates the environment.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import sys
import sysconfig
from pathlib import Path

# The platform of requirements/gpu.lock.
PYTHON, MACHINE, CUDA = (3, 12), "x86_64", 13
# First driver version of each CUDA, for messages.
_DRIVERS = {12: 525, 13: 580}
_DRIVER_LIBRARY = "libcuda.so.1"


def wrong_python() -> str:
    """Return why the environment cannot use this interpreter, or ""."""
    if (sys.version_info[:2], platform.machine()) == (PYTHON, MACHINE):
        return ""
    wanted = ".".join(map(str, PYTHON))
    own = f"Python {platform.python_version()} on {platform.machine()}"
    return (
        f"the wheels in requirements/gpu.lock are for Python {wanted} on {MACHINE}, and"
        f" {sys.executable} is {own}: name another one, as in make gpu-install"
        f" VENV=.venv-gpu PYTHON=python{wanted}"
    )


def missing_compiler() -> str:
    """Return the missing requirement of Triton, which compiles C code against Python when a kernel
    first runs, or ""."""
    named = os.environ.get("CC", "")
    package = f"python{sys.version_info[0]}.{sys.version_info[1]}-dev"
    help_text = f"(Debian, Ubuntu: apt-get install gcc {package})"
    if not any(shutil.which(program) for program in ([named] if named else ["gcc", "clang"])):
        what = f"CC={named} is no program" if named else "neither gcc nor clang is on the path"
        return f"Triton needs a C compiler, and {what} {help_text}"
    # As in Triton, because Debian's default scheme names a folder that its packages do not fill.
    header = Path(sysconfig.get_path("include", "posix_prefix"), "Python.h")
    return "" if header.is_file() else f"Triton needs {header}, which is missing {help_text}"


def unfit_driver(cuda: int, library: str = _DRIVER_LIBRARY) -> str:
    """Return why programs of this major version of CUDA cannot run with the NVIDIA driver, or "".

    Queries `library`, not the driver's version, because NVIDIA's package cuda-compat runs newer
    CUDA on older drivers.
    """
    first = f"CUDA {cuda} needs the NVIDIA driver {_DRIVERS.get(cuda, 'of its time')} or newer"
    version = ctypes.c_int()
    try:
        failed = ctypes.CDLL(library).cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return f"{first}, and this machine has none ({library})"
    if failed or version.value // 1000 >= cuda:
        return ""
    has = f"{version.value // 1000}.{version.value % 1000 // 10}"
    return f"{first}; that of this machine runs CUDA {has} at most: install a newer one"


def main() -> int:
    """Print what this machine lacks for the GPU build. Return 1 if it cannot run at all."""
    problems = [each for each in (wrong_python(), missing_compiler()) if each]
    for problem in problems:
        sys.stderr.write(f"{problem}\n")
    if not problems and (driver := unfit_driver(CUDA)):
        # The machine that builds an image, or a node's disk, may have no GPU.
        sys.stderr.write(f"installed all the same; workers will not start here: {driver}\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
