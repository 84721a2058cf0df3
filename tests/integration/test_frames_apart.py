"""Frames over a connection of their own, between a real worker and a real link."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import pytest

from pdserve import wire
from pdserve.errors import InvalidRequest, Overloaded, PdserveError, Unavailable, WorkerFailed
from pdserve.frames import TOKEN_BYTES, Offer, pack
from pdserve.types import FinishReason, StreamDelta
from pdserve.v1 import worker_pb2 as w
from router import frame_connection
from router.member import Member
from router.worker_link import LinkSettings, WorkerLink
from tests.patience import WAIT_S
from tests.unit.workers.router_side import LONG, PLAIN, a_worker
from workers import frame_port
from workers.fake_settings import FakeTiming

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from pdserve.step_moments import StepMoments
    from pdserve.types import SamplingParams, WorkerLoad
    from workers.server import WorkerServer

SETTINGS = LinkSettings(attach_timeout_s=WAIT_S, backoff_min_s=0.005, backoff_max_s=0.02)
SLOW = FakeTiming(step_s=0.005)


class Answer:
    """What one stream said."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.spoke = asyncio.Event()
        self.end: asyncio.Future[StreamDelta | PdserveError] = asyncio.Future()

    def on_delta(self, delta: StreamDelta) -> None:
        self.token_ids += delta.token_ids
        self.spoke.set()
        if delta.finish_reason is not None:
            self.end.set_result(delta)

    def on_token(self, token_id: int, text: str) -> None:
        self.token_ids.append(token_id)
        self.spoke.set()

    def on_lost(self, error: PdserveError) -> None:
        self.end.set_result(error)


class Observer:
    """Whether the link is attached, and how often it was."""

    def __init__(self) -> None:
        self.is_attached = asyncio.Event()
        self.times = 0

    def attached(self, member: Member) -> None:
        self.times += 1
        self.is_attached.set()

    def detached(self, member: Member) -> None:
        self.is_attached.clear()

    def reported(self, member: Member, load: WorkerLoad) -> None:
        """Not looked at."""

    def measured(self, member: Member, steps: StepMoments) -> None:
        """Not looked at."""


class Attached:
    """A link to a worker, and what is asked over it."""

    def __init__(self, server: WorkerServer) -> None:
        self.observer = Observer()
        member = Member(server.info, lease_end=0.0)
        self.link = WorkerLink(
            member, router_id="router-1", observer=self.observer, settings=SETTINGS
        )
        self.link.start()

    async def ask(self, sampling: SamplingParams) -> Answer:
        await self.observer.is_attached.wait()
        answer = Answer()
        submit = w.Submit(
            request_id="r",
            prompt_token_ids=[20, 21, 22],
            sampling=wire.sampling_to_pb(sampling),
            aggregated=w.AggregatedPhase(),
        )
        self.link.submit(w.Command(submit=submit), answer)
        return answer


@asynccontextmanager
async def attached(server: WorkerServer) -> AsyncIterator[Attached]:
    link = Attached(server)
    try:
        async with asyncio.timeout(WAIT_S):
            yield link
    finally:
        task = link.link.close("the test is over")
        if task is not None:
            await asyncio.wait([task])
        assert link.link.open_streams == 0


def connections(server: WorkerServer) -> set[frame_port._Connection]:
    assert server.frames is not None
    return server.frames.connections


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - what it asks of says nothing when it changes
            await asyncio.sleep(0.005)


async def is_gone(server: WorkerServer) -> None:
    assert server.frames is not None
    frames = server.frames
    await until(lambda: not (frames.connections or frames._awaited))


async def is_cut(reader: asyncio.StreamReader) -> bool:
    async with asyncio.timeout(WAIT_S):
        try:
            return not await reader.read(1)
        except ConnectionResetError:
            return True


async def test_an_answer_comes_whole_and_the_connection_ends_with_the_link() -> None:
    async with a_worker() as server:
        async with attached(server) as link:
            answer = await link.ask(PLAIN)
            last = await answer.end
            assert isinstance(last, StreamDelta)
            assert last.finish_reason is FinishReason.LENGTH
            assert len(answer.token_ids) == PLAIN.max_tokens
            assert len(connections(server)) == 1
        await is_gone(server)


async def test_commands_go_the_same_way_where_the_worker_takes_them_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(frame_port, "MAX_COMMANDS", 1)  # what comes at once is read bit by bit
    for takes in (True, False):
        monkeypatch.setattr(frame_port, "Offer", partial(Offer, takes_commands=takes))
        async with a_worker() as server, attached(server) as link:
            answers = [await link.ask(PLAIN) for _ in range(50)]
            for answer in answers:
                assert isinstance(await answer.end, StreamDelta)
                assert len(answer.token_ids) == PLAIN.max_tokens
            outgoing = link.link._outgoing
            assert isinstance(outgoing, frame_connection.FrameConnection) is takes


async def test_commands_wait_for_a_worker_that_does_not_read_and_are_not_too_many() -> None:
    async with a_worker() as server, attached(server) as link:
        await link.observer.is_attached.wait()
        connection = link.link._outgoing
        assert isinstance(connection, frame_connection.FrameConnection)
        connection.pause_writing()
        connection._max_waiting = 2
        first, second = await link.ask(PLAIN), await link.ask(PLAIN)
        with pytest.raises(Overloaded):
            await link.ask(PLAIN)
        connection.resume_writing()
        assert isinstance(await first.end, StreamDelta)
        assert isinstance(await second.end, StreamDelta)


async def test_a_worker_that_stops_says_all_that_it_has_to_say() -> None:
    async with a_worker(timing=SLOW) as server:
        async with attached(server) as link:
            answer = await link.ask(LONG)
            await answer.spoke.wait()
            server.worker.end_streams(Unavailable("on purpose"))
            server.worker.close_sessions()
            last = await answer.end
            assert isinstance(last, StreamDelta)
            assert last.error is not None
            assert last.error.message == "on purpose"
        await is_gone(server)


async def test_a_connection_that_breaks_ends_the_stream_and_the_link_comes_back() -> None:
    async with a_worker(timing=SLOW) as server:
        async with attached(server) as link:
            answer = await link.ask(LONG)
            await answer.spoke.wait()
            (connection,) = connections(server)
            connection.abort()
            assert isinstance(await answer.end, WorkerFailed)
            again = await link.ask(PLAIN)
            assert isinstance(await again.end, StreamDelta)
            assert link.observer.times == 2
            assert len(connections(server)) == 1
        await is_gone(server)


async def test_frames_come_over_grpc_where_the_port_cannot_be_reached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def refused(*_: object, **__: object) -> None:
        raise ConnectionRefusedError("nobody is there")

    monkeypatch.setattr(frame_connection, "connect", refused)
    async with a_worker() as server, attached(server) as link:
        answer = await link.ask(PLAIN)
        assert isinstance(await answer.end, StreamDelta)
        assert len(answer.token_ids) == PLAIN.max_tokens
        assert not connections(server)


async def test_a_router_that_does_not_come_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_port, "CONNECT_S", 0.01)
    real = frame_connection.connect
    silent: list[frame_connection.FrameConnection] = []

    async def connects_and_says_nothing(*args: object, **names: object) -> object:
        reader = await real(*args, **names)  # type: ignore[arg-type]
        if not silent:
            silent.append(reader)
            monkeypatch.setattr(reader, "start", lambda: None)
        return reader

    monkeypatch.setattr(frame_connection, "connect", connects_and_says_nothing)
    async with a_worker() as server:
        async with attached(server) as link:
            await until(lambda: link.observer.times == 2)
            monkeypatch.setattr(frame_port, "CONNECT_S", WAIT_S)
        await is_gone(server)


@pytest.mark.parametrize("shown", [b"x" * TOKEN_BYTES, b"x" * 2 * TOKEN_BYTES])
async def test_who_shows_no_token_is_turned_away(shown: bytes) -> None:
    async with a_worker() as server:
        assert server.frames is not None
        offer = server.frames.expect().offer
        reader, writer = await asyncio.open_connection("127.0.0.1", offer.port)
        writer.write(shown)
        assert await is_cut(reader)
        writer.close()
        assert server.frames.take(offer.token) is not None
        await is_gone(server)


async def test_a_token_is_good_once_and_commands_follow_it() -> None:
    async with a_worker() as server:
        assert server.frames is not None
        carrier = server.frames.expect()
        first, second = [
            await asyncio.open_connection("127.0.0.1", carrier.offer.port) for _ in range(2)
        ]
        first[1].write(carrier.offer.token)
        async with asyncio.timeout(WAIT_S):
            await carrier.write(w.StepFrame())
            assert await first[0].readexactly(4) == bytes(4)
            second[1].write(carrier.offer.token)
            assert await is_cut(second[0])
            command = w.Command(cancel=w.Cancel(stream_id=7))
            first[1].write(pack(command) + b"\xff" * 4)
            assert await anext(carrier) == command
            with pytest.raises(InvalidRequest):
                await anext(carrier)
            for _, writer in (first, second):
                writer.close()
            await carrier.closed
        carrier.close()
        await is_gone(server)


async def test_strangers_are_few_and_do_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_port, "MAX_STRANGERS", 2)
    async with a_worker() as server:
        assert server.frames is not None
        port = server.frames.expect().offer.port
        opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        assert await is_cut(opened[2][0])
        for connection in list(connections(server)):
            connection._give_up_in(0.0)
        await until(lambda: not connections(server))
        for _, writer in opened:
            writer.close()
