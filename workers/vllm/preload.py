"""Import of everything that a vLLM worker needs, so that workers on a CPU start by a fork."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

from pdserve.process.entry_points import COMMANDS, entry_point
from pdserve.process.gpus import is_cpu_build
from workers.vllm.start import settings
from workers.vllm.start.settings import VllmSettings

_MODULES = (
    "workers.vllm.core",
    "workers.server",
    "workers.main",
    "kv_transfer.vllm.connector",
    "vllm.model_executor.models.llama",
)


def preload() -> None:
    """Import vLLM in the common environment of all engines. A forked engine sets the environment
    again for its own settings; of those, vLLM reads only the number of threads at import."""
    os.environ.pop("OMP_NUM_THREADS", None)
    settings.apply_environment(VllmSettings(str(Path.cwd()), (), threads=1))
    # Not the former on a GPU, where it replaces torch's streams and events.
    worker = "vllm.v1.worker.cpu_worker" if is_cpu_build() else "vllm.v1.worker.gpu_worker"
    for name in (*_MODULES, worker):
        importlib.import_module(name)
    entry_point(COMMANDS, "worker").load()  # each fork runs it
    settings.is_preloaded = True
