"""The body of POST /v1/chat/completions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.errors import UnsupportedField
from pdserve.tokenizer import ChatMessage
from pdserve.types import MAX_LOGPROBS
from router.http.asked import (
    Asked,
    read_model,
    read_priority,
    read_resume,
    read_service_class,
    read_streaming,
)
from router.http.fields import ASSISTANT_ONLY, CHAT, check_names
from router.http.reading import Fields, kind_of, refuse
from router.http.sampling import read_sampling
from router.intake import CHAT_ROLES, OPEN_ENDED, Ask, ChatPrompt

if TYPE_CHECKING:
    from typing import NoReturn

_PART_JOIN = "\n"
_MESSAGE_FIELDS = ("role", "content", "name")


def read_chat(body: dict[str, object], request_id: str) -> Asked:
    """Raises InvalidRequest naming the field at fault. Without a length, the answer may be as long
    as the context allows."""
    check_names(body, CHAT)
    fields = Fields(body)
    max_tokens, max_tokens_field = _max_tokens(fields)
    ask = Ask(
        model=read_model(fields),
        prompt=ChatPrompt(_messages(fields)),
        sampling=read_sampling(
            fields, max_tokens=max_tokens or OPEN_ENDED, logprobs=_logprobs(fields)
        ),
        request_id=request_id,
        fills_context=max_tokens is None,
        prompt_field="messages",
        max_tokens_field=max_tokens_field,
        priority=read_priority(fields),
        service_class=read_service_class(fields),
        resume=read_resume(fields),
    )
    return Asked(ask, read_streaming(fields))


def _max_tokens(fields: Fields) -> tuple[int | None, str]:
    """`max_tokens` is the older name of `max_completion_tokens`."""
    new = fields.integer("max_completion_tokens", minimum=1)
    old = fields.integer("max_tokens", minimum=1)
    if new is None:
        return old, "max_tokens"
    if old is not None and old != new:
        refuse("max_tokens", f"is {old}, but max_completion_tokens is {new}")
    return new, "max_completion_tokens"


def _logprobs(fields: Fields) -> int | None:
    wanted = fields.boolean("logprobs") or False
    top = fields.integer("top_logprobs", minimum=0)
    if top is not None and not wanted:
        refuse("top_logprobs", "is only for logprobs: true")
    if top is not None and top > MAX_LOGPROBS:
        refuse("top_logprobs", f"must be at most {MAX_LOGPROBS}, not {top}")
    return (top or 0) if wanted else None


def _messages(fields: Fields) -> tuple[ChatMessage, ...]:
    values = fields.array("messages")
    if not values:
        refuse("messages", "must hold at least one message")
    return tuple(_message(value, f"messages[{i}]") for i, value in enumerate(values))


def _message(value: object, at: str) -> ChatMessage:
    if not isinstance(value, dict):
        refuse(at, f"must be an object, not {kind_of(value)}")
    fields = Fields(value, at)
    role = fields.string("role")
    if role in ("tool", "function"):
        _unsupported(f"{at}.role", f"{role} messages are not supported, because tools are not")
    if role not in CHAT_ROLES:
        refuse(f"{at}.role", f"must be one of {', '.join(CHAT_ROLES)}, not {role!r}")
    if role == "assistant":
        fields.allow((*_MESSAGE_FIELDS, *ASSISTANT_ONLY))
        for name in ASSISTANT_ONLY:
            if fields.get(name) not in (None, []):
                _unsupported(f"{at}.{name}", "is not supported: only text is served")
    else:
        fields.allow(_MESSAGE_FIELDS)
    return ChatMessage(role, _content(value.get("content"), f"{at}.content"), fields.string("name"))


def _content(value: object, at: str) -> str:
    """Text, or parts of text, which are joined by line breaks as vLLM joins them."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        refuse(at, f"must be a string or an array of text parts, not {kind_of(value)}")
    if not value:
        refuse(at, "must not be empty")
    return _PART_JOIN.join(_part(part, f"{at}[{i}]") for i, part in enumerate(value))


def _part(value: object, at: str) -> str:
    if not isinstance(value, dict):
        refuse(at, f"must be an object, not {kind_of(value)}")
    fields = Fields(value, at)
    kind = fields.string("type")
    if kind != "text":
        _unsupported(f"{at}.type", f"{kind!r} is not supported: only text is served")
    fields.allow(("type", "text"))
    text = fields.string("text")
    if text is None:
        refuse(f"{at}.text", "is needed")
    return text


def _unsupported(path: str, reason: str) -> NoReturn:
    raise UnsupportedField(f"{path}: {reason}", field=path)
