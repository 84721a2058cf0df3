"""The link to one worker: order, dispatch, breaks, coming back, refusals."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.errors import InternalError, Overloaded, PdserveError, WorkerFailed
from pdserve.net import rpc
from pdserve.types import FinishReason, Role, StreamDelta, WorkerLoad
from pdserve.v1 import worker_pb2 as w
from router.fleet.member import Member
from router.fleet.worker_link import LinkLimits, WorkerLink, connect_over_tcp
from tests.support.router_stack import FAST_RECONNECTS, WAIT_S, ScriptedWorker

if TYPE_CHECKING:
    from router.fleet.worker_link import Renewals

LOAD = WorkerLoad(1, 2, 0.5, 50)


def submit_of(**fields: Any) -> w.Command:
    return w.Command(submit=w.Submit(**fields))


def token(token_id: int, text: str) -> StreamDelta:
    """Return what a sink keeps of a single token, which comes without the stream id."""
    return StreamDelta(0, (token_id,), text)


class Sink:
    """A stream: its deltas and errors, in order of arrival."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[StreamDelta | PdserveError] = asyncio.Queue()

    async def next(self) -> StreamDelta | PdserveError:
        async with asyncio.timeout(WAIT_S):
            return await self.events.get()


class Receiver:
    def on_delta(self, stream: Sink, delta: StreamDelta) -> None:
        stream.events.put_nowait(delta)

    def on_token(self, stream: Sink, token_id: int, text: str) -> None:
        stream.events.put_nowait(token(token_id, text))

    def on_lost(self, stream: Sink, error: PdserveError) -> None:
        stream.events.put_nowait(error)


class BrokenReceiver(Receiver):
    def on_delta(self, stream: Sink, delta: StreamDelta) -> None:
        raise ZeroDivisionError

    def on_token(self, stream: Sink, token_id: int, text: str) -> None:
        raise ZeroDivisionError


class DeafReceiver(Receiver):
    def on_lost(self, stream: Sink, error: PdserveError) -> None:
        raise ZeroDivisionError


class Attached:
    """A connection to a scripted worker, closed at the exit."""

    def __init__(self, worker: ScriptedWorker, limits: LinkLimits = FAST_RECONNECTS) -> None:
        self.worker, self._limits = worker, limits
        self.states: asyncio.Queue[bool] = asyncio.Queue()
        self.renewals: Renewals = asyncio.Queue()
        self._serving = worker.serving()

    async def __aenter__(self) -> Attached:
        await self._serving.__aenter__()
        self.member = Member(self.worker.info)
        self.link = WorkerLink(
            self.member,
            router_id="router-1",
            connect=connect_over_tcp(rpc.PLAIN),
            changed=lambda: self.states.put_nowait(self.member.attached),
            renewals=self.renewals,
            limits=self._limits,
        )
        self.link.start()
        return self

    async def change(self) -> str:
        """Wait for the next change of the connection."""
        async with asyncio.timeout(WAIT_S):
            return "attached" if await self.states.get() else "detached"

    def submit(self, command: w.Command, stream: Sink) -> int:
        return self.link.submit(command, Receiver(), stream)

    async def __aexit__(self, *exc: object) -> None:
        task = self.link.close("the test is over")
        if task is not None:
            await asyncio.wait([task])
        assert self.link.open_streams == 0
        await self._serving.__aexit__(None, None, None)


@pytest.fixture
def worker() -> ScriptedWorker:
    return ScriptedWorker("d", Role.DECODE)


async def test_each_delta_goes_to_the_sink_of_its_stream(worker: ScriptedWorker) -> None:
    async with Attached(worker) as attached:
        assert await attached.change() == "attached"
        first, second = Sink(), Sink()
        one = attached.submit(submit_of(request_id="1"), first)
        two = attached.submit(submit_of(request_id="2"), second)
        assert one != two
        assert [(await worker.submitted()).request_id for _ in range(2)] == ["1", "2"]
        unknown = StreamDelta(999, (9,))
        worker.step(StreamDelta(two, (5, 6), "ab"), unknown, StreamDelta(one, (7,)), load=LOAD)
        assert await second.next() == StreamDelta(two, (5, 6), "ab")
        assert await first.next() == token(7, "")
        assert attached.member.reported.load == LOAD
        worker.step(StreamDelta(one, (), finish_reason=FinishReason.STOP))
        assert (await first.next()) == StreamDelta(one, (), finish_reason=FinishReason.STOP)
        assert attached.link.open_streams == 1


async def test_lists_of_different_lengths_are_no_frame(worker: ScriptedWorker) -> None:
    async with Attached(worker) as attached:
        await attached.change()
        sink = Sink()
        stream_id = attached.submit(submit_of(), sink)
        await worker.submitted()
        plain = w.PlainTokens(stream_ids=[stream_id, stream_id], token_ids=[1], texts=["a", "b"])
        worker.send_frame(w.StepFrame(tokens=plain))
        assert isinstance(await sink.next(), WorkerFailed)


async def test_commands_arrive_in_order_and_a_cancelled_stream_is_silent(
    worker: ScriptedWorker,
) -> None:
    async with Attached(worker) as attached:
        await attached.change()
        sink, other = Sink(), Sink()
        stream_id = attached.submit(submit_of(), sink)
        attached.link.cancel(stream_id)
        attached.link.cancel(stream_id)
        last = attached.submit(submit_of(), other)
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
        await attached.change()
        sinks = [Sink(), Sink()]
        ids = [attached.submit(submit_of(), sink) for sink in sinks]
        await worker.submitted()
        worker.break_link()
        for sink in sinks:
            error = await sink.next()
            assert isinstance(error, WorkerFailed)
            assert error.message == "worker d closed the connection"
        assert attached.link.open_streams == 0
        assert [await attached.change() for _ in range(2)] == ["detached", "attached"]
        assert worker.hellos == 2
        again = Sink()
        assert attached.submit(submit_of(), again) > max(ids), "ids are never reused"


async def test_a_worker_of_another_instance_id_is_not_attached(worker: ScriptedWorker) -> None:
    worker.accepts_hello = False
    async with Attached(worker) as attached:
        for _ in range(2):
            async with asyncio.timeout(WAIT_S):
                await worker.refused.wait()
            worker.refused.clear()
        assert attached.states.empty()
        worker.accepts_hello = True
        assert await attached.change() == "attached"


async def test_closing_fails_open_requests_with_the_reason(worker: ScriptedWorker) -> None:
    async with Attached(worker) as attached:
        await attached.change()
        sink = Sink()
        attached.submit(submit_of(), sink)
        await worker.submitted()
        attached.link.close("worker d is gone: its lease ran out")
        error = sink.events.get_nowait()
        assert isinstance(error, WorkerFailed)
        assert error.message == "worker d is gone: its lease ran out"
        async with asyncio.timeout(WAIT_S):
            await worker.ended.wait()
        assert not worker.open


@pytest.mark.parametrize("token_ids", [(1,), (1, 2)])
async def test_a_receiver_that_fails_ends_its_stream_and_no_other(
    worker: ScriptedWorker, token_ids: tuple[int, ...]
) -> None:
    async with Attached(worker) as attached:
        await attached.change()
        broken, other = Sink(), Sink()
        stream_id = attached.link.submit(submit_of(), BrokenReceiver(), broken)
        other_id = attached.submit(submit_of(), other)
        await worker.submitted()
        worker.step(StreamDelta(stream_id, token_ids), StreamDelta(other_id, token_ids, "ab"))
        assert await other.next() == StreamDelta(
            0 if len(token_ids) == 1 else other_id, token_ids, "ab"
        )
        assert isinstance(await broken.next(), InternalError)
        assert await worker.cancelled() == stream_id
        assert attached.states.empty(), "the connection stays"


async def test_a_receiver_that_fails_at_the_loss_keeps_it_from_no_other(
    worker: ScriptedWorker,
) -> None:
    async with Attached(worker) as attached:
        await attached.change()
        other = Sink()
        attached.link.submit(submit_of(), DeafReceiver(), Sink())
        attached.submit(submit_of(), other)
        await worker.submitted()
        worker.break_link()
        assert isinstance(await other.next(), WorkerFailed)
        assert [await attached.change() for _ in range(2)] == ["detached", "attached"]


async def test_commands_that_wait_are_bounded_and_a_cancel_is_never_lost(
    worker: ScriptedWorker,
) -> None:
    limits = replace(FAST_RECONNECTS, max_unsent_bytes=1000)
    async with Attached(worker, limits) as attached:
        await attached.change()
        sinks = [Sink(), Sink()]
        large = submit_of(prompt_token_ids=[1 << 20] * 400)
        ids = [attached.submit(submit_of(), sinks[0]), attached.submit(large, sinks[1])]
        with pytest.raises(Overloaded, match="does not read its commands"):
            attached.submit(submit_of(), Sink())
        attached.link.cancel(ids[0])
        error = await sinks[1].next()
        assert isinstance(error, WorkerFailed)
        assert "does not read its commands" in error.message
        assert [await attached.change() for _ in range(2)] == ["detached", "attached"]


async def test_commands_with_images_take_turns_and_do_not_count_as_a_slow_reader(
    worker: ScriptedWorker,
) -> None:
    limits = replace(FAST_RECONNECTS, max_unsent_bytes=1000)
    async with Attached(worker, limits) as attached:
        await attached.change()
        large = submit_of(media=[w.MediaItem(modality="image", data=bytes(32 << 20))])
        await attached.link.drained()
        attached.submit(large, Sink())
        waiting = asyncio.create_task(attached.link.drained())
        await asyncio.sleep(0)
        assert not waiting.done(), "the image is not sent yet"
        attached.submit(submit_of(request_id="small"), Sink())
        await waiting
        assert [(await worker.submitted()).request_id for _ in range(2)][1] == "small"
