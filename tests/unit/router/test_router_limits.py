"""What the coordinator refuses, what it makes wait, and what it cuts."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from pdserve.errors import (
    Cancelled,
    ContextLengthExceeded,
    DeadlineExceeded,
    ModelNotFound,
    Overloaded,
    Refusal,
    Unavailable,
)
from pdserve.types import FinishReason, Role, SamplingParams
from router.admission import AdmissionLimits, Tenant, Tenants
from router.answer import AnswerDelta, BufferLimits
from tests.fakes import ScriptedWorker, running_stack
from tests.patience import WAIT_S, skip
from tests.unit.router.asking import read, request

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
FAR_S = WAIT_S / 2


@pytest.fixture
def prefill() -> ScriptedWorker:
    return ScriptedWorker("p", Role.PREFILL)


@pytest.fixture
def decode() -> ScriptedWorker:
    return ScriptedWorker("d", Role.DECODE)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model": "other"}, ModelNotFound, "model other is not served here; served are: demo"),
        (
            {"prompt_token_ids": (1,) * 1600},
            ContextLengthExceeded,
            "the prompt has 1600 tokens, and the largest worker of model demo holds the KV of 1600",
        ),
        ({"deadline": 1.0}, DeadlineExceeded, "before the request was admitted"),
    ],
)
async def test_refusals_come_before_anything_is_sent(
    prefill: ScriptedWorker,
    decode: ScriptedWorker,
    changes: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    async with running_stack(prefill, decode) as stack:
        with pytest.raises(error, match=message):
            async with stack.coordinator.generate(request(**changes)):
                raise AssertionError("it was admitted")
        assert not prefill.has_submissions
        assert not decode.has_submissions
        assert b"pdserve_refusals_total" in stack.coordinator.metrics.render()
        assert b'model="other"' not in stack.coordinator.metrics.render()


async def test_a_missing_worker_is_named(prefill: ScriptedWorker) -> None:
    limits = AdmissionLimits(queue_timeout_s=0.01)
    async with running_stack(prefill, limits=limits) as stack:
        stack.fleet.pool.members[prefill.info.worker_id].draining = True
        with pytest.raises(Unavailable, match="no decode worker is ready for model demo"):
            stack.coordinator.check_ready()
        with pytest.raises(Unavailable, match="no decode worker is ready for model demo"):
            async with stack.coordinator.generate(request()):
                raise AssertionError("it was admitted")
    async with running_stack() as stack:
        with pytest.raises(Unavailable, match="no worker is registered"):
            stack.coordinator.check_ready()


async def test_models_and_readiness_come_from_the_pool(
    prefill: ScriptedWorker, decode: ScriptedWorker
) -> None:
    async with running_stack(prefill, decode) as stack:
        stack.coordinator.check_ready()
        assert [m.max_model_len for m in stack.coordinator.models().values()] == [4096]


async def test_a_request_waits_for_kv_and_is_placed_when_another_ends(
    prefill: ScriptedWorker, decode: ScriptedWorker
) -> None:
    large = request(sampling=SamplingParams(max_tokens=1000))
    async with running_stack(prefill, decode) as stack:

        async def second() -> AnswerDelta:
            async with stack.coordinator.generate(large) as answer:
                return await read(answer)

        async with stack.coordinator.generate(large) as answer:
            submit = await decode.submitted()
            prefill.send(await prefill.submitted(), 7, finish=LENGTH)
            waiting = asyncio.create_task(second())
            await anext(answer)
            assert stack.coordinator.queued_requests == 1
            assert not prefill.has_submissions
            decode.send(submit, 8, finish=STOP)
            await read(answer)
        prefill.send(await prefill.submitted(), 7, finish=STOP)
        assert (await waiting).token_ids == (7,)


async def test_over_the_queue_a_request_is_refused(
    prefill: ScriptedWorker, decode: ScriptedWorker
) -> None:
    async with (
        running_stack(prefill, decode, limits=AdmissionLimits(1, 0)) as stack,
        stack.coordinator.generate(request()),
    ):
        with pytest.raises(Overloaded) as caught:
            async with stack.coordinator.generate(request()):
                raise AssertionError("it was admitted")
        assert caught.value.retry_after_s > 0


@pytest.mark.parametrize("tokens", [0, 1, 2])
async def test_a_deadline_ends_the_answer_and_both_sides(
    prefill: ScriptedWorker, decode: ScriptedWorker, tokens: int
) -> None:
    async with running_stack(prefill, decode) as stack:
        late = request(deadline=time.monotonic() + FAR_S)
        async with stack.coordinator.generate(late) as answer:
            to_prefill, to_decode = await prefill.submitted(), await decode.submitted()
            if tokens:
                prefill.send(to_prefill, 7, finish=LENGTH)
                await anext(answer)
            if tokens > 1:
                decode.send(to_decode, 8)
                await anext(answer)
            skip(FAR_S)
            with pytest.raises(DeadlineExceeded, match=f"after {tokens} tokens"):
                await anext(answer)
            assert await decode.cancelled() == to_decode.stream_id
            if not tokens:
                assert await prefill.cancelled() == to_prefill.stream_id
            assert stack.coordinator.running_requests == 0
        assert b'outcome="deadline_exceeded"} 1.0' in stack.coordinator.metrics.render()


async def test_a_reader_that_stops_reading_is_cut(
    prefill: ScriptedWorker, decode: ScriptedWorker
) -> None:
    limits = BufferLimits(tokens=16)
    long = request(sampling=SamplingParams(max_tokens=500))
    async with (
        running_stack(prefill, decode, buffer_limits=limits) as stack,
        stack.coordinator.generate(long) as answer,
    ):
        submit = await decode.submitted()
        prefill.send(await prefill.submitted(), 7, finish=LENGTH)
        decode.send(submit, *range(20))
        assert await decode.cancelled() == submit.stream_id
        with pytest.raises(Cancelled, match="does not read"):
            await anext(answer)


async def test_a_tenant_over_its_limit_is_refused_and_counted(
    prefill: ScriptedWorker, decode: ScriptedWorker
) -> None:
    tenants = Tenants([Tenant("a", max_concurrent_requests=1), Tenant("b")])
    async with running_stack(prefill, decode, tenants=tenants) as stack:
        async with stack.coordinator.generate(request(tenant="a")) as answer:
            with pytest.raises(Overloaded) as caught:
                async with stack.coordinator.generate(request(tenant="a")):
                    raise AssertionError("it was admitted")
            assert caught.value.reason == Refusal.TENANT_CONCURRENCY
            async with stack.coordinator.generate(request(tenant="b")):
                assert tenants.concurrent("b") == 1
            prefill.send(await prefill.submitted(), 7, finish=STOP)
            await read(answer)
        metrics = stack.coordinator.metrics.render().decode()
        for line in (
            'tenant_refusals_total{code="overloaded",reason="tenant_concurrency",tenant="a"} 1.0',
            'tenant_answers_total{tenant="a"} 1.0',
            'tenant_tokens_total{kind="prompt",tenant="a"} 40.0',
            'tenant_requests_open{tenant="b"} 0.0',
        ):
            assert f"pdserve_{line}" in metrics
        assert (tenants.concurrent("a"), tenants.concurrent("b")) == (0, 0)
