"""Validation and compilation of constraints as in the engine. Runs in forks of guard.py."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from vllm.exceptions import VLLMClientError
from vllm.sampling_params import SamplingParams
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_guidance import GuidanceBackend
from vllm.v1.structured_output.request import StructuredOutputRequest

from pdserve.types import Constraint, StructuredOutput
from workers.vllm.step.sampling import structured_to_vllm

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# The engine validates on its step thread, which delays all its requests.
MAX_VALIDATION_S = 0.25


class GrammarCompiler:
    """Compiler of constraints. State: the tokenizer, and vLLM's manager for each backend that the
    engine may use."""

    def __init__(self, config: VllmConfig) -> None:
        """Load the tokenizer and the backends, as the engine of `config` does."""
        self._config = config
        self._managers: dict[str, StructuredOutputManager] = {}
        self._tokenizer = StructuredOutputManager(config).tokenizer
        backend = config.structured_outputs_config.backend
        backends = [backend]
        if backend == "auto":
            # vLLM selects a backend per constraint, but compiles all of them with the first one it
            # selected. So each constraint is tried on both.
            backends = ["xgrammar"]
            if GuidanceBackend.is_tokenizer_supported(self._tokenizer):
                backends.append("guidance")
        for name in backends:
            if reason := self._compile(_params(StructuredOutput(Constraint.JSON_OBJECT)), name):
                raise RuntimeError(f"{name} {reason}")

    def refusal(self, constraint: StructuredOutput) -> str:
        """Return the reason to refuse `constraint`, or "". The process dies if a backend crashes or
        exceeds the limits."""
        config, params, began = self._config, _params(constraint), time.process_time()
        try:
            params.verify(
                config.model_config,
                config.speculative_config,
                config.structured_outputs_config,
                self._tokenizer,
            )
        except (VLLMClientError, ValueError) as error:
            return str(next(iter(error.args), error)) or type(error).__name__
        if time.process_time() - began > MAX_VALIDATION_S:
            return f"takes over {MAX_VALIDATION_S:g} s to validate"
        chosen: str = params.structured_outputs._backend
        failures = {name: self._compile(params, name) for name in {*self._managers, chosen}}
        return failures[chosen]

    def _compile(self, params: Any, backend: str) -> str:
        """Compile and compute the mask of the first token. Return the error, or ""."""
        manager = self._managers.get(backend)
        if manager is None:
            manager = self._managers[backend] = StructuredOutputManager(self._config)
            manager._use_async_grammar_compilation = False  # threads would not survive a fork
        params.structured_outputs._backend = backend
        wanted = StructuredOutputRequest(params.structured_outputs)
        request: Any = SimpleNamespace(
            request_id="", sampling_params=params, structured_output_request=wanted
        )
        manager.grammar_init(request)
        grammar = wanted.grammar
        if isinstance(grammar, Exception):
            return f"could not be compiled to a grammar: {grammar}"
        assert manager.backend is not None
        assert grammar is not None
        grammar.fill_bitmask(manager.backend.allocate_token_bitmask(1), 0)
        return ""


def _params(constraint: StructuredOutput) -> Any:
    return SamplingParams(structured_outputs=structured_to_vllm(constraint))
