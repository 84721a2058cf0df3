"""Which answers pass the check of `escalate`."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import pytest

from pdserve.config import EscalateConfig
from pdserve.types import (
    FinishReason,
    PositionLogprobs,
    Receipt,
    TokenLogprob,
    ToolCallDelta,
    Usage,
)
from router.attempt.answer import AnswerDelta, ParsedDelta
from router.virtual.held_answer import PASSED, AnswerCheck, HeldAnswer

SURE = EscalateConfig(to="large", tokens=4, min_mean_logprob=-1.0)
VALID = EscalateConfig(to="large", tokens=4, valid_json=True, valid_tool_calls=True)
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": ["integer", "null"]},
        "units": {"enum": ["C", "F"]},
        "tags": {"type": "array", "items": {"anyOf": [{"type": "string"}, {"const": 1}]}},
    },
    "required": ["city"],
    "additionalProperties": False,
}


class Sink:
    def __init__(self) -> None:
        self.deltas: list[AnswerDelta] = []

    def write(self, delta: AnswerDelta) -> bool:
        self.deltas.append(delta)
        return True


def token(text: str = "x", logprob: float = -0.5) -> AnswerDelta:
    position = PositionLogprobs(TokenLogprob(7, text, logprob, 1))
    return AnswerDelta((7,), text, (position,))


def last(text: str = "", finish: FinishReason = FinishReason.STOP) -> AnswerDelta:
    usage, receipt = Usage(1, 1), Receipt(cost=2.0)
    return AnswerDelta((7,), text, finish_reason=finish, usage=usage, receipt=receipt)


async def held(check: AnswerCheck, *deltas: AnswerDelta) -> tuple[HeldAnswer, Sink]:
    sink = Sink()
    answer = HeldAnswer(check, sink, hides_logprobs=True)
    for delta in deltas:
        assert answer.write(delta)
        # Nothing gets out before the check has passed.
        assert answer.passed or not sink.deltas
    return answer, sink


@pytest.mark.parametrize(
    ("logprobs", "code"),
    [
        ((-0.5, -1.5, -1.0, -1.0), ""),
        ((-0.5, -1.6, -1.0, -1.0), "logprob"),
        ((math.nan,) * 4, "logprob"),
    ],
)
async def test_the_mean_logprob_of_the_held_tokens_decides(
    logprobs: tuple[float, ...], code: str
) -> None:
    check = AnswerCheck(SURE, None, {})
    answer, sink = await held(check, *(token(logprob=x) for x in logprobs[:3]))
    assert not answer.verdict.done()
    answer.write(token(logprob=logprobs[3]))
    assert answer.verdict.result().code == code
    answer.write(token("y", -90.0))
    answer.write(last())
    assert len(sink.deltas) == (0 if code else 6)
    assert not any(x.logprobs for x in sink.deltas)  # the client did not ask for them
    assert (answer.receipt is None) is not bool(code)


async def test_a_short_answer_is_checked_at_its_end() -> None:
    answer, _ = await held(AnswerCheck(SURE, None, {}), token(logprob=-3.0), last())
    assert answer.verdict.result().code == "logprob"
    assert answer.receipt is not None
    assert answer.receipt.cost == 2.0


@pytest.mark.parametrize(
    ("value", "fits"),
    [
        ({"city": "Ulm"}, True),
        ({"city": "Ulm", "days": 2, "units": "C", "tags": ["a", 1]}, True),
        ({"city": "Ulm", "days": None}, True),
        ({"city": "Ulm", "days": True}, False),
        ({"city": "Ulm", "days": 2.5}, False),
        ({"city": "Ulm", "units": "K"}, False),
        ({"city": "Ulm", "tags": [2]}, False),
        ({"days": 2}, False),
        ({"city": "Ulm", "other": 1}, False),
        ([], False),
    ],
)
async def test_json_and_tool_calls_must_fit_their_schemas(value: Any, fits: bool) -> None:
    text = json.dumps(value)
    answer, _ = await held(AnswerCheck(VALID, SCHEMA, {}), last(text))
    assert answer.verdict.result().code == ("" if fits else "json")
    call = ParsedDelta((7,), tool_calls=(ToolCallDelta(0, "id", "weather", text[:3]),))
    rest = ParsedDelta((7,), tool_calls=(ToolCallDelta(0, arguments=text[3:]),))
    answer, _ = await held(AnswerCheck(VALID, None, {"weather": SCHEMA}), call, rest, last())
    assert answer.verdict.result().code == ("" if fits else "tool_call")
    answer, _ = await held(AnswerCheck(VALID, None, {"other": SCHEMA}), call, rest, last())
    assert answer.verdict.result().code == "tool_call"


@pytest.mark.parametrize(
    "schema",
    [
        {"type": 5, "required": 1, "properties": []},
        # Each level doubles the work.
        {"allOf": [{"anyOf": [{"anyOf": [{"const": 1}] * 30}] * 30}] * 30},
    ],
)
async def test_a_schema_that_is_wrong_or_endless_is_not_met(schema: Any) -> None:
    answer, _ = await held(AnswerCheck(VALID, schema, {}), last("{}"))
    assert answer.verdict.result().code == "json"


async def test_what_must_be_whole_must_end_within_the_held_tokens() -> None:
    answer, sink = await held(AnswerCheck(VALID, {}, {}), *(token("{"),) * 4)
    assert answer.verdict.result().code == "too_long"
    answer, sink = await held(AnswerCheck(VALID, None, {}), *(token(),) * 4)
    assert answer.verdict.result() is PASSED
    assert len(sink.deltas) == 4
    await asyncio.sleep(0)
