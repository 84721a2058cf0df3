"""Loads the libraries of the CUDA shim. An environment that `make gpu-shim` made imports this
module at every start of Python, before torch."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

for _path in sorted(Path(sys.prefix, "cuda-shim").glob("lib*.so*")):
    # torch, which names the same libraries, then takes those that are loaded.
    ctypes.CDLL(str(_path), mode=ctypes.RTLD_GLOBAL)
