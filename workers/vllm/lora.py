"""LoRA in the processes that run the model. Tried with vLLM 0.32.0 (vllm/lora/ops/torch_ops,
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
    """Load an adapter in a process. Return why it cannot be loaded, or "".

    Raised instead, an error would leave the answers of the other processes unread, and the executor
    would take them for those to its next call.
    """
    try:
        worker.add_lora(request)
    except Exception as error:  # noqa: BLE001 - of any class, depending on what is wrong
        return str(error) or type(error).__name__
    return ""


def mend_lora(_worker: Any) -> None:
    """Keep adapters away from tokens of the model itself (vllm#48421). Idempotent.

    Tokens without an adapter have the index -1. vLLM's kernels for GPUs skip them; those for CPUs
    use it as an index of Python, and add what the adapter in the last slot computes.
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
        # Each is linear in its inputs, and adds the result to the output.
        kept = torch.where(indices.unsqueeze(-1) >= 0, inputs, torch.zeros_like(inputs))
        return operation(kept, weights, output, indices, *more, **options)

    return mended
