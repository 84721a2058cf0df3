"""Answers on their way through a parser process that dies, hangs, refuses or differs."""

from __future__ import annotations

import asyncio
import sys
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.config import SloConfig
from pdserve.errors import AnswerNotParsed, Cancelled, InternalError, ParserFailed, TransferFailed
from pdserve.process.child_pool import End, execute
from pdserve.types import (
    FinishReason,
    GenerateRequest,
    Parsing,
    Role,
    SamplingParams,
    Usage,
)
from router.attempt.answer import AnswerDelta, ParsedDelta
from router.metrics import RouterMetrics
from router.steps.parse import ParseStep
from router.steps.parser_process import ParserProcess
from tests.support.commands import ROOT
from tests.support.router_stack import ScriptedWorker, request, running_stack, serve_parsed
from tests.support.timeouts import WAIT_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from router.attempt.answer import Out

SCRIPT = ROOT / "tests/support/scripted_parser.py"


class Generator:
    """Writes the words of a request's id, one a delta; each waits for `may_go_on`."""

    def __init__(self) -> None:
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()
        self.requests: list[GenerateRequest] = []

    async def serve(self, request: GenerateRequest, out: Out) -> None:
        self.requests.append(request)
        n = request.sampling.n
        for word in request.request_id.split():
            await self.may_go_on.wait()
            for index in range(n):
                if not out.write(AnswerDelta((1,), word, index=index)):
                    raise Cancelled("the client does not read its answer")
            await asyncio.sleep(0)
        for index in range(n):
            last = AnswerDelta((2,), finish_reason=FinishReason.STOP, index=index)
            last.usage = Usage(1, 1) if index == n - 1 else None
            out.write(last)


class Client:
    """Collects an answer. `on_delta` is called with the number of deltas so far."""

    def __init__(self, on_delta: Callable[[int], None] = lambda _: None) -> None:
        self.deltas: list[ParsedDelta] = []
        self._on_delta = on_delta

    def write(self, delta: AnswerDelta) -> bool:
        assert isinstance(delta, ParsedDelta)
        self.deltas.append(delta)
        self._on_delta(len(self.deltas))
        return True

    def text(self, index: int = 0) -> str:
        return " ".join(x.text for x in self.deltas if x.index == index and x.text)


class Service:
    def __init__(self, directory: Path, **limits: float) -> None:
        self.metrics = RouterMetrics(SloConfig())
        start = partial(execute, (sys.executable, str(SCRIPT), str(directory)))
        self.process = ParserProcess(self.metrics, start, **limits)
        self.generator = Generator()

    async def ask(self, text: str, client: Client | None = None, **values: Any) -> Client:
        parsing = Parsing("", {}, values.pop("parser", "fits"), "r", "{}", "{}")
        sampling = SamplingParams(n=values.pop("n", 1))
        client = client or Client()
        request = GenerateRequest(text, "m", (1,), sampling, parsing=parsing, **values)
        async with asyncio.timeout(WAIT_S):
            await serve_parsed(self.process, request, client, self.generator.serve)
        return client

    def counted(self, name: str) -> float:
        lines = self.metrics.render()[0].decode().splitlines()
        # A counter without events has no line.
        line = next((x for x in lines if x.startswith(name)), "0")
        return float(line.rpartition(" ")[2])


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    async with running(tmp_path) as service:
        yield service


@asynccontextmanager
async def running(directory: Path, **limits: float) -> AsyncIterator[Service]:
    service = Service(directory, **limits)
    try:
        yield service
    finally:
        await service.process.close()


async def test_each_answer_is_parsed_apart_and_counted_once(service: Service) -> None:
    client = await service.ask("one two", n=2)
    assert [client.text(0), client.text(1)] == ["ONE TWO", "ONE TWO"]
    usage = client.deltas[-1].usage
    assert usage is not None
    assert usage.reasoning_tokens == 4


class BrokenClient(Client):
    def write(self, delta: AnswerDelta) -> bool:
        raise IndexError  # in the answer's writer


async def test_a_client_that_fails_ends_its_answer_and_no_other(service: Service) -> None:
    failed, other = await asyncio.gather(
        service.ask("one two", BrokenClient()), service.ask("three four"), return_exceptions=True
    )
    assert isinstance(failed, InternalError)
    assert isinstance(other, Client)
    assert other.text() == "THREE FOUR"
    assert service.counted("pdserve_parser_restarts_total") == 0


async def test_a_dead_process_is_replaced_and_repeats_no_text(service: Service) -> None:
    other = Client()
    beside, client = await asyncio.gather(
        service.ask("this goes on", other), service.ask("one two dies-once three")
    )
    assert client.text() == "ONE TWO DIES-ONCE THREE"
    assert beside.text() == "THIS GOES ON"
    assert service.counted("pdserve_parser_restarts_total") == 1


async def test_an_answer_on_which_the_process_hangs_fails_at_once_and_no_other(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, delta_s=1.0) as service:

        async def fails() -> None:
            with pytest.raises(AnswerNotParsed, match="hung on this answer"):
                await service.ask("one hangs- two")

        other, _ = await asyncio.gather(service.ask("this goes on"), fails())
        assert other.text() == "THIS GOES ON"
        assert service.counted("pdserve_parser_restarts_total") <= 1


async def test_an_answer_that_ends_the_process_twice_fails_and_no_other(service: Service) -> None:
    async def fails() -> None:
        client = Client()
        with pytest.raises(AnswerNotParsed, match="died twice"):
            await service.ask("one dies-always two", client)
        assert "dies-always" not in client.text().lower()

    other, _ = await asyncio.gather(service.ask("this goes on"), fails())
    assert other.text() == "THIS GOES ON"
    assert (await service.ask("next")).text() == "NEXT"


async def test_a_killed_process_costs_an_idle_stream_nothing(service: Service) -> None:
    go_on = service.generator.may_go_on

    def stop_after_one(count: int) -> None:
        if count == 1:
            go_on.clear()
            # Nothing is due: nobody is to blame.
            asyncio.get_running_loop().call_soon(kill)

    def kill() -> None:
        child = service.process._child
        assert child is not None
        child._end(End.BROKE)
        asyncio.get_running_loop().call_later(0.01, go_on.set)

    client = await service.ask("one two three", Client(stop_after_one))
    assert client.text() == "ONE TWO THREE"


async def test_closing_waits_for_a_process_that_is_just_being_killed(service: Service) -> None:
    await service.ask("one")
    child = service.process._child
    assert child is not None
    assert child.process is not None
    child._end(End.BROKE)
    await asyncio.wait([child.ended])
    await asyncio.sleep(0)  # the process is killed now, and waited for
    await service.process.close()
    assert child.process.returncode is not None


async def test_a_parser_that_raises_ends_the_answer(service: Service) -> None:
    with pytest.raises(AnswerNotParsed, match="ValueError"):
        await service.ask("one raises- two")
    assert (await service.ask("next")).text() == "NEXT"


async def test_a_process_that_does_not_start_fails_the_requests(tmp_path: Path) -> None:
    (tmp_path / "does-not-start").touch()
    async with running(tmp_path) as service:
        with pytest.raises(ParserFailed, match="did not start"):
            await service.ask("one")
        (tmp_path / "does-not-start").unlink()
        assert (await service.ask("one")).text() == "ONE"


async def test_an_answer_that_moves_and_a_parser_that_dies_change_nothing(tmp_path: Path) -> None:
    prefill, decode = ScriptedWorker("p", Role.PREFILL), ScriptedWorker("d", Role.DECODE)
    length = FinishReason.LENGTH
    async with (
        running(tmp_path) as service,
        running_stack(prefill, decode, parse=ParseStep(service.process)) as stack,
    ):
        parsing = Parsing("", {}, "fits", "", "{}", "{}")
        async with stack.ask(request(parsing=parsing)) as answer:
            prefill.send(await prefill.submitted(), 7, finish=length)
            first = await decode.submitted()
            decode.send(first, 8)
            begun = [await answer.next(), await answer.next()]
            child = service.process._child
            assert child is not None
            child._end(End.BROKE)
            decode.fail(first, TransferFailed("lost"))
            second, again = await prefill.submitted(), await decode.submitted()
            assert list(again.resume_token_ids) == [7, 8]
            prefill.send(second, 9, finish=length)
            decode.send(again, 10, finish=FinishReason.STOP)
            last = await answer.rest()
    assert "".join(x.text for x in begun) + last.text == "<7><8><9><10>"
    assert last.usage is not None
    assert last.usage.completion_tokens == 4
