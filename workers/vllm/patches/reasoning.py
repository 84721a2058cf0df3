"""The start of the constraint on an answer: at its first token, or after its reasoning.

The router sends the parser with each request. All engines of a request therefore agree, and need no
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
    """Set the start of the constraint for a request that the scheduler has just accepted. Raises
    InvalidRequest for a parser that is unknown to vLLM or does not fit the model."""
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
    # vLLM uses the request's own parser only if its configuration names one, so set that.
    manager.reasoner_cls = manager.reasoner_cls or kind
