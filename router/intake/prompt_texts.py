"""The texts of a prompt that guards check: all that the model gets, and that a client can choose.
They are checked before the chat template is rendered, because what a guard replaces must be
tokenised in its place, and because no match shall span the template's own markup."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec import Struct, structs

from pdserve.model.tokenizer import Conversation

if TYPE_CHECKING:
    from pdserve.model.tokenizer import ChatMessage, Tokenizer
    from router.dialects.parsed_request import ParsedRequest

# Kind of the text of tokens that the client says it has. They cannot be replaced.
RESUMED = "resumed"

# Returns what stands in place of a text of some kind.
_Change = Callable[[str, str], str]


class PromptTexts(Struct, frozen=True):
    """What to do with the texts of prompts: return them if they are `wanted`, and replace those
    that are in `changes`. Equal texts are replaced alike."""

    wanted: bool = False
    changes: Mapping[str, str] = {}


UNCHECKED = PromptTexts()


def pieces_of(request: ParsedRequest, tokenizer: Tokenizer | None) -> list[tuple[str, str]]:
    """Return kind and text of each text of a prompt: the role of a message, "tools", or "prompt".
    Token ids need the tokenizer."""
    found: list[tuple[str, str]] = []

    def collect(kind: str, text: str) -> str:
        found.append((kind, text))
        return text

    _changed(request, collect, tokenizer)
    if request.resume and tokenizer is not None:
        found.append((RESUMED, tokenizer.decode(request.resume)))
    return found


def with_changes(
    request: ParsedRequest, changes: Mapping[str, str], tokenizer: Tokenizer | None = None
) -> ParsedRequest:
    """Return a request with its texts replaced. Without a tokenizer, token ids stay."""
    return _changed(request, lambda _, text: changes.get(text, text), tokenizer)


def _changed(request: ParsedRequest, change: _Change, tokenizer: Tokenizer | None) -> ParsedRequest:
    prompt = request.prompt
    if isinstance(prompt, Conversation):
        return structs.replace(request, prompt=_conversation(prompt, change))
    if isinstance(prompt, str):
        return structs.replace(request, prompt=change("prompt", prompt))
    if tokenizer is None:
        return request
    text = tokenizer.decode(prompt)
    if (new := change("prompt", text)) == text:
        return request
    # The text of special tokens becomes these tokens again.
    tokens = tuple(tokenizer.encode(new, add_special_tokens=False))
    return structs.replace(request, prompt=tokens)


def _conversation(chat: Conversation, change: _Change) -> Conversation:
    return replace(
        chat,
        messages=[_message(x, partial(change, x.role)) for x in chat.messages],
        variables=in_objects(chat.variables, partial(change, "tools")),
        tools=in_objects(chat.tools, partial(change, "tools")),
    )


def _message(message: ChatMessage, change: Callable[[str], str]) -> ChatMessage:
    def optional(text: str | None) -> str | None:
        return change(text) if text else text

    return replace(
        message,
        content=optional(message.content) or "",
        name=optional(message.name),
        reasoning=optional(message.reasoning),
        tool_calls=in_objects(message.tool_calls, change),
        tool_call_id=optional(message.tool_call_id),
        parts=[change(x) if isinstance(x, str) else x for x in message.parts],
    )


def in_objects(value: Any, change: Callable[[str], str]) -> Any:
    """Return a JSON value with its texts and keys replaced."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(str(key)): in_objects(x, change) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [in_objects(x, change) for x in value]
    return value
