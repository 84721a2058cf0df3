"""Pipeline stages in the processes that run the model. Tested with vLLM 0.32.0
(vllm/v1/worker/gpu_model_runner.py, vllm/v1/worker/cpu_model_runner.py)."""

from __future__ import annotations

from typing import Any

from vllm.distributed import get_pp_group


def mend_pipeline(worker: Any) -> None:
    """Create the buffer into which a later stage copies the output of the stage before it. vLLM
    creates it in the warm-up of a compiled model, which its CPU runner skips in eager mode, so the
    first step would end the engine. Idempotent.
    """
    runner = worker.model_runner
    if get_pp_group().is_first_rank or runner.intermediate_tensors is not None:
        return
    runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
        batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
    )
