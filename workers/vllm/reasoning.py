"""When the constraint on an answer begins: at its first token, or after its reasoning.

The router says it with each request. So all engines that a request comes to agree, and need no
reasoning parser in their configuration.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from vllm.reasoning import ReasoningParserManager

from pdserve.errors import InvalidRequest

if TYPE_CHECKING:
    from pdserve.types import ReasoningGate


def set_gate(scheduler: Any, vllm_id: str, gate: ReasoningGate | None) -> None:
    """Tell a request that the scheduler has just taken when its constraint begins. Raises
    InvalidRequest for a parser that vLLM does not have or that does not fit the model."""
    structured = scheduler.requests[vllm_id].structured_output_request
    if structured is None:
        return
    structured.reasoning_ended = gate is None
    if gate is None:
        return
    manager = scheduler.structured_output_manager
    try:
        kind = ReasoningParserManager.get_reasoning_parser(gate.parser)
        structured.reasoner = kind(tokenizer=manager.tokenizer, **json.loads(gate.kwargs_json))
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        text = f"reasoning parser {gate.parser}: {error}"
        raise InvalidRequest(text, field="reasoning_gate") from error
    # vLLM asks the request's own parser only if its configuration names one.
    manager.reasoner_cls = manager.reasoner_cls or kind
