"""The machine's facts in a GPU report, as JSON: `python -m benchmarks.micro.gpu_facts`.

{"gpu": why no GPU can be used, or "", "vllm": why vLLM cannot use one, or "", "facts": {...}}.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from pdserve import __version__
from pdserve.process.gpu_machine import CUDA, missing_compiler, unfit_driver

_PACKAGES: Final = ("torch", "triton", "vllm", "flashinfer-python", "nvidia-nccl-cu13", "nixl")
_SMI: Final = "nvidia-smi"
_QUERY: Final = (
    "index,name,driver_version,memory.total,pcie.link.gen.max,pcie.link.width.max,mig.mode.current"
)
_LIMIT_S: Final = 20.0
# Modules that `make gpu-shim` has every start of its Python import.
_SHIM: Final = "tests.gpu.shim.preload"


def main() -> None:
    facts: dict[str, object] = {
        "pdserve": _said("git", "describe", "--always", "--dirty") or __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cores": os.cpu_count(),
        **{name: _version_of(name) for name in _PACKAGES},
        "driver": unfit_driver(CUDA) or "fits",
        "compiler": missing_compiler() or "found",
        "is_shim": _SHIM in sys.modules,
    }
    reason, more = _gpus()
    facts |= more
    for name, words in (
        ("gpus", (f"--query-gpu={_QUERY}", "--format=csv,noheader")),
        ("topology", ("topo", "-m")),
        ("nvlink", ("nvlink", "--status")),
    ):
        facts[name] = _said(_SMI, *words) or f"not known: no answer of {_SMI}"
    print(json.dumps({"gpu": reason, "vllm": reason or _missing_vllm(), "facts": facts}))  # noqa: T201


def _gpus() -> tuple[str, dict[str, object]]:
    """Return (why torch can use no GPU, or ""; facts reported by torch and NCCL)."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed", {}
    import torch

    if not torch.cuda.is_available():
        return "torch finds no CUDA GPU", {"cuda": torch.version.cuda}
    from kv_transfer.errors import KvTransferError
    from kv_transfer.transport.nccl import binding

    try:
        nccl: object = binding.load().version()
    except KvTransferError as error:
        nccl = str(error)
    devices = range(torch.cuda.device_count())
    return "", {
        "cuda": torch.version.cuda,
        "nccl": nccl,
        "devices": [torch.cuda.get_device_name(n) for n in devices],
        "capability": ["{}.{}".format(*torch.cuda.get_device_capability(n)) for n in devices],
        "peer_access": [
            [a == b or torch.cuda.can_device_access_peer(a, b) for b in devices] for a in devices
        ],
    }


def _missing_vllm() -> str:
    return "" if _version_of("vllm") else "vLLM's build for GPUs is not installed: make gpu-install"


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _said(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout.strip()


if __name__ == "__main__":
    main()
