"""The parameters of embeddings and scores in vLLM's terms."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.entrypoints.pooling.scoring.utils import compress_token_type_ids
from vllm.pooling_params import PoolingParams

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

    from workers.engine import PoolingPhase


def pooling_params(
    engine: LLMEngine, phase: PoolingPhase, length: int, *, scores: bool
) -> PoolingParams:
    """Return the parameters for a prompt of `length` tokens. `scores`: the model is a cross
    encoder."""
    if not scores:
        return PoolingParams(task="embed")
    params = PoolingParams(task="classify")
    if "token_type_ids" in engine.get_tokenizer().model_input_names:
        second_at = phase.second_text_at
        types = compress_token_type_ids([0] * second_at + [1] * (length - second_at))
        params.extra_kwargs = {"compressed_token_type_ids": types}
    return params
