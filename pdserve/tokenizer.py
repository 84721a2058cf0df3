"""The tokenizer and chat template of a model, without transformers or torch."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from tokenizers import Tokenizer as FastTokenizer

from pdserve.chat_template import ChatTemplate
from pdserve.errors import ConfigError, InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

# One text at a time: the library's threads would only delay it.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@dataclass(slots=True)
class ChatMessage:
    """One message of a conversation. The template gets `name` if it is set."""

    role: str
    content: str
    name: str | None = None


class Tokenizer:
    """Converts text to token ids. Plain text gets the special tokens of `tokenizer.json`, a
    conversation only those that its template writes, so that there are not two BOS tokens."""

    def __init__(self, fast: FastTokenizer, template: ChatTemplate | None) -> None:
        # Files saved after training may enable truncation and padding.
        fast.no_truncation()
        fast.no_padding()
        self._fast = fast
        self._template = template

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Read `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja`, which overrides
        the template in the configuration. Raises ConfigError naming the file."""
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"{path} does not exist", field="model")
        try:
            fast = FastTokenizer.from_file(str(path))
        # The library raises a bare Exception for a file that it cannot read.
        except Exception as error:
            raise ConfigError(f"{path} is not a tokenizer: {error}", field="model") from error
        return cls(fast, _read_template(directory))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Return the token ids of `text`. Raises InvalidRequest for text that is not Unicode (a
        lone surrogate)."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidRequest("the text holds half a surrogate pair", field="prompt") from error
        # The batch call makes no offsets, and releases the GIL.
        encoding = self._fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        return tuple(encoding.ids)

    def render_chat(self, messages: Sequence[ChatMessage]) -> str:
        """Return the conversation as text, up to the start of the answer. Raises InvalidRequest
        (field `messages`) if the model has no template or the template rejects the messages."""
        if self._template is None:
            raise InvalidRequest(
                "the model has no chat template; send a prompt instead", field="messages"
            )
        plain = [{"role": x.role, "content": x.content} for x in messages]
        for message, values in zip(messages, plain, strict=True):
            if message.name is not None:
                values["name"] = message.name
        return self._template.render(plain)

    def encode_chat(self, messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        """Return the token ids of the conversation, up to the start of the answer."""
        return self.encode(self.render_chat(messages), add_special_tokens=False)


def _read_template(directory: Path) -> ChatTemplate | None:
    path = directory / "tokenizer_config.json"
    try:
        config: Any = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        if not isinstance(config, dict):
            raise ConfigError(f"{path} does not hold a JSON object", field="model")
        template = config.get("chat_template")
        path = directory / "chat_template.jinja"
        if path.is_file():
            template = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}", field="model") from error
    if isinstance(template, list):
        # Older files have several templates; "default" is the one for plain conversations.
        template = {x.get("name"): x.get("template") for x in template}.get("default")
    if template is None:
        return None
    if not isinstance(template, str):
        raise ConfigError(f"{directory}: chat_template is not text", field="model")
    # A special token is its text, or an object with `content`.
    named = {name: value for name, value in config.items() if name.endswith("_token")}
    tokens = {x: y.get("content") if isinstance(y, dict) else y for x, y in named.items()}
    return ChatTemplate(template, {x: y for x, y in tokens.items() if isinstance(y, str)})
