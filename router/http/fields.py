"""Every field of OpenAI's Completions and Chat Completions, and what becomes of it.

A field is honoured, or taken and without any influence on the answer, or taken only with the value
that means nothing, or refused. Any other name is unknown, and refused too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

from pdserve.errors import UnknownField, UnsupportedField
from pdserve.types import MAX_LOGPROBS, MAX_STOP_STRINGS, RANGES

if TYPE_CHECKING:
    from collections.abc import Mapping


class Treatment(Enum):
    """What becomes of a field."""

    HONOURED = auto()
    WITHOUT_EFFECT = auto()
    NEUTRAL_ONLY = auto()


@dataclass(frozen=True, slots=True)
class Rule:
    """One field. `neutral` are the values beside null that say what we do anyway; `why` is the
    reason for refusing the others, or for taking it without effect. `schema` is what JSON Schema
    says of an honoured one, as far as it can."""

    treatment: Treatment = Treatment.HONOURED
    neutral: tuple[object, ...] = ()
    why: str = ""
    schema: Mapping[str, object] = field(default_factory=dict)


def _honoured(*names: str, **schema: object) -> dict[str, Rule]:
    return dict.fromkeys(names, Rule(schema=schema))


def _numbers(kind: str, *names: str) -> dict[str, Rule]:
    limits = {name: {"minimum": low, "maximum": high} for name, low, high in RANGES}
    return {name: Rule(schema={"type": kind, **limits.get(name, {})}) for name in names}


def _without_effect(why: str) -> Rule:
    return Rule(Treatment.WITHOUT_EFFECT, why=why)


def _only(*neutral: object, why: str) -> Rule:
    return Rule(Treatment.NEUTRAL_ONLY, neutral, why)


_NO_TOOLS = "tools are not supported"
_TEXT_ONLY = "only text is served"
_NOT_KEPT = "nothing is stored here"

_FLAG = {"type": "boolean"}
_TEXT = {"type": "string", "minLength": 1}
_TEXTS = {"type": "array", "items": _TEXT}
_TOKENS = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_COUNT = {"type": "integer", "minimum": 0, "maximum": MAX_LOGPROBS}
_TEXT_PART = {
    "type": "object",
    "required": ["type", "text"],
    "additionalProperties": False,
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
}
_CONTENT = {"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART, "minItems": 1}]}


def _message(*roles: str, **more: object) -> dict[str, object]:
    return {
        "type": "object",
        "required": ["role", "content"],
        "additionalProperties": False,
        "properties": {
            "role": {"enum": list(roles)},
            "content": _CONTENT,
            "name": {"type": "string"},
            **more,
        },
    }


# OpenAI's clients send answers back with these, null or empty where they say nothing.
ASSISTANT_ONLY = ("refusal", "audio", "tool_calls", "function_call", "annotations")
_MESSAGE = {
    "anyOf": [
        _message("system", "developer", "user"),
        _message("assistant", **{key: {"enum": [None, []]} for key in ASSISTANT_ONLY}),
    ]
}
_BIAS = {
    "type": "object",
    "propertyNames": {"pattern": "^[0-9]+$"},
    "additionalProperties": {"type": "number"},
}
_STREAM_OPTIONS = {
    "type": "object",
    "additionalProperties": False,
    "properties": {"include_usage": _FLAG},
}

_SHARED: dict[str, Rule] = {
    **_honoured("model", type="string", minLength=1),
    **_honoured("stream", type="boolean"),
    **_honoured("stream_options", **_STREAM_OPTIONS),
    # OpenAI's sampling.
    **_numbers("integer", "n", "max_tokens", "seed"),
    **_numbers("number", "temperature", "top_p", "presence_penalty", "frequency_penalty"),
    **_honoured("stop", anyOf=[_TEXT, {**_TEXTS, "maxItems": MAX_STOP_STRINGS}]),
    **_honoured("logit_bias", **_BIAS),
    # vLLM's sampling, under vLLM's names.
    **_numbers("integer", "top_k", "min_tokens"),
    **_numbers("number", "min_p", "repetition_penalty"),
    **_honoured("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", **_FLAG),
    **_honoured("stop_token_ids", **_TOKENS),
    **_honoured("response_format", "structured_outputs", type="object"),
    # The order in the queue: vLLM's field and OpenAI's.
    **_honoured("priority", type="integer", minimum=-(1 << 63), maximum=(1 << 63) - 1),
    **_honoured("service_tier", enum=["auto", "default", "flex"]),
    # vLLM's, and ours: what a client needs that goes on where its answer broke off.
    **_honoured("return_token_ids", **_FLAG),
    **_honoured("resume_token_ids", **_TOKENS),
    "user": _without_effect("a label of the caller's"),
}

COMPLETIONS: dict[str, Rule] = {
    **_SHARED,
    **_honoured("prompt", anyOf=[_TEXT, _TOKENS]),
    **_honoured("logprobs", **_COUNT),
    "best_of": _only(1, why="answers are not ranked; n gives several"),
    "echo": _only(False, why="the prompt is not repeated"),
    "suffix": _only(why="insertion is not supported"),
}

CHAT: dict[str, Rule] = {
    **_SHARED,
    **_honoured("messages", type="array", items=_MESSAGE, minItems=1),
    **_honoured("logprobs", **_FLAG),
    **_honoured("top_logprobs", **_COUNT),
    **_honoured("max_completion_tokens", type="integer", minimum=1),
    "metadata": _without_effect("labels of the caller's for stored answers; none are stored"),
    "safety_identifier": _without_effect("a label of the caller's"),
    "prompt_cache_key": _without_effect("prefixes are found by their content"),
    "store": _only(False, why=_NOT_KEPT),
    "modalities": _only(["text"], why=_TEXT_ONLY),
    "tool_choice": _only("none", why=_NO_TOOLS),
    "function_call": _only("none", why=_NO_TOOLS),
    "tools": _only(why=_NO_TOOLS),
    "functions": _only(why=_NO_TOOLS),
    "parallel_tool_calls": _only(why=_NO_TOOLS),
    "audio": _only(why=_TEXT_ONLY),
    "moderation": _only(why="answers are not moderated here"),
    "prediction": _only(why="predicted outputs are not supported"),
    "prompt_cache_options": _only(why="the cache is not steered by requests"),
    "prompt_cache_retention": _only(why="the cache is not steered by requests"),
    "reasoning_effort": _only(why="reasoning effort is not supported"),
    "verbosity": _only(why="verbosity is not supported"),
    "web_search_options": _only(why="there is no web search"),
}


# Names that are taken whatever their values: most bodies have no others.
_FREE = {
    id(rules): frozenset(
        name for name, rule in rules.items() if rule.treatment is not Treatment.NEUTRAL_ONLY
    )
    for rules in (COMPLETIONS, CHAT)
}


def check_names(body: Mapping[str, object], rules: Mapping[str, Rule]) -> None:
    """Raises UnknownField or UnsupportedField for the first field that is not taken as it is."""
    if body.keys() <= _FREE[id(rules)]:
        return
    for name, value in body.items():
        rule = rules.get(name)
        if rule is None:
            raise UnknownField(f"{name} is not a field of this endpoint", field=name)
        if rule.treatment is not Treatment.NEUTRAL_ONLY or value is None:
            continue
        # True equals 1 in Python, and is another thing in JSON.
        if not any(type(value) is type(x) and value == x for x in rule.neutral):
            raise UnsupportedField(f"{name} is not supported: {rule.why}", field=name)
