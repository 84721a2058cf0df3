"""Requests made of our own OpenAPI document, right and wrong, to a whole service: each is answered
as the document says, none is a 500, and the service lives."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from pdserve.types import SamplingParams
from tests.cluster import Cluster
from tests.patience import WAIT_S

if TYPE_CHECKING:
    from collections.abc import Iterator

EXAMPLES = 30
SHORT = {"model": "pdserve-demo", "max_tokens": 3, "max_completion_tokens": 3}


def fuzz(address: str) -> set[int]:
    """The statuses that came."""
    schema = schemathesis.openapi.from_url(f"http://{address}/openapi.json", wait_for_schema=WAIT_S)
    return {
        status
        for found in schema.get_all_operations()
        for mode in (GenerationMode if found.ok().body else [GenerationMode.POSITIVE])
        for status in fuzz_operation(found.ok(), mode)
    }


def fuzz_operation(operation: Any, mode: GenerationMode) -> Iterator[int]:
    seen: set[int] = set()

    @settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck), deadline=None)
    @given(operation.as_strategy(generation_mode=mode))
    def structured(case: Any) -> None:
        if isinstance(case.body, dict):
            case.body |= {name: x for name, x in SHORT.items() if name in case.body}
        response = case.call(timeout=WAIT_S)
        seen.add(response.status_code)
        # Some fields rule each other out, which the document does not say.
        case.validate_response(response, excluded_checks=[positive_data_acceptance])

    structured()
    yield from seen


async def test_every_answer_is_one_that_the_document_knows() -> None:
    async with Cluster(aggregated=1) as cluster:
        seen = await asyncio.to_thread(fuzz, cluster.http)
        assert {200, 400} <= seen
        answer = await cluster.ask([1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True))
        assert len(answer.token_ids) == 4
