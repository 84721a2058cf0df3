"""Import of everything that a vLLM worker on a CPU needs, so that workers start by a fork."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

from pdserve.process.entry_points import COMMANDS, entry_point
from workers.vllm import settings
from workers.vllm.settings import VllmSettings

_MODULES = (
    "workers.vllm.core",
    "workers.server",
    "workers.main",
    "kv_transfer.vllm.connector",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.llama",
)


def preload() -> None:
    """Import vLLM in the common environment of all engines. A forked engine sets the environment
    again for its own settings; of those, vLLM reads only the number of threads at import."""
    os.environ.pop("OMP_NUM_THREADS", None)
    settings.apply_environment(VllmSettings(str(Path.cwd()), (), threads=1))
    for name in _MODULES:
        importlib.import_module(name)
    entry_point(COMMANDS, "worker").load()  # what each fork runs
    settings.is_preloaded = True
