"""JSON bodies of the HTTP API: reading them strictly, and writing.

A field that is null counts as not given. Unknown fields are refused. Fields of other servers that
pdserve does not have are known by a table: accepted at values that change nothing, otherwise
refused by name.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Callable, Mapping, Sequence  # noqa: TC003 - msgspec reads the annotations
from functools import cache
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple, NoReturn, TypeVar, cast

import msgspec
from msgspec import Meta, Struct

from pdserve.errors import InvalidRequest, UnknownField, UnsupportedField

if TYPE_CHECKING:
    from pdserve.types import GenerateRequest
    from router.api.preprocess import ParsedRequest
    from router.api.sinks import Writer

encode = msgspec.json.Encoder().encode

Text = Annotated[str, Meta(min_length=1)]
TokenId = Annotated[int, Meta(ge=0)]
TokenIds = Annotated[list[TokenId], Meta(description="Token ids of the model's tokenizer.")]
NO_EFFECT = "Accepted without effect."
Ignored = Annotated[Any, Meta(description=NO_EFFECT)]
Share = Annotated[float, Meta(ge=0, le=1)]
Count = Annotated[int, Meta(ge=1, le=1 << 30)]
TopK = Annotated[int, Meta(ge=-1, le=1 << 30)] | None
FollowsSchema = Annotated[
    bool | None, Meta(description="Calls follow the schema. Forced calls always do.")
]
ModelName = Annotated[
    Text | None, Meta(description="Name of a served model. Required if there are several.")
]


class Strict(Struct, kw_only=True, forbid_unknown_fields=True):
    """A part of a request body."""


class Known(NamedTuple):
    """A field that is refused unless it is null or one of `accepts`; `reason` may say why."""

    accepts: tuple[object, ...] = ()
    reason: str = ""

    @property
    def description(self) -> str:
        values = ", ".join(encode(x).decode() for x in (None, *self.accepts))
        return f"Not supported: only {values}."


_OFF = Known((False,))
_EMPTY = Known(({}, []))
_NULL = Known()
_TEXT_ONLY = "only text is generated"

# Fields of OpenAI, vLLM 0.32 and SGLang for chat and completions.
KNOWN: dict[str, Known] = {
    "allowed_token_ids": _NULL,
    "bad_words": _EMPTY,
    "best_of": Known((1,), "use n to get several answers"),
    "bootstrap_host": _NULL,
    "bootstrap_port": _NULL,
    "bootstrap_room": _NULL,
    "custom_logit_processor": _NULL,
    "custom_params": _EMPTY,
    "data_parallel_rank": _NULL,
    "ebnf": Known((), "use structured_outputs.grammar"),
    "ec_transfer_params": _NULL,
    "extra_key": Known((), "use cache_salt"),
    "input_ids": Known((), "use prompt"),
    "kv_transfer_params": _NULL,
    "length_penalty": Known((1,)),
    "logprob_token_ids": _EMPTY,
    "lora_path": Known((), "name the adapter as the model"),
    "mm_payload": Known(("tensors", "none")),
    "no_stop_trim": Known((False,), "use include_stop_str_in_output"),
    "prompt_embeds": _NULL,
    "prompt_logprobs": Known((), "use echo and logprobs of /v1/completions"),
    "regex": Known((), "use structured_outputs.regex"),
    "repetition_detection": _NULL,
    "return_cached_tokens_details": _OFF,
    "return_hidden_states": _OFF,
    "return_mm_kwargs": _OFF,
    "return_prompt_text": _OFF,
    "return_routed_experts": _OFF,
    "return_token_offsets": _OFF,
    "return_tokens_as_token_ids": _OFF,
    "rid": Known((), "use request_id"),
    "routed_dp_rank": _NULL,
    "routed_experts_prompt_start": Known((0,)),
    "session_id": _NULL,
    "session_params": _EMPTY,
    "spaces_between_special_tokens": Known((True,)),
    "stop_regex": Known(([], "")),
    "stream_interval": Known((1,)),
    "thinking_token_budget": _NULL,
    "truncate_prompt_tokens": _NULL,
    "truncation_side": Known(("left", "right")),
    "use_beam_search": _OFF,
    "vllm_xargs": _EMPTY,
    "watermarking": _OFF,
}
KNOWN_OF_COMPLETIONS: dict[str, Known] = {"suffix": Known(("",))}
KNOWN_OF_CHAT: dict[str, Known] = {
    "audio": Known((), _TEXT_ONLY),
    "chat_template": Known((), "the model's own is used"),
    "documents": _EMPTY,
    "echo": Known((False,), "the prompt is not repeated"),
    "function_call": Known(("none",)),
    "functions": _NULL,
    "max_dynamic_patch": _NULL,
    "media_io_kwargs": _EMPTY,
    "min_dynamic_patch": _NULL,
    "mm_processor_kwargs": _EMPTY,
    "modalities": Known((["text"],), _TEXT_ONLY),
    "moderation": _NULL,
    "prediction": _NULL,
    "prompt_cache_options": _NULL,
    "prompt_cache_retention": Known(("in_memory", "in-memory")),
    "use_audio_in_video": _OFF,
    "verbosity": Known(("medium",)),
    "web_search_options": _NULL,
}


class Body(Strict):
    """A whole request body."""

    known: ClassVar[Mapping[str, Known]] = {}
    _values_of: ClassVar[Callable[[Any], tuple[object, ...]]]

    def check_known(self) -> None:
        """Raises UnsupportedField for a known field that asks for something."""
        kind = type(self)
        values = kind._values_of(self) if kind.known else ()
        if values.count(None) < len(values):
            for (name, known), value in zip(kind.known.items(), values, strict=True):
                if value is not None and value not in known.accepts:
                    raise not_supported(name, known.reason)


class GenerateBody(Body, kw_only=True):
    """A body that asks for answers."""

    id_prefix: ClassVar[str] = ""
    model: ModelName = None
    stream: bool | None = None

    @property
    def constraint_field(self) -> str:
        """Field that a constraint on the answer came from."""
        return ""

    def given(self, *names: str) -> dict[str, Any]:
        """Return the fields of these names that are set."""
        return {x: value for x in names if (value := getattr(self, x)) is not None}

    def named_id(self) -> str | None:
        """Return the request id that the body gives."""
        return None

    def parse(self, request_id: str) -> list[ParsedRequest]:
        """Return a request for each prompt. Raises InvalidRequest naming the field."""
        raise NotImplementedError

    def writer(self, request_id: str, made: Sequence[GenerateRequest]) -> Writer:
        """Return what encodes the answers to the requests of `parse`, once they are prepared."""
        raise NotImplementedError


B = TypeVar("B", bound=Body)


def _only(name: str) -> Callable[[object], tuple[object, ...]]:
    """Return an attrgetter that returns a tuple for one name too."""
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
    """Validate a part of a body that is at `at`. Raises InvalidRequest naming the field."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise _error_for(str(error), kind, at) from error


_AT = re.compile(r" - at (?:`key` in )?`\$\.?(.*)`$")
_NAMED = re.compile(r"Object (contains unknown|missing required) field `(.*?)`")


def _error_for(message: str, kind: Any, within: str = "") -> InvalidRequest:
    """The error for msgspec's message of a `kind`: "Expected `int`, got `str` - at `$.n`"."""
    at = _AT.search(message)
    path, reason = (at.group(1), message[: at.start()]) if at else ("", message)
    before, _, value = reason.partition("Invalid enum value ")
    if value and not before:
        names = re.sub(r"\[.*?\]", "", path).strip(".").split(".")
        reason = f"must be one of {', '.join(map(str, _literals(kind, names)))}, not {value}"
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
    """Return the values that the field at the path `names` of `kind` may have."""
    parts: Sequence[Any] = typing.get_args(kind)
    if typing.get_origin(kind) is typing.Literal:
        return [] if names else list(parts)
    if names and isinstance(kind, type) and issubclass(kind, Struct):
        parts = [x.type for x in msgspec.structs.fields(kind) if x.encode_name == names[0]]
        names = names[1:]
    return [x for part in parts for x in _literals(part, names)]


def refuse(field: str, reason: str) -> NoReturn:
    raise InvalidRequest(f"'{field}' {reason}", field=field)


def not_supported(field: str, reason: str = "") -> UnsupportedField:
    text = f"'{field}' is not supported" + (f": {reason}" if reason else "")
    return UnsupportedField(text, field=field)
