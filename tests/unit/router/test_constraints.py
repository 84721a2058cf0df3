"""Bounds on constraints of answers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdserve.errors import InvalidRequest
from pdserve.types import Constraint, StructuredOutput
from router.admission.constraints import check_constraint, check_schema

JSON, TAG = Constraint.JSON_SCHEMA, Constraint.STRUCTURAL_TAG
REGEX, GRAMMAR = Constraint.REGEX, Constraint.GRAMMAR


def deep(levels: int) -> dict[str, Any]:
    """Return a schema of nested objects."""
    return {"items": deep(levels - 1)} if levels > 1 else {}


def pattern(text: str) -> dict[str, Any]:
    return {"properties": {"a": {"type": "string", "pattern": text}}}


def parens(depth: int) -> str:
    return "(" * depth + "a" + ")" * depth


# A constraint at a bound or within it, one beyond it, and what the error says.
BOUNDS: list[tuple[Constraint, object, object, str]] = [
    (JSON, {"title": "a" * 65_500}, {"title": "a" * 65_525}, "has 65538 bytes; the limit is 65536"),
    (JSON, {"enum": ["é"] * 999}, {"title": "é" * 32_763}, "has 65539 bytes; the limit is 65536"),
    (
        JSON,
        {"a": [[0] * 1024] * 7},
        {"a": [[0] * 1024] * 8},
        "has over 8192 values; the limit is 8192",
    ),
    (JSON, deep(64), deep(65), "is nested 65 deep; the limit is 64"),
    (JSON, {}, "[" * 20_000, "is nested too deeply; the limit is 64"),
    (JSON, {}, "{", "is not JSON"),
    (
        JSON,
        {"enum": list(range(1024))},
        {"anyOf": [{}] * 1025},
        "has a list of 1025 items; the limit is 1024",
    ),
    (
        JSON,
        pattern("a" * 4096),
        pattern("a" * 4097),
        "has a pattern of 4097 characters; the limit is 4096",
    ),
    (
        JSON,
        pattern(parens(64)),
        pattern(parens(65)),
        "has a pattern with parentheses nested 65 deep; the limit is 64",
    ),
    (
        JSON,
        {"patternProperties": {parens(64): {}}},
        {"patternProperties": {parens(65): {}}},
        "has a pattern with parentheses nested 65 deep; the limit is 64",
    ),
    (
        REGEX,
        r"\(" * 99 + "[(]" * 99 + "[](]" * 99 + "(a)" * 99,
        parens(65),
        "has a pattern with parentheses nested 65 deep; the limit is 64",
    ),
    (REGEX, "a" * 4096, "a" * 4097, "has a pattern of 4097 characters; the limit is 4096"),
    (
        GRAMMAR,
        'root ::= "(" [(] ' * 99,
        f"root ::= {parens(65)}",
        "has a grammar with parentheses nested 65 deep; the limit is 64",
    ),
    (GRAMMAR, "a" * 65_536, "a" * 65_537, "has 65537 bytes; the limit is 65536"),
    (TAG, deep(80), deep(81), "is nested 81 deep; the limit is 80"),
    (
        TAG,
        {"format": {"type": "grammar", "grammar": parens(64)}},
        {"format": {"type": "grammar", "grammar": parens(65)}},
        "has a grammar with parentheses nested 65 deep; the limit is 64",
    ),
    (TAG, {"a": "b" * 524_200}, {"a": "b" * 524_280}, "has 524289 bytes; the limit is 524288"),
]


@pytest.mark.parametrize(("kind", "within", "beyond", "message"), BOUNDS)
def test_a_bound_is_named_with_field_value_and_limit(
    kind: Constraint, within: object, beyond: object, message: str
) -> None:
    def check(value: object) -> None:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        check_constraint(StructuredOutput(kind, text), field="format")

    check(within)
    with pytest.raises(InvalidRequest) as caught:
        check(beyond)
    assert caught.value.field == "format"
    assert caught.value.message.startswith(f"'format': {message}")


def test_choices_are_bounded_in_number_and_bytes() -> None:
    def check(*choices: str) -> None:
        check_constraint(StructuredOutput(Constraint.CHOICE, choices=choices), field="choice")

    check(*map(str, range(1024)))
    for choices, message in (
        (map(str, range(1025)), "'choice': has 1025 choices; the limit is 1024"),
        (["a" * 40_000, "b" * 40_000], "'choice': has 80000 bytes; the limit is 65536"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            check(*choices)
        assert caught.value.message == message


def test_a_tools_schema_has_the_bounds_of_a_constraint() -> None:
    check_schema(None, field="tools[0]")
    check_schema(deep(64), field="tools[0]")
    with pytest.raises(InvalidRequest, match=r"'tools\[0\]': is nested 65 deep"):
        check_schema(deep(65), field="tools[0]")
