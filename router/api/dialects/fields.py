"""Strict decoding of JSON bodies of the HTTP API, and encoding.

A null field counts as not set. Unknown fields are refused. Fields of other servers that pdserve
does not support are accepted at values that change nothing, and otherwise refused by name.
"""

from __future__ import annotations

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
    TypeVar,
    cast,
)

import msgspec
from msgspec import Meta, Struct

from pdserve.errors import InvalidRequest, UnknownField, UnsupportedField
from pdserve.types import MAX_SEED, Receipt, SamplingParams, ServiceClass
from router.api.preprocess import OPEN_ENDED, ParsedRequest
from router.api.session_ids import MAX_SESSION_ID

if TYPE_CHECKING:
    from pdserve.errors import PdserveError
    from pdserve.types import GenerateRequest, PositionLogprobs, TokenLogprob
    from router.api.preprocess import Prompt
    from router.request.answer import AnswerDelta

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
Count = Annotated[int, Meta(ge=1, le=1 << 30)]
TopK = Annotated[int, Meta(ge=-1, le=1 << 30)] | None
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


class Body(Strict):
    """A whole request body."""

    known: ClassVar[Mapping[str, Known]] = {}
    _values_of: ClassVar[Callable[[Any], tuple[object, ...]]]

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

    def given(self, *names: str) -> dict[str, Any]:
        """Return those of the fields `names` that are set."""
        return {x: value for x in names if (value := getattr(self, x)) is not None}

    def named_id(self) -> str | None:
        """Return the request id in the body, if it has one."""
        return None

    def parse(self, request_id: str) -> list[ParsedRequest]:
        """Return a request for each prompt. Raises InvalidRequest naming the field."""
        raise NotImplementedError

    def without_prompt(self) -> GenerateBody:
        """Return the body with placeholders for the parts that are rendered and tokenised. `parse`
        must still return the same number of requests."""
        raise NotImplementedError

    def writer(self, request_id: str, made: Sequence[GenerateRequest]) -> Writer:
        """Return the encoder of the answers. `made`: the prepared requests of `parse`."""
        raise NotImplementedError


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
        body: B = _decoder(kind).decode(data)
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


# JSON has no infinity. OpenAI uses this value for a token that is practically impossible.
MIN_LOGPROB = -9999.0


class TextFormat(Strict, tag_field="type", tag="text"):
    pass


class JsonObjectFormat(Strict, tag_field="type", tag="json_object"):
    pass


class OpenAiBody(GenerateBody, kw_only=True):
    """Fields shared by OpenAI's endpoints that generate."""

    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Share | None = None
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
    user: Ignored = None

    def _request(
        self, prompt: Prompt, request_id: str, max_tokens: int | None, given: dict[str, Any]
    ) -> ParsedRequest:
        """Return the request. `given`: the sampling parameters that the client set."""
        flex = self.service_tier == "flex"
        return ParsedRequest(
            model=self.model or "",
            prompt=prompt,
            sampling=SamplingParams(max_tokens=max_tokens or OPEN_ENDED, **given),
            request_id=request_id,
            priority=self.priority or 0,
            service_class=ServiceClass.BATCH if flex else ServiceClass.INTERACTIVE,
            given=given.keys(),
            cache_salt=self.cache_salt or "",
        )


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
