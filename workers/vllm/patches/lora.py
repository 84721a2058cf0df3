"""LoRA in the processes that run the model. Tested with vLLM 0.32.0 (vllm/lora/ops/torch_ops,
vllm/lora/punica_wrapper/punica_cpu.py, vllm/v1/executor/multiproc_executor.py)."""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vllm.lora.request import LoRARequest

_SHOWN = 3  # names in an error
_OPERATIONS = ("bgmv_expand", "bgmv_expand_slice", "bgmv_shrink")


class Loaded(NamedTuple):
    """Result of loading an adapter in one process. `error`: why it failed, or "". `fits`: number of
    modules that it changes. `unfit`: its names that match no module of this process. `modules`:
    names of modules that would match."""

    error: str = ""
    fits: int = 0
    unfit: frozenset[str] = frozenset()
    modules: tuple[str, ...] = ()


def load_in(worker: Any, request: LoRARequest) -> Loaded:
    """Load an adapter in this process.

    Must not raise: the executor would leave the replies of the other processes unread, and read
    them as replies to its next call.
    """
    try:
        worker.add_lora(request)
        return _compare(worker.model_runner.lora_manager._adapter_manager, request.lora_int_id)
    except Exception as error:  # noqa: BLE001 - of any class, depending on what is wrong
        return Loaded(str(error) or type(error).__name__)


def _compare(manager: Any, adapter_id: int) -> Loaded:
    """Compare the adapter's names with the modules. vLLM compares only the last part of the names,
    so weights for a missing module are loaded and never used. It may leave out existing modules,
    such as an image encoder's."""
    adapter = manager.list_adapters()[adapter_id]
    used = [manager._get_lora_layer_weights(adapter, name) for name in manager.modules]
    names = {weights.module_name for weights in used if weights is not None}
    folders = {name for name, _ in manager.model.named_modules(remove_duplicate=False)}
    unfit = {
        name
        for name, weights in adapter.loras.items()
        if weights.module_name not in names and name.rpartition(".")[0] not in folders
    }
    return Loaded("", len(names), frozenset(unfit), tuple(manager.modules)[:_SHOWN])


def reason_to_refuse(ranks: Sequence[Loaded]) -> str:
    """Return why an adapter that `ranks` have loaded is refused, or "". A pipeline stage has only
    the modules of its own layers."""
    if error := next((rank.error for rank in ranks if rank.error), ""):
        return error
    unfit = sorted(frozenset.intersection(*(rank.unfit for rank in ranks)))
    if not unfit and any(rank.fits for rank in ranks):
        return ""
    have = ", ".join(ranks[0].modules)
    names = f"{', '.join(unfit[:_SHOWN])} ({len(unfit)} in all)" if unfit else "of all names"
    return f"its weights {names} fit no module of the model, which has {have} and others"


def mend_lora(_worker: Any) -> None:
    """Prevent adapters from changing tokens without an adapter (vllm#48421). Idempotent.

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
