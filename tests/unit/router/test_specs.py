"""The streams of an attempt, and what the fleet learns from one of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pdserve.errors import WorkerFailed
from pdserve.types import (
    ErrorInfo,
    FinishReason,
    GenerateRequest,
    SamplingParams,
    StreamDelta,
)
from router.attempt import specs
from router.attempt.handoff import Side
from router.attempt.observer import StreamObserver
from router.attempt.placer import Reservation
from router.attempt.specs import SubmitInputs
from router.attempt.streams import WorkerStream
from router.fleet.registry import Fleet
from tests.support.placement import worker

if TYPE_CHECKING:
    from router.attempt.specs import StreamSpec

REQUEST = GenerateRequest(
    request_id="r", model="demo", prompt_token_ids=(1, 2, 3), sampling=SamplingParams(max_tokens=4)
)


def pair() -> list[StreamSpec]:
    held = Reservation(worker("d0"), prefill=worker("p0"), encoder=worker("e0"))
    return specs.generation(REQUEST, held)


def test_decode_is_sent_first() -> None:
    assert [x.side for x in pair()] == [Side.DECODE, Side.ENCODE, Side.PREFILL]


@pytest.mark.parametrize("sent", [(), (Side.ENCODE,)])
def test_prefill_waits_only_for_embeddings_that_were_asked_for(sent: tuple[Side, ...]) -> None:
    prefill = pair()[-1].build(SubmitInputs((), (), sent)).submit.prefill
    assert prefill.HasField("embeddings") is bool(sent)


async def test_failures_of_an_encode_worker_count_only_in_a_row() -> None:
    observer, charge = StreamObserver(Fleet()), pair()[1].charge
    stream = WorkerStream(Side.ENCODE, charge.member, charge, None, "", is_optional=True)
    failed = StreamDelta(0, error=ErrorInfo(WorkerFailed.code, "it failed"))
    failed.finish_reason = FinishReason.ERROR
    for delta in (failed, failed, StreamDelta(0, finish_reason=FinishReason.STOP), failed):
        observer.first_delta(stream, delta)
        observer.ended(stream, delta, None)
    assert not charge.member.suspended
