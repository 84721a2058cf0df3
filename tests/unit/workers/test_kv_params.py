"""What a connector is told of a piece of work."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kv_transfer.vllm.params import parse
from pdserve.errors import InvalidRequest
from pdserve.types import SamplingParams
from workers.engine import AggregatedPhase, DecodePhase, Phase, PrefillPhase, Work
from workers.vllm.step.kv_params import params_for


def work(phase: Phase, *resume: int) -> Work:
    return Work(1, "r", (5, 6), SamplingParams(), phase, resume)


def test_a_whole_request_needs_no_more_than_its_tokens() -> None:
    assert params_for(work(AggregatedPhase())) == {}
    assert params_for(work(AggregatedPhase(), 7, 8)) == {"resume": [7, 8]}


@pytest.mark.parametrize(
    "phase", [PrefillPhase("t"), DecodePhase("t", ("h:1",), "e"), AggregatedPhase()]
)
def test_kv_that_must_not_be_stored_is_marked_for_the_tiers(phase: Phase) -> None:
    made = params_for(replace(work(phase), no_tiers=True))
    assert made["no_tiers"] is True
    assert parse(made).no_tiers


def test_a_stream_that_comes_with_its_kv_needs_its_tokens() -> None:
    phase = DecodePhase("t", ("h:1",), "e", live=True)
    assert params_for(work(phase, 7, 8))["live"] is True
    with pytest.raises(InvalidRequest) as caught:
        params_for(work(phase))
    assert caught.value.field == "kv_transfer_params.live"


def test_an_invalid_address_is_refused_at_once() -> None:
    with pytest.raises(InvalidRequest) as caught:
        params_for(work(DecodePhase("t", ("nowhere",), "e")))
    assert caught.value.field == "kv_transfer_params.producer_addresses"
