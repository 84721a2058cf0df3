"""Has the parser process parse answers for tool calls and reasoning. A parser's state depends only
on the tokens of the answer, all of which pass through here. Workers therefore need not know about
tools, an answer can move between workers, and a replacement parser process only parses the answer
again.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from msgspec import structs

from pdserve import wire
from pdserve.errors import DeadlineExceeded, PdserveError, from_info
from pdserve.types import ReasoningGate, ToolCallDelta
from pdserve.v1 import parser_pb2 as p
from router.admission.constraints import check_constraint
from router.attempt.answer import ParsedDelta

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdserve import types as t
    from router.attempt.answer import AnswerDelta, Out
    from router.steps.parser_process import ParserProcess
    from router.walk import Answered, Proceed, Walk

T = TypeVar("T")


class ParseStep:
    """Raises InvalidRequest for unusable tools, AnswerNotParsed if the answer exceeds the parser's
    time limits, and ParserFailed. Without a `process`, as in the simulator, nothing is parsed."""

    def __init__(self, process: ParserProcess | None) -> None:
        self._process = process

    async def __call__(self, walk: Walk, proceed: Proceed) -> Answered:
        request, parsing = walk.request, walk.request.parsing
        if parsing is None or self._process is None:
            return await proceed(walk)
        with _ParsedAnswer(request, parsing, walk.out, self._process) as answer:
            plan = await _until(request.deadline, answer.plan)
            request = _constrained(request, parsing, plan)
            try:
                done = await proceed(structs.replace(walk, request=request, out=answer))
            except PdserveError:
                if answer.error is not None:  # it caused the cancellation that `proceed` raised
                    raise answer.error from None
                raise
            await _until(request.deadline, answer.ended)
            return done


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
    request = structs.replace(request, parsing=None)
    if not plan.HasField("structured_output"):
        return request
    wanted = wire.structured_from_pb(plan.structured_output)
    # The API checked the client's constraint; this one is derived from the schemas of its tools.
    check_constraint(wanted, field="tools")
    gate = None
    if plan.after_reasoning:
        gate = ReasoningGate(parsing.reasoning_parser, parsing.reasoning_kwargs_json)
    sampling = replace(request.sampling, structured_output=wanted)
    return structs.replace(request, sampling=sampling, reasoning_gate=gate)


class _ParsedAnswer:
    """All answers to one request while the parser process parses them. A context manager. State:
    `_deltas`, all deltas from the workers in order; `_logprobs`, their logprobs by answer; `_said`,
    the number of deltas whose parsed form was sent; `_replies`, the number of replies from the
    current parser process.
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
        self._logprobs: dict[int, list[t.PositionLogprobs]] = {}
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
        if delta.logprobs:
            self._logprobs.setdefault(delta.index, []).extend(delta.logprobs)
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
        # A piece is text, reasoning or a call, so text takes the path of unparsed answers.
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
        last.token_ids = delta.token_ids
        # Only logprobs of content: reasoning may be hidden, and tool calls have no field for them.
        if (known := self._logprobs.get(delta.index)) and found.content_tokens:
            of_content = next((x for x in pieces if x.text), last)
            of_content.logprobs = tuple(known[x] for x in found.content_tokens if x < len(known))
        last.finish_reason, last.stop_reason = delta.finish_reason, delta.stop_reason
        last.usage, last.receipt = delta.usage, delta.receipt
        last.routed_experts = delta.routed_experts
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
                future.exception()  # mark as retrieved: asyncio logs errors that are not awaited
