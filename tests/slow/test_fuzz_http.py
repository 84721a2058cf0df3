"""Requests made of our own OpenAPI document, right and wrong, to a whole service: each is answered
as the document says, none is a 500, and the service lives."""

from __future__ import annotations

import asyncio
from typing import Any

import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from pdserve.types import SamplingParams
from tests.cluster import Cluster
from tests.patience import WAIT_S

EXAMPLES = settings(max_examples=15, suppress_health_check=list(HealthCheck), deadline=None)
SHORT = {"model": "pdserve-demo", "max_tokens": 3, "max_completion_tokens": 3}


def fuzz(address: str) -> set[int]:
    """The statuses that came."""
    schema = schemathesis.openapi.from_url(f"http://{address}/openapi.json", wait_for_schema=WAIT_S)
    seen: set[int] = set()
    for found in schema.get_all_operations():
        operation = found.ok()
        fuzz_operation(operation, GenerationMode.POSITIVE, seen)
        if operation.body:
            fuzz_operation(operation, GenerationMode.NEGATIVE, seen)
            fuzz_bytes(f"http://{address}{operation.path}")
    return seen


def fuzz_operation(operation: Any, mode: GenerationMode, seen: set[int]) -> None:
    """What the document allows, or forbids."""

    @EXAMPLES
    @given(operation.as_strategy(generation_mode=mode))
    def structured(case: Any) -> None:
        if isinstance(case.body, dict):
            case.body |= {name: x for name, x in SHORT.items() if name in case.body}
        response = case.call(timeout=WAIT_S)
        seen.add(response.status_code)
        # Some fields rule each other out, which the document does not say.
        case.validate_response(response, excluded_checks=[positive_data_acceptance])

    structured()


def fuzz_bytes(url: str) -> None:
    """What is mostly no JSON at all."""

    @EXAMPLES
    @given(st.binary(max_size=64))
    def unstructured(body: bytes) -> None:
        response = requests.post(url, body, timeout=WAIT_S)
        assert 400 <= response.status_code < 500, response.text
        parts = {"message", "type"} if "/messages" in url else {"message", "type", "param", "code"}
        assert parts <= set(response.json()["error"])

    unstructured()


async def test_every_answer_is_one_that_the_document_knows() -> None:
    async with Cluster(aggregated=1) as cluster:
        seen = await asyncio.to_thread(fuzz, cluster.http)
        assert {200, 400} <= seen
        answer = await cluster.ask([1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True))
        assert len(answer.token_ids) == 4
