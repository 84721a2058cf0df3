"""Requests of all kinds, the clients that send them, and their answers."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from contextlib import aclosing
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Final, Literal

from benchmarks.client import GrpcTarget, HttpTarget, Request, completion_body
from benchmarks.errors import BenchError, TargetError
from benchmarks.traces import load_trace
from benchmarks.workload import PromptMaker, Shape, shape_workload
from pdserve.errors import BudgetExhausted, DeadlineExceeded, Overloaded, Unavailable, WorkerFailed
from pdserve.types import Constraint, SamplingParams, StructuredOutput

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from benchmarks.client import Piece
    from benchmarks.service import LocalService

CLIENT_TIMEOUT_S: Final = 600.0
_SHAPE: Final = Shape(scale_lengths=Fraction(1, 2), max_output_tokens=96, max_total_tokens=1500)
_LEAST_OUTPUT: Final = 24
_LOGPROB_TOLERANCE: Final = 1e-3
_SCHEMA: Final = StructuredOutput(
    Constraint.JSON_SCHEMA,
    '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}',
)
# Codes of errors after which a client may retry.
CLEAN: Final = {
    x.code for x in (Unavailable, BudgetExhausted, Overloaded, DeadlineExceeded, WorkerFailed)
}
# API and sampling parameters by kind of request. Each request has its own seed.
KINDS: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    "greedy": ("grpc", {"temperature": 0.0}),
    "seeded": ("grpc", {"temperature": 0.9, "top_p": 0.95}),
    "stream": ("sse", {"temperature": 0.0}),
    "n": ("grpc", {"temperature": 0.8, "n": 2}),
    "logprobs": ("grpc", {"temperature": 0.0, "logprobs": 3}),
    "structured": ("grpc", {"temperature": 0.0, "ignore_eos": False, "structured_output": _SCHEMA}),
    "penalties": ("grpc", {"temperature": 0.9, "presence_penalty": 0.6, "frequency_penalty": 0.4}),
    "stop": ("sse", {"temperature": 0.9, "stop": (" the", "er")}),
}


@dataclass(frozen=True, slots=True)
class Question:
    """One request. Each `number` has a different prompt. `model`: an adapter, or "" for the model
    itself."""

    number: int
    kind: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    model: str = ""
    session: str = ""


def make_questions(
    count: int,
    *,
    seed: int,
    vocab_size: int,
    kinds: Sequence[str],
    first: int,
    models: Sequence[str] = ("",),
    sessions: int = 0,
) -> list[Question]:
    """Return `count` requests of the chat trace, from row `first` on. Their kinds rotate through
    `kinds`, and then through `models`. They are turns of so many `sessions`, if there are any."""
    trace = load_trace("chat")
    rows = shape_workload(trace, _SHAPE).rows
    maker = PromptMaker(trace.digest(), seed, vocab_size, None)
    found = []
    for number in range(first, first + count):
        _, row = rows[number % len(rows)]
        kind = kinds[number % len(kinds)]
        values: dict[str, Any] = {"ignore_eos": True, "seed": 1000 * seed + number}
        length = max(_LEAST_OUTPUT, row.output_tokens)
        sampling = SamplingParams(max_tokens=length, **{**values, **KINDS[kind][1]})
        prompt = tuple(maker.tokens(str(number), row))
        model = models[number // len(kinds) % len(models)]
        session = f"chaos-{seed}-{number % sessions}" if sessions else ""
        found.append(Question(number, kind, prompt, sampling, model, session))
    return found


@dataclass(slots=True)
class ObservedChoice:
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish: str = ""
    logprobs: list[float] = field(default_factory=list)


@dataclass(slots=True)
class ObservedAnswer:
    """One answer so far. `pause_s`: longest wait for a piece. `code`: code of the error that ended
    it, or "". `slow_s`: time that a slow client waits after each piece. `request_id`: "" for a line
    of a batch. `is_handed_over`: KV moved from a prefill to a decode worker. `copied_tokens`: those
    whose KV another worker's cache had."""

    number: int
    sent_s: float
    slow_s: float = 0.0
    ending: Literal["open", "ok", "failed", "aborted"] = "open"
    error: str = ""
    code: str = ""
    heard_s: float = 0.0
    pause_s: float = 0.0
    completion_tokens: int = 0
    request_id: str = ""
    fallbacks: tuple[str, ...] = ()
    is_handed_over: bool = False
    copied_tokens: int = 0
    choices: dict[int, ObservedChoice] = field(default_factory=dict)

    def take(self, piece: Piece) -> None:
        self._hear()
        if piece.has_choice:
            choice = self.choices.setdefault(piece.index, ObservedChoice())
            choice.token_ids += piece.token_ids
            choice.text += piece.text
            choice.logprobs += piece.logprobs
            choice.finish = piece.finish_reason or choice.finish
        if piece.usage is not None:
            self.completion_tokens = piece.usage["completion_tokens"] or 0
        if piece.receipt is not None:
            self.fallbacks = tuple(piece.receipt["fallbacks"])
            self.is_handed_over = bool(piece.receipt["transfer_blocks"])
            self.copied_tokens = piece.receipt["fetched_tokens"]

    def end(self, ending: Literal["ok", "failed", "aborted"], error: str = "") -> None:
        self._hear()
        self.ending, self.error = ending, error

    @property
    def received_tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self.choices.values())

    def _hear(self) -> None:
        now = time.monotonic()
        self.pause_s = max(self.pause_s, now - (self.heard_s or self.sent_s))
        self.heard_s = now


def wrong_tokens(got: ObservedAnswer, want: ObservedAnswer) -> int:
    """Return the number of tokens that differ. Only the received tokens of an incomplete answer are
    compared. A different text, finish reason or logprobs counts as one."""
    is_whole = got.ending == "ok"
    wrong = abs(got.completion_tokens - want.completion_tokens) if is_whole else 0
    for index in got.choices.keys() | want.choices.keys():
        a, b = (each.choices.get(index, ObservedChoice()) for each in (got, want))
        count = len(a.token_ids)
        pairs = zip_longest(a.token_ids, b.token_ids if is_whole else b.token_ids[:count])
        differ = sum(x != y for x, y in pairs)
        if is_whole:
            is_right = (a.text, a.finish, len(a.logprobs)) == (b.text, b.finish, len(b.logprobs))
        else:
            is_right = b.text.startswith(a.text)
        near = zip(a.logprobs, b.logprobs, strict=False)
        is_right = is_right and all(abs(x - y) <= _LOGPROB_TOLERANCE for x, y in near)
        wrong += differ or not is_right
    return wrong


class Clients:
    """Connections to a service. With several routers, an interrupted answer over gRPC continues at
    the next router. Must be created inside a running loop."""

    def __init__(self, service: LocalService) -> None:
        routers = service.ready["routers"]
        self.has_failover = len(routers) > 1
        self._model = service.ready["model"]
        self.grpc = GrpcTarget(",".join(x["grpc"] for x in routers))
        self._http = HttpTarget(service.ready["http"])

    async def aclose(self) -> None:
        await self.grpc.aclose()
        await self._http.aclose()

    async def ask(self, question: Question, answer: ObservedAnswer) -> None:
        """Send one request and receive its answer to the end. Cancelling aborts the request."""
        answer.request_id = f"chaos-{uuid.uuid4().hex}"
        stream = self._stream(question, answer.request_id)
        try:
            async with asyncio.timeout(CLIENT_TIMEOUT_S), aclosing(stream):  # type: ignore[type-var]
                async for piece in stream:
                    answer.take(piece)
                    if answer.slow_s:
                        await asyncio.sleep(answer.slow_s)
            if sum(bool(x.finish) for x in answer.choices.values()) < question.sampling.n:
                raise TargetError("the stream ended before its answers")
        except (TargetError, OSError, TimeoutError) as error:
            answer.code = getattr(error, "code", "")
            answer.end("failed", f"{type(error).__name__}: {error}")
        except asyncio.CancelledError:
            answer.end("aborted")
            raise
        else:
            answer.end("ok")

    def _stream(self, question: Question, name: str) -> AsyncIterator[Piece]:
        api = KINDS[question.kind][0]
        model, session = question.model or self._model, question.session
        if api == "grpc":
            made = Request(name, model, question.prompt, question.sampling, session=session)
            return self.grpc.stream(made)
        body = json.dumps(self.body(question)).encode()
        return self._http.stream(Request(name, model, body, session=session))

    def body(self, question: Question) -> dict[str, Any]:
        """Return the body of a streaming request to `/v1/completions`."""
        model = question.model or self._model
        body = completion_body(model, question.prompt, question.sampling)
        return {**body, "return_token_ids": True}


async def right_answers(
    clients: Clients, questions: Sequence[Question]
) -> dict[int, ObservedAnswer]:
    """Return the answers of a service without faults. Raises BenchError if a request fails."""
    found = {x.number: ObservedAnswer(x.number, time.monotonic()) for x in questions}
    at_once = asyncio.Semaphore(8)

    async def ask(question: Question) -> None:
        async with at_once:
            answer = found[question.number]
            await clients.ask(question, answer)
            if answer.ending != "ok":
                of = f"request {question.number} ({question.kind})"
                raise BenchError(f"{of} failed without a fault: {answer.error}")

    await asyncio.gather(*map(ask, questions))
    return found
