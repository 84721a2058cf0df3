"""Requests that run while a service is broken, and what became of each."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final, Literal, Self

from benchmarks.client import HttpTarget, Request, completion_body, piece_of
from benchmarks.errors import BenchError, TargetError
from benchmarks.traces import load_trace
from benchmarks.workload import PromptMaker, Shape, shape_workload
from pdserve.client import PATIENCE_S, Client
from pdserve.errors import (
    BudgetExhausted,
    Conflict,
    DeadlineExceeded,
    Overloaded,
    PdserveError,
    TransferFailed,
    Unavailable,
    WorkerFailed,
)
from pdserve.types import Constraint, SamplingParams, StructuredOutput

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from benchmarks.client import Piece

TIMEOUT_S: Final = 120.0  # of one request, whatever happens to it
REPEATED: Final = 1_000_000  # is added to the number of a request that is sent once more
_SHAPE: Final = Shape(scale_lengths=Fraction(1, 2), max_output_tokens=96, max_total_tokens=1500)
_LEAST_OUTPUT: Final = 24
_LOGPROB_TOLERANCE: Final = 1e-3
_SCHEMA: Final = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
_RETRYABLE: Final = (Unavailable, BudgetExhausted, Overloaded, DeadlineExceeded)
# Errors that say that another attempt may succeed.
_CLEAN: Final = {kind.code for kind in (*_RETRYABLE, WorkerFailed, TransferFailed)}
# Errors after which another router is asked; "" is a connection that broke.
_ELSEWHERE: Final = {"", Unavailable.code, BudgetExhausted.code, Conflict.code}

# Kind: API and sampling parameters. Each request has a seed of its own.
KINDS: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    "greedy": ("grpc", {"temperature": 0.0}),
    "seeded": ("grpc", {"temperature": 0.9, "top_p": 0.95}),
    "stream": ("sse", {"temperature": 0.0}),
    "n": ("grpc", {"temperature": 0.8, "n": 2}),
    "logprobs": ("grpc", {"temperature": 0.0, "logprobs": 3}),
    "structured": ("grpc", {"temperature": 0.7, "ignore_eos": False, "min_tokens": 0}),
    "plain": ("http", {"temperature": 0.7}),
    "penalties": ("grpc", {"temperature": 0.9, "presence_penalty": 0.6, "frequency_penalty": 0.4}),
    "stop": ("sse", {"temperature": 0.9, "stop": (" the", "er")}),
}


@dataclass(frozen=True, slots=True)
class Question:
    """One request. No two numbers share a prompt."""

    number: int
    kind: str
    prompt: tuple[int, ...]
    sampling: SamplingParams


def make_questions(
    count: int, *, seed: int, vocab_size: int, engine: str, first: int
) -> list[Question]:
    """Take `count` requests of the chat trace from row `first` on, of all kinds that the engine can
    answer."""
    kinds = [kind for kind in KINDS if engine != "fake" or kind != "structured"]
    trace = load_trace("chat")
    rows = shape_workload(trace, _SHAPE).rows
    maker = PromptMaker(trace.digest(), seed=seed, vocab_size=vocab_size, block_size=None)
    found = []
    for number in range(first, first + count):
        _, row = rows[number % len(rows)]
        kind = kinds[number % len(kinds)]
        values: dict[str, Any] = {"ignore_eos": True, "seed": 1000 * seed + number}
        if kind == "structured":
            values["structured_output"] = StructuredOutput(Constraint.JSON_SCHEMA, _SCHEMA)
        length = max(_LEAST_OUTPUT, row.output_tokens)
        sampling = SamplingParams(max_tokens=length, **{**values, **KINDS[kind][1]})
        found.append(Question(number, kind, tuple(maker.tokens(str(number), row)), sampling))
    return found


@dataclass(slots=True)
class Choice:
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish: str = ""
    logprobs: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Answer:
    """One answer so far. `pause_s` is the longest wait for a next piece; `code` the service's name
    for the error it ended with, "" if there was none."""

    number: int
    sent_s: float
    ending: Literal["open", "ok", "failed", "aborted"] = "open"
    error: str = ""
    code: str = ""
    ended_s: float = 0.0
    heard_s: float = 0.0
    pause_s: float = 0.0
    pieces: int = 0
    completion_tokens: int = 0
    fallbacks: tuple[str, ...] = ()
    choices: dict[int, Choice] = field(default_factory=dict)

    def take(self, piece: Piece) -> None:
        self._hear()
        self.pieces += 1
        if piece.has_choice:
            choice = self.choices.setdefault(piece.index, Choice())
            choice.token_ids += piece.token_ids
            choice.text += piece.text
            choice.logprobs += piece.logprobs
            choice.finish = piece.finish_reason or choice.finish
        if piece.usage is not None:
            self.completion_tokens = piece.usage["completion_tokens"] or 0
        if piece.receipt is not None:
            self.fallbacks = tuple(piece.receipt["fallbacks"])

    def end(
        self, ending: Literal["ok", "failed", "aborted"], error: str = "", code: str = ""
    ) -> None:
        self._hear()
        self.ending, self.error, self.code, self.ended_s = ending, error, code, self.heard_s

    def _hear(self) -> None:
        now = time.monotonic()
        self.pause_s = max(self.pause_s, now - (self.heard_s or self.sent_s))
        self.heard_s = now

    @property
    def is_clean_failure(self) -> bool:
        """The client was told in time why it failed."""
        return self.code in _CLEAN and self.ended_s - self.sent_s <= TIMEOUT_S


def wrong_tokens(got: Answer, want: Answer) -> int:
    """Count the tokens that differ; of an answer that broke off, among those that came."""
    is_whole = got.ending == "ok"
    wrong = len(got.choices.keys() - want.choices.keys())
    for index, expected in want.choices.items():
        wrong += _wrong_in(got.choices.get(index, Choice()), expected, is_whole=is_whole)
    if is_whole:
        wrong += abs(got.completion_tokens - want.completion_tokens)
    return wrong


def _wrong_in(got: Choice, want: Choice, *, is_whole: bool) -> int:
    wrong = sum(a != b for a, b in zip(got.token_ids, want.token_ids, strict=False))
    pairs = zip(got.logprobs, want.logprobs, strict=False)
    wrong += sum(abs(a - b) > _LOGPROB_TOLERANCE for a, b in pairs)
    missing = len(want.token_ids) - len(got.token_ids)
    if is_whole:
        wrong += abs(missing) + (len(got.logprobs) != len(want.logprobs))
        return wrong or (got.text, got.finish) != (want.text, want.finish)
    return wrong + max(0, -missing) or not want.text.startswith(got.text)


class Asker:
    """Clients of one service. With several routers, an answer that breaks off continues at the
    next router, over gRPC and over HTTP."""

    def __init__(
        self, *, grpc: Sequence[str], http: Sequence[str], model: str, timeout_s: float = TIMEOUT_S
    ) -> None:
        self._grpc, self._urls, self._model = grpc, http, model
        self._timeout_s = timeout_s
        self._at = 0  # the HTTP listener that is asked first
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        self._client = await self._stack.enter_async_context(Client(self._grpc))
        self._targets = [HttpTarget(url) for url in self._urls]
        for target in self._targets:
            self._stack.push_async_callback(target.aclose)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()

    async def ask(self, question: Question, answer: Answer, *, slow_s: float = 0.0) -> None:
        """Follow one request to its end. Cancelling aborts it. A slow client pauses `slow_s` after
        each piece."""
        over_grpc = KINDS[question.kind][0] == "grpc"
        stream = self._over_grpc(question) if over_grpc else self._over_http(question, answer)
        try:
            async with asyncio.timeout(self._timeout_s + 10.0), aclosing(stream):  # type: ignore[type-var]
                async for piece in stream:
                    answer.take(piece)
                    if slow_s:
                        await asyncio.sleep(slow_s)
            finished = [x for x in answer.choices.values() if x.finish]
            if len(finished) < question.sampling.n:
                raise BenchError("the stream ended before its answers")
        except (PdserveError, TargetError, BenchError, OSError, TimeoutError) as error:
            answer.end("failed", f"{type(error).__name__}: {error}", getattr(error, "code", ""))
        except asyncio.CancelledError:
            answer.end("aborted")
            raise
        else:
            answer.end("ok")

    async def _over_grpc(self, question: Question) -> AsyncIterator[Piece]:
        deltas = self._client.generate(
            question.prompt, question.sampling, model=self._model, timeout_s=self._timeout_s
        )
        async with aclosing(deltas):  # type: ignore[type-var]
            async for delta in deltas:
                yield piece_of(delta)

    async def _over_http(self, question: Question, answer: Answer) -> AsyncIterator[Piece]:
        body = completion_body(self._model, question.prompt, question.sampling)
        if KINDS[question.kind][0] == "sse":
            body["return_token_ids"] = True
        else:
            del body["stream_options"]
            body["stream"] = False
        name = f"chaos-{uuid.uuid4().hex}"
        key = {"idempotency-key": name} if len(self._targets) > 1 else {}
        since_s = 0.0
        while True:
            at, pieces = self._at, answer.pieces
            request = Request(name, self._model, json.dumps(body).encode(), headers=key)
            try:
                async with aclosing(self._targets[at].stream(request)) as stream:  # type: ignore[type-var]
                    async for piece in stream:
                        yield piece
                return
            except TargetError as error:
                if answer.pieces > pieces or not since_s:
                    since_s = time.monotonic()
                is_late = time.monotonic() - since_s > PATIENCE_S
                if len(self._targets) == 1 or is_late or error.code not in _ELSEWHERE:
                    raise
            if self._at == at:
                self._at = (at + 1) % len(self._targets)
            if answer.choices:
                body["resume_token_ids"] = list(answer.choices[0].token_ids)
            await asyncio.sleep(0.1)


class Load:
    """Questions on their way, each sent when it is due. State: the answers so far, by number.

    Nothing is sent while `may_send` is not set.
    """

    def __init__(self, questions: Sequence[Question], asker: Asker, rate_per_s: float) -> None:
        self._questions = {x.number: x for x in questions}
        self._asker = asker
        self._rate_per_s = rate_per_s
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self.may_send = asyncio.Event()
        self.may_send.set()
        self.answers: dict[int, Answer] = {}
        self.slow: set[int] = set()
        self.is_over = False

    async def run(self) -> None:
        """Send all and wait for their end."""
        try:
            for number in self._questions:
                await self.may_send.wait()
                self.send(number)
                await asyncio.sleep(1 / self._rate_per_s)
            while self.open():
                await asyncio.wait(self._tasks.values(), timeout=0.05)
        finally:
            self.is_over = True
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def send(self, number: int, *, slow_s: float = 0.0) -> None:
        """Send a question now; one that was sent before goes out under a number of its own."""
        question = self._questions[number % REPEATED]
        while number in self.answers:
            number += REPEATED
        if slow_s:
            self.slow.add(number)
        answer = self.answers[number] = Answer(number, time.monotonic())
        self._tasks[number] = asyncio.create_task(self._asker.ask(question, answer, slow_s=slow_s))

    @property
    def unsent(self) -> int:
        return len(self._questions) - sum(number < REPEATED for number in self.answers)

    def abort(self, number: int) -> None:
        """The client of a request goes away."""
        self._tasks[number].cancel()

    def open(self) -> list[Answer]:
        return [x for x in self.answers.values() if x.ending == "open"]


async def right_answers(asker: Asker, questions: Sequence[Question]) -> dict[int, Answer]:
    """Ask a service to which nothing happens. Raises BenchError if a request fails."""
    found: dict[int, Answer] = {}
    todo = iter(questions)

    async def one_after_another() -> None:
        for question in todo:
            answer = found[question.number] = Answer(question.number, time.monotonic())
            await asker.ask(question, answer)
            if answer.ending != "ok":
                raise BenchError(
                    f"request {question.number} ({question.kind}) failed without a fault: "
                    f"{answer.error}"
                )

    await asyncio.gather(*(one_after_another() for _ in range(8)))
    return found
