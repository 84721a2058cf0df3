"""Limits of output constraints and of tool schemas, the same for every API.

Grammar compilers are recursive native code, so workers first compile every constraint in a separate
process (workers/vllm/grammar/guard.py). These limits refuse, at no cost to a worker, constraints
that no honest request needs.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import msgspec

from pdserve.errors import InvalidRequest
from pdserve.types import Constraint, StructuredOutput

MAX_BYTES = 64 << 10
MAX_NODES = 8192
MAX_DEPTH = 64  # vLLM's limit
MAX_ALTERNATIVES = 1024
MAX_PATTERN_CHARS = 4096
MAX_NESTING = 64
# A structural tag contains the schemas of all tools, nested a few levels deep.
_TAG_FACTOR, _TAG_DEPTH = 8, 16

# Parentheses in escapes, character classes and strings do not nest. Closing delimiters are
# optional, so that the regular expressions never backtrack: the time is linear.
_TOKENS = {
    "pattern": re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]?|[()]", re.DOTALL),
    "grammar": re.compile(r'"(?:\\.|[^"\\\n])*"?|\[(?:\\.|[^\]\\\n])*\]?|[()]'),
}
_GRAMMARS = ("grammar", "ebnf")


def check_constraint(constraint: StructuredOutput, *, field: str) -> None:
    """Raise InvalidRequest, naming `field`, for a constraint that exceeds a bound."""
    try:
        _check(constraint)
    except InvalidRequest as error:
        raise InvalidRequest(f"'{field}': {error.message}", field=field) from None


def check_schema(schema: dict[str, Any] | None, *, field: str) -> None:
    """Raise InvalidRequest, naming `field`, for a tool's schema that exceeds a bound."""
    if schema is not None:
        text = msgspec.json.encode(schema).decode()
        check_constraint(StructuredOutput(Constraint.JSON_SCHEMA, text), field=field)


@lru_cache(maxsize=128)  # all prompts of a request share a constraint, and agents repeat theirs
def _check(constraint: StructuredOutput) -> None:
    kind, value, choices = constraint.kind, constraint.value, constraint.choices
    factor = _TAG_FACTOR if kind is Constraint.STRUCTURAL_TAG else 1
    size = len(value.encode()) + sum(len(x.encode()) for x in choices)
    _bound(size, MAX_BYTES * factor, f"has {size} bytes")
    _bound(len(choices), MAX_ALTERNATIVES, f"has {len(choices)} choices")
    if kind is Constraint.REGEX:
        _check_pattern(value)
    elif kind is Constraint.GRAMMAR:
        _check_nesting("grammar", value)
    elif kind is Constraint.JSON_SCHEMA:
        _check_json(value, MAX_NODES, MAX_DEPTH)
    elif kind is Constraint.STRUCTURAL_TAG:
        _check_json(value, MAX_NODES * factor, MAX_DEPTH + _TAG_DEPTH)


def _check_json(text: str, max_nodes: int, max_depth: int) -> None:
    try:
        left = [(msgspec.json.decode(text), "", 1)]  # value, its key, its depth
    except RecursionError:
        raise InvalidRequest(f"is nested too deeply; the limit is {max_depth}") from None
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"is not JSON: {error}") from None
    nodes = 0
    while left:
        value, key, depth = left.pop()
        nodes += 1
        if isinstance(value, str):
            if key == "pattern":
                _check_pattern(value)
            elif key in _GRAMMARS:
                _check_nesting("grammar", value)
        elif isinstance(value, dict):
            if key == "patternProperties":
                for pattern in value:
                    _check_pattern(pattern)
            left += [(inner, name, depth + 1) for name, inner in value.items()]
        elif isinstance(value, list):
            _bound(len(value), MAX_ALTERNATIVES, f"has a list of {len(value)} items")
            left += [(inner, "", depth + 1) for inner in value]
        if isinstance(value, (dict, list)):
            _bound(depth, max_depth, f"is nested {depth} deep")
        _bound(nodes + len(left), max_nodes, f"has over {max_nodes} values")


def _check_pattern(pattern: str) -> None:
    _bound(len(pattern), MAX_PATTERN_CHARS, f"has a pattern of {len(pattern)} characters")
    _check_nesting("pattern", pattern)


def _check_nesting(kind: str, text: str) -> None:
    depth = deepest = 0
    for token in _TOKENS[kind].findall(text):
        if token == "(":
            depth += 1
            deepest = max(deepest, depth)
        elif token == ")":
            depth -= 1
    _bound(deepest, MAX_NESTING, f"has a {kind} with parentheses nested {deepest} deep")


def _bound(value: int, limit: int, what: str) -> None:
    if value > limit:
        raise InvalidRequest(f"{what}; the limit is {limit}")
