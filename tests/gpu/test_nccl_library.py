"""The binding against the header and the library of NVIDIA's wheel. Needs no GPU."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("msgspec")

from kv_transfer.transport.nccl import binding
from tests.support.gpu_caches import is_shim


def _folder(module: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        return None
    return Path(next(iter(spec.submodule_search_locations or ()))) if spec is not None else None


NCCL, CUDA = _folder("nvidia.nccl"), _folder("nvidia.cu13")
pytestmark = pytest.mark.skipif(NCCL is None, reason="nvidia-nccl-cu13 is not installed")
FIELDS = [name for name, *_ in binding._NcclConfig._fields_]
# Prints a JSON object. `sizes` has the bytes of each argument of a function.
PROGRAM = """
#define __CUDA_FP16_H__
#define __CUDA_BF16_H__
#define __CUDA_FP8_H__
#include <nccl.h>
#include <cstddef>
#include <cstdio>
template <class R, class... A> void sizes(const char *name, R (*)(A...)) {
  std::printf("\\"%%s\\": [", name);
  const size_t all[] = {sizeof(A)..., 0};
  for (size_t n = 0; n < sizeof...(A); ++n) std::printf("%%s%%zu", n ? ", " : "", all[n]);
  std::printf("],\\n");
}
int main() {
  std::printf("{");
  %s
  std::printf("\\"version\\": %%d}", NCCL_VERSION_CODE);
}
"""


@pytest.fixture(scope="module")
def header(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what a C++ compiler makes of nccl.h."""
    if CUDA is None or not (CUDA / "include" / "crt").exists() or shutil.which("g++") is None:
        pytest.skip("needs g++ and CUDA's headers (nvidia-cuda-runtime, nvidia-cuda-crt)")
    assert NCCL is not None
    values = {
        **{f"offset {name}": f"offsetof(ncclConfig_t, {name})" for name in FIELDS},
        **{f"result {n}": f"nccl{n}" for n in ("Success", "InvalidUsage", "InProgress", "Timeout")},
        "unique id": "sizeof(ncclUniqueId)",
        "magic": "NCCL_API_MAGIC",
        "undefined": "NCCL_CONFIG_UNDEF_INT",
        "byte": "ncclUint8",
    }
    lines = [
        f'std::printf("\\"{name}\\": %lld,\\n", (long long)({value}));'
        for name, value in values.items()
    ]
    lines += [f'sizes("{name}", {name});' for name in binding.PROTOTYPES]
    folder = tmp_path_factory.mktemp("nccl")
    source, program = folder / "layout.cpp", folder / "layout"
    source.write_text(PROGRAM % "\n  ".join(lines))
    headers = [f"-isystem{each}/include" for each in (NCCL, CUDA)]
    # The functions are named for their types and never called.
    linked = ["-Wl,--unresolved-symbols=ignore-all"]
    subprocess.run(["g++", "-std=c++17", *headers, source, *linked, "-o", program], check=True)
    done = subprocess.run([program], check=True, stdout=subprocess.PIPE)
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def test_the_configuration_is_the_beginning_of_the_headers(header: dict[str, Any]) -> None:
    for name in FIELDS:
        assert header[f"offset {name}"] == getattr(binding._NcclConfig, name).offset, name
    assert header["magic"] == binding._CONFIG_MAGIC
    assert header["undefined"] == binding._UNDEFINED
    assert header["byte"] == binding._UINT8
    assert header["unique id"] == binding.UNIQUE_ID_BYTES


def test_results_and_arguments_are_those_of_the_header(header: dict[str, Any]) -> None:
    result = binding.Result
    for name, value in {
        "Success": result.SUCCESS,
        "InvalidUsage": result.INVALID_USAGE,
        "InProgress": result.IN_PROGRESS,
        "Timeout": result.TIMEOUT,
    }.items():
        assert header[f"result {name}"] == value
    for function, types in binding.PROTOTYPES.items():
        assert header[function] == [ctypes.sizeof(each) for each in types], function


def test_the_library_takes_the_bindings_calls(header: dict[str, Any]) -> None:
    assert NCCL is not None
    nccl = binding.Nccl(ctypes.CDLL(str(NCCL / "lib" / "libnccl.so.2")))
    assert nccl.version() == header["version"]
    ids = [nccl.unique_id() for _ in range(2)]
    assert ids[0] != ids[1]
    if is_shim():  # it has come through the arguments, to the driver
        result, comm = nccl.comm_init(ids[0], 0, 4)
        assert result is binding.Result.UNHANDLED_CUDA_ERROR
        assert "driver" in nccl.last_error(comm)
