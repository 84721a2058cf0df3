"""A request that is forwarded arrives as it was sent."""

from __future__ import annotations

import pytest
from msgspec import structs

from pdserve.errors import Unavailable
from pdserve.types import (
    Adapter,
    Constraint,
    MediaItem,
    ReasoningGate,
    SamplingParams,
    ServiceClass,
    StaleKv,
    StructuredOutput,
)
from router.attempt.forwarded import request_from_pb, request_to_pb
from tests.support.router_stack import request

ADAPTER = Adapter("a", "d", "/a", "demo")


async def test_every_field_that_another_region_needs_arrives() -> None:
    image = MediaItem("image", "h", 3, 2, metadata=b"m", data=b"pixels")
    constraint = StructuredOutput(Constraint.REGEX, "a+")
    sent = request(
        sampling=SamplingParams(max_tokens=9, seed=3, structured_output=constraint),
        priority=2,
        service_class=ServiceClass.BATCH,
        tenant="t",
        traceparent="00-1-2-01",
        resume=(5, 6),
        adapter=ADAPTER,
        cache_salt="eu+us\0salt",
        reasoning_gate=ReasoningGate("parser", "{}"),
        media=(image,),
        session="s",
        regions=frozenset({"eu", "us"}),
        stale_kv=StaleKv.ABORT,
    )
    message = await request_to_pb(sent, tokenizer="digest", from_region="eu")
    assert (message.tokenizer, message.from_region) == ("digest", "eu")
    found = request_from_pb(message, {ADAPTER.key: ADAPTER}, 60.0)
    assert found.pixels is not None
    assert await found.pixels.read() == (image,)
    assert found.deadline is not None
    same = {"deadline": sent.deadline, "pixels": sent.pixels, "from_region": ""}
    assert structs.replace(found, **same) == sent
    with pytest.raises(Unavailable, match="adapter a@d is not loaded"):
        request_from_pb(message, {}, 60.0)
