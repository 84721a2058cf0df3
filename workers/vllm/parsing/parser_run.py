"""A parser of vLLM on the answer to one request."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from vllm.parser.abstract_parser import DelegatingParser

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.entrypoints.generate.base.protocol import DeltaMessage, FunctionCall
    from vllm.parser.abstract_parser import Parser

logger = logging.getLogger(__name__)


class ParserRun:
    """State: the parser's. `has_calls`: it reads tool calls, and the request has tools.
    `is_forced`: the client has asked for a call."""

    def __init__(self, make_parser: Callable[[], Parser], request: Any, prompt: list[int]) -> None:
        self._make_parser, self._request, self._prompt = make_parser, request, prompt
        self._parser = make_parser()
        # Parsers of a single format have no separate reader of tool calls.
        self.has_calls = (
            isinstance(self._parser, DelegatingParser)
            and type(self._parser).parse_delta is DelegatingParser.parse_delta
            and self._parser.tool_parser is not None
            and bool(request.tools)
        )
        self.is_forced = request.tool_choice not in (None, "none", "auto")

    def parse(self, text: str, token_ids: list[int], *, finished: bool) -> DeltaMessage | None:
        return self._parser.parse_delta(
            text, token_ids, self._request, self._prompt, finished=finished
        )

    @property
    def is_answering(self) -> bool:
        """True after the end of the reasoning. Only with `has_calls`."""
        parser: Any = self._parser
        return bool(parser._stream_state.reasoning_ended)

    @property
    def end_mark(self) -> str:
        """The text that ends the reasoning, or "". Only with `has_calls`."""
        parser: Any = self._parser
        return (parser.reasoning_parser and parser.reasoning_parser.reasoning_end_str) or ""

    def count_reasoning_tokens(self, token_ids: list[int]) -> int:
        count: int = self._parser.count_reasoning_tokens(token_ids)
        return count

    def read_whole(self, text: str) -> tuple[list[FunctionCall], str]:
        """Return the calls and the content that vLLM's parser of whole texts finds."""
        parser: Any = self._make_parser()
        try:
            calls, content = parser._extract_tool_calls(text, self._request, enable_auto_tools=True)
        except Exception:
            logger.exception("the parser failed on a whole answer")
            return [], text
        return calls or [], content or ""
