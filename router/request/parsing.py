"""Answers that the parser process parses for tool calls and reasoning.

A parser's state follows from the tokens of the answer alone, and all tokens pass through here.
Workers therefore need no knowledge of tools, an answer can move between workers, and a parser
process that is replaced only parses the answer again.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from pdserve import wire
from pdserve.errors import DeadlineExceeded, PdserveError, from_info
from pdserve.types import ReasoningGate, ToolCallDelta
from pdserve.v1 import parser_pb2 as p
from router.request.answer import ParsedDelta
from router.request.constraints import check_constraint

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from pdserve import types as t
    from router.request.answer import AnswerDelta, Out
    from router.request.parser_process import ParserProcess

T = TypeVar("T")


class AnswerParser:
    """Serves requests whose answers have to be parsed."""

    def __init__(self, process: ParserProcess) -> None:
        self._process = process

    async def serve(
        self,
        request: t.GenerateRequest,
        parsing: t.Parsing,
        out: Out,
        serve: Callable[[t.GenerateRequest, Out], Awaitable[None]],
    ) -> None:
        """Answer the request with `serve` and write the parsed deltas to `out`.

        Raises the errors of `serve`, InvalidRequest for unusable tools, AnswerNotParsed if the
        answer exceeds the parser's time limits, and ParserFailed.
        """
        with _ParsedAnswer(request, parsing, out, self._process) as answer:
            plan = await _until(request.deadline, answer.plan)
            try:
                await serve(_constrained(request, parsing, plan), answer)
            except PdserveError:
                if answer.error is not None:  # it caused the cancellation that `serve` raised
                    raise answer.error from None
                raise
            await _until(request.deadline, answer.ended)


async def _until(deadline: float | None, future: asyncio.Future[T]) -> T:
    try:
        async with asyncio.timeout_at(deadline):
            return await asyncio.shield(future)
    except TimeoutError:
        raise DeadlineExceeded("the deadline passed while the answer was parsed") from None


def _constrained(
    request: t.GenerateRequest, parsing: t.Parsing, plan: p.ParserPlan
) -> t.GenerateRequest:
    """Return the request for workers, with the structured output that its tools require."""
    request = replace(request, parsing=None)
    if not plan.HasField("structured_output"):
        return request
    wanted = wire.structured_from_pb(plan.structured_output)
    # The API checked the client's constraint; this one comes from the schemas of its tools.
    check_constraint(wanted, field="tools")
    gate = None
    if plan.after_reasoning:
        gate = ReasoningGate(parsing.reasoning_parser, parsing.reasoning_kwargs_json)
    sampling = replace(request.sampling, structured_output=wanted)
    return replace(request, sampling=sampling, reasoning_gate=gate)


class _ParsedAnswer:
    """All answers to one request while the parser process parses them. A context manager.

    State: `_deltas`, all deltas from the workers in order; `_said`, the number of deltas whose
    parsed form was sent; `_replies`, the number of replies from the current parser process.
    """

    def __init__(
        self,
        request: t.GenerateRequest,
        parsing: t.Parsing,
        out: Out,
        process: ParserProcess,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.plan: asyncio.Future[p.ParserPlan] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()
        self.error: PdserveError | None = None
        self._out, self._process = out, process
        self._deltas: list[AnswerDelta] = []
        self._said = self._replies = self._reasoning_tokens = 0
        self._unfinished = request.sampling.n
        self._reads = True
        self._is_left = False
        self._open = p.OpenParser(
            tokenizer=process.tokenizer(parsing.tokenizer, parsing.tokenizer_files),
            tool_parser=parsing.tool_parser,
            reasoning_parser=parsing.reasoning_parser,
            request_json=parsing.request_json,
            prompt_token_ids=request.prompt_token_ids,
            resume_token_ids=request.resume,
        )
        self._stream_id = process.open(self)
        process.send(self._command(open=self._open))

    def __enter__(self) -> _ParsedAnswer:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_left = True
        self.plan.cancel()
        self.ended.cancel()
        self._process.close_stream(self._stream_id)

    def write(self, delta: AnswerDelta) -> bool:
        """Accept a delta from a worker. Return False if the client reads too slowly or parsing has
        failed."""
        self._deltas.append(delta)
        self._process.send(self._input(delta))
        return self._reads and self.error is None

    def history(self) -> Iterator[p.ParserCommand]:
        """Yield all commands so far, for a parser process that replaces another."""
        self._replies = 0
        yield self._command(open=self._open)
        yield from map(self._input, self._deltas)

    def _command(self, **command: p.OpenParser | p.ParserInput) -> p.ParserCommand:
        return p.ParserCommand(stream_id=self._stream_id, **command)  # type: ignore[arg-type]

    def _input(self, delta: AnswerDelta) -> p.ParserCommand:
        return self._command(
            input=p.ParserInput(
                index=delta.index,
                token_ids=delta.token_ids,
                text=delta.text,
                finished=delta.finish_reason is not None,
            )
        )

    def on_reply(self, reply: p.ParserReply) -> None:
        match reply.WhichOneof("reply"):
            case "plan":
                if not self.plan.done():
                    self.plan.set_result(reply.plan)
            case "output":
                self._replies += 1
                # A new parser process repeats replies that the client already has.
                if self._replies > self._said:
                    self._said += 1
                    self._say(self._deltas[self._said - 1], reply.output)
            case "error":
                self.on_failed(from_info(wire.error_from_pb(reply.error)))

    def _say(self, delta: AnswerDelta, found: p.ParserOutput) -> None:
        if self._is_left or self.error is not None:
            return
        # Each piece has only one of the three, so its text takes the path of unparsed answers.
        calls = tuple(ToolCallDelta(x.index, x.id, x.name, x.arguments) for x in found.tool_calls)
        pieces = [
            ParsedDelta(text=text, reasoning=reasoning, tool_calls=tool_calls, index=delta.index)
            for text, reasoning, tool_calls in (
                ("", found.reasoning, ()),
                (found.content, "", ()),
                ("", "", calls),
            )
            if text or reasoning or tool_calls
        ] or [ParsedDelta(index=delta.index)]
        last = pieces[-1]
        last.token_ids, last.logprobs = delta.token_ids, delta.logprobs
        last.finish_reason, last.stop_reason = delta.finish_reason, delta.stop_reason
        last.usage, last.receipt = delta.usage, delta.receipt
        if delta.finish_reason is not None:
            self._reasoning_tokens += found.reasoning_tokens
            self._unfinished -= 1
        if last.usage is not None:
            last.usage.reasoning_tokens = self._reasoning_tokens
        for piece in pieces:
            self._reads = self._out.write(piece) and self._reads
        if not self._unfinished and not self.ended.done():
            self.ended.set_result(None)

    def on_failed(self, error: PdserveError) -> None:
        self.error = self.error or error
        for future in (self.plan, self.ended):
            if not future.done():
                future.set_exception(error)
                future.exception()  # mark as retrieved: asyncio logs an error that nobody awaits
