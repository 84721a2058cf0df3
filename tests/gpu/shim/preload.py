"""Loads the libraries of the CUDA shim. An environment that `make gpu-shim` made imports this
module at every start of Python, before torch."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

_LIBRARIES = Path(sys.prefix, "cuda-shim")
for _path in sorted(_LIBRARIES.glob("lib*.so*")):
    # torch, which names the same libraries, then takes those that are loaded.
    ctypes.CDLL(str(_path), mode=ctypes.RTLD_GLOBAL)
# torch also loads the real one, if it is installed.
os.environ.setdefault("PDSERVE_NCCL_SO", str(_LIBRARIES / "libnccl.so.2"))
