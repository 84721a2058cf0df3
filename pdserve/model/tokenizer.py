"""The tokenizer and chat template of a model, without transformers or torch."""

from __future__ import annotations

import hashlib
import json
import os
import re
import string
from bisect import bisect_right
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

from tokenizers import Tokenizer as FastTokenizer

from pdserve.errors import ConfigError, InvalidRequest
from pdserve.model.answer_formats import parsers_of
from pdserve.model.chat_template import ChatTemplate, ParserNames
from pdserve.model.token_ids import TokenIds

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tokenizers import AddedToken

    from pdserve.model.token_cache import CachedParts

_FAST, _CONFIG, _TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
# The template for conversations with tools: its name in the configuration's list, and the name of
# its file in a folder beside the model's own template.
_TOOL_USE, _MORE_TEMPLATES = "tool_use", "additional_chat_templates"
# Below rpc.MAX_MESSAGE_BYTES, since workers send the files in one message. Published tokenizers
# have up to 35 MB.
MAX_FILES_BYTES = 48 << 20
# Shortest cached part of a text, in characters. Looking it up costs as much as tokenising some.
LEAST_PART = 256
# A shorter text is not cached.
LEAST_CACHED = 2048
# Not whitespace, which a token before it may absorb, and not part of a word, which may be excluded.
_CUT_BEFORE = set(string.punctuation) - {"_"}

# Texts are encoded one at a time, so the library's threads would only add delay.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@dataclass(frozen=True, slots=True)
class MessageImage:
    """An image of a message: an encoded file, or its address. `detail`: as in OpenAI's API.
    `field`: its place in the client's request, for errors."""

    source: bytes | str = field(repr=False)
    detail: str
    field: str


@dataclass(slots=True)
class ChatMessage:
    """One message of a conversation. The template gets only fields that are set. `tool_calls` have
    OpenAI's format, except that their arguments are objects. `parts`: texts and images in order, if
    the message has images; its `content` is then empty."""

    role: str
    content: str
    name: str | None = None
    reasoning: str | None = None
    tool_calls: Sequence[Mapping[str, Any]] = ()
    tool_call_id: str | None = None
    parts: Sequence[str | MessageImage] = ()

    @classmethod
    def of_parts(cls, role: str, parts: Sequence[str | MessageImage], **fields: Any) -> ChatMessage:
        """Return a message of these parts. Texts without images are joined by line breaks."""
        texts = [x for x in parts if isinstance(x, str)]
        if len(texts) == len(parts):
            return cls(role, "\n".join(texts), **fields)
        return cls(role, "", parts=parts, **fields)


@dataclass(slots=True)
class Conversation:
    """Input of a chat template. `variables`: further template variables. `tools`: in OpenAI's
    format. The answer begins a new message, or continues the last one if
    `continue_final_message`."""

    messages: Sequence[ChatMessage]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)
    tools: Sequence[Mapping[str, Any]] = ()

    @property
    def images(self) -> list[MessageImage]:
        return [x for m in self.messages for x in m.parts if isinstance(x, MessageImage)]

    @property
    def chars(self) -> int:
        """Number of characters that the template gets. Objects count as JSON."""
        count = 0
        for message in self.messages:
            count += len(message.content)
            if message.parts:
                count += sum(len(x) for x in message.parts if isinstance(x, str))
            if message.name is not None:
                count += len(message.name)
            if message.reasoning is not None:
                count += len(message.reasoning)
            if message.tool_calls:
                count += len(json.dumps(message.tool_calls, ensure_ascii=False))
        for objects in (self.variables, self.tools):
            if objects:
                count += len(json.dumps(objects, ensure_ascii=False))
        return count


def plain_messages(chat: Conversation) -> list[dict[str, Any]]:
    """Return the messages as chat templates get them. An image is the part {"type": "image"}."""
    plain: list[dict[str, Any]] = [{"role": x.role, "content": x.content} for x in chat.messages]
    for message, values in zip(chat.messages, plain, strict=True):
        if message.parts:
            values["content"] = [
                {"type": "text", "text": x} if isinstance(x, str) else {"type": "image"}
                for x in message.parts
            ]
        if message.name is not None:
            values["name"] = message.name
        if message.reasoning is not None:
            # Some published templates read `reasoning_content`, others `reasoning`.
            values["reasoning_content"] = values["reasoning"] = message.reasoning
        if message.tool_calls:
            values["tool_calls"] = message.tool_calls
        if message.tool_call_id is not None:
            values["tool_call_id"] = message.tool_call_id
    return plain


def _with_properties(tools: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Return the tools with properties, if only empty ones, in their parameters."""
    found = []
    for tool in tools:
        function = dict(tool["function"])
        given = function.get("parameters") or {}
        function["parameters"] = {
            "type": "object",
            **given,
            "properties": given.get("properties") or {},
        }
        found.append({**tool, "function": function})
    return found


class TextPair(NamedTuple):
    """Two texts that a cross-encoder compares."""

    first: str
    second: str


def read_files(path: Path) -> dict[str, bytes]:
    """Return the contents by name of the tokenizer files that `Tokenizer.load` takes. `path` is a
    model directory, or a file of Mistral's own library. The result is empty if the model has no
    tokenizer. Raises ConfigError naming a file that cannot be read, and above MAX_FILES_BYTES."""
    names = (_FAST, _CONFIG, _TEMPLATE, f"{_MORE_TEMPLATES}/{_TOOL_USE}.jinja")
    paths = [path] if path.is_file() else [path / name for name in names]
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
    """Return the digest that identifies a tokenizer, or "" without files."""
    each = (f"{name} {hashlib.sha256(files[name]).hexdigest()}\n" for name in sorted(files))
    return hashlib.sha256("".join(each).encode()).hexdigest() if files else ""


class Tokenizer:
    """Converts text to token ids. Plain text gets the special tokens of `tokenizer.json`. A
    conversation gets only the special tokens that its template inserts, because it would have two
    BOS tokens otherwise."""

    def __init__(self, fast: FastTokenizer, templates: Mapping[str, ChatTemplate]) -> None:
        # A tokenizer saved after training may have truncation and padding enabled.
        fast.no_truncation()
        fast.no_padding()
        self._fast = fast
        self._templates = templates  # by name
        # Length of the longest token, in characters. A text N times as long has at least N tokens.
        self.longest_token = max(map(len, fast.get_vocab()), default=1)
        self.files: Mapping[str, bytes] = {}  # the files it was loaded from
        self._parsers: dict[bool, ParserNames] = {}
        self._id = os.urandom(16)  # key in caches
        self._cuts = _Cuts(fast.get_added_tokens_decoder().values())
        self._around = _around(fast)

    def _template_of(self, tools: bool) -> ChatTemplate | None:
        names = (_TOOL_USE, "default") if tools else ("default",)
        return next((self._templates[x] for x in names if x in self._templates), None)

    def parsers(self, tools: bool) -> ParserNames:
        """Return the parsers that fit answers to conversations with or without tools."""
        if tools not in self._parsers:
            template = self._template_of(tools)
            found = ParserNames() if template is None else parsers_of(template)
            own = self.info.get("response_template")  # the model's description of its answers
            if isinstance(own, dict) and not (found.tool_calls or found.reasoning):
                fields = own.get("fields", ())
                tools_parser, reasoning = ("hf" * (x in fields) for x in ("tool_calls", "thinking"))
                found = ParserNames(tools_parser, reasoning)
            self._parsers[tools] = found
        return self._parsers[tools]

    @cached_property
    def shows_tools(self) -> bool:
        """Whether prompts show the tools of a conversation to the model."""
        template = self._template_of(tools=True)
        return template is not None and template.takes_tools

    @property
    def info(self) -> dict[str, Any]:
        """The tokenizer's configuration with its chat template. Special tokens are text."""
        found: dict[str, Any] = json.loads(self.files.get(_CONFIG, b"{}"))
        found |= _special_tokens(found)
        if _TEMPLATE in self.files:
            found["chat_template"] = self.files[_TEMPLATE].decode()
        return found

    @staticmethod
    def load(files: Mapping[str, bytes]) -> Tokenizer:
        """Return the tokenizer of the files that `read_files` returned: `tokenizer.json`,
        `tokenizer_config.json` and `chat_template.jinja`, or a file of Mistral's own library. The
        separate template overrides the one in the configuration. Raises ConfigError naming the
        file."""
        if not files:
            raise ConfigError("the model has no tokenizer.json", field="model")
        if _FAST not in files:
            return MistralTokenizer(files)
        try:
            fast = FastTokenizer.from_buffer(files[_FAST])
        # For an unreadable file the library raises Exception itself, not a subclass.
        except Exception as error:
            raise ConfigError(f"{_FAST} is not a tokenizer: {error}", field="model") from error
        tokenizer = Tokenizer(fast, _read_templates(files))
        tokenizer.files = files
        return tokenizer

    def encode(
        self, text: str, *, add_special_tokens: bool = True, parts: CachedParts | None = None
    ) -> Sequence[int]:
        """Return the token ids of `text`, with cached parts from `parts`. Raises InvalidRequest if
        it has a lone surrogate."""
        _check_unicode(text)
        around = self._around if add_special_tokens else ((), ())
        if parts is not None and around is not None and len(text) >= LEAST_CACHED:
            tokens = parts.encode(self._id, self._cuts.parts(text), self._encode_each)
            before, after = map(TokenIds.of, around)
            return TokenIds.joined((before, tokens, after))
        # The batch call computes no offsets, and releases the GIL.
        encoding = self._fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        return tuple(encoding.ids)

    def _encode_each(self, texts: list[str]) -> list[list[int]]:
        return [x.ids for x in self._fast.encode_batch_fast(texts, add_special_tokens=False)]

    def encode_pair(self, pair: TextPair) -> tuple[tuple[int, ...], int]:
        """Return the token ids of both texts, and the index where the second text begins."""
        encoding = self._fast.encode(*pair)
        first = next((i for i, x in enumerate(encoding.type_ids) if x), len(encoding.ids))
        return tuple(encoding.ids), first

    @cached_property
    def truncation_side(self) -> str:
        """The side on which the model's configuration truncates texts: left or right."""
        return "left" if self.info.get("truncation_side") == "left" else "right"

    def encode_within(self, texts: Sequence[str], most: int) -> tuple[tuple[int, ...], int]:
        """Return at most `most` token ids of one text or a pair, and the index where the second
        text begins. As with transformers' `truncation=True`, special tokens are kept, and the
        longer text of a pair is truncated first."""
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
        template = self._template_of(bool(chat.tools))
        if template is None:
            raise InvalidRequest(
                "the model has no chat template; send a prompt instead", field="messages"
            )
        try:
            return self._rendered(template, chat, chat.tools)
        except InvalidRequest:
            # Some templates read the properties of each tool.
            if (tools := _with_properties(chat.tools)) == chat.tools:
                raise
            return self._rendered(template, chat, tools)

    @staticmethod
    def _rendered(
        template: ChatTemplate, chat: Conversation, tools: Sequence[Mapping[str, Any]]
    ) -> str:
        return template.render(
            plain_messages(chat),
            {**chat.variables, "tools": tools} if tools else chat.variables,
            add_generation_prompt=chat.add_generation_prompt,
            continue_final_message=chat.continue_final_message,
        )

    def encode_chat(
        self,
        chat: Conversation,
        *,
        add_special_tokens: bool = False,
        parts: CachedParts | None = None,
    ) -> Sequence[int]:
        """Return the token ids of the conversation, up to the start of the answer. `parts`: as for
        `encode`."""
        text = self.render_chat(chat)
        return self.encode(text, add_special_tokens=add_special_tokens, parts=parts)


class MistralTokenizer(Tokenizer):
    """A tokenizer of Mistral's own library (`tekken.json`, or a versioned sentencepiece model). The
    library formats conversations without a template."""

    shows_tools = True

    def __init__(self, files: Mapping[str, bytes]) -> None:
        ((name, content),) = files.items()
        self.files = files
        try:
            from mistral_common.protocol.instruct.validator import ValidationMode
            from mistral_common.tokens.tokenizers import mistral
        except ImportError as error:
            raise ConfigError(f"{name} needs the package mistral-common", field="model") from error
        # The library loads only from a path, and detects the format by the file's name.
        with TemporaryDirectory(prefix="pdserve-tokenizer-") as directory:
            file = Path(directory, Path(name).name)
            file.write_bytes(content)
            # vLLM uses this mode too.
            self._mistral = mistral.MistralTokenizer.from_file(str(file), mode=ValidationMode.test)
        self.longest_token = max(map(len, self._mistral.instruct_tokenizer.tokenizer.vocab()))

    def encode(
        self, text: str, *, add_special_tokens: bool = True, parts: CachedParts | None = None
    ) -> Sequence[int]:
        _check_unicode(text)
        tokenizer = self._mistral.instruct_tokenizer.tokenizer
        return tuple(tokenizer.encode(text, bos=add_special_tokens, eos=False))

    def parsers(self, tools: bool) -> ParserNames:
        return ParserNames("mistral")

    def encode_within(self, texts: Sequence[str], most: int) -> tuple[tuple[int, ...], int]:
        return tuple(self.encode(texts[0])[:most]), 0

    def decode(self, token_ids: Sequence[int]) -> str:
        from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy

        tokenizer = self._mistral.instruct_tokenizer.tokenizer
        return tokenizer.decode(list(token_ids), special_token_policy=SpecialTokenPolicy.KEEP)

    def encode_chat(
        self,
        chat: Conversation,
        *,
        add_special_tokens: bool = False,
        parts: CachedParts | None = None,
    ) -> Sequence[int]:
        from mistral_common.exceptions import MistralCommonException
        from mistral_common.protocol.instruct.request import ChatCompletionRequest

        if chat != Conversation(chat.messages, tools=chat.tools) or add_special_tokens:
            raise InvalidRequest(
                "the model has no chat template, so it accepts no template options",
                field="messages",
            )
        for message in chat.messages:
            _check_unicode(message.content)
        names = {"developer": "system"}  # the library has no role `developer`
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


class _Cuts:
    """The added tokens before which a text may be cut, so that the token ids of both parts equal
    those of the whole. The library first divides a text at its added tokens, from left to right,
    the longest first, and then tokenises the pieces between them. The text of an added token is
    therefore always that token, unless it may be part of another added token or depends on its
    neighbours.
    """

    def __init__(self, added: Iterable[AddedToken]) -> None:
        first = [x for x in added if x.content and not x.normalized]
        texts = sorted(x.content for x in first)
        # Tails of added tokens by first character: where another added token may begin inside one.
        inner: dict[str, list[str]] = {}
        for text in texts:
            for start in range(1, len(text)):
                if text[start] in _CUT_BEFORE:
                    inner.setdefault(text[start], []).append(text[start:])
        self._texts = set()
        for token in first:
            text = token.content
            if text[0] not in _CUT_BEFORE or token.lstrip or token.rstrip or token.single_word:
                continue
            following = bisect_right(texts, text)
            begins_longer = following < len(texts) and texts[following].startswith(text)
            within = (x.startswith(text) or text.startswith(x) for x in inner.get(text[0], ()))
            if not (begins_longer or any(within)):
                self._texts.add(text)
        # Models have up to thousands of added tokens: a pattern of them all would be slow.
        self._sizes = sorted({len(x) for x in self._texts})
        begins = sorted({re.escape(x[:2]) for x in self._texts})
        self._begin = re.compile("|".join(begins)) if begins else None

    def parts(self, text: str) -> list[str]:
        """Divide a text into parts of at least LEAST_PART characters, except the last one."""
        at = [0]
        for found in () if self._begin is None else self._begin.finditer(text):
            start = found.start()
            if start - at[-1] >= LEAST_PART and any(
                text[start : start + size] in self._texts for size in self._sizes
            ):
                at.append(start)
        return [text[begin:end] for begin, end in zip(at, [*at[1:], len(text)], strict=True)]


def _around(fast: FastTokenizer) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the token ids that the tokenizer adds before and after each text, or None if it
    changes texts in another way."""
    plain, whole = (tuple(fast.encode("a", add_special_tokens=x).ids) for x in (False, True))
    for size in range(len(whole) - len(plain) + 1):
        before, after = whole[:size], whole[size + len(plain) :]
        if plain and before + plain + after == whole and not {*plain} & {*before, *after}:
            return before, after
    return None


def _shares(sizes: Sequence[int], room: int) -> list[int]:
    """Divide `room` tokens among one or two texts, as the library's `longest_first` does."""
    if sum(sizes) <= room or len(sizes) == 1:
        return [min(size, room) for size in sizes]
    short = min(*sizes, room // 2)
    return [short, room - short] if sizes[0] <= sizes[1] else [room - short, short]


def _check_unicode(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequest("the text has a lone surrogate", field="prompt") from error


def _read_templates(files: Mapping[str, bytes]) -> dict[str, ChatTemplate]:
    """Return the chat templates by name: "default", and others of older configurations."""
    name = _CONFIG
    try:
        config: Any = json.loads(files.get(name, b"{}").decode())
        if not isinstance(config, dict):
            raise ConfigError(f"{name} does not hold a JSON object", field="model")
        found = config.get("chat_template")
        templates: dict[str, Any] = (
            {x.get("name"): x.get("template") for x in found}
            if isinstance(found, list)
            else {"default": found}
        )
        for name, key in ((_TEMPLATE, "default"), (f"{_TOOL_USE}.jinja", _TOOL_USE)):
            if name in files:
                templates[key] = files[name].decode()
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"cannot read {name}: {error}", field="model") from error
    known = {x: templates[x] for x in ("default", _TOOL_USE) if templates.get(x) is not None}
    if not all(isinstance(x, str) for x in known.values()):
        raise ConfigError(f"{_CONFIG}: chat_template is not text", field="model")
    return {x: ChatTemplate(text, _special_tokens(config)) for x, text in known.items()}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the text of each special token by name. The configuration has either the text, or an
    object with `content`."""
    named = {name: value for name, value in config.items() if name.endswith("_token")}
    tokens = {x: y.get("content") if isinstance(y, dict) else y for x, y in named.items()}
    return {x: y for x, y in tokens.items() if isinstance(y, str)}
