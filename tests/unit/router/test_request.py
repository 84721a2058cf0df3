"""The request path over scripted workers: what is sent to them, and what the client gets."""

from __future__ import annotations

import asyncio
import gc
import weakref
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from msgspec import structs

from pdserve import wire
from pdserve.config import QueueConfig, SloConfig, TenantConfig
from pdserve.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    PdserveError,
    TransferFailed,
    Unavailable,
    UnsupportedField,
)
from pdserve.types import (
    EngineLimits,
    FinishReason,
    MediaItem,
    ModelWeights,
    PhaseReport,
    Role,
    SamplingParams,
    StreamDelta,
    TransferReport,
    Usage,
)
from router.api.console.views import _request
from router.attempt.answer import AnswerDelta, Discard
from router.attempt.placer import Charge, Placer
from router.placement.values import PrefixFetch
from tests.support.router_stack import (
    MEDIA_MIB,
    MODEL,
    PROMPT,
    ScriptedWorker,
    request,
    running_stack,
)
from tests.support.timeouts import WAIT_S, wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from router.attempt.placer import Reservation
    from router.fleet.member import Member
    from router.placement.values import Demand
    from router.walk import RequestRecord
    from tests.support.router_stack import RouterStack

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
NEWEST = ModelWeights(2, "2", "/w", "b")
TRANSFER = TransferReport(0.02, 0.01, 4096, 3, "loopback")


@pytest.fixture
def prefill() -> ScriptedWorker:
    return ScriptedWorker("p", Role.PREFILL)


@pytest.fixture
def decode() -> ScriptedWorker:
    return ScriptedWorker("d", Role.DECODE)


@pytest.fixture
async def stack(prefill: ScriptedWorker, decode: ScriptedWorker) -> AsyncIterator[RouterStack]:
    async with running_stack(prefill, decode) as stack:
        yield stack


class TestAnswer:
    async def test_both_workers_get_the_request_and_the_client_one_answer(
        self, stack: RouterStack, prefill: ScriptedWorker, decode: ScriptedWorker
    ) -> None:
        async with stack.ask(request()) as answer:
            to_prefill, to_decode = await prefill.submitted(), await decode.submitted()
            assert tuple(to_prefill.prompt_token_ids) == tuple(to_decode.prompt_token_ids) == PROMPT
            assert to_prefill.request_id == to_decode.request_id == "r1"
            assert to_prefill.sampling == to_decode.sampling
            assert to_prefill.prefill.transfer_id == to_decode.decode.transfer_id != ""
            assert to_decode.decode.producer_addresses == ["kv-p"]
            assert to_decode.decode.producer_instance_id == "e1"
            assert stack.member(decode).placed.reserved_blocks == 3, "40 + 8 tokens in blocks of 16"
            assert stack.member(prefill).placed.outstanding_tokens == 40

            prefill.send(to_prefill, 7, finish=LENGTH)
            assert await answer.next() == AnswerDelta((7,), "<7>")
            assert stack.member(prefill).placed.outstanding_tokens == 0
            decode.send(to_decode, 8)
            assert await answer.next() == AnswerDelta((8,), "<8>")
            decode.send(to_decode, 9, finish=STOP, transfer=TRANSFER, stop_reason="x")
            last = await answer.rest()
            assert (last.token_ids, last.finish_reason, last.stop_reason) == ((9,), STOP, "x")
            assert last.usage == Usage(prompt_tokens=40, completion_tokens=3, cached_tokens=4)
            receipt = last.receipt
            assert receipt is not None
            assert (receipt.prefill_worker, receipt.decode_worker) == ("p", "d")
            assert receipt.first_token_source == "prefill"
            assert (receipt.prefill_s, receipt.decode_s) == (1.0, 1.5)
            assert (receipt.transfer_s, receipt.exposed_transfer_s) == (0.02, 0.01)
            assert (receipt.transfer_bytes, receipt.transfer_blocks) == (4096, 3)
            assert (receipt.transport, receipt.fallbacks) == ("loopback", ())
            assert receipt.queue_s >= 0.25

    async def test_an_answer_that_ends_with_the_first_token_cancels_decode(
        self, stack: RouterStack, prefill: ScriptedWorker, decode: ScriptedWorker
    ) -> None:
        async with stack.ask(request()) as answer:
            submit = await decode.submitted()
            prefill.send(await prefill.submitted(), 7, finish=STOP)
            last = await answer.rest()
            assert (last.token_ids, last.finish_reason) == ((7,), STOP)
            assert last.receipt is not None
            assert last.receipt.decode_worker == ""
            assert await decode.cancelled() == submit.stream_id

    async def test_one_token_is_made_by_the_prefill_worker_alone(
        self, stack: RouterStack, prefill: ScriptedWorker, decode: ScriptedWorker
    ) -> None:
        one = request(sampling=SamplingParams(max_tokens=1))
        async with stack.ask(one) as answer:
            submit = await prefill.submitted()
            assert submit.WhichOneof("phase") == "aggregated"
            prefill.send(submit, 7, finish=LENGTH)
            last = await answer.rest()
            assert (last.token_ids, last.finish_reason) == ((7,), LENGTH)
            assert last.receipt is not None
            assert (last.receipt.first_token_source, last.receipt.decode_worker) == ("prefill", "")
            assert not decode.has_submissions

    async def test_all_workers_of_an_attempt_are_asked_for_the_same_weights(
        self, stack: RouterStack, prefill: ScriptedWorker, decode: ScriptedWorker
    ) -> None:
        # As if prefill had been left out of an update since it was reserved.
        for worker, weights in ((prefill, ModelWeights(1, "1", "/w", "a")), (decode, NEWEST)):
            member = stack.member(worker)
            member.reported = structs.replace(member.reported, weights=weights)
        async with stack.ask(request()):
            for submit in (await prefill.submitted(), await decode.submitted()):
                assert (submit.weights_sequence, submit.weights_digest) == NEWEST.identity


@pytest.mark.parametrize("ending", ["answered", "failed", "lost", "left", "late"])
async def test_an_ended_request_is_freed_without_garbage_collection(
    stack: RouterStack, prefill: ScriptedWorker, decode: ScriptedWorker, ending: str
) -> None:
    """Cycles of objects would wait for a collection, which stops a busy router for 0.4 s."""
    deadline = asyncio.get_running_loop().time() + (0.1 if ending == "late" else 60.0)
    gc.disable()
    try:
        serve = stack.requests.server.serve
        asking = asyncio.create_task(serve(request(deadline=deadline), Discard()))
        to_prefill, to_decode = await prefill.submitted(), await decode.submitted()
        (open_answer,) = stack.requests.generating.open
        kept = [weakref.ref(open_answer), weakref.ref(open_answer.attempt)]
        del open_answer
        match ending:
            case "answered":
                prefill.send(to_prefill, 7, finish=LENGTH)
                decode.send(to_decode, 8, finish=STOP)
            case "failed":
                decode.fail(to_decode, InvalidRequest("it is wrong", field="prompt"))
            case "lost":
                prefill.break_link()
                decode.fail(await decode.submitted(), InvalidRequest("it is wrong"))
            case "left":
                asking.cancel()
        with suppress(PdserveError, asyncio.CancelledError):
            await asking
        del asking
        await asyncio.sleep(0)  # the event loop held the task while it woke this one
        assert [x() for x in kept] == [None, None]
    finally:
        gc.enable()


class TestLeaving:
    """A client may leave wherever its request waits. The stack asserts that nothing stays."""

    async def test_while_it_is_queued(
        self, prefill: ScriptedWorker, decode: ScriptedWorker
    ) -> None:
        async with (
            running_stack(
                prefill, decode, queue=QueueConfig(max_running_requests=1, timeout_s=WAIT_S)
            ) as stack,
            stack.ask(request()),
            stack.ask(request(request_id="r2")),
        ):
            await wait_until(lambda: stack.requests.admission.queued == 1)
        assert [x.receipt is None for x in stack.requests.log.ended] == [True, False]

    async def test_while_its_kv_is_exported(
        self, prefill: ScriptedWorker, decode: ScriptedWorker
    ) -> None:
        other = ScriptedWorker("d2", Role.DECODE)
        async with running_stack(prefill, decode, other) as stack:
            stack.member(other).reported = structs.replace(
                stack.member(other).reported, draining=True
            )
            async with stack.ask(request()) as answer:
                prefill.send(await prefill.submitted(), 7, finish=LENGTH)
                decode.send(await decode.submitted(), 8)
                await answer.next()
                await answer.next()
                stack.member(other).reported = structs.replace(
                    stack.member(other).reported, draining=False
                )
                assert stack.requests.generating.move_off("d", "the test") == 1
                assert stack.member(other).placed.outstanding_requests == 1
            assert not other.has_submissions

    async def test_while_images_wait_for_their_turn(
        self, stack: RouterStack, prefill: ScriptedWorker
    ) -> None:
        link = stack.link_pool.links[stack.member(prefill)]
        async with link._connection.drain_turn, stack.ask(request(media=(IMAGE,))):
            await wait_until(lambda: stack.member(prefill).placed.outstanding_requests == 1)
        assert not prefill.has_submissions

    @pytest.mark.parametrize("copies", [1, 2])
    async def test_while_cached_kv_is_copied(
        self,
        prefill: ScriptedWorker,
        decode: ScriptedWorker,
        monkeypatch: pytest.MonkeyPatch,
        copies: int,
    ) -> None:
        """By its own copy, or by that of another request."""
        async with (
            running_stack(
                prefill, decode, queue=QueueConfig(max_running_requests=8, timeout_s=0.1)
            ) as stack,
            AsyncExitStack() as asked,
        ):
            reserve, plan = Placer.reserve, PrefixFetch("d", 32, 32, 1, 600.0, 600.0, 0.0, 32)

            def with_copy(placer: Placer, demand: Demand) -> Reservation:
                reservation = reserve(placer, demand)
                reservation.fetch = plan
                return reservation

            monkeypatch.setattr(Placer, "reserve", with_copy)
            for i in range(copies):
                await asked.enter_async_context(stack.ask(request(request_id=f"r{i}")))
            placed = stack.member(decode).placed
            # Each answer, and one copy.
            await wait_until(lambda: placed.outstanding_requests == copies + 1)
            assert (await decode.submitted()).WhichOneof("phase") == "prefill"
            assert (await prefill.submitted()).WhichOneof("phase") == "decode"


class TestReadiness:
    @pytest.mark.parametrize("state", ["draining", "left", "suspended"])
    async def test_a_model_that_is_given_up_keeps_no_router_out(self, state: str) -> None:
        """One whose worker may come back does; and so does one that is the only one."""
        other = ScriptedWorker("o", Role.AGGREGATED, model=replace(MODEL, name="other"))
        async with running_stack(ScriptedWorker("a", Role.AGGREGATED), other) as stack:
            stack.requests.models.check_ready()

            def end(member: Member) -> None:
                if state == "draining":
                    member.reported = structs.replace(member.reported, draining=True)
                elif state == "left":
                    stack.fleet.deregister(member.worker_id, member.info.instance_id)
                else:
                    member.reported = structs.replace(member.reported, unhealthy="it hangs")

            end(stack.member(other))
            if state == "suspended":
                with pytest.raises(Unavailable, match="model other"):
                    stack.requests.models.check_ready()
                return
            stack.requests.models.check_ready()
            end(stack.fleet.members["a"])
            with pytest.raises(Unavailable, match="is ready for model"):
                stack.requests.models.check_ready()


class TestClientThatLeft:
    """It is no failure of the service, and what was done for it is recorded."""

    @staticmethod
    def ended(stack: RouterStack) -> tuple[RequestRecord, str]:
        return stack.requests.log.ended[-1], stack.metrics.render()[0].decode()

    async def test_after_tokens(
        self, stack: RouterStack, prefill: ScriptedWorker, decode: ScriptedWorker
    ) -> None:
        async with stack.ask(request()) as answer:
            prefill.send(await prefill.submitted(), 7, finish=LENGTH)
            await answer.next()
            decode.send(await decode.submitted(), 8)
            await answer.next()
        record, page = self.ended(stack)
        assert (record.outcome, record.is_partial, record.ttft_met) == ("cancelled", True, True)
        assert record.usage == Usage(40, 2, 4)
        receipt = record.receipt
        assert receipt is not None
        assert (receipt.prefill_worker, receipt.decode_worker) == ("p", "d")
        assert receipt.prefill_s == 0.5, "as the worker reported"
        assert 0 < receipt.decode_s < record.ended - record.arrived
        assert 0 < record.ttft_s < record.ended - record.arrived
        assert 'pdserve_requests_total{model="demo",outcome="cancelled"} 1.0' in page
        assert 'pdserve_slo_requests_total{met="yes",model="demo",slo="ttft"} 1.0' in page
        assert 'slo="tpot"' not in page
        row = _request(record)
        assert (row["partial_receipt"], row["ttft_met"], "receipt" in row) == (receipt, True, False)

    @pytest.mark.parametrize("is_late", [False, True])
    async def test_before_the_first_token(
        self, stack: RouterStack, prefill: ScriptedWorker, is_late: bool
    ) -> None:
        async with stack.ask(request()):
            await prefill.submitted()
            if is_late:
                (record,) = stack.requests.log.open
                record.arrived -= SloConfig().ttft_s
        record, page = self.ended(stack)
        assert (record.outcome, record.ttft_s) == ("cancelled", 0.0)
        assert record.ttft_met is (False if is_late else None)
        assert record.receipt is not None
        assert record.receipt.prefill_worker == "p"
        assert record.receipt.prefill_s > 0
        late = 'pdserve_slo_requests_total{met="no",model="demo",slo="ttft"} 1.0'
        assert (late in page) is is_late


@pytest.mark.parametrize("wanted", [0, 1])
async def test_an_encode_worker_is_blamed_only_for_embeddings_that_were_wanted(
    prefill: ScriptedWorker,
    decode: ScriptedWorker,
    monkeypatch: pytest.MonkeyPatch,
    wanted: int,
) -> None:
    """Prefill fetches none for images whose KV it has cached."""
    kv = replace(prefill.info.kv, embedding_bytes=8)  # type: ignore[type-var]
    encode = ScriptedWorker("e", Role.ENCODE, kv=kv)
    async with running_stack(prefill, decode, encode) as stack:
        reserve = Placer.reserve

        def with_encoder(placer: Placer, demand: Demand) -> Reservation:
            reservation = reserve(placer, demand)
            reservation.encode_charge = Charge(stack.member(encode))
            return reservation

        monkeypatch.setattr(Placer, "reserve", with_encoder)
        for i in range(3):
            async with stack.ask(request(request_id=f"r{i}", media=(IMAGE,))) as answer:
                encode.send(await encode.submitted(), finish=STOP)
                await wait_until(lambda: not stack.member(encode).placed.outstanding_requests)
                report, submit = PhaseReport(wanted_images=wanted), await prefill.submitted()
                prefill.step(StreamDelta(submit.stream_id, (7,), "", (), LENGTH, report=report))
                decode.send(await decode.submitted(), 8, finish=STOP)
                await answer.rest()
        ejected = {("e", "p")} if wanted else set()
        assert stack.fleet.outliers.ejected(stack.fleet.now()) == ejected


class TestParallelSampling:
    async def test_children_start_on_the_decode_worker_once_it_has_the_kv(
        self, stack: RouterStack, prefill: ScriptedWorker, decode: ScriptedWorker
    ) -> None:
        three = request(sampling=SamplingParams(max_tokens=8, n=3, seed=5))
        async with stack.ask(three) as answer:
            parent = await decode.submitted()
            prefill.send(await prefill.submitted(), 7, finish=LENGTH)
            assert not decode.has_submissions
            reserved = stack.member(decode).placed.reserved_blocks
            decode.send(parent, 8)
            children = [await decode.submitted(), await decode.submitted()]
            assert [x.WhichOneof("phase") for x in children] == ["aggregated"] * 2
            assert [x.sampling.seed for x in (parent, *children)] == [5, 6, 7]
            assert stack.member(decode).placed.reserved_blocks <= reserved + 4
            for i, child in enumerate(children):
                decode.send(child, 20 + i, finish=STOP)
            decode.send(parent, 9, finish=STOP, transfer=TRANSFER)
            last = await answer.rest()
            assert last.usage == Usage(40, 5, 4)
            assert last.receipt is not None
            assert (last.receipt.prefill_worker, last.receipt.transfer_blocks) == ("p", 3)
            assert not prefill.has_submissions

    async def test_an_error_of_one_child_ends_all(
        self, stack: RouterStack, prefill: ScriptedWorker, decode: ScriptedWorker
    ) -> None:
        two = request(sampling=SamplingParams(max_tokens=8, n=2))
        async with stack.ask(two) as answer:
            parent = await decode.submitted()
            prefill.send(await prefill.submitted(), 7, finish=LENGTH)
            decode.send(parent, 8)
            decode.fail(await decode.submitted(), InvalidRequest("no such grammar"))
            with pytest.raises(InvalidRequest, match="no such grammar"):
                await answer.rest()
            assert await decode.cancelled() == parent.stream_id


class TestRetry:
    async def test_a_failed_transfer_is_tried_again_without_repeating_a_token(
        self, stack: RouterStack, prefill: ScriptedWorker, decode: ScriptedWorker
    ) -> None:
        async with stack.ask(request()) as answer:
            first = await prefill.submitted()
            prefill.send(first, 7, finish=LENGTH)
            decode.fail(await decode.submitted(), TransferFailed("no blocks"))
            second, again = await prefill.submitted(), await decode.submitted()
            assert list(second.resume_token_ids) == list(again.resume_token_ids) == [7]
            assert second.prefill.transfer_id == again.decode.transfer_id
            assert second.prefill.transfer_id != first.prefill.transfer_id
            assert await prefill.cancelled() == first.stream_id, "it held KV"
            prefill.send(second, 8, finish=LENGTH)
            decode.send(again, 9, finish=STOP)
            last = await answer.rest()
            assert last.token_ids == (7, 8, 9)
            assert last.usage == Usage(40, 3, 4), "each token counts once"
            assert last.receipt is not None
            assert last.receipt.fallbacks == ("pair:transfer_failed",)
            text = stack.metrics.render()[0].decode()
            labels = 'model="demo",reason="transfer_failed",step="pair"'
            assert f"pdserve_fallbacks_total{{{labels}}} 1.0" in text
            assert 'pdserve_requests_total{model="demo",outcome="stop"} 1.0' in text


IMAGE = MediaItem("image", "h", offset=4, length=9, metadata=b"grid", data=b"pixels")


class TestImages:
    async def test_only_workers_that_compute_the_prompt_get_the_pixels(
        self, stack: RouterStack, prefill: ScriptedWorker, decode: ScriptedWorker
    ) -> None:
        async with stack.ask(request(media=(IMAGE,), render_s=0.5)) as answer:
            for tokens, step in (([], "first"), ([7], "again")):
                to_prefill, to_decode = await prefill.submitted(), await decode.submitted()
                assert [wire.media_from_pb(x.media, 40) for x in (to_prefill, to_decode)] == [
                    (IMAGE,),
                    (replace(IMAGE, data=b""),),
                ]
                assert list(to_prefill.resume_token_ids) == tokens
                prefill.send(to_prefill, 7 + len(tokens), finish=LENGTH)
                if step == "first":
                    # It must compute the prompt again, and has no pixels.
                    decode.fail(to_decode, TransferFailed("no pixels"))
            decode.fail(to_decode, TransferFailed("no pixels"))
            alone = await decode.submitted()
            assert alone.WhichOneof("phase") == "aggregated"
            assert wire.media_from_pb(alone.media, 40) == (IMAGE,)
            decode.send(alone, 9, finish=STOP)
            last = await answer.rest()
            assert last.token_ids == (7, 8, 9)
            assert last.receipt is not None
            assert (last.receipt.images, last.receipt.render_s) == (1, 0.5)
        assert stack.requests.media_memory.used == 0

    async def test_pixels_beyond_memory_wait_on_disk(
        self, stack: RouterStack, prefill: ScriptedWorker, decode: ScriptedWorker
    ) -> None:
        """A retry reads them again. Beyond the disk too, requests are refused."""
        memory = stack.requests.media_memory
        memory.disk_limit = 2 * len(IMAGE.data)
        two = (IMAGE, replace(IMAGE, hash="i", offset=20, data=b"others"))
        asked = request(media=two)
        with memory.hold(MEDIA_MIB << 20):
            async with stack.ask(asked) as answer:
                for attempt in range(2):
                    to_prefill, to_decode = await prefill.submitted(), await decode.submitted()
                    assert wire.media_from_pb(to_prefill.media, 40) == two
                    assert [x.data for x in to_decode.media] == [b"", b""]
                    prefill.send(to_prefill, 7 + attempt, finish=LENGTH)
                    if attempt == 0:
                        decode.fail(to_decode, TransferFailed("no pixels"))
                assert asked.pixels is not None
                assert not any(x.data for x in asked.pixels._items), "memory still has them"
                other = request(request_id="r2", media=(IMAGE,))
                with pytest.raises(Overloaded, match="disk_mib"):
                    await stack.requests.server.serve(other, Discard())
                decode.send(to_decode, 9, finish=STOP)
                assert (await answer.rest()).token_ids == (7, 8, 9)
            assert memory.on_disk == 0
        assert memory.used == 0


class TestRefusals:
    @pytest.mark.parametrize(
        ("changes", "error", "message"),
        [
            ({"model": "other"}, ModelNotFound, "model other is not served"),
            ({"prompt_token_ids": (1,) * 1600}, ContextLengthExceeded, "holds the KV of 1600"),
            ({"deadline": 1.0}, DeadlineExceeded, "before the request was admitted"),
        ],
    )
    async def test_a_request_that_cannot_be_served_is_refused_at_once(
        self,
        prefill: ScriptedWorker,
        decode: ScriptedWorker,
        changes: dict[str, Any],
        error: type[Exception],
        message: str,
    ) -> None:
        async with running_stack(prefill, decode) as stack:
            async with stack.ask(request(**changes)) as answer:
                with pytest.raises(error, match=message):
                    await answer.rest()
            assert not prefill.has_submissions
            assert b"pdserve_refusals_total" in stack.metrics.render()[0]
            assert b'model="other"' not in stack.metrics.render()[0]

    async def test_a_parameter_that_one_worker_refuses_is_refused_before_the_other_has_begun(
        self, prefill: ScriptedWorker, decode: ScriptedWorker
    ) -> None:
        decode.info = replace(decode.info, unsupported_fields=("min_p",))
        async with running_stack(prefill, decode) as stack:
            async with stack.ask(request(sampling=SamplingParams(min_p=0.1))) as answer:
                with pytest.raises(UnsupportedField, match="'min_p'") as refused:
                    await answer.rest()
            assert refused.value.field == "min_p"
            assert not prefill.has_submissions

    async def test_a_request_waits_for_room_and_is_placed_when_another_ends(
        self, stack: RouterStack, prefill: ScriptedWorker, decode: ScriptedWorker
    ) -> None:
        large = request(sampling=SamplingParams(max_tokens=1000))
        async with stack.ask(large) as first:
            submit = await decode.submitted()
            prefill.send(await prefill.submitted(), 7, finish=LENGTH)
            await first.next()
            second = stack.ask(large)
            await asyncio.sleep(0)
            assert stack.requests.admission.queued == 1
            assert not prefill.has_submissions
            decode.send(submit, 8, finish=STOP)
            await first.rest()
        async with second:
            prefill.send(await prefill.submitted(), 7, finish=STOP)
            assert (await second.rest()).token_ids == (7,)

    @pytest.mark.parametrize(("step_tokens", "queued"), [(32, 1), (0, 0)])
    async def test_a_worker_whose_step_is_limited_is_given_few_prompts_ahead(
        self, prefill: ScriptedWorker, decode: ScriptedWorker, step_tokens: int, queued: int
    ) -> None:
        prefill.info = replace(prefill.info, limits=EngineLimits(8, step_tokens))
        async with (
            running_stack(prefill, decode, prefill_chunks_ahead=2) as stack,
            stack.ask(request()) as first,
            stack.ask(request()) as second,
        ):
            submit = await prefill.submitted()
            await asyncio.sleep(0)
            assert stack.requests.admission.queued == queued
            prefill.send(submit, 7, finish=STOP)
            await first.rest()
            prefill.send(await prefill.submitted(), 8, finish=STOP)
            assert (await second.rest()).token_ids == (8,)

    async def test_a_tenant_over_its_limit_is_refused_and_counted(
        self, prefill: ScriptedWorker, decode: ScriptedWorker
    ) -> None:
        tenants = [TenantConfig(name="a", max_concurrent_requests=1), TenantConfig(name="b")]
        async with running_stack(prefill, decode, tenants=tenants) as stack:
            async with stack.ask(request(tenant="a")) as answer:
                submit = await prefill.submitted()
                async with stack.ask(request(tenant="a")) as refused:
                    with pytest.raises(Overloaded):
                        await refused.rest()
                prefill.send(submit, 7, finish=STOP)
                await answer.rest()
            metrics = stack.metrics.render()[0].decode()
            for line in (
                'tenant_refusals_total{code="overloaded",reason="tenant_concurrency",tenant="a"} 1',
                'tenant_answers_total{tenant="a"} 1.0',
                'tenant_tokens_total{kind="prompt",tenant="a"} 40.0',
                'tenant_requests_open{tenant="b"} 0.0',
            ):
                assert f"pdserve_{line}" in metrics
