"""Cancellation in every phase: both workers hear of it, and nothing stays behind."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from pdserve.errors import Overloaded, WorkerFailed
from pdserve.types import FinishReason, GenerateRequest, Role, SamplingParams
from router.admission import AdmissionLimits
from tests.fakes import ScriptedWorker, Stack, running_stack

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from pdserve.v1 import worker_pb2 as w

REQUEST = GenerateRequest("r1", "demo", tuple(range(40)), SamplingParams(max_tokens=8))


class Scene:
    """One request, read by a task that the test can cancel as a client's leaving does."""

    def __init__(self, stack: Stack, prefill: ScriptedWorker, decode: ScriptedWorker) -> None:
        self.stack = stack
        self.prefill = prefill
        self.decode = decode
        self.read: asyncio.Queue[int] = asyncio.Queue()
        self.to_prefill: w.Submit | None = None
        self.to_decode: w.Submit | None = None
        self._client = asyncio.create_task(self._run())

    async def _run(self) -> None:
        async with self.stack.coordinator.generate(REQUEST) as answer:
            async for delta in answer:
                for token in delta.token_ids:
                    self.read.put_nowait(token)

    async def submitted(self) -> tuple[w.Submit, w.Submit]:
        self.to_prefill = await self.prefill.submitted()
        self.to_decode = await self.decode.submitted()
        return self.to_prefill, self.to_decode

    async def leave(self) -> None:
        self._client.cancel()
        await asyncio.gather(self._client, return_exceptions=True)
        assert self._client.cancelled()


async def before_anything_is_sent(scene: Scene) -> None:
    """The task has not run yet."""


async def while_prefilling(scene: Scene) -> None:
    await scene.submitted()


async def with_early_tokens_of_decode(scene: Scene) -> None:
    _, to_decode = await scene.submitted()
    scene.decode.send(to_decode, 8)


async def after_the_first_token(scene: Scene) -> None:
    to_prefill, _ = await scene.submitted()
    scene.prefill.send(to_prefill, 7, finish=FinishReason.LENGTH)
    assert await scene.read.get() == 7


async def while_decoding(scene: Scene) -> None:
    await after_the_first_token(scene)
    assert scene.to_decode is not None
    scene.decode.send(scene.to_decode, 8)
    assert await scene.read.get() == 8


async def while_prefill_is_retried(scene: Scene) -> None:
    to_prefill, to_decode = await scene.submitted()
    scene.prefill.fail(to_prefill, Overloaded("full"))
    assert await scene.decode.cancelled() == to_decode.stream_id
    await scene.submitted()


async def while_recomputing(scene: Scene) -> None:
    await while_decoding(scene)
    assert scene.to_decode is not None
    scene.decode.fail(scene.to_decode, WorkerFailed("dead"))  # there is no other
    scene.to_decode = await scene.decode.submitted()
    assert list(scene.to_decode.resume_token_ids) == [7, 8]


@pytest.mark.parametrize(
    ("reach", "prefill_is_cancelled", "decode_is_cancelled"),
    [
        (before_anything_is_sent, False, False),
        (while_prefilling, True, True),
        (with_early_tokens_of_decode, True, True),
        (after_the_first_token, False, True),
        (while_decoding, False, True),
        (while_prefill_is_retried, True, True),
        (while_recomputing, False, True),
    ],
)
async def test_a_client_leaves(
    reach: Callable[[Scene], Awaitable[None]],
    prefill_is_cancelled: bool,
    decode_is_cancelled: bool,
) -> None:
    prefill, decode = ScriptedWorker("p", Role.PREFILL), ScriptedWorker("d", Role.DECODE)
    async with running_stack(prefill, decode) as stack:
        scene = Scene(stack, prefill, decode)
        await reach(scene)
        await scene.leave()
        stack.assert_no_leaks()
        if prefill_is_cancelled:
            assert scene.to_prefill is not None
            assert await prefill.cancelled() == scene.to_prefill.stream_id
        if decode_is_cancelled:
            assert scene.to_decode is not None
            assert await decode.cancelled() == scene.to_decode.stream_id
        assert not prefill.open
        assert not decode.open


async def test_a_client_leaves_the_queue() -> None:
    prefill, decode = ScriptedWorker("p", Role.PREFILL), ScriptedWorker("d", Role.DECODE)
    async with running_stack(prefill, decode, limits=AdmissionLimits(1, 8)) as stack:
        first = Scene(stack, prefill, decode)
        await first.submitted()
        second = Scene(stack, prefill, decode)
        # It takes its place in the queue before this yields for long.
        await asyncio.sleep(0)
        assert stack.coordinator.queued_requests == 1
        await second.leave()
        assert (stack.coordinator.queued_requests, stack.coordinator.open_requests) == (0, 1)
        assert not prefill.has_submissions
        await first.leave()


async def test_leaving_without_reading_to_the_end_cancels_both_sides() -> None:
    prefill, decode = ScriptedWorker("p", Role.PREFILL), ScriptedWorker("d", Role.DECODE)
    async with running_stack(prefill, decode) as stack:
        async with stack.coordinator.generate(REQUEST):
            to_prefill, to_decode = await prefill.submitted(), await decode.submitted()
        assert await prefill.cancelled() == to_prefill.stream_id
        assert await decode.cancelled() == to_decode.stream_id
        metrics = stack.coordinator.metrics.render().decode()
        assert 'pdserve_requests_total{model="demo",outcome="cancelled"} 1.0' in metrics


async def test_a_client_that_leaves_after_the_end_costs_no_cancel() -> None:
    prefill, decode = ScriptedWorker("p", Role.PREFILL), ScriptedWorker("d", Role.DECODE)
    async with running_stack(prefill, decode) as stack:
        async with stack.coordinator.generate(REQUEST) as answer:
            prefill.send(await prefill.submitted(), 7, finish=FinishReason.LENGTH)
            decode.send(await decode.submitted(), 8, finish=FinishReason.STOP)
            async for _ in answer:
                pass
        async with stack.coordinator.generate(REQUEST):
            # Commands are ordered: a cancel of the first request would have come before this.
            second = await decode.submitted()
        assert await decode.cancelled() == second.stream_id
