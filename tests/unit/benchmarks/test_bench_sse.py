"""Reading streamed completions from their bytes."""

from __future__ import annotations

import json

import pytest

from benchmarks.errors import TargetError
from benchmarks.records import Timeline
from benchmarks.sse import CompletionStream, error_text


def _event(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def _chunk(text: str, **more: object) -> bytes:
    finish = more.pop("finish_reason", None)
    choice = {"index": 0, "text": text, "finish_reason": finish} | more
    return _event({"choices": [choice]})


def _usage(tokens: int, **more: object) -> bytes:
    usage = {"prompt_tokens": 7, "completion_tokens": tokens}
    return _event({"choices": [], "usage": usage} | more)


DONE = b"data: [DONE]\n\n"


def _timeline(tokens: int) -> Timeline:
    return Timeline(
        index=0,
        request_id="r",
        input_tokens=7,
        output_tokens=tokens,
        scheduled_s=0.0,
        now=lambda: 9.0,
    )


def _read(tokens: int, *pieces: bytes) -> Timeline:
    timeline = _timeline(tokens)
    stream = CompletionStream(timeline)
    for at_s, piece in enumerate(pieces):
        stream.feed(piece, float(at_s))
    timeline.complete(stream.answer())
    return timeline


def test_each_chunk_is_a_token_where_they_are_as_many() -> None:
    record = _read(3, _chunk("a"), _chunk(""), _chunk("c", finish_reason="length"), _usage(3), DONE)
    assert record.record().chunk_s == (0.0, 1.0, 2.0)
    assert record.record().chunk_tokens == (1, 1, 1)
    assert record.record().prompt_tokens == 7


def test_an_empty_last_chunk_beyond_the_tokens_is_no_token() -> None:
    timeline = _read(
        2, _chunk("a"), _chunk("b"), _chunk("", finish_reason="length"), _usage(2), DONE
    )
    assert timeline.record().chunk_s == (0.0, 1.0)
    assert timeline.record().chunk_tokens == (1, 1)


def test_an_empty_last_chunk_may_be_the_last_token() -> None:
    timeline = _read(2, _chunk("a"), _chunk("", finish_reason="length"), _usage(2), DONE)
    assert timeline.record().chunk_s == (0.0, 1.0)


def test_chunks_of_several_tokens_are_not_counted_as_one() -> None:
    assert _read(5, _chunk("ab"), _chunk("cde"), _usage(5), DONE).record().chunk_tokens is None


def test_token_ids_and_running_usage_tell_the_counts() -> None:
    by_ids = _read(
        3,
        _chunk("ab", token_ids=[4, 5]),
        _chunk("", token_ids=[]),
        _chunk("c", token_ids=[6], finish_reason="length"),
        _usage(3) + DONE,
    )
    assert by_ids.record().chunk_s == (0.0, 2.0)
    assert by_ids.record().chunk_tokens == (2, 1)

    def running(text: str, tokens: int) -> bytes:
        return _event({"choices": [{"text": text}], "usage": {"completion_tokens": tokens}})

    by_usage = _read(3, running("ab", 2), running("c", 3), _usage(3) + DONE)
    assert by_usage.record().chunk_tokens == (2, 1)


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_pieces_may_break_anywhere(size: int) -> None:
    whole = b": ping\r\n\r\n" + _chunk("é").replace(b"\n", b"\r\n") + _chunk("b") + _usage(2) + DONE
    pieces = [whole[start : start + size] for start in range(0, len(whole), size)]
    assert _read(2, *pieces).record().chunk_tokens == (1, 1)


def test_the_receipt_and_cached_tokens_are_kept() -> None:
    receipt = {"prefill_s": 0.25, "fallbacks": []}
    usage = {
        "prompt_tokens": 7,
        "completion_tokens": 1,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    last = {"choices": [], "usage": usage, "pdserve": {"receipt": receipt}}
    record = _read(1, _chunk("a"), _event(last), DONE).record()
    assert record.receipt == receipt
    assert record.cached_tokens == 4


BROKEN = [
    pytest.param([_chunk("a"), _usage(1)], "before \\[DONE\\]", id="broken off"),
    pytest.param([_chunk("a"), DONE], "no usage", id="no usage"),
    pytest.param([_chunk("a"), _event({"usage": {}}), DONE], "no usage", id="empty usage"),
    pytest.param([_chunk("a"), _usage(2), DONE], "wrong length", id="too long"),
    pytest.param([_usage(1), DONE], "no tokens", id="usage without tokens"),
    pytest.param([b"data: {\n\n"], "not JSON", id="garbage"),
    pytest.param([b"data: 3\n\n"], "not a JSON object", id="no object"),
    pytest.param(
        [_chunk("a"), _event({"error": {"message": "worker lost"}})], "worker lost", id="error"
    ),
]


@pytest.mark.parametrize(("pieces", "message"), BROKEN)
def test_a_stream_that_is_not_a_whole_answer_is_a_failure(
    pieces: list[bytes], message: str
) -> None:
    with pytest.raises(TargetError, match=message):
        _read(1, *pieces)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        ({"error": {"message": "m", "type": "t"}}, "m"),
        ({"message": "m"}, "m"),
        ({"error": "m"}, "m"),
        ("m", "m"),
        ({"detail": "d"}, "{'detail': 'd'}"),
    ],
)
def test_error_texts(error: object, text: str) -> None:
    assert error_text(error) == text
