"""The tokenizer and chat template of a model, without transformers or torch."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

from tokenizers import Tokenizer as FastTokenizer

from pdserve.chat_template import ChatTemplate, ParserNames
from pdserve.errors import ConfigError, InvalidRequest, UnsupportedField

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_FAST, _CONFIG, _TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
# Less than a gRPC message takes (rpc.py). Published tokenizers have up to 35 MB.
MAX_FILES_BYTES = 48 << 20

# One text at a time: the library's threads would only delay it.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@dataclass(slots=True)
class ChatMessage:
    """One message of a conversation. The template gets what is set. `tool_calls` are as OpenAI
    writes them, but their arguments are objects."""

    role: str
    content: str
    name: str | None = None
    reasoning: str | None = None
    tool_calls: Sequence[Mapping[str, Any]] = ()
    tool_call_id: str | None = None


@dataclass(slots=True)
class Conversation:
    """What a chat template renders. `variables` are given to the template by name, `tools` as
    OpenAI writes them. The answer begins a new message, unless `continue_final_message`: then it
    continues the last one."""

    messages: Sequence[ChatMessage]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)
    tools: Sequence[Mapping[str, Any]] = ()


class TextPair(NamedTuple):
    """Two texts that a cross-encoder compares."""

    first: str
    second: str


def read_files(path: Path) -> dict[str, bytes]:
    """Return the files from which `Tokenizer.load` makes the tokenizer of the model directory
    `path`, or of a file of Mistral's own library: contents by name. Empty if the model has none of
    them. Raises ConfigError naming a file that cannot be read, and beyond MAX_FILES_BYTES."""
    paths = [path] if path.is_file() else [path / name for name in (_FAST, _CONFIG, _TEMPLATE)]
    if not paths[0].is_file():
        return {}
    try:
        found = {each.name: each.read_bytes() for each in paths if each.is_file()}
    except OSError as error:
        raise ConfigError(f"cannot read the tokenizer: {error}", field="model") from error
    if (size := sum(map(len, found.values()))) > MAX_FILES_BYTES:
        text = f"the tokenizer in {path} has {size} bytes; at most {MAX_FILES_BYTES} are sent"
        raise ConfigError(text, field="model")
    return found


def digest_of(files: Mapping[str, bytes]) -> str:
    """Return what identifies a tokenizer; "" without files."""
    each = (f"{name} {hashlib.sha256(files[name]).hexdigest()}\n" for name in sorted(files))
    return hashlib.sha256("".join(each).encode()).hexdigest() if files else ""


class Tokenizer:
    """Converts text to token ids. Plain text gets the special tokens of `tokenizer.json`, a
    conversation only those that its template writes, so that there are not two BOS tokens."""

    def __init__(self, fast: FastTokenizer, template: ChatTemplate | None) -> None:
        # Files saved after training may enable truncation and padding.
        fast.no_truncation()
        fast.no_padding()
        self._fast = fast
        self._template = template
        self.files: Mapping[str, bytes] = {}  # what it was loaded from

    @property
    def parsers(self) -> ParserNames:
        """The parsers of what the model writes, as far as its chat template tells."""
        return ParserNames() if self._template is None else self._template.parsers

    @property
    def info(self) -> dict[str, Any]:
        """The configuration and chat template of the model's files; special tokens as text."""
        found: dict[str, Any] = json.loads(self.files.get(_CONFIG, b"{}"))
        found |= _special_tokens(found)
        if _TEMPLATE in self.files:
            found["chat_template"] = self.files[_TEMPLATE].decode()
        return found

    @staticmethod
    def load(files: Mapping[str, bytes]) -> Tokenizer:
        """Make a tokenizer of what `read_files` returned: `tokenizer.json`, `tokenizer_config.json`
        and `chat_template.jinja`, which overrides the template in the configuration, or a file of
        Mistral's own library. Raises ConfigError naming the file."""
        if not files:
            raise ConfigError("the model has no tokenizer.json", field="model")
        if _FAST not in files:
            return MistralTokenizer(files)
        try:
            fast = FastTokenizer.from_buffer(files[_FAST])
        # The library raises a bare Exception for a file that it cannot read.
        except Exception as error:
            raise ConfigError(f"{_FAST} is not a tokenizer: {error}", field="model") from error
        tokenizer = Tokenizer(fast, _read_template(files))
        tokenizer.files = files
        return tokenizer

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Return the token ids of `text`. Raises InvalidRequest for text that is not Unicode (a
        lone surrogate)."""
        _check_unicode(text)
        # The batch call makes no offsets, and releases the GIL.
        encoding = self._fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        return tuple(encoding.ids)

    def encode_pair(self, pair: TextPair) -> tuple[tuple[int, ...], int]:
        """Return the token ids of both texts, and where those of the second one begin."""
        encoding = self._fast.encode(*pair)
        first = next((i for i, x in enumerate(encoding.type_ids) if x), len(encoding.ids))
        return tuple(encoding.ids), first

    @cached_property
    def truncation_side(self) -> str:
        """Where the model's configuration has texts cut: left or right."""
        return "left" if self.info.get("truncation_side") == "left" else "right"

    def encode_within(self, texts: Sequence[str], most: int) -> tuple[tuple[int, ...], int]:
        """Return at most `most` token ids of a text, or of two that a cross-encoder compares, and
        where those of the second one begin. As with transformers' `truncation=True`, special tokens
        stay, and of two texts the longer one is cut first."""
        for text in texts:
            _check_unicode(text)
        parts = [self._fast.encode(text, add_special_tokens=False) for text in texts]
        room = max(0, most - self._fast.num_special_tokens_to_add(len(parts) == 2))
        for part, size in zip(parts, _shares(list(map(len, parts)), room), strict=True):
            part.truncate(size, direction=self.truncation_side)
        encoding = self._fast.post_process(parts[0], parts[1] if len(parts) > 1 else None)
        first = next((i for i, x in enumerate(encoding.type_ids) if x), len(encoding.ids))
        return tuple(encoding.ids)[:most], min(first, most)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of `token_ids`, special tokens included."""
        return self._fast.decode(list(token_ids), skip_special_tokens=False)

    def render_chat(self, chat: Conversation) -> str:
        """Return the conversation as text, up to the start of the answer. Raises InvalidRequest
        (field `messages`) if the model has no template or the template rejects the messages."""
        if self._template is None:
            raise InvalidRequest(
                "the model has no chat template; send a prompt instead", field="messages"
            )
        plain: list[dict[str, Any]] = [
            {"role": x.role, "content": x.content} for x in chat.messages
        ]
        for message, values in zip(chat.messages, plain, strict=True):
            if message.name is not None:
                values["name"] = message.name
            if message.reasoning is not None:
                # Published templates use either name.
                values["reasoning_content"] = values["reasoning"] = message.reasoning
            if message.tool_calls:
                values["tool_calls"] = message.tool_calls
            if message.tool_call_id is not None:
                values["tool_call_id"] = message.tool_call_id
        variables = chat.variables
        if chat.tools:
            if not self._template.takes_tools:
                text = "'tools': the model's chat template does not take tools"
                raise UnsupportedField(text, field="tools")
            variables = {**variables, "tools": chat.tools}
        return self._template.render(
            plain,
            variables,
            add_generation_prompt=chat.add_generation_prompt,
            continue_final_message=chat.continue_final_message,
        )

    def encode_chat(
        self, chat: Conversation, *, add_special_tokens: bool = False
    ) -> tuple[int, ...]:
        """Return the token ids of the conversation, up to the start of the answer."""
        return self.encode(self.render_chat(chat), add_special_tokens=add_special_tokens)


class MistralTokenizer(Tokenizer):
    """A tokenizer of Mistral's own library (`tekken.json`, or a versioned sentencepiece model),
    which writes conversations without a template."""

    parsers = ParserNames("mistral")

    def __init__(self, files: Mapping[str, bytes]) -> None:
        ((name, content),) = files.items()
        self.files = files
        try:
            from mistral_common.protocol.instruct.validator import ValidationMode
            from mistral_common.tokens.tokenizers import mistral
        except ImportError as error:
            raise ConfigError(f"{name} needs the package mistral-common", field="model") from error
        # The library reads only files, and their format is in their names.
        with TemporaryDirectory(prefix="pdserve-tokenizer-") as directory:
            file = Path(directory, Path(name).name)
            file.write_bytes(content)
            # The mode that vLLM uses.
            self._mistral = mistral.MistralTokenizer.from_file(str(file), mode=ValidationMode.test)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        _check_unicode(text)
        tokenizer = self._mistral.instruct_tokenizer.tokenizer
        return tuple(tokenizer.encode(text, bos=add_special_tokens, eos=False))

    def encode_within(self, texts: Sequence[str], most: int) -> tuple[tuple[int, ...], int]:
        return self.encode(texts[0])[:most], 0

    def decode(self, token_ids: Sequence[int]) -> str:
        from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy

        tokenizer = self._mistral.instruct_tokenizer.tokenizer
        return tokenizer.decode(list(token_ids), special_token_policy=SpecialTokenPolicy.KEEP)

    def encode_chat(
        self, chat: Conversation, *, add_special_tokens: bool = False
    ) -> tuple[int, ...]:
        from mistral_common.exceptions import MistralCommonException
        from mistral_common.protocol.instruct.request import ChatCompletionRequest

        if chat != Conversation(chat.messages, tools=chat.tools) or add_special_tokens:
            raise InvalidRequest(
                "the model has no chat template to give options to", field="messages"
            )
        for message in chat.messages:
            _check_unicode(message.content)
        names = {"developer": "system"}  # the library does not know the first
        plain: list[Any] = [
            {"role": names.get(x.role, x.role), "content": x.content} for x in chat.messages
        ]
        for message, values in zip(chat.messages, plain, strict=True):
            if message.tool_calls:
                values["tool_calls"] = [
                    {**x, "function": {**x["function"], "arguments": json.dumps(arguments)}}
                    for x in message.tool_calls
                    for arguments in [x["function"]["arguments"]]
                ]
            if message.tool_call_id is not None:
                values["tool_call_id"] = message.tool_call_id
        try:
            tools: Any = [*chat.tools] or None
            request = ChatCompletionRequest.from_openai(messages=plain, tools=tools)
            return tuple(self._mistral.encode_chat_completion(request).tokens)
        except (MistralCommonException, ValueError) as error:
            raise InvalidRequest(
                f"Mistral's tokenizer refuses these messages: {error}", field="messages"
            ) from error


def _shares(sizes: Sequence[int], room: int) -> list[int]:
    """Return how many tokens of `room` one or two texts get (`longest_first` of the library)."""
    if sum(sizes) <= room or len(sizes) == 1:
        return [min(size, room) for size in sizes]
    short = min(*sizes, room // 2)
    return [short, room - short] if sizes[0] <= sizes[1] else [room - short, short]


def _check_unicode(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequest("the text holds half a surrogate pair", field="prompt") from error


def _read_template(files: Mapping[str, bytes]) -> ChatTemplate | None:
    name = _CONFIG
    try:
        config: Any = json.loads(files.get(name, b"{}").decode())
        if not isinstance(config, dict):
            raise ConfigError(f"{name} does not hold a JSON object", field="model")
        template = config.get("chat_template")
        name = _TEMPLATE
        if name in files:
            template = files[name].decode()
    except ValueError as error:
        raise ConfigError(f"cannot read {name}: {error}", field="model") from error
    if isinstance(template, list):
        # Older files have several templates; "default" is the one for plain conversations.
        template = {x.get("name"): x.get("template") for x in template}.get("default")
    if template is None:
        return None
    if not isinstance(template, str):
        raise ConfigError(f"{_CONFIG}: chat_template is not text", field="model")
    return ChatTemplate(template, _special_tokens(config))


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return them by name. One is its text, or an object with `content`."""
    named = {name: value for name, value in config.items() if name.endswith("_token")}
    tokens = {x: y.get("content") if isinstance(y, dict) else y for x, y in named.items()}
    return {x: y for x, y in tokens.items() if isinstance(y, str)}
