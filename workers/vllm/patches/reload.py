"""Weights that are loaded again in the processes that run the model. Tested with vLLM 0.32.0
(vllm/model_executor/model_loader/reload/, model_executor/layers/vocab_parallel_embedding.py)."""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader import get_model_loader

from pdserve.model.weight_deltas import read_deltas

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdserve.model.weight_deltas import WeightFiles

# Types of the size of a value, in bytes, that numpy knows, too.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def reload_in(worker: Any, files: WeightFiles) -> str:
    """Load weights in this process. Return why it failed, or "".

    Must not raise: the executor would leave the replies of the other processes unread, and read
    them as replies to its next call.
    """
    try:
        worker.reload_weights(weights_iterator=read_tensors(worker, files))
        _pack_tied_heads(worker.model_runner.get_model())
    except Exception as error:  # noqa: BLE001 - of any class, depending on what is wrong
        return str(error) or type(error).__name__
    return ""


def read_tensors(worker: Any, files: WeightFiles) -> Iterator[tuple[str, torch.Tensor]]:
    """Return all tensors as vLLM reads them from the base's directory, with the values that the
    differences replace. Whole tensors, because vLLM makes its parameters of several of them, packs
    these, and cuts them for its ranks: a value's place in a parameter is not known outside."""
    # A copy, because the path in the engine's own configuration is a part of the key of its KV, and
    # of the names of its tiers. What says where the former weights were is cleared, as vLLM does.
    config = copy(worker.vllm_config.model_config)
    config.model, config.model_weights, config.revision = files.base, "", None
    loader: Any = get_model_loader(worker.vllm_config.load_config)
    deltas = read_deltas(files, field="weights.path")
    for name, tensor in loader.get_all_weights(config, worker.model_runner.get_model()):
        if changes := [x for x in deltas if x.changes(name)]:
            # A copy: the tensor may be the mapped file.
            tensor = tensor.contiguous().clone()  # noqa: PLW2901
            bits = tensor.reshape(-1).view(_BITS[tensor.element_size()]).numpy()
            for delta in changes:
                delta.apply(name, bits.view(f"<u{bits.itemsize}"))
        yield name, tensor


def _pack_tied_heads(model: Any) -> None:
    """Pack the weight of an output layer that is tied to the input embedding again.

    On CPUs both layers compute with packed copies of the shared weight. vLLM loads that weight for
    the embedding alone ("ParallelLMHead: Failed to load weights"), so the output layer would
    compute with the packed copy of the old weight. Tokens would be wrong without any error.
    """
    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)
