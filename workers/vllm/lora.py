"""LoRA in the processes that run the model. Tested with vLLM 0.32.0 (vllm/lora/ops/torch_ops,
vllm/lora/punica_wrapper/punica_cpu.py, vllm/v1/executor/multiproc_executor.py)."""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.lora.request import LoRARequest

_OPERATIONS = ("bgmv_expand", "bgmv_expand_slice", "bgmv_shrink")


def load_in(worker: Any, request: LoRARequest) -> str:
    """Load an adapter in this process. Return the error, or "".

    Do not raise: the executor would leave the replies of the other processes unread, and take them
    for the replies to its next call.
    """
    try:
        worker.add_lora(request)
    except Exception as error:  # noqa: BLE001 - of any class, depending on what is wrong
        return str(error) or type(error).__name__
    return ""


def mend_lora(_worker: Any) -> None:
    """Stop adapters from changing tokens without an adapter (vllm#48421). Idempotent.

    Tokens without an adapter have the index -1. vLLM's GPU kernels skip them. Its CPU kernels use
    -1 as a Python index and add the result of the adapter in the last slot.
    """
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    for name in _OPERATIONS:
        operation = getattr(lora_ops, name)
        if not hasattr(operation, "__wrapped__"):
            for module in (lora_ops, punica_cpu):
                setattr(module, name, _skipping(operation))


def _skipping(operation: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(operation)
    def mended(
        inputs: torch.Tensor,
        weights: torch.Tensor,
        output: torch.Tensor,
        indices: torch.Tensor,
        *more: Any,
        **options: Any,
    ) -> Any:
        # Zero the inputs of these tokens: each operation is linear in its inputs and adds its
        # result to the output.
        kept = torch.where(indices.unsqueeze(-1) >= 0, inputs, torch.zeros_like(inputs))
        return operation(kept, weights, output, indices, *more, **options)

    return mended
