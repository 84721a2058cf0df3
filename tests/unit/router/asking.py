"""Requests for the tests of the request path."""

from __future__ import annotations

from typing import Any

from pdserve import deadline
from pdserve.types import GenerateRequest, SamplingParams

PROMPT = tuple(range(1, 41))


def request(**changes: Any) -> GenerateRequest:
    """Forty prompt tokens, and an answer of at most eight."""
    values: dict[str, Any] = {
        "request_id": "r1",
        "model": "demo",
        "prompt_token_ids": PROMPT,
        "sampling": SamplingParams(max_tokens=8),
        "deadline": deadline.after(600.0),
    }
    return GenerateRequest(**(values | changes))
