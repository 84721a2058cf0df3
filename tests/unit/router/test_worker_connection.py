"""The link to one worker: order, dispatch, breaks, coming back, refusals."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pdserve import framing, rpc
from pdserve.errors import Overloaded, PdserveError, WorkerFailed
from pdserve.types import FinishReason, Role, StreamDelta, WorkerLoad
from pdserve.v1 import worker_pb2 as w
from router.fleet.connection import WorkerConnection, connect_over_tcp
from router.fleet.member import Member
from tests.fakes import WAIT_S, ScriptedWorker, fast_reconnects

LOAD = WorkerLoad(1, 2, 0.5, 50)


def submit_of(**fields: Any) -> w.Command:
    return w.Command(submit=w.Submit(**fields))


def token(token_id: int, text: str) -> StreamDelta:
    """What a sink keeps of a token that came by itself: it is not told the stream's id."""
    return StreamDelta(0, (token_id,), text)


class Sink:
    """Deltas and errors of one stream, in the order in which they came."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[StreamDelta | PdserveError] = asyncio.Queue()

    def on_delta(self, delta: StreamDelta) -> None:
        self.events.put_nowait(delta)

    def on_token(self, token_id: int, text: str) -> None:
        self.events.put_nowait(token(token_id, text))

    def on_lost(self, error: PdserveError) -> None:
        self.events.put_nowait(error)

    async def next(self) -> StreamDelta | PdserveError:
        async with asyncio.timeout(WAIT_S):
            return await self.events.get()


class BrokenSink(Sink):
    def on_delta(self, delta: StreamDelta) -> None:
        raise ZeroDivisionError

    def on_token(self, token_id: int, text: str) -> None:
        raise ZeroDivisionError


class Observer:
    def __init__(self) -> None:
        self.events: asyncio.Queue[str | WorkerLoad] = asyncio.Queue()

    def attached(self, member: Member) -> None:
        self.events.put_nowait("attached")

    def detached(self, member: Member) -> None:
        self.events.put_nowait("detached")

    def reported(self, member: Member, load: WorkerLoad) -> None:
        self.events.put_nowait(load)

    async def next(self) -> str | WorkerLoad:
        async with asyncio.timeout(WAIT_S):
            return await self.events.get()


class Attached:
    """A link to a scripted worker, closed at the end."""

    def __init__(self, worker: ScriptedWorker) -> None:
        self.worker = worker
        self.observer = Observer()
        self._patches = fast_reconnects()
        self._serving = worker.serving()

    async def __aenter__(self) -> Attached:
        self._patches.__enter__()
        await self._serving.__aenter__()
        self.link = WorkerConnection(
            Member(self.worker.info, lease_end=0.0),
            router_id="router-1",
            observer=self.observer,
            connect=connect_over_tcp(rpc.PLAIN),
        )
        self.link.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        task = self.link.close("the test is over")
        if task is not None:
            await asyncio.wait([task])
        assert self.link.open_streams == 0
        await self._serving.__aexit__(None, None, None)
        self._patches.__exit__(None, None, None)


@pytest.fixture
def worker() -> ScriptedWorker:
    return ScriptedWorker("d", Role.DECODE)


async def test_each_delta_goes_to_the_sink_of_its_stream(worker: ScriptedWorker) -> None:
    async with Attached(worker) as attached:
        assert await attached.observer.next() == "attached"
        first, second = Sink(), Sink()
        one = attached.link.submit(submit_of(request_id="1"), first)
        two = attached.link.submit(submit_of(request_id="2"), second)
        assert one != two
        assert [(await worker.submitted()).request_id for _ in range(2)] == ["1", "2"]
        unknown = StreamDelta(999, (9,))
        worker.step(StreamDelta(two, (5, 6), "ab"), unknown, StreamDelta(one, (7,)), load=LOAD)
        assert await second.next() == StreamDelta(two, (5, 6), "ab")
        assert await first.next() == token(7, "")
        assert await attached.observer.next() == LOAD
        worker.step(StreamDelta(one, (), finish_reason=FinishReason.STOP))
        assert (await first.next()) == StreamDelta(one, (), finish_reason=FinishReason.STOP)
        assert attached.link.open_streams == 1


async def test_lists_of_different_lengths_are_no_frame(worker: ScriptedWorker) -> None:
    async with Attached(worker) as attached:
        await attached.observer.next()
        sink = Sink()
        stream_id = attached.link.submit(submit_of(), sink)
        await worker.submitted()
        plain = w.PlainTokens(stream_ids=[stream_id, stream_id], token_ids=[1], texts=["a", "b"])
        worker.send_frame(w.StepFrame(tokens=plain))
        assert isinstance(await sink.next(), WorkerFailed)


async def test_commands_arrive_in_order_and_a_cancelled_stream_is_silent(
    worker: ScriptedWorker,
) -> None:
    async with Attached(worker) as attached:
        await attached.observer.next()
        sink, other = Sink(), Sink()
        stream_id = attached.link.submit(submit_of(), sink)
        attached.link.cancel(stream_id)
        attached.link.cancel(stream_id)
        last = attached.link.submit(submit_of(), other)
        assert (await worker.submitted()).stream_id == stream_id
        assert await worker.cancelled() == stream_id
        assert (await worker.submitted()).stream_id == last
        worker.step(StreamDelta(stream_id, (1,)), StreamDelta(last, (2,)))
        await other.next()
        assert sink.events.empty()


async def test_a_break_is_heard_by_every_stream_and_the_link_comes_back(
    worker: ScriptedWorker,
) -> None:
    async with Attached(worker) as attached:
        await attached.observer.next()
        sinks = [Sink(), Sink()]
        ids = [attached.link.submit(submit_of(), sink) for sink in sinks]
        await worker.submitted()
        worker.break_link()
        for sink in sinks:
            error = await sink.next()
            assert isinstance(error, WorkerFailed)
            assert error.message == "worker d closed the connection"
        assert attached.link.open_streams == 0
        assert [await attached.observer.next() for _ in range(2)] == ["detached", "attached"]
        assert worker.hellos == 2
        again = Sink()
        assert attached.link.submit(submit_of(), again) > max(ids), "ids are never reused"


async def test_a_worker_of_another_instance_id_is_not_attached(worker: ScriptedWorker) -> None:
    worker.accepts_hello = False
    async with Attached(worker) as attached:
        for _ in range(2):
            async with asyncio.timeout(WAIT_S):
                await worker.refused.wait()
            worker.refused.clear()
        assert attached.observer.events.empty()
        worker.accepts_hello = True
        assert await attached.observer.next() == "attached"


async def test_closing_fails_what_is_open_with_the_reason(worker: ScriptedWorker) -> None:
    async with Attached(worker) as attached:
        await attached.observer.next()
        sink = Sink()
        attached.link.submit(submit_of(), sink)
        await worker.submitted()
        attached.link.close("worker d is gone: its lease ran out")
        error = sink.events.get_nowait()
        assert isinstance(error, WorkerFailed)
        assert error.message == "worker d is gone: its lease ran out"
        async with asyncio.timeout(WAIT_S):
            await worker.ended.wait()
        assert not worker.open


async def test_what_cannot_be_handled_ends_the_stream_and_not_the_link(
    worker: ScriptedWorker,
) -> None:
    async with Attached(worker) as attached:
        await attached.observer.next()
        broken, other = BrokenSink(), Sink()
        stream_id = attached.link.submit(submit_of(), broken)
        attached.link.submit(submit_of(), other)
        await worker.submitted()
        worker.step(StreamDelta(stream_id, (1,)))
        assert isinstance(await other.next(), WorkerFailed)
        assert [await attached.observer.next() for _ in range(2)] == ["detached", "attached"]


async def test_commands_that_wait_are_bounded_and_a_cancel_is_never_lost(
    worker: ScriptedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Attached(worker) as attached:
        monkeypatch.setattr(framing, "MAX_UNSENT_BYTES", 1000)
        await attached.observer.next()
        sinks = [Sink(), Sink()]
        large = submit_of(prompt_token_ids=[1 << 20] * 400)
        ids = [attached.link.submit(submit_of(), sinks[0]), attached.link.submit(large, sinks[1])]
        with pytest.raises(Overloaded, match="does not read its commands"):
            attached.link.submit(submit_of(), Sink())
        attached.link.cancel(ids[0])
        error = await sinks[1].next()
        assert isinstance(error, WorkerFailed)
        assert "does not read its commands" in error.message
        assert [await attached.observer.next() for _ in range(2)] == ["detached", "attached"]
