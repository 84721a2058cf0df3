"""Import everything that a vLLM worker on a CPU needs, so that workers start from a fork."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

from workers.vllm import settings
from workers.vllm.settings import VllmSettings

_MODULES = (
    "workers.vllm.core",
    "workers.server",
    "workers.main",
    "pdserve.cli",
    "kv_transfer.vllm.connector",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.llama",
)


def preload() -> None:
    """Import vLLM in the environment that every engine sets. A forked engine sets it again for its
    own settings; of those, only the number of threads is read at import."""
    os.environ.pop("OMP_NUM_THREADS", None)
    settings.apply_environment(VllmSettings(str(Path.cwd()), (), threads=1))
    for name in _MODULES:
        importlib.import_module(name)
    settings.is_preloaded = True
