"""Compiled code of a model on a CPU, made ahead by a process that serves nothing."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from pdserve.errors import ConfigError
from workers.make_engine import vllm_settings
from workers.metering.worker_account import BusyTime
from workers.vllm.start.settings import apply_environment

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from pdserve.config import WorkerConfig

_LOWEST_PRIORITY = 19


def require_code() -> None:
    """Make a start fail, instead of compiling for a minute, if code cannot be loaded. Call it
    before vllm is used."""
    os.environ["VLLM_FORCE_AOT_LOAD"] = "1"


def make_code(config: WorkerConfig) -> dict[str, int]:
    """Start the engine of a worker, which makes compiled code or loads it, and end it. Return the
    sizes of the files with the model's code, by path. Raises ConfigError for a model that is not to
    be compiled, and what vLLM raises."""
    yield_to_others()
    settings = vllm_settings(config, f"code-{os.getpid()}")
    apply_environment(settings)
    import torch._inductor.config as inductor

    # Without processes of its own for compiling, which would outlive a kill.
    inductor.compile_threads = 1
    from vllm.usage.usage_lib import UsageContext

    from workers.vllm.core import VllmCore
    from workers.vllm.start.args import make_config

    if why := why_not(make_config(settings, UsageContext.OPENAI_API_SERVER)[0]):
        raise ConfigError(f"{why} run eagerly")
    core = VllmCore(settings, lambda: None, BusyTime())
    try:
        folder = Path(core.compiled_code)
        return {str(x): x.stat().st_size for x in sorted(folder.glob("rank_*/model"))}
    finally:
        core.close()


def yield_to_others() -> None:
    """Give this process the lowest priority for cores, disks and memory."""
    priority = os.nice(_LOWEST_PRIORITY)
    with contextlib.suppress(OSError, AttributeError):
        psutil.Process().ionice(psutil.IOPRIO_CLASS_IDLE)
    # A session of its own is also a scheduling group of its own, where nice compares no other
    # processes. And if memory ends, the kernel is to kill this process first.
    for file, value in (("autogroup", priority), ("oom_score_adj", 1000)):
        with contextlib.suppress(OSError):
            Path("/proc/self", file).write_text(str(value))


def why_not(config: VllmConfig) -> str:
    """Return what models are not compiled without being asked, "" for others. Our patches of these
    come after vLLM has compiled, or no test hands their KV over between compiled workers."""
    model = config.model_config
    kinds = {
        "models with experts": model.is_moe,
        "models with MLA": model.use_mla,
        "models with states": model.is_hybrid or model.is_attention_free,
        "models with images": model.is_multimodal_model,
        "quantized models": model.quantization is not None,
    }
    return next((kind for kind, is_it in kinds.items() if is_it), "")
