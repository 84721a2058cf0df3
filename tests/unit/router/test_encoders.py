"""When an encode worker encodes the images of a request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from msgspec import structs

from router.placement.encoders import MARGIN_S, choose_encoder
from router.placement.values import Decision, Demand, MemberState, Placement
from tests.support.placement import IDLE, worker

if TYPE_CHECKING:
    from router.placement.encoders import EncoderChoice
    from router.placement.values import Cached, Candidate

IMAGES = Demand("demo", 100, 150, media=(("hash-a", 10, 20), ("hash-b", 60, 20)))


@dataclass
class Times:
    """Encoding takes `encode_s` for a token; prefill starts in `wait_s`."""

    token_s: float | None = 0.001
    wait_s: float | None = 1.0

    def encode_s(self, model: str, tokens: int) -> float | None:
        return None if self.token_s is None else tokens * self.token_s

    def prefill_wait_s(self, demand: Demand, prefill: Candidate, cached: Cached) -> float | None:
        return self.wait_s


def choice(
    *encoders: Candidate,
    times: Times | None = None,
    demand: Demand = IMAGES,
    ahead: int = 1000,
    cached: int = 0,
    aggregated: bool = False,
) -> EncoderChoice:
    """Choose for a request on prefill worker p0, which has `ahead` prompt tokens to compute."""
    prefill, decode = (
        worker("p0", IDLE, outstanding_tokens=ahead).snapshot(),
        worker("d0", IDLE).snapshot(),
    )
    placement = Placement(decode, None if aggregated else prefill)
    decision = Decision("test", [], demand, 0, placement, cached={"p0": cached})
    return choose_encoder(decision, encoders, times)


def encoder(name: str = "e0", ahead: int = 0, **state: object) -> Candidate:
    return worker(name, IDLE, outstanding_tokens=ahead, **state).snapshot()


def test_the_encoder_with_the_shortest_queue_encodes_while_prefill_is_busy() -> None:
    found = choice(encoder("e0", 40), encoder("e1", 20), times=Times(wait_s=0.5))
    assert found.worker_id == "e1"
    assert found.reason == "encoding takes 40.0 ms; p0 starts in 500.0 ms, e1 in 20.0 ms"


@pytest.mark.parametrize("ahead_s", [0.0, MARGIN_S])
def test_prefill_that_starts_as_early_encodes_itself(ahead_s: float) -> None:
    assert not choice(encoder(), times=Times(wait_s=ahead_s)).worker_id
    assert choice(encoder(), times=Times(wait_s=ahead_s + 0.001 + MARGIN_S)).worker_id == "e0"


@pytest.mark.parametrize("times", [None, Times(token_s=None), Times(wait_s=None)])
def test_before_times_are_known_queues_are_compared(times: Times | None) -> None:
    assert choice(encoder(ahead=30), times=times, ahead=31).worker_id == "e0"
    assert not choice(encoder(ahead=30), times=times, ahead=30).worker_id


def test_no_encoder_is_used_where_it_cannot_help() -> None:
    assert choice(encoder()).worker_id == "e0"
    lost = encoder(lost=True)
    assert lost.state is not MemberState.READY
    avoided = structs.replace(IMAGES, avoid=frozenset({"e0"}))
    ejected = structs.replace(IMAGES, excluded=frozenset({("e0", "p0")}))
    adapted = structs.replace(IMAGES, adapter="a@1")
    reasons = [
        choice(lost).reason,
        choice(encoder(), demand=avoided).reason,
        choice(encoder(), demand=ejected).reason,
        choice(encoder(), demand=adapted).reason,
        choice(encoder(), cached=80).reason,
        choice(encoder(), aggregated=True).reason,
    ]
    assert reasons == [
        *["no encode worker is ready"] * 3,
        "an adapter may change the encoder",
        "p0 has the images in its KV cache",
        "one worker computes the whole request",
    ]
    assert choice(encoder(), cached=79).worker_id == "e0"
