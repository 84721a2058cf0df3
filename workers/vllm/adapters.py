"""The LoRA adapters that vLLM's engine has loaded."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from vllm.lora.request import LoRARequest

from pdserve.errors import InvalidRequest
from workers.engine import NO_LORA
from workers.vllm.patches.lora import load_in, reason_to_refuse

if TYPE_CHECKING:
    from pdserve.types import Adapter
    from workers.vllm.open import OpenedEngine
    from workers.vllm.step.watch import StepWatch


class EngineAdapters:
    """State: the loaded adapters by key. Only the step thread uses it."""

    def __init__(self, opened: OpenedEngine, steps: StepWatch) -> None:
        self._engine, self._executor = opened.engine, opened.executor
        self._steps = steps
        self._loaded: dict[str, LoRARequest] = {}
        self._ids = itertools.count(1)

    def request_of(self, key: str) -> LoRARequest | None:
        """Return vLLM's request of an adapter, None for the key "" of the model itself. Raises
        InvalidRequest if it is not loaded."""
        if key and key not in self._loaded:
            raise InvalidRequest(f"adapter {key} is not loaded", field="adapter")
        return self._loaded.get(key)

    def load(self, adapter: Adapter) -> None:
        """Load a LoRA adapter, if it is not. Raises InvalidRequest with vLLM's reason."""
        config = self._engine.vllm_config.lora_config
        if config is None:
            raise InvalidRequest(NO_LORA, field="lora_name")
        if adapter.key in self._loaded:
            return
        if len(self._loaded) >= config.max_cpu_loras:
            raise InvalidRequest(
                f"{len(self._loaded)} adapters are loaded, as many as "
                f"worker.engine_args.max_cpu_loras allows",
                field="lora_name",
            )
        request = LoRARequest(adapter.key, next(self._ids), adapter.path)
        self._steps.pause()
        results = self._executor.collective_rpc(load_in, args=(request,))
        if error := reason_to_refuse(results):
            self._engine.remove_lora(request.lora_int_id)
            text = f"adapter {adapter.name} cannot be loaded from {adapter.path}: {error}"
            raise InvalidRequest(text, field="lora_path")
        self._loaded[adapter.key] = request

    def unload(self, key: str) -> None:
        """Unload an adapter that no request uses."""
        if (request := self._loaded.pop(key, None)) is not None:
            self._engine.remove_lora(request.lora_int_id)
