"""Strict decoding of JSON bodies of the HTTP API, and encoding.

A null field counts as not set. Unknown fields are refused. Fields of other servers that pdserve
does not support are accepted at values that change nothing, and otherwise refused by name.
"""

from __future__ import annotations

import codecs
import re
import typing
from collections.abc import Callable, Mapping, Sequence  # noqa: TC003 - msgspec reads the annotations
from functools import cache
from operator import attrgetter
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    NoReturn,
    Protocol,
    Self,
    TypeVar,
    cast,
)

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from pdserve.errors import ClientError, InvalidRequest, UnknownField, UnsupportedField
from pdserve.types import (
    MAX_SEED,
    MAX_STOP_STRINGS,
    Constraint,
    Receipt,
    SamplingParams,
    ServiceClass,
    StaleKv,
    StructuredOutput,
)
from router.dialects.parsed_request import OPEN_ENDED, ParsedRequest
from router.dialects.session_ids import MAX_SESSION_ID

if TYPE_CHECKING:
    from pdserve.errors import PdserveError
    from pdserve.types import GenerateRequest, PositionLogprobs, TokenLogprob, Usage
    from router.attempt.answer import AnswerDelta
    from router.dialects.parsed_request import Prompt

encode = msgspec.json.Encoder().encode

Text = Annotated[str, Meta(min_length=1)]
TokenId = Annotated[int, Meta(ge=0)]
TokenIds = Annotated[list[TokenId], Meta(description="Token ids of the model's tokenizer.")]
NO_EFFECT = "Accepted without effect."
Ignored = Annotated[Any, Meta(description=NO_EFFECT)]
SessionId = Annotated[
    Annotated[str, Meta(max_length=MAX_SESSION_ID, pattern=r"^[^\x00-\x1f\x7f]*$")] | None,
    Meta(description="Id of the conversation. The header X-Session-Id takes precedence."),
]
Share = Annotated[float, Meta(ge=0, le=1)]
TopP = Annotated[float, Meta(gt=0, le=1)] | None
Count = Annotated[int, Meta(ge=1, le=1 << 30)]
TopK = Annotated[int, Meta(ge=-1, le=1 << 30)] | None
_Penalty = Annotated[float, Meta(ge=-2, le=2)]
_Bias = Annotated[float, Meta(ge=-100, le=100)]
FollowsSchema = Annotated[
    bool | None, Meta(description="Calls follow the schema. Forced calls always do.")
]
# Limit of a large body without its prompt.
MAX_REST_BYTES = 1 << 20
# Limit of messages or items in a conversation: each takes time to render, even without text.
MAX_MESSAGES = 4096
ModelName = Annotated[
    Text | None, Meta(description="Name of a served model. Required if there are several.")
]
InferenceGeo = Annotated[
    Text | None,
    Meta(
        description="Region where the data of the request may be, or `global`: any. Same as the "
        "header X-Inference-Geo."
    ),
]


class Strict(Struct, kw_only=True, forbid_unknown_fields=True):
    """A part of a request body."""


class Known(NamedTuple):
    """A field that is refused unless it is null or one of `accepts`. `reason` is optional."""

    accepts: tuple[object, ...] = ()
    reason: str = ""

    @property
    def description(self) -> str:
        values = ", ".join(encode(x).decode() for x in (None, *self.accepts))
        return f"Not supported: only {values}."


# Fields of vLLM's bodies that generate, at values that change nothing.
KNOWN_OF_VLLM = {
    "chat_template": Known((), "the model's own is used"),
    "ec_transfer_params": Known(),
    "kv_transfer_params": Known(),
    "media_io_kwargs": Known(({}, [])),
    "mm_payload": Known(("tensors", "none")),
    "mm_processor_kwargs": Known(({}, [])),
    "return_mm_kwargs": Known((False,)),
    "vllm_xargs": Known(({}, [])),
    "watermarking": Known((False,)),
}


class Body(Strict):
    """A whole request body."""

    known: ClassVar[Mapping[str, Known]] = {}
    _values_of: ClassVar[Callable[[Any], tuple[object, ...]]]

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Decode and validate a body. Raises InvalidRequest naming the field."""
        return read(cls, data)

    def encoded(self) -> bytes:
        return encode(self)

    def check_known(self) -> None:
        """Raise UnsupportedField for a known field with a value that is not accepted."""
        kind = type(self)
        values = kind._values_of(self) if kind.known else ()
        if values.count(None) < len(values):
            for (name, known), value in zip(kind.known.items(), values, strict=True):
                if value is not None and value not in known.accepts:
                    raise not_supported(name, known.reason)


class Names(Body, kw_only=True, forbid_unknown_fields=False):
    """The fields of a body that are needed before it is read as a whole. Skipping the others is
    fast."""

    model: ModelName = None
    inference_geo: Text | None = None
    previous_response_id: Text | None = None


class Writer(Protocol):
    """Encodes an answer in the format of one endpoint."""

    def write(self, delta: AnswerDelta) -> bytes:
        """Return the events of `delta`; b"" if the answer is not streamed."""
        ...

    def end(self) -> bytes:
        """Return the last events, or the whole body. Raises InternalError if the answer is
        incomplete."""
        ...

    def fail(self, error: PdserveError) -> bytes:
        """Return the event that ends a stream with an error."""
        ...


class GenerateBody(Body, kw_only=True):
    """A body of an endpoint that generates."""

    id_prefix: ClassVar[str] = ""
    model: ModelName = None
    stream: bool | None = None
    inference_geo: InferenceGeo = None

    def given(self, *names: str) -> dict[str, Any]:
        """Return the fields among `names` that are set."""
        return {x: value for x in names if (value := getattr(self, x)) is not None}

    def named_id(self) -> str | None:
        """Return the request id in the body, if it has one."""
        return None

    def parse(self) -> list[ParsedRequest]:
        """Return a request for each prompt. Raises InvalidRequest naming the field."""
        raise NotImplementedError

    def without_prompt(self) -> GenerateBody:
        """Return the body with placeholders for the parts that are rendered and tokenised. `parse`
        must still return the same number of requests."""
        raise NotImplementedError

    def with_changes(self, changes: Mapping[str, str]) -> GenerateBody:
        """Return the body with the texts that guards replaced, if it keeps or repeats some."""
        return self

    def writer(self, request_id: str, made: Sequence[GenerateRequest]) -> Writer:
        """Return the encoder of the answers. `made`: the prepared requests of `parse`."""
        raise NotImplementedError

    def refusal(self, request_id: str) -> Writer | None:
        """Return the encoder of an empty answer to a prompt that a guard refuses. None: the client
        expects an error."""
        return None


B = TypeVar("B", bound=Body)


def _only(name: str) -> Callable[[object], tuple[object, ...]]:
    """Return a getter of one attribute as a tuple: attrgetter returns no tuple for one name."""
    return lambda body: (getattr(body, name),)


def knows(known: Mapping[str, Known]) -> Callable[[type[B]], type[B]]:
    """Return a decorator that adds the fields of `known` to a body."""

    def extend(kind: type[B]) -> type[B]:
        own = kind.__struct_fields__
        names = [name for name in known if name not in own]
        fields = [(name, _type_of(known[name]), None) for name in names]
        namespace = {
            "__doc__": kind.__doc__,
            "known": {name: known[name] for name in names},
            "_values_of": attrgetter(*names) if len(names) > 1 else _only(*names),
        }
        bases: Any = (kind,)
        made: Any = msgspec.defstruct(
            kind.__name__, fields, bases=bases, namespace=namespace, kw_only=True
        )
        return cast("type[B]", made)

    return extend


def _type_of(known: Known) -> Any:
    schema = {"enum": [None, *known.accepts]}
    return Annotated[Any, Meta(description=known.description, extra_json_schema=schema)]


@cache
def _decoder(kind: type[Body]) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def read(kind: type[B], data: bytes) -> B:
    """Decode and validate a body. Raises InvalidRequest naming the field."""
    try:
        # Windows editors put a byte order mark before the text of a file.
        body: B = _decoder(kind).decode(data.removeprefix(codecs.BOM_UTF8))
    except msgspec.ValidationError as error:
        raise _error_for(str(error), kind) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from error
    except RecursionError as error:
        raise InvalidRequest("the body is nested too deeply") from error
    body.check_known()
    return body


def convert(value: Any, kind: Any, at: str) -> Any:
    """Validate the part of a body at the path `at`. Raises InvalidRequest naming the field."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise _error_for(str(error), kind, at) from error


_AT = re.compile(r" - at (?:`key` in )?`\$\.?(.*)`$")
_NAMED = re.compile(r"Object (contains unknown|missing required) field `(.*?)`")


def _error_for(message: str, kind: Any, within: str = "") -> InvalidRequest:
    """Convert msgspec's message, such as "Expected `int`, got `str` - at `$.n`", to an error."""
    at = _AT.search(message)
    path, reason = (at.group(1), message[: at.start()]) if at else ("", message)
    before, _, value = reason.partition("Invalid enum value ")
    if value and not before:
        names = re.sub(r"\[.*?\]", "", path).strip(".").split(".")
        reason = f"must be one of {', '.join(map(str, _literals(kind, names)))}, not {value}"
    elif value == "" and path.endswith("type") and reason.startswith("Invalid value "):
        reason = f"{reason.removeprefix('Invalid value ')} is not supported"
    path = f"{within}.{path}".strip(".") if within else path
    named = _NAMED.match(reason)
    if named is not None:
        field = f"{path}.{named.group(2)}".lstrip(".")
        if named.group(1) == "missing required":
            return InvalidRequest(f"'{field}' is required", field=field)
        return UnknownField(f"unknown field '{field}'", field=field)
    # msgspec says it in three ways: the last two of the `type` of a union's structs.
    nulls = ("got `null`", "got `NoneType`")
    if path and (reason.endswith(nulls) or reason == "Expected `str`"):
        return InvalidRequest(f"'{path}' is required", field=path)
    reason = reason.replace("`", "").replace(" | null", "")
    reason = reason[:1].lower() + reason[1:]
    field = path.removesuffix("[...]")
    return InvalidRequest(f"'{field}': {reason}" if field else f"body: {reason}", field=field)


def _literals(kind: Any, names: Sequence[str]) -> list[object]:
    """Return the values of the Literal at the path `names` in `kind`."""
    parts: Sequence[Any] = typing.get_args(kind)
    if typing.get_origin(kind) is typing.Literal:
        return [] if names else list(parts)
    if names and isinstance(kind, type) and issubclass(kind, Struct):
        parts = [x.type for x in msgspec.structs.fields(kind) if x.encode_name == names[0]]
        names = names[1:]
    return [x for part in parts for x in _literals(part, names)]


def check_rest(size: int) -> None:
    """Raise InvalidRequest if a body without its prompt is too large. `size`: its bytes."""
    if size > MAX_REST_BYTES:
        raise InvalidRequest(
            f"the body has {size} bytes without its prompt; the limit is {MAX_REST_BYTES}"
        )


def refuse(field: str, reason: str) -> NoReturn:
    raise InvalidRequest(f"'{field}' {reason}", field=field)


def not_supported(field: str, reason: str = "") -> UnsupportedField:
    text = f"'{field}' is not supported" + (f": {reason}" if reason else "")
    return UnsupportedField(text, field=field)


StaleKvValue = Annotated[
    str | None,
    Meta(
        description="What happens to the answer if the weights change: `recompute` continues it "
        "with the new ones and computes its KV again, `allow` keeps its KV, `abort` ends it. "
        "Default: router.weights.stale_kv."
    ),
]


def stale_kv_of(value: str) -> StaleKv | None:
    """Return the value of the field. Raises InvalidRequest."""
    if value not in {"", *StaleKv}:
        raise InvalidRequest(f"'stale_kv' must be one of {', '.join(StaleKv)}", field="stale_kv")
    return StaleKv(value) if value else None


# JSON has no infinity. OpenAI uses this value for a token that is practically impossible.
MIN_LOGPROB = -9999.0


class TextFormat(Strict, tag_field="type", tag="text"):
    pass


class JsonObjectFormat(Strict, tag_field="type", tag="json_object"):
    pass


class StructuredOutputs(Strict):
    """vLLM's constraints on the answer. Exactly one must be set. Limits, which also apply to a
    `json_schema` and to the `parameters` of a tool: 64 KiB, 8,192 values, 64 levels, 1,024
    alternatives or choices, patterns of 4,096 characters, 64 nested parentheses.
    """

    json: Annotated[
        dict[str, Any] | str | None, Meta(description="A JSON schema, or its JSON text.")
    ] = None
    json_object: bool | None = None
    regex: Text | None = None
    choice: Annotated[list[Text], Meta(min_length=1)] | None = None
    grammar: Annotated[Text, Meta(description="A grammar in EBNF.")] | None = None


class OpenAiBody(GenerateBody, kw_only=True):
    """Fields shared by OpenAI's endpoints that generate, with vLLM's."""

    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: TopP = None
    top_k: TopK = None
    priority: (
        Annotated[
            int,
            Meta(ge=-MAX_SEED - 1, le=MAX_SEED, description="Lower values are served earlier."),
        ]
        | None
    ) = None
    service_tier: Annotated[
        Literal["auto", "default", "flex", "priority"] | None,
        Meta(
            description="flex requests are batch work and wait for interactive requests. The other "
            "values are equivalent."
        ),
    ] = None
    cache_salt: Annotated[
        Text | None, Meta(description="Only requests with the same salt share cached prefixes.")
    ] = None
    stale_kv: StaleKvValue = None
    user: Ignored = None
    min_p: Share | None = None
    seed: Annotated[int, Meta(ge=-MAX_SEED - 1, le=MAX_SEED)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=1 << 30)] | None = None
    stop: Text | Annotated[list[Text], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    logit_bias: dict[TokenId, _Bias] | None = None
    skip_special_tokens: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    request_id: Annotated[
        str | None, Meta(description="Same as the header X-Request-Id, which takes precedence.")
    ] = None
    session_id: SessionId = None
    prompt_cache_key: SessionId = None

    def named_id(self) -> str | None:
        return self.request_id

    def _request(
        self,
        prompt: Prompt,
        max_tokens: int | None,
        form: tuple[StructuredOutput | None, str],
        given: dict[str, Any],
        own: dict[str, Any],
        session: str = "",
    ) -> ParsedRequest:
        """Return the request. `form`: the constraint of the field for the answer's format, and the
        field's name. `given`: sampling parameters that the client set in fields of its API. `own`:
        further fields of the request. `session`: used if the body names none."""
        flex = self.service_tier == "flex"
        values = zip(_SAMPLING, _sampling_of(self), strict=True)
        given |= {name: value for name, value in values if value is not None}
        if self.stop is not None:
            given["stop"] = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if self.stop_token_ids is not None:
            given["stop_token_ids"] = tuple(self.stop_token_ids)
        by_format, field = form
        if self.structured_outputs is not None:
            if by_format is not None:
                refuse("structured_outputs", f"cannot be combined with {field}")
            by_format, field = _constraint(self.structured_outputs), "structured_outputs"
        given["structured_output"] = by_format
        return ParsedRequest(
            model=self.model or "",
            prompt=prompt,
            sampling=SamplingParams(max_tokens=max_tokens or OPEN_ENDED, **given),
            constraint_field=field,
            priority=self.priority or 0,
            service_class=ServiceClass.BATCH if flex else ServiceClass.INTERACTIVE,
            given=given.keys(),
            cache_salt=self.cache_salt or "",
            stale_kv=stale_kv_of(self.stale_kv or ""),
            session=self.session_id or self.prompt_cache_key or session,
            **own,
        )


# Fields that have the same name as a sampling parameter.
_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "min_tokens", "ignore_eos"),
    *("include_stop_str_in_output", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "logit_bias", "skip_special_tokens"),
)
_sampling_of = attrgetter(*_SAMPLING)


def _constraint(given: StructuredOutputs) -> StructuredOutput:
    values = {name: getattr(given, name) for name in given.__struct_fields__}
    if sum(value is not None for value in values.values()) != 1:
        refuse("structured_outputs", f"needs one of {', '.join(values)}")
    if given.json is not None:
        return json_schema(given.json)
    if given.json_object is not None:
        if not given.json_object:
            refuse("structured_outputs.json_object", "must be true")
        return StructuredOutput(Constraint.JSON_OBJECT)
    if given.choice is not None:
        return StructuredOutput(Constraint.CHOICE, choices=tuple(given.choice))
    if given.regex is not None:
        return StructuredOutput(Constraint.REGEX, given.regex)
    return StructuredOutput(Constraint.GRAMMAR, given.grammar or "")


def json_schema(schema: dict[str, Any] | str) -> StructuredOutput:
    """Return the constraint of a JSON schema, or of its JSON text."""
    if isinstance(schema, str):
        try:
            schema = msgspec.json.decode(schema, type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError) as error:
            refuse("structured_outputs.json", f"is not a JSON schema: {error}")
    return StructuredOutput(Constraint.JSON_SCHEMA, encode(schema).decode())


def prompts_of(given: Any, field: str, most: int) -> list[str | tuple[int, ...]]:
    """Return the prompts of a text, its token ids, or a list of them. Raises InvalidRequest."""
    if isinstance(given, str) or not given or isinstance(given[0], int):
        return [_one_prompt(given, field)]
    if len(given) > most:
        refuse(field, f"holds {len(given)} prompts; at most {most} are answered at a time")
    return [_one_prompt(x, f"{field}[{i}]") for i, x in enumerate(given)]


def _one_prompt(given: Any, field: str) -> str | tuple[int, ...]:
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        refuse(field, "must be text or token ids, as the first prompt")
    # One pass in C, since a prompt may have thousands of tokens.
    if set(map(type, given)) - {int}:
        wrong = next(i for i, x in enumerate(given) if not isinstance(x, int))
        refuse(f"{field}[{wrong}]", "expected a token id")
    return tuple(given)


class Extension(Struct):
    """Fields that pdserve adds to OpenAI's responses."""

    receipt: Receipt


def chat_logprobs(positions: Sequence[PositionLogprobs]) -> list[msgspec.Raw]:
    """Return the JSON of each position."""
    return [
        msgspec.Raw(encode({**_token(x.sampled), "top_logprobs": [_token(top) for top in x.top]}))
        for x in positions
    ]


def _token(token: TokenLogprob) -> dict[str, object]:
    as_bytes = list(token.text.encode("utf-8", "replace"))
    return {"token": token.text, "logprob": finite(token), "bytes": as_bytes}


def finite(token: TokenLogprob) -> float:
    # In this order of arguments, NaN becomes MIN_LOGPROB too.
    return max(MIN_LOGPROB, token.logprob)


# -- Answers of OpenAI's endpoints and vLLM's

# Ends a stream of events.
DONE = b"data: [DONE]\n\n"


class PromptDetails(Struct):
    cached_tokens: int


class CompletionDetails(Struct):
    reasoning_tokens: int


class UsageBody(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails | UnsetType = UNSET
    completion_tokens_details: CompletionDetails | UnsetType = UNSET
    inference_geo: str | UnsetType = UNSET


def usage_body(usage: Usage) -> UsageBody:
    total = usage.prompt_tokens + usage.completion_tokens
    details = PromptDetails(usage.cached_tokens)
    reasoning = usage.reasoning_tokens
    completion = CompletionDetails(reasoning) if reasoning else UNSET
    geo = usage.inference_geo or UNSET
    return UsageBody(usage.prompt_tokens, usage.completion_tokens, total, details, completion, geo)


class ErrorDetails(Struct, omit_defaults=True):
    message: str
    type: str
    param: str | UnsetType | None
    code: str
    reason: str = ""


_ERROR_TYPES = {429: "rate_limit_error", 503: "service_unavailable_error"}


class ErrorBody(Struct):
    error: ErrorDetails

    @classmethod
    def of(cls, error: PdserveError) -> ErrorBody:
        default = "invalid_request_error" if isinstance(error, ClientError) else "server_error"
        kind = _ERROR_TYPES.get(error.http_status, default)
        return cls(ErrorDetails(error.message, kind, error.field or None, error.code, error.reason))
