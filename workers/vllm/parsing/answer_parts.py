"""Reasoning, content and tool calls of one answer, found by a parser of vLLM.

The result of vLLM's parsers depends on how text and token ids are divided: some lose arguments or
leak markup if a delta has several tokens (vllm#55082, vllm#47907), and text that is held back for a
stop string would be attributed to a later token. Each call therefore gets one token with its own
text, once the engine has released that text. The parsers also lose the text of calls that they
cannot read, and text after calls. Such text is detected here and becomes content.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.renderers.chat_utils import make_tool_call_id

from pdserve.v1 import parser_pb2 as p
from workers.vllm.parsing.parser_run import ParserRun
from workers.vllm.parsing.token_texts import TokenPlaces, UnreleasedTokens

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vllm.entrypoints.generate.base.protocol import DeltaMessage, FunctionCall
    from vllm.parser.abstract_parser import Parser
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

# Names of tags, and the keys of calls: text that a parser may drop.
_MARKUP = re.compile(r"</?[\w:.|｜▁]*|\[/?[A-Z_]+\]")
_KEYS = re.compile(
    r"name|arguments|parameters|functions?|functools|call|type|id|json|tool_name|tool_call_id|\d+"
)
# The end of a parsed call, before text that was dropped.
_CLOSERS = re.compile(r"^(?:[\s}\]`),;]|</[^<>]*>|<[|｜][^<>]*end[^<>]*[|｜]>|<end_[^<>]*>)+")


class _Arguments:
    """The arguments of a call as they arrive. Only the text of an object passes."""

    def __init__(self) -> None:
        self.text = ""
        self.is_closed = False
        self._depth = 0
        self._in_string = self._escaped = False

    def take(self, text: str) -> str:
        """Return the part of `text` that continues the object, "" without an object or after its
        end."""
        if not self.text and not (text := text.lstrip()).startswith("{"):
            self.is_closed = self.is_closed or bool(text)
        size = 0
        for char in "" if self.is_closed else text:
            size += 1
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped, self._in_string = char == "\\", char != '"'
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if not self._depth:
                    self.is_closed = True
                    break
        self.text += text[:size]
        return text[:size]

    def completed_by(self, text: str) -> str:
        """Take and return the part of `text` that completes the object, or ""."""
        if self.is_closed or not self.text:
            return ""
        tried = _Arguments()
        tried.take(self.text)
        more = tried.take(text)
        if not (tried.is_closed and _object(tried.text) is not None):
            return ""
        return self.take(more)


@dataclass(slots=True)
class _PartialCall:
    id: str
    name: str
    arguments: _Arguments


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


class AnswerParts:
    """State: the parser; tokens whose text is not released yet; the text so far, and the start of
    text that is not in any part yet."""

    def __init__(
        self,
        make_parser: Callable[[], Parser],
        request: Any,
        prompt: list[int],
        detokenizer: IncrementalDetokenizer,
        *,
        is_stream: bool,
    ) -> None:
        self._parser = ParserRun(make_parser, request, prompt)
        self._held = UnreleasedTokens(detokenizer)
        self._places = TokenPlaces()
        self._token_ids: list[int] = []
        self._text = ""
        self._said_to = 0
        self._answer_at: int | None = None  # where the text after the reasoning begins
        self._content: list[tuple[int, str]] = []  # (position, text)
        self._calls: dict[int, _PartialCall] = {}
        # Text that is in no part, with the call parsed after it.
        self._dropped: list[tuple[int, int, _PartialCall | None]] = []
        self._whole = p.ParserOutput() if self._parser.has_calls and not is_stream else None

    def resume(self, token_ids: Sequence[int]) -> None:
        """Take tokens that the client already has."""
        output = p.ParserOutput()
        for token_id in token_ids:
            self._feed([token_id], self._held.text_of(token_id), output)
        self._places.begin_here()

    def parse(
        self, token_ids: Sequence[int], text: str, output: p.ParserOutput, *, finished: bool
    ) -> None:
        """Add the parts of `token_ids` to `output`. `text`: released by the engine, of these and of
        earlier tokens."""
        self._held.add(token_ids, text)
        found = output if self._whole is None else self._whole
        for released_ids, released in self._held.take():
            self._feed(released_ids, released, found)
        if finished:
            self._finish(found)
            if found is not output:
                output.MergeFrom(found)
            output.reasoning_tokens = self._parser.count_reasoning_tokens(self._token_ids)

    def _feed(
        self, token_ids: list[int], text: str, output: p.ParserOutput, *, finished: bool = False
    ) -> None:
        begin = len(self._text)
        self._text += text
        self._token_ids += token_ids
        self._places.add(len(token_ids), len(self._text))
        delta = self._parser.parse(text, token_ids, finished=finished)
        if self._parser.has_calls and self._answer_at is None:
            self._answer_at = self._end_of_reasoning(begin)
        if delta is not None:
            self._say(delta, begin, output, is_last=finished)

    def _end_of_reasoning(self, begin: int) -> int | None:
        """Return where the answer begins, None during the reasoning. `begin`: start of the last
        token, the first one after the reasoning."""
        if not self._parser.is_answering:
            return None
        mark = self._parser.end_mark
        return len(self._text) if mark and self._text.rstrip().endswith(mark) else begin

    def _say(
        self, delta: DeltaMessage, begin: int, output: p.ParserOutput, *, is_last: bool
    ) -> None:
        if delta.reasoning:
            output.reasoning += delta.reasoning
            self._said_to = len(self._text)
        if delta.content:
            self._say_content(delta.content, output)
        for given in delta.tool_calls or ():
            function: Any = given.function
            call = self._calls.get(given.index)
            if call is None:
                call = _PartialCall(given.id or make_tool_call_id(), "", _Arguments())
                self._calls[given.index] = call
            call.name += (function and function.name) or ""
            arguments = (function and function.arguments) or ""
            if not (is_last and arguments == "{}"):  # invented for an incomplete call
                self._say_call(given.index, arguments, begin, output)

    def _say_content(self, content: str, output: p.ParserOutput) -> None:
        output.content += content
        unsaid = self._text[self._said_to :]
        size = len(content)
        at = unsaid.rfind(content)
        if at < 0:
            at, size = unsaid.rfind(content.strip()), len(content.strip())
        if at < 0:  # the parser changed it
            at, size = 0, len(unsaid)
        at += self._said_to
        self._dropped.append((self._said_to, at, None))
        self._said_to = at + size
        self._content.append((at, content))
        self._score(at, self._said_to, output)

    def _say_call(self, index: int, arguments: str, begin: int, output: p.ParserOutput) -> None:
        """Output the new part of a call. A call whose arguments are not an object is ignored."""
        call = self._calls[index]
        is_new = not call.arguments.text
        if not (more := call.arguments.take(arguments)):
            return
        if is_new:
            self._complete_call(begin, output)
        said = output.tool_calls.add(index=index, arguments=more)
        if is_new:
            said.id, said.name = call.id, call.name
            self._dropped.append((self._said_to, begin, call))
        self._said_to = len(self._text.removesuffix(arguments[len(more) :]))

    def _score(self, begin: int, end: int, output: p.ParserOutput) -> None:
        """Name the tokens with the text from `begin` to `end`, unless they were named before."""
        output.content_tokens.extend(self._places.named(begin, end))

    # -- The end

    def _finish(self, output: p.ParserOutput) -> None:
        ends = self._held.token_ids
        # Ignore tokens of a stop string. A single token without text ends the answer.
        is_cut = bool(self._held.released) or len(ends) > 1
        self._feed([] if is_cut else ends, self._held.released, output, finished=True)
        if is_cut:
            self._token_ids += ends
            self._places.add(len(ends), len(self._text))
        if self._parser.has_calls and self._answer_at is not None:
            self._complete_call(len(self._text), output)
            self._dropped.append((self._said_to, len(self._text), None))
            if self._whole is None or self._keeps(self._answer_at, output):
                self._say_dropped(self._answer_at, output)
        # The end belongs to the content, if there is nothing else.
        if self._content and not (self._said_calls() or output.tool_calls):
            output.content_tokens.extend(self._places.rest())

    def _said_calls(self) -> list[_PartialCall]:
        return [call for _, call in sorted(self._calls.items()) if call.arguments.text]

    def _complete_call(self, end: int, output: p.ParserOutput) -> None:
        """Output the rest of a call, up to `end`, that the parser dropped, as in a string with
        markup."""
        for index, call in self._calls.items():
            if more := call.arguments.completed_by(self._text[self._said_to : end]):
                output.tool_calls.add(index=index, arguments=more)
                self._said_to += len(more)

    def _say_dropped(self, answer_at: int, output: p.ParserOutput) -> None:
        """Output text that is in no part as content."""
        calls = self._said_calls()
        names = [x for call in calls for x in (call.id, call.name)]
        for since, end, following in self._dropped:
            begin = max(since, answer_at)
            text = self._text[begin:end]
            said = names if following is None else [*names, *_texts_of(following)]
            # Without a call, markup is ordinary text.
            if not (_words_without(text, said) if calls else text.strip()):
                continue
            if calls:
                text = _CLOSERS.sub("", text).strip()
                text = f"\n{text}" if self._content else text
            output.content += text
            self._content.append((begin, text))
            self._score(begin, end, output)

    def _keeps(self, answer_at: int, output: p.ParserOutput) -> bool:
        """Compare a whole answer with the result of vLLM's whole-text parser. Return False if that
        is better, or has no call; `output` is then replaced."""
        text, found = self._text[answer_at:], self._said_calls()
        calls, content = self._parser.read_whole(text)
        named = [(x.name, _object(x.arguments)) for x in calls]
        # Parsers invent empty arguments for an incomplete call.
        is_good = bool(named) and all(name and value for name, value in named)
        pairs = [(x.name, _object(x.arguments.text)) for x in found]
        is_lossy = bool(_words_without(text, [content, *(x for y in calls for x in _texts_of(y))]))
        is_better = is_good and named != pairs and not (is_lossy and self._calls)
        is_kept = bool(found) or not any(
            self._text[max(begin, answer_at) : end].strip() for begin, end, _ in self._dropped
        )
        # Who asked for a call gets the beginning of one that is cut off, as in a stream.
        is_readable = self._parser.is_forced or all(value is not None for _, value in pairs)
        if not is_better and is_kept and is_readable:
            return True
        del output.tool_calls[:], output.content_tokens[:]
        before = [(at, x) for at, x in self._content if at < answer_at]
        if is_better:
            for index, call in enumerate(calls):
                own_id = call.id or make_tool_call_id()
                output.tool_calls.add(
                    index=index, id=own_id, name=call.name, arguments=call.arguments
                )
        else:
            self._calls.clear()
        kept = content if is_better and not is_lossy else text
        self._content = [*before, (answer_at, kept)]
        self._places.name_again()
        output.content = "".join(x for _, x in self._content)
        if output.content:
            begin = self._content[0][0]
            self._score(begin, max(begin + 1, answer_at + len(kept)), output)
        return False


def _texts_of(call: _PartialCall | FunctionCall) -> list[str]:
    arguments = call.arguments.text if isinstance(call, _PartialCall) else call.arguments
    # Escapes have other spellings too.
    plain = json.dumps(_object(arguments), ensure_ascii=False)
    return [call.id or "", call.name, arguments, plain]


def _words_without(text: str, said: Sequence[str]) -> list[str]:
    """Return the words of `text` that are neither part of `said` nor markup."""
    whole = "\n".join(said).casefold()
    words: list[str] = re.findall(r"\w+", _MARKUP.sub(" ", text).casefold())
    return [x for x in words if x not in whole and not _KEYS.fullmatch(x)]
