"""Compiled code of a model that an earlier start left on disk, on a CPU. Tested with vLLM 0.32.0
(vllm/compilation/decorators.py `_try_load_aot_compiled_fn`, vllm/compilation/caching.py
`aot_compile_hash_factors`).
"""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
import torch.compiler
from vllm.compilation import caching

from pdserve.process.cpu import cpu_digest

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def mend_compiled() -> None:
    """Let vLLM use compiled code that it finds on disk, if it fits. Idempotent.

    vLLM calls `finalize_loading` of the loaded function, which only the functions of its GPU mode
    have. On a CPU the call fails, so each start would compile the model again. It would also load
    code that was made for another number of threads or another processor.
    """
    load = torch.compiler.load_compiled_function
    if hasattr(load, "__wrapped__"):
        return

    @wraps(load)
    def load_finalized(*args: Any, **options: Any) -> Any:
        loaded: Any = load(*args, **options)
        compiled = loaded._artifacts.compiled_fn
        if not hasattr(compiled, "finalize_loading"):
            compiled.finalize_loading = _nothing_to_finalize
        return loaded

    torch.compiler.load_compiled_function = load_finalized
    factors_of = caching.aot_compile_hash_factors

    def with_machine(config: VllmConfig) -> list[str]:
        # The code has the number of threads in its loops, and every instruction of this processor.
        return [*factors_of(config), f"threads {torch.get_num_threads()}", cpu_digest()]

    caching.aot_compile_hash_factors = with_machine


def _nothing_to_finalize(_config: VllmConfig) -> None:
    """Do nothing: functions of the CPU mode are complete when they are read."""
