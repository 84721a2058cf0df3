"""One real vLLM engine that does prefill and decode itself."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest

from pdserve.types import Constraint, FinishReason, SamplingParams, StructuredOutput
from tests.support.engine_pair import params
from workers.engine import DecodePhase, Phase, PrefillPhase

if TYPE_CHECKING:
    from tests.support.engines import EngineProcess

pytestmark = pytest.mark.asyncio(loop_scope="session")
PROMPT = tuple(1 + (11 * i * i + 5 * i) % 400 for i in range(100))


@pytest.mark.parametrize("include", [False, True])
async def test_a_stop_string_ends_the_text_where_it_should(
    aggregated: EngineProcess, include: bool
) -> None:
    whole = (await aggregated.run(PROMPT, params(60, ignore_eos=True))).text
    stop = whole[20:24]
    answer = await aggregated.run(
        PROMPT, params(60, ignore_eos=True, stop=(stop,), include_stop_str_in_output=include)
    )
    end = whole.index(stop) + (len(stop) if include else 0)
    assert answer.text == whole[:end]
    assert answer.finish_reason is FinishReason.STOP
    assert answer.stop_reason == stop


async def test_logprobs_name_the_sampled_token_and_the_best(aggregated: EngineProcess) -> None:
    answer = await aggregated.run(PROMPT, params(logprobs=3, ignore_eos=True))
    assert tuple(p.sampled.token_id for p in answer.logprobs) == answer.token_ids
    for position in answer.logprobs:
        assert [t.rank for t in position.top] == [1, 2, 3]
        assert position.top[0] == position.sampled
        assert position.top[0].logprob >= position.top[1].logprob >= position.top[2].logprob
    none = await aggregated.run(PROMPT, params(logprobs=0))
    assert all(position.top == () for position in none.logprobs)


SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
)
CONSTRAINTS = {
    "regex": (StructuredOutput(Constraint.REGEX, r"[ab]{6}"), r"[ab]{6}"),
    "choice": (StructuredOutput(Constraint.CHOICE, choices=("yes", "no")), r"yes|no"),
    "schema": (
        StructuredOutput(Constraint.JSON_SCHEMA, SCHEMA),
        r"\{\s*\"ok\"\s*:\s*(true|false)\s*\}",
    ),
    "grammar": (StructuredOutput(Constraint.GRAMMAR, 'root ::= "go" ("!" | "?")'), r"go[!?]"),
}


@pytest.mark.parametrize("name", list(CONSTRAINTS))
async def test_structured_output_keeps_to_its_constraint(
    aggregated: EngineProcess, name: str
) -> None:
    constraint, pattern = CONSTRAINTS[name]
    answer = await aggregated.run(PROMPT, params(200, structured_output=constraint))
    assert answer.error is None
    assert re.fullmatch(pattern, answer.text), answer.text
    assert answer.finish_reason is FinishReason.STOP


def structured(kind: Constraint, value: str) -> SamplingParams:
    return params(structured_output=StructuredOutput(kind, value))


# Name of the case: prompt, sampling, field in error. What needs no engine is refused by the router,
# and tested there.
BAD: dict[str, tuple[tuple[int, ...], SamplingParams, str]] = {
    "prompt too long": ((1,) * 4096, params(), "prompt_token_ids"),
    "answer too long": ((1,) * 4000, params(97), "max_tokens"),
    "token above vocabulary": ((1, 100_000), params(), "prompt_token_ids"),
    "logit_bias": (PROMPT, params(logit_bias={100_000: 1.0}), "logit_bias"),
    "stop token": (PROMPT, params(stop_token_ids=(100_000,)), "stop_token_ids"),
    "regex": (PROMPT, structured(Constraint.REGEX, "(["), "structured_output"),
    "schema": (PROMPT, structured(Constraint.JSON_SCHEMA, "{"), "structured_output"),
    "grammar": (PROMPT, structured(Constraint.GRAMMAR, "root ::= nothing"), "structured_output"),
}


@pytest.mark.parametrize("name", list(BAD))
async def test_a_bad_request_is_refused_by_field_without_effect_on_others(
    aggregated: EngineProcess, name: str
) -> None:
    prompt, sampling, field = BAD[name]
    answer = await aggregated.run(prompt, sampling)
    assert answer.finish_reason is FinishReason.ERROR
    assert answer.error is not None
    code = "context_length_exceeded" if "too long" in name else "invalid_value"
    assert (answer.error.code, answer.error.field) == (code, field), answer.error
    assert (await aggregated.run(PROMPT, params())).error is None
    await aggregated.until_empty()


@pytest.mark.parametrize("phase", [PrefillPhase("t"), DecodePhase("t", ("127.0.0.1:1",), "e")])
async def test_without_a_connector_no_part_of_a_request_is_taken(
    aggregated: EngineProcess, phase: Phase
) -> None:
    answer = await aggregated.run(PROMPT, params(), phase)
    assert answer.error is not None
    assert answer.error.field == "phase"
