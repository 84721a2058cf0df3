"""An answer that is held back until it passes a check (`escalate` of a rule)."""

from __future__ import annotations

import asyncio
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from msgspec import Struct, structs

from pdserve.model.tokenizer import Conversation
from pdserve.types import Constraint, FinishReason
from router.attempt.answer import ParsedDelta

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve.config import EscalateConfig
    from pdserve.types import GenerateRequest, Receipt
    from router.attempt.answer import AnswerDelta, Out
    from router.dialects.parsed_request import ParsedRequest

# A client's schema may need exponential time. A value that needs more steps does not pass.
_MAX_STEPS = 10_000
_TYPES: Mapping[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "boolean": (bool,),
    "null": (type(None),),
    "number": (int, float),
    "integer": (int,),
}


class HeldVerdict(NamedTuple):
    """Why an answer does not pass: a code for metrics, and a text."""

    code: str
    text: str


PASSED = HeldVerdict("", "")


class AnswerCheck(Struct, frozen=True):
    """The check of one request's answer. `schema`: of the JSON that the request asks for, None if
    it asks for none. `tools`: the schemas of its tools, by name."""

    config: EscalateConfig
    schema: Any
    tools: Mapping[str, Any]

    def verdict(self, held: HeldTokens, finish: FinishReason | None) -> HeldVerdict | None:
        """Return whether an answer passes, None as long as it is open. `finish`: None before its
        end."""
        config = self.config
        if finish is None and held.tokens < config.tokens:
            return None
        if config.min_mean_logprob and held.logprobs:
            mean = fmean(held.logprobs)
            if not mean >= config.min_mean_logprob:  # NaN does not pass
                return HeldVerdict(
                    "logprob", f"mean logprob {mean:.3f} of {len(held.logprobs)} tokens"
                )
        if self.schema is None and not self.tools:
            return PASSED
        if finish is None:
            return HeldVerdict("too_long", f"no end within {config.tokens} tokens")
        if self.schema is not None and not held.calls and not _fits(held.text, self.schema):
            return HeldVerdict("json", "the answer is no JSON, or does not fit its schema")
        if self.tools:
            for name, arguments in held.calls.values():
                if name not in self.tools or not _fits(arguments or "{}", self.tools[name]):
                    return HeldVerdict("tool_call", f"the call of {name!r} does not fit its schema")
        return PASSED


def check_of(
    config: EscalateConfig, parsed: ParsedRequest, request: GenerateRequest
) -> AnswerCheck:
    """Return the check of a request's answer."""
    form, schema = request.sampling.structured_output, None
    if form is not None and config.valid_json:
        if form.kind is Constraint.JSON_SCHEMA:
            schema = msgspec.json.decode(form.value)
        elif form.kind is Constraint.JSON_OBJECT:
            schema = {"type": "object"}
    tools = parsed.prompt.tools if isinstance(parsed.prompt, Conversation) else ()
    functions = [x["function"] for x in tools] if config.valid_tool_calls else []
    return AnswerCheck(config, schema, {x["name"]: x.get("parameters") or {} for x in functions})


class HeldTokens:
    """What a check reads of an answer: `calls` has name and arguments of each tool call."""

    def __init__(self) -> None:
        self.tokens = 0
        self.text = ""
        self.logprobs: list[float] = []
        self.calls: dict[int, tuple[str, str]] = {}

    def add(self, delta: AnswerDelta) -> None:
        self.tokens += len(delta.token_ids)
        self.text += delta.text
        self.logprobs += [x.sampled.logprob for x in delta.logprobs]
        if isinstance(delta, ParsedDelta):
            for call in delta.tool_calls:
                name, arguments = self.calls.get(call.index, ("", ""))
                self.calls[call.index] = (name + call.name, arguments + call.arguments)


class HeldAnswer:
    """Out of an answer that is held back. `verdict` gets the result of the check. An answer that
    passes is written to `out`."""

    def __init__(self, check: AnswerCheck, out: Out, *, hides_logprobs: bool) -> None:
        """`hides_logprobs`: only the check wanted logprobs."""
        self.verdict: asyncio.Future[HeldVerdict] = asyncio.get_running_loop().create_future()
        self.held = HeldTokens()
        self.receipt: Receipt | None = None  # of an answer that ended while it was held back
        self._check, self._out, self._hides_logprobs = check, out, hides_logprobs
        self._deltas: list[AnswerDelta] = []

    @property
    def passed(self) -> bool:
        return self.verdict.done() and self.verdict.result() is PASSED

    def write(self, delta: AnswerDelta) -> bool:
        decided = self.verdict.done()
        if not decided:
            self.held.add(delta)
        if self._hides_logprobs and delta.logprobs:
            delta = structs.replace(delta, logprobs=())
        if decided and self.passed:
            return self._out.write(delta)
        if decided:
            self.receipt = delta.receipt
            return True  # it did not pass, and is being stopped
        self._deltas.append(delta)
        # The last delta has the usage; before it, an answer may be split into several pieces.
        finish = None if delta.usage is None else delta.finish_reason or FinishReason.STOP
        verdict = self._check.verdict(self.held, finish)
        if verdict is not None:
            self.verdict.set_result(verdict)
            deltas, self._deltas = self._deltas, []
            if verdict is not PASSED:
                self.receipt = delta.receipt
                return True
            for each in deltas:
                reads = self._out.write(each)
            return reads
        return True


def _fits(text: str, schema: Any) -> bool:
    """Return True if a text is JSON that fits a client's schema."""
    try:
        return _SchemaCheck().fits(msgspec.json.decode(text), schema)
    except (msgspec.DecodeError, RecursionError, AttributeError, TypeError):  # of a wrong schema
        return False


class _SchemaCheck:
    """Compares a value with a schema: types, enum, const, required, properties, items and their
    combinations. Other keywords, such as pattern and $ref, are not checked."""

    def __init__(self) -> None:
        self._steps = 0

    def fits(self, value: Any, schema: Any) -> bool:
        self._steps += 1
        if self._steps > _MAX_STEPS:
            return False
        if not isinstance(schema, dict):
            return schema is not False
        kinds = schema.get("type")
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if kinds and not any(_has_type(value, x) for x in kinds):
            return False
        if ("const" in schema and value != schema["const"]) or (
            "enum" in schema and value not in schema["enum"]
        ):
            return False
        for key, how in (("allOf", all), ("anyOf", any), ("oneOf", any)):
            if (parts := schema.get(key)) and not how(self.fits(value, x) for x in parts):
                return False
        if isinstance(value, dict):
            return self._fits_object(value, schema)
        if isinstance(value, list) and "items" in schema:
            return all(self.fits(x, schema["items"]) for x in value)
        return True

    def _fits_object(self, value: dict[str, Any], schema: dict[str, Any]) -> bool:
        properties = schema.get("properties", {})
        if any(x not in value for x in schema.get("required", ())):
            return False
        others = True if "patternProperties" in schema else schema.get("additionalProperties", True)
        return all(self.fits(x, properties.get(name, others)) for name, x in value.items())


def _has_type(value: Any, kind: str) -> bool:
    if isinstance(value, bool) and kind != "boolean":
        return False
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _TYPES.get(kind, (object,)))
