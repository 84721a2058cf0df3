"""What a connector is told of a piece of work, and what comes back from it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from kv_transfer.vllm.params import parse
from pdserve.errors import InvalidRequest
from pdserve.types import HandoffStyle, SamplingParams
from workers.engine import AggregatedPhase, DecodePhase, Phase, PrefillPhase, Work
from workers.vllm.step.kv_params import handle_of, params_for

AT_ONCE, IN_TURN = HandoffStyle.CONCURRENT, HandoffStyle.SEQUENTIAL
LEFT = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]], "remote_port": 5}


def work(phase: Phase, *resume: int) -> Work:
    return Work(1, "r", (5, 6), SamplingParams(), phase, resume)


def decode(handle: bytes) -> DecodePhase:
    return DecodePhase("t", ("h:1",), "e", kv_handle=handle)


def test_decode_gets_the_transfer_parameters_of_prefill() -> None:
    assert params_for(work(decode(handle_of(LEFT)), 7), IN_TURN) == {**LEFT, "resume": [7]}


def test_a_sequential_prefill_is_ordered_to_keep_its_kv() -> None:
    params = params_for(work(PrefillPhase("t")), IN_TURN)
    assert params == {"do_remote_decode": True, "do_remote_prefill": False}


@pytest.mark.parametrize("style", [AT_ONCE, IN_TURN])
def test_a_whole_request_needs_no_more_than_its_tokens(style: HandoffStyle) -> None:
    assert params_for(work(AggregatedPhase()), style) == {}
    assert params_for(work(AggregatedPhase(), 7, 8), style) == {"resume": [7, 8]}


@pytest.mark.parametrize(
    "phase", [PrefillPhase("t"), DecodePhase("t", ("h:1",), "e"), AggregatedPhase()]
)
def test_kv_that_must_not_be_stored_is_marked_for_the_tiers(phase: Phase) -> None:
    made = params_for(replace(work(phase), no_tiers=True), AT_ONCE)
    assert made["no_tiers"] is True
    assert parse(made).no_tiers


def test_a_stream_that_comes_with_its_kv_needs_its_tokens() -> None:
    phase = DecodePhase("t", ("h:1",), "e", live=True)
    assert params_for(work(phase, 7, 8), AT_ONCE)["live"] is True
    with pytest.raises(InvalidRequest) as caught:
        params_for(work(phase), AT_ONCE)
    assert caught.value.field == "kv_transfer_params.live"


def test_a_prefill_that_kept_nothing_has_no_handle() -> None:
    assert handle_of(None) == b""


@pytest.mark.parametrize(
    "handle", [b"", b"{", b"[]", b"\xff", json.dumps({"do_remote_prefill": False}).encode()]
)
def test_a_handle_that_names_no_kv_is_refused(handle: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        params_for(work(decode(handle)), IN_TURN)
    assert caught.value.field == "decode.kv_handle"


def test_an_invalid_address_is_refused_at_once() -> None:
    with pytest.raises(InvalidRequest) as caught:
        params_for(work(DecodePhase("t", ("nowhere",), "e")), AT_ONCE)
    assert caught.value.field == "kv_transfer_params.producer_addresses"
