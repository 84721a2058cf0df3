"""Requests whose answers are parsed for tool calls and reasoning, by the parser process.

All that a parser knows of an answer follows from its tokens, which pass through here. So workers
know nothing of tools, and an answer that moves between them, or a parser that is replaced, costs
nothing but parsing again.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from pdserve import wire
from pdserve.errors import DeadlineExceeded, PdserveError, from_info
from pdserve.types import FinishReason, ReasoningGate, ToolCallDelta
from pdserve.v1 import parser_pb2 as p
from router.answer import ParsedDelta

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from pdserve import types as t
    from router.answer import AnswerDelta, Out
    from router.metrics import RouterMetrics
    from router.parser_process import ParserProcess

T = TypeVar("T")


class AnswerParser:
    """Parses the answers of requests that ask for it."""

    def __init__(self, process: ParserProcess, metrics: RouterMetrics) -> None:
        self._process = process
        self._metrics = metrics

    async def serve(
        self,
        request: t.GenerateRequest,
        parsing: t.Parsing,
        out: Out,
        serve: Callable[[t.GenerateRequest, Out], Awaitable[None]],
    ) -> None:
        """Have `serve` answer the request, and write to `out` what is found in the answer. Raises
        what `serve` raises, InvalidRequest for tools that cannot be used, and ParserFailed."""
        with _ParsedAnswer(request, parsing, out, self._process, self._metrics) as answer:
            plan = await _until(request.deadline, answer.plan)
            try:
                await serve(_constrained(request, parsing, plan), answer)
            except PdserveError:
                if answer.error is not None:  # the request was cancelled because of it
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
    """Return the request for workers, with the constraint that its tools ask for."""
    request = replace(request, parsing=None)
    if not plan.HasField("structured_output"):
        return request
    wanted = wire.structured_from_pb(plan.structured_output)
    gate = None
    if plan.after_reasoning:
        gate = ReasoningGate(parsing.reasoning_parser, parsing.reasoning_kwargs_json)
    sampling = replace(request.sampling, structured_output=wanted)
    return replace(request, sampling=sampling, reasoning_gate=gate)


class _ParsedAnswer:
    """All answers to one request, on their way through the parser process. A context manager.

    State: every delta from the workers, in order; how many of them were parsed and said, and how
    many replies came from the process that parses now.
    """

    def __init__(
        self,
        request: t.GenerateRequest,
        parsing: t.Parsing,
        out: Out,
        process: ParserProcess,
        metrics: RouterMetrics,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.plan: asyncio.Future[p.ParserPlan] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()
        self.error: PdserveError | None = None
        self._model = request.model
        self._out, self._process, self._metrics = out, process, metrics
        self._deltas: list[AnswerDelta] = []
        self._said = self._replies = self._reasoning_tokens = 0
        self._choices = self._unchecked = self._unfinished = request.sampling.n
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
        if self._unfinished or not self._unchecked:
            self._process.close_stream(self._stream_id)

    def write(self, delta: AnswerDelta) -> bool:
        """Take a delta of a worker. Return False if the client reads too slowly, or if parsing has
        failed."""
        self._deltas.append(delta)
        self._process.send(self._input(delta))
        return self._reads and self.error is None

    def history(self) -> Iterator[p.ParserCommand]:
        if self._is_left:  # only a check was due
            self._process.close_stream(self._stream_id)
            return
        self._replies, self._unchecked = 0, self._choices
        yield self._command(open=self._open)
        yield from map(self._input, self._deltas)

    def _command(self, **command: p.OpenParser | p.ParserInput) -> p.ParserCommand:
        return p.ParserCommand(stream_id=self._stream_id, **command)  # type: ignore[arg-type]

    def _input(self, delta: AnswerDelta) -> p.ParserCommand:
        reason = delta.finish_reason
        return self._command(
            input=p.ParserInput(
                index=delta.index,
                token_ids=delta.token_ids,
                text=delta.text,
                finished=reason is not None,
                truncated=reason is not FinishReason.STOP,
            )
        )

    def on_reply(self, reply: p.ParserReply) -> None:
        match reply.WhichOneof("reply"):
            case "plan":
                if not self.plan.done():
                    self.plan.set_result(reply.plan)
            case "output":
                self._replies += 1
                if self._replies > self._said:  # else it was said before the parser was replaced
                    self._said += 1
                    self._say(self._deltas[self._said - 1], reply.output)
            case "check":
                self._checked(diverged=reply.check.diverged)
            case "error":
                self.on_failed(from_info(wire.error_from_pb(reply.error)))

    def _say(self, delta: AnswerDelta, found: p.ParserOutput) -> None:
        if self._is_left:
            return
        # A piece has one of the three: text goes the same way as that of answers without parsing.
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

    def _checked(self, *, diverged: bool) -> None:
        self._unchecked -= 1
        if diverged:
            self._metrics.count("parser_divergences", self._model)
        if self._is_left and not self._unchecked:
            self._process.close_stream(self._stream_id)

    def on_failed(self, error: PdserveError) -> None:
        self.error = self.error or error
        for future in (self.plan, self.ended):
            if not future.done():
                future.set_exception(error)
                future.exception()  # seen, though nobody may wait for it
