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
    """Converts text to token ids and back. Plain text gets the special tokens of `tokenizer.json`,
    a conversation only those that its template writes, so that there are not two BOS tokens."""

    def __init__(
        self, fast: FastTokenizer, *, template: ChatTemplate | None, eos_token: str | None
    ) -> None:
        # Files saved after training may enable truncation and padding.
        fast.no_truncation()
        fast.no_padding()
        self._fast = fast
        self._template = template
        self._eos_token = eos_token

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
        config = _read_config(directory / "tokenizer_config.json")
        special = {name: _token(value) for name, value in config.items() if name.endswith("_token")}
        special_tokens = {name: token for name, token in special.items() if token is not None}
        source = _read_template(directory, config)
        return cls(
            fast,
            template=None if source is None else ChatTemplate(source, special_tokens),
            eos_token=special_tokens.get("eos_token"),
        )

    @property
    def vocab_size(self) -> int:
        """Number of token ids with a token. The model may have more embedding rows."""
        return self._fast.get_vocab_size(with_added_tokens=True)

    @property
    def eos_token_id(self) -> int | None:
        """The configured end-of-sequence token, if any."""
        return None if self._eos_token is None else self._fast.token_to_id(self._eos_token)

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

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

    def render_chat(
        self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool = True
    ) -> str:
        """Return the conversation as text. Raises InvalidRequest (field `messages`) if the model
        has no template or the template rejects the messages."""
        if self._template is None:
            raise InvalidRequest(
                "the model has no chat template; send a prompt instead", field="messages"
            )
        return self._template.render(
            [_message(message) for message in messages],
            add_generation_prompt=add_generation_prompt,
        )

    def encode_chat(self, messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        """Return the token ids of the conversation, up to the start of the answer."""
        return self.encode(self.render_chat(messages), add_special_tokens=False)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self._fast.decode(list(token_ids), skip_special_tokens=skip_special_tokens)


def _message(message: ChatMessage) -> dict[str, str]:
    plain = {"role": message.role, "content": message.content}
    return plain if message.name is None else {**plain, "name": message.name}


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}", field="model") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} does not hold a JSON object", field="model")
    return config


def _read_template(directory: Path, config: dict[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read {path}: {error}", field="model") from error
    template = config.get("chat_template")
    if isinstance(template, list):
        # Older files have several templates; "default" is the one for plain conversations.
        named = {item.get("name"): item.get("template") for item in template}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise ConfigError(f"{directory}: chat_template is not text", field="model")
    return template


def _token(value: object) -> str | None:
    """Return the text of a special token, which may be an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
