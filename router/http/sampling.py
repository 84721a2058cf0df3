"""Sampling parameters and structured outputs out of a request body, for both endpoints."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pdserve.errors import InvalidRequest
from pdserve.types import Constraint, SamplingParams, StructuredOutput
from router.http.reading import Fields, as_number, as_strings, as_token_ids, kind_of, refuse

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
_INTEGERS = ("top_k", "seed", "min_tokens", "n")
_FLAGS = ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens")
_CONSTRAINTS = ("json", "json_object", "regex", "choice", "grammar")


def read_sampling(fields: Fields, *, max_tokens: int, logprobs: int | None) -> SamplingParams:
    """Raises InvalidRequest naming the field; `max_tokens` and `logprobs`, which the endpoints
    spell differently, are the caller's to read."""
    values: dict[str, Any] = {}
    for name, value in fields.items():
        read = None if value is None else _READERS.get(name)
        if read is not None:
            values[name] = read(fields, name)
    structured_output = _structured_output(fields)
    return SamplingParams(
        max_tokens=max_tokens, logprobs=logprobs, structured_output=structured_output, **values
    )


def _token_ids(fields: Fields, name: str) -> tuple[int, ...]:
    return as_token_ids(fields.array(name) or [], fields.path(name))


def _stop(fields: Fields, name: str) -> tuple[str, ...]:
    value = fields.get(name)
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        refuse("stop", f"must be a string or an array of strings, not {kind_of(value)}")
    return as_strings(value, "stop")


def _logit_bias(fields: Fields, name: str) -> Mapping[int, float]:
    section = fields.section(name)
    assert section is not None, "it is given"
    biases: dict[int, float] = {}
    for key, value in section.items():
        # Python reads "1_0" and "１" as numbers too.
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            refuse("logit_bias", f"has the key {key!r}, which is not a token id")
        biases[int(key)] = as_number(value, section.path(key))
    return biases


# Of a field that is given; those that are not take their defaults.
_READERS: dict[str, Callable[[Fields, str], object]] = {
    **dict.fromkeys(_NUMBERS, Fields.number),
    **dict.fromkeys(_INTEGERS, Fields.integer),
    **dict.fromkeys(_FLAGS, Fields.boolean),
    "stop": _stop,
    "stop_token_ids": _token_ids,
    "logit_bias": _logit_bias,
}


def _structured_output(fields: Fields) -> StructuredOutput | None:
    by_format = _response_format(fields)
    by_constraint = _structured_outputs(fields)
    if by_format is not None and by_constraint is not None:
        refuse("structured_outputs", "cannot be given beside response_format")
    return by_format or by_constraint


def _response_format(fields: Fields) -> StructuredOutput | None:
    section = fields.section("response_format")
    if section is None:
        return None
    kind = section.string("type")
    if kind == "json_schema":
        section.allow(("type", "json_schema"))
        named = section.section("json_schema")
        if named is None:
            refuse(section.path("json_schema"), "is needed")
        named.allow(("name", "schema", "strict", "description"))
        named.string("name")
        named.string("description")
        # The answer is held to the schema either way.
        named.boolean("strict")
        schema = named.get("schema")
        if not isinstance(schema, dict):
            refuse(named.path("schema"), f"must be an object, not {kind_of(schema)}")
        return StructuredOutput(Constraint.JSON_SCHEMA, json.dumps(schema))
    section.allow(("type",))
    if kind == "json_object":
        return StructuredOutput(Constraint.JSON_OBJECT)
    if kind != "text":
        refuse(section.path("type"), f"must be text, json_object or json_schema, not {kind!r}")
    return None


def _structured_outputs(fields: Fields) -> StructuredOutput | None:
    section = fields.section("structured_outputs")
    if section is None:
        return None
    section.allow(_CONSTRAINTS)
    given = [name for name in _CONSTRAINTS if section.get(name) is not None]
    if len(given) != 1:
        refuse("structured_outputs", f"needs exactly one of {', '.join(_CONSTRAINTS)}")
    match given[0]:
        case "json":
            return StructuredOutput(Constraint.JSON_SCHEMA, _schema_text(section))
        case "json_object":
            if not section.boolean("json_object"):
                refuse(section.path("json_object"), "must be true where it is given")
            return StructuredOutput(Constraint.JSON_OBJECT)
        case "choice":
            choices = as_strings(section.array("choice") or [], section.path("choice"))
            if not choices:
                refuse(section.path("choice"), "must not be empty")
            return StructuredOutput(Constraint.CHOICE, choices=choices)
        case name:
            text = section.string(name)
            if not text:
                refuse(section.path(name), "must not be empty")
            return StructuredOutput(Constraint(name), text)


def _schema_text(section: Fields) -> str:
    """A schema is an object, or the JSON text of one."""
    value, path = section.get("json"), section.path("json")
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"{path} is not JSON: {error}", field=path) from error
    if not isinstance(value, dict):
        refuse(path, f"must be an object, not {kind_of(value)}")
    return json.dumps(value)
