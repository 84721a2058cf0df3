"""Weights that are loaded again in the processes that run the model. Tested with vLLM 0.32.0
(vllm/model_executor/model_loader/reload/, model_executor/layers/vocab_parallel_embedding.py)."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding


def reload_in(worker: Any, path: str) -> str:
    """Load the weights in the directory `path` in this process. Return why it failed, or "".

    Must not raise: the executor would leave the replies of the other processes unread, and read
    them as replies to its next call.
    """
    try:
        worker.reload_weights(weights_path=path)
        _pack_tied_heads(worker.model_runner.get_model())
    except Exception as error:  # noqa: BLE001 - of any class, depending on what is wrong
        return str(error) or type(error).__name__
    return ""


def _pack_tied_heads(model: Any) -> None:
    """Pack the weight of an output layer that is tied to the input embedding again.

    On CPUs both layers compute with packed copies of the shared weight. vLLM loads that weight for
    the embedding alone ("ParallelLMHead: Failed to load weights"), so the output layer would
    compute with the packed copy of the old weight. Tokens would be wrong without any error.
    """
    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)
