"""Constraints that crash or stall compilers of grammars, past the router's bounds."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from pdserve.types import Constraint, FinishReason, StructuredOutput
from tests.support.engine_pair import params, prompt

if TYPE_CHECKING:
    from tests.support.engines import EngineProcess

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPT = prompt(40)
PARENS = "(" * 30_000 + "a" + ")" * 30_000
JSON, TAG = Constraint.JSON_SCHEMA, Constraint.STRUCTURAL_TAG
REGEX, GRAMMAR = Constraint.REGEX, Constraint.GRAMMAR
CRASH = "crashes the compiler of grammars, or takes over 1 GiB of memory to compile"
SLOW, SLOW_TO_VALIDATE = "takes over 4 s of CPU time to compile", "takes over 0.25 s to validate"


def as_json(kind: Constraint, value: object) -> StructuredOutput:
    return StructuredOutput(kind, json.dumps(value))


def many_objects(count: int) -> dict[str, Any]:
    inner = {"type": "object", "properties": {"a": {"type": "string"}}}
    return {"type": "object", "properties": {f"p{i}": inner for i in range(count)}}


HOSTILE_PATTERN = {"type": "string", "pattern": PARENS}
HOSTILE: dict[str, tuple[StructuredOutput, str]] = {
    "pattern": (as_json(JSON, HOSTILE_PATTERN), CRASH),
    "key of patternProperties": (
        as_json(JSON, {"type": "object", "patternProperties": {PARENS: {}}}),
        CRASH,
    ),
    "pattern in a structural tag": (
        as_json(
            TAG,
            {
                "type": "structural_tag",
                "format": {"type": "json_schema", "json_schema": HOSTILE_PATTERN},
            },
        ),
        CRASH,
    ),
    "rules, each of the next": (
        StructuredOutput(
            GRAMMAR,
            "root ::= r0\n"
            + "".join(f"r{i} ::= r{i + 1}\n" for i in range(5000))
            + 'r5000 ::= "a"\n',
        ),
        CRASH,
    ),
    "memory": (
        as_json(JSON, {"type": "array", "items": {"type": "string"}, "minItems": 100_000_000}),
        CRASH,
    ),
    # A busy machine may need more than 0.25 s of CPU time to validate it.
    "many objects": (as_json(JSON, many_objects(4000)), (SLOW, SLOW_TO_VALIDATE)),
    "many choices": (
        StructuredOutput(Constraint.CHOICE, choices=tuple(map(str, range(200_000)))),
        SLOW_TO_VALIDATE,
    ),
    "nested objects": (
        StructuredOutput(JSON, '{"items":' * 30_000 + "{}" + "}" * 30_000),
        "The JSON schema is nested too deeply",
    ),
    "regex": (StructuredOutput(REGEX, PARENS), "Grammar error"),
    "lark": (StructuredOutput(GRAMMAR, f"start: {PARENS}"), "Grammar error"),
}


@pytest.mark.parametrize("name", list(HOSTILE))
async def test_a_hostile_constraint_fails_only_its_own_request(
    aggregated: EngineProcess, name: str
) -> None:
    constraint, reason = HOSTILE[name]
    bystander = aggregated.submit(PROMPT, params(64))
    answer = await aggregated.run(PROMPT, params(structured_output=constraint))
    assert answer.finish_reason is FinishReason.ERROR
    assert answer.error is not None
    assert (answer.error.code, answer.error.field) == ("invalid_value", "structured_output")
    said = answer.error.message.removeprefix("structured_output: ")
    assert said.startswith(reason), answer.error
    assert (await aggregated.collect(bystander)).error is None
    assert psutil.pid_exists(aggregated.pid)
    again = await aggregated.run(PROMPT, params(structured_output=constraint))
    assert again.error == answer.error
    await aggregated.until_empty()


async def test_a_cancel_while_the_guard_compiles_ends_the_request(
    aggregated: EngineProcess,
) -> None:
    slow = as_json(JSON, many_objects(700))
    stream_id = aggregated.submit(PROMPT, params(structured_output=slow))
    aggregated.cancel(stream_id)
    answer = await aggregated.run(PROMPT, params(1, structured_output=slow))
    assert answer.error is None
    assert not aggregated.answer(stream_id).deltas
    await aggregated.until_empty()
