"""Compile the CUDA shim for the environment of this interpreter: `make gpu-shim`.

The CUDA builds of torch and vLLM need libraries of CUDA that a machine without a GPU lacks.
cudart.cpp stands in for the runtime, driver.c for the driver, nccl.cpp for NCCL and nvml.c for
NVML. All other symbols that they name get a function that says its name and refuses. Where kernels
are skipped (CUDA_SHIM_KERNELS), those of cuBLAS are, too.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
PACKAGES = Path(sysconfig.get_path("purelib"))
LIBRARIES = Path(sys.prefix, "cuda-shim")
INCLUDES = ("nvidia/cu13/include", "nvidia/nccl/include")
SOURCES = {
    "libcudart.so.13": "cudart.cpp",
    "libcuda.so.1": "driver.c",
    "libnccl.so.2": "nccl.cpp",
    "libnvidia-ml.so.1": "nvml.c",
}
# Where a symbol belongs that names no library. All others are the driver's.
PREFIXES = {
    "cublas": "libcublas.so.13",
    "cublasLt": "libcublasLt.so.13",
    "cuFile": "libcufile.so.0",
    "cusparseLt": "libcusparseLt.so.0",
    "nccl": "libnccl.so.2",
    "nvshmem": "libnvshmem_host.so.3",
}
DRIVER = "libcuda.so.1"
# Read by importlib.metadata: `import torch` calls what an entry point of this group names.
ENTRY_POINTS = "[torch.backends]\ncuda_shim = tests.gpu.shim.kernels:implement\n"
METADATA = "Metadata-Version: 2.1\nName: cuda-shim\nVersion: 0\n"
REFUSAL = """#include <stdio.h>
#include <stdlib.h>
#include <string.h>
static int refuse(const char *name) {
  const char *kernels = getenv("CUDA_SHIM_KERNELS");
  if (kernels && !strcmp(kernels, "skip") && !strncmp(name, "cublas", 6)) return 0;
  fprintf(stderr, "CUDA shim: %s is not there\\n", name);
  return 801; /* cudaErrorNotSupported, CUDA_ERROR_NOT_SUPPORTED, and an error everywhere else */
}
"""


def said(*command: str | Path) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def needed(library: Path) -> set[str]:
    """Return the libraries of CUDA that this one names."""
    names = re.findall(r"\(NEEDED\).*\[(lib(?:cu|nv|nccl)[^]]*)\]", said("readelf", "-d", library))
    return {name for name in names if not (library.parent / name).exists()}


def missing(libraries: list[Path]) -> dict[str, dict[str, str]]:
    """Return the symbols that `libraries` expect of CUDA's, each with its version."""
    found: dict[str, dict[str, str]] = {
        name: {} for library in libraries for name in needed(library)
    }
    for library in libraries:
        for line in said("nm", "-D", "--undefined-only", library).splitlines():
            symbol, _, version = line.split()[-1].partition("@")
            prefixes = sorted((x for x in PREFIXES if symbol.startswith(x)), key=len)
            if version in found:
                found[version][symbol] = version
            elif prefixes and version in ("", "NVSHMEM"):
                found[PREFIXES[prefixes[-1]]][symbol] = version
            elif re.match(r"cu[A-Z]", symbol) and not version:
                found[DRIVER][symbol] = version
    return found


def compile_library(name: str, symbols: dict[str, str]) -> None:
    """Compile one library: our source if there is one, and refusals of the other symbols."""
    work, objects, own = LIBRARIES / "build", [], set[str]()
    if source := SOURCES.get(name):
        objects.append(work / f"{source}.o")
        tool = ["g++", "-std=c++20"] if source.endswith("pp") else ["gcc"]
        headers = [x for each in INCLUDES for x in ("-isystem", PACKAGES / each)]
        said(
            *tool,
            "-O2",
            "-Wall",
            "-Wextra",
            "-fPIC",
            *headers,
            "-c",
            HERE / source,
            "-o",
            objects[0],
        )
        text = said("nm", "--defined-only", "--extern-only", objects[0])
        own = {line.split()[-1] for line in text.splitlines()}
    exported = own | symbols.keys()
    refusals, script = work / f"{name}.c", work / f"{name}.map"
    lines = [f'int {x}(void) {{ return refuse("{x}"); }}' for x in sorted(exported - own)]
    refusals.write_text("\n".join([REFUSAL, *lines, ""]) if lines else "")
    version = max(symbols.values(), default="")
    names = " ".join(f"{x};" for x in sorted(exported))
    script.write_text(f"{version} {{ {f'global: {names}' if names else ''} local: *; }};\n")
    linked = ["-shared", "-fPIC", f"-Wl,-soname,{name}", f"-Wl,--version-script={script}"]
    rest = ["-x", "c", "-w", refusals, "-lpthread"]
    said("g++", *linked, "-o", LIBRARIES / name, *objects, *rest)


def install() -> None:
    """Make every start of this environment's Python load the libraries, and torch our kernels."""
    (PACKAGES / "cuda-shim.pth").write_text(f"{ROOT}\nimport tests.gpu.shim.preload\n")
    folder = PACKAGES / "cuda_shim-0.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "entry_points.txt").write_text(ENTRY_POINTS)
    (folder / "METADATA").write_text(METADATA)


def main() -> None:
    (LIBRARIES / "build").mkdir(parents=True, exist_ok=True)
    libraries = sorted((PACKAGES / "torch/lib").glob("*.so*"))
    libraries += sorted((PACKAGES / "vllm").rglob("*.so"))
    for name, symbols in {"libnvidia-ml.so.1": {}, **missing(libraries)}.items():
        compile_library(name, symbols)
    install()


if __name__ == "__main__":
    main()
