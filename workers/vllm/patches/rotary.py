"""Rotary embeddings in the processes that run the model. Tested with vLLM 0.32.0
(vllm/_custom_ops.py `rotary_embedding`, vllm/model_executor/layers/rotary_embedding/base.py)."""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any

from vllm import _custom_ops
from vllm.platforms import current_platform

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


def mend_rotary(_worker: Any) -> None:
    """Rotate queries and keys of the shape [tokens, heads, head size] by their own positions, on a
    CPU. Idempotent.

    vLLM's CPU kernel uses the stride of heads as the stride of tokens. MLA layers pass views with
    different strides, so their tokens got wrong positions, which depended on the rest of the step.
    """
    # Not RotaryEmbedding.forward_cpu: loaded layers keep the method that they had.
    if current_platform.is_cpu() and not hasattr(_custom_ops.rotary_embedding, "__wrapped__"):
        _custom_ops.rotary_embedding = _by_rows(_custom_ops.rotary_embedding)


def _by_rows(operation: Callable[..., None]) -> Callable[..., None]:
    @wraps(operation)
    def mended(
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor | None,
        *more: Any,
        **options: Any,
    ) -> None:
        tokens = positions.numel()
        rows = [None if x is None else x.reshape(tokens, -1).contiguous() for x in (query, key)]
        operation(positions, *rows, *more, **options)
        # The operation works in place, and a view that is not contiguous was copied.
        for given, row in zip((query, key), rows, strict=True):
            if given is not None and row is not None and row.data_ptr() != given.data_ptr():
                given.copy_(row.view_as(given))

    return mended
