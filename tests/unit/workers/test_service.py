"""A worker over its session: streams, refusals, cancels, drain, role, failures."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from pdserve import wire
from pdserve.errors import InvalidRequest, Unavailable
from pdserve.net import rpc
from pdserve.observe.step_costs import FEATURES
from pdserve.types import ErrorInfo, FinishReason, Role
from pdserve.v1 import common_pb2 as c
from pdserve.v1 import worker_pb2 as w
from pdserve.wire import moments_from_pb
from tests.support.cluster import Cluster
from tests.support.fake_router import (
    LONG,
    PLAIN,
    WAIT_S,
    FakeRegistry,
    FakeRouter,
    deltas_of,
    engine_of,
    error_of,
    fake_engine,
    running_worker,
    token_ids,
)
from tests.support.started_workers import fake
from tests.support.timeouts import wait_until
from workers.control.worker_drain import DrainManager, DrainTiming
from workers.control.worker_intake import RoleChangeState, WorkerIntake
from workers.fake.engine import FakeEngine
from workers.fake.render import IMAGE_TOKEN
from workers.fake.settings import FakeFaults, FakeSettings
from workers.link import registration
from workers.link.registration import Registrations
from workers.link.router_link import MAX_STRANGERS, OpenLinks
from workers.service import WorkerService

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


def code_of(error: ErrorInfo | None) -> str:
    assert error is not None
    return error.code


SLOW = FakeSettings(step_s=0.01)
PREFILL = {"prefill": w.PrefillPhase(transfer_id="t")}
DECODE = {
    "decode": w.DecodePhase(
        transfer_id="t", producer_addresses=["127.0.0.1:1"], producer_instance_id="e"
    )
}


class TestStreams:
    async def test_a_router_without_streams_hears_of_a_load_that_changed(self) -> None:
        """Otherwise the engine may take it for a stream that another router cancelled."""
        async with (
            running_worker(timing=SLOW) as server,
            FakeRouter(server, "one") as one,
            FakeRouter(server, "two") as two,
        ):
            await one.submit(1, LONG)
            await two.until(lambda: two.frames and two.frames[-1].load.num_running_reqs == 1)
            await one.cancel(1)
            await two.until(lambda: two.frames[-1].load.num_running_reqs == 0)
            assert two.frames[-1].load.free_blocks == FakeSettings().total_blocks

    async def test_a_later_router_knows_step_costs_at_once(self) -> None:
        timing = FakeSettings(step_s=0.001)
        async with running_worker(timing=timing) as server:
            async with FakeRouter(server) as first:
                await first.submit(1)
                await first.finish(1)
                told = [frame for frame in first.frames if frame.HasField("steps")]
                assert told[0] is next(x for x in first.frames if deltas_of(x))
            async with FakeRouter(server) as second:
                await second.until(lambda: second.frames)
                steps = moments_from_pb(second.frames[0].steps)
            assert steps.prefill.steps == pytest.approx(1, rel=0.5)
            assert steps.decode.steps > 0
            assert steps.decode.sums[FEATURES] * timing.step_s == pytest.approx(
                steps.decode.steps, rel=0.01
            )

    async def test_one_frame_a_step_carries_all_streams_of_a_router(self) -> None:
        async with running_worker() as server, FakeRouter(server) as router:
            # No step is made before all three are there.
            engine_of(server).faults = FakeFaults(stalled=True)
            for stream_id in (1, 2, 3):
                await router.submit(stream_id)
            await router.until_open(3)
            engine_of(server).faults = FakeFaults()
            for stream_id in (1, 2, 3):
                await router.finish(stream_id)
            steps = [found for frame in router.frames if (found := deltas_of(frame))]
            assert len(steps) == PLAIN.max_tokens
            assert all([x.stream_id for x in step] == [1, 2, 3] for step in steps)


class TestHello:
    @pytest.mark.parametrize(
        "command",
        [
            w.Command(cancel=w.Cancel(stream_id=1)),
            w.Command(),
            w.Command(hello=w.Hello(instance_id="aggregated-instance")),
            w.Command(hello=w.Hello(router_id="r", instance_id="of-another-life")),
        ],
        ids=["cancel", "nothing", "no-router-id", "another-instance"],
    )
    async def test_an_invalid_hello_is_refused(self, command: w.Command) -> None:
        async with running_worker() as server:
            router = FakeRouter(server)
            await router.open()
            await router.send(command)
            assert code_of(await router.ended) == "invalid_value"
            await router.close()

    async def test_connections_without_a_hello_are_bounded(self) -> None:
        async with running_worker() as server:
            routers = [FakeRouter(server) for _ in range(MAX_STRANGERS + 1)]
            for router in routers:
                await router.open()
            await routers[-1].ended
            await routers[0].submit(1, tokens=range(10_000))
            assert code_of(await routers[0].ended) == "invalid_value"
            for router in routers:
                await router.close()

    async def test_a_router_that_attaches_anew_takes_the_place_of_its_older_stream(self) -> None:
        async with running_worker() as server, FakeRouter(server, "same") as older:
            await older.begin(1)
            async with FakeRouter(server, "same") as newer:
                assert code_of(await older.ended) == "unavailable"
                await newer.submit(1)
                assert len(token_ids(await newer.finish(1))) == PLAIN.max_tokens
                assert server.service.open_streams == 0


class TestRefusals:
    @pytest.mark.parametrize(
        ("role", "phase", "field"),
        [
            (Role.AGGREGATED, PREFILL, "phase"),
            (Role.AGGREGATED, DECODE, "phase"),
            (Role.PREFILL, {"prefill": w.PrefillPhase()}, "prefill.transfer_id"),
            (Role.DECODE, {"decode": w.DecodePhase(transfer_id="t")}, "decode.producer_addresses"),
        ],
    )
    async def test_a_phase_that_the_role_does_not_take_is_refused(
        self, role: Role, phase: dict[str, Any], field: str
    ) -> None:
        async with running_worker(role) as server, FakeRouter(server) as router:
            await router.submit(1, **phase)
            assert error_of(await router.finish(1)) == ("invalid_value", field)
            await router.submit(2)
            assert (await router.finish(2))[-1].finish_reason is FinishReason.LENGTH

    @pytest.mark.parametrize(
        ("change", "field"),
        [
            ({"aggregated": None}, "phase"),
            ({"request_id": ""}, "request_id"),
            ({"prompt_token_ids": []}, "prompt_token_ids"),
            ({"prompt_token_ids": [1 << 31]}, "prompt_token_ids"),
            ({"sampling": c.SamplingParams()}, "max_tokens"),
            ({"sampling": c.SamplingParams(max_tokens=4, top_p=7.0)}, "top_p"),
            ({"sampling": c.SamplingParams(max_tokens=4, temperature=float("nan"))}, "temperature"),
            ({"sampling": c.SamplingParams(max_tokens=4, stop=[""])}, "stop"),
        ],
    )
    async def test_a_malformed_request_ends_alone_and_by_name(
        self, change: dict[str, Any], field: str
    ) -> None:
        values: dict[str, Any] = {
            "stream_id": 1,
            "request_id": "request",
            "prompt_token_ids": [20, 21],
            "sampling": wire.sampling_to_pb(PLAIN),
            "aggregated": w.AggregatedPhase(),
            **change,
        }
        async with running_worker() as server, FakeRouter(server) as router:
            await router.submit(9, replace(PLAIN, max_tokens=50))
            await router.send(w.Command(submit=w.Submit(**values)))
            assert error_of(await router.finish(1)) == ("invalid_value", field)
            assert len(token_ids(await router.finish(9))) == 50

    async def test_a_stream_id_that_is_in_use_ends_with_an_error(self) -> None:
        async with running_worker() as server, FakeRouter(server) as router:
            engine_of(server).faults = FakeFaults(stalled=True)
            await router.submit(1, LONG)
            await router.submit(1, LONG)
            assert error_of(await router.finish(1)) == ("invalid_value", "stream_id")
            await router.until_empty()

    @pytest.mark.parametrize("command", [w.Command(), w.Command(hello=w.Hello(router_id="r"))])
    async def test_a_command_of_no_request_ends_the_stream(self, command: w.Command) -> None:
        async with running_worker() as server, FakeRouter(server) as router:
            await router.submit(1, LONG)
            await router.send(command)
            assert code_of(await router.ended) == "invalid_value"

    async def test_an_engine_that_raises_costs_one_request(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with running_worker() as server, FakeRouter(server) as router:
            with monkeypatch.context() as patch:
                patch.setattr(FakeEngine, "submit", lambda *_: 1 / 0)
                await router.submit(1)
                assert error_of(await router.finish(1)) == ("internal_error", "")
            await router.submit(2)
            assert (await router.finish(2))[-1].error is None


class TestRenewals:
    @pytest.fixture(autouse=True)
    def _router_is_never_slow(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(registration, "_RPC_S", WAIT_S)

    async def test_the_link_of_the_router_takes_renewals_and_calls_those_without_a_link(
        self,
    ) -> None:
        registry = FakeRegistry(lease_s=3000.0, router_id="router-1")
        async with running_worker(registry=registry) as server:
            await server.routers.renewed()
            async with FakeRouter(server, "another"), FakeRouter(server) as router:
                calls = len(registry.renewals)
                server.readiness.set_unhealthy("hot")
                await server.routers.renewed()
                await router.until(lambda: router.renewals)
                assert router.renewals[-1].unhealthy == "hot"
                assert router.renewals[-1].worker_id == server.info.worker_id
                assert len(registry.renewals) == calls > 0
            await registry.until(lambda: registry.renewals[-1].number > router.renewals[-1].number)

    @pytest.mark.parametrize("lease_s", [0.2, 3000.0], ids=["mute", "closed"])
    async def test_a_renewal_without_an_acknowledgement_is_repeated_by_a_call(
        self, lease_s: float
    ) -> None:
        """The router's link says nothing, or it ends."""
        registry = FakeRegistry(lease_s=lease_s, router_id="router-1")
        async with running_worker(registry=registry) as server:
            router = await FakeRouter(server, is_mute=True).__aenter__()
            server.routers.renew()
            await router.until(lambda: router.renewals)
            if lease_s > 1.0:
                await router.close()
            number = router.renewals[0].number
            await registry.until(lambda: number in [x.number for x in registry.renewals])
            if lease_s < 1.0:
                await router.close()

    async def test_a_router_of_an_older_version_gets_calls(self) -> None:
        registry = FakeRegistry(lease_s=3000.0)
        async with running_worker(registry=registry) as server, FakeRouter(server) as router:
            await server.routers.renewed()
            assert registry.renewals
            assert not router.renewals


class TestStatusAndDrain:
    async def test_drain_lets_streams_end_and_refuses_those_of_routers_that_know(self) -> None:
        registry, step = FakeRegistry(), FakeSettings(step_s=0.002)
        async with (
            running_worker(registry=registry, timing=step) as server,
            FakeRouter(server) as router,
        ):
            await router.submit(1, replace(PLAIN, max_tokens=40))
            await router.until(lambda: router.deltas.get(1))
            registry.answers.clear()
            drain = asyncio.create_task(router.drain(WAIT_S))
            await registry.until(lambda: registry.renewals and registry.renewals[-1].draining)
            await router.submit(2)
            await router.until(lambda: router.deltas.get(2))
            assert router.deltas[2][0].error is None
            registry.answers.set()
            for stream_id in itertools.count(3):
                await router.submit(stream_id)
                if (await router.finish(stream_id))[-1].error is not None:
                    break
            assert error_of(router.deltas[stream_id]) == ("unavailable", "")
            assert len(token_ids(await router.finish(1))) == 40
            assert len(token_ids(await router.finish(2))) == PLAIN.max_tokens
            assert (await drain).drained

    async def test_a_router_that_does_not_answer_holds_up_no_drain(self) -> None:
        registry, timing = FakeRegistry(), DrainTiming(announce_s=0.05)
        worker = running_worker(registry=registry, drain_timing=timing)
        async with worker as server, FakeRouter(server) as router:
            registry.answers.clear()
            assert (await router.drain(WAIT_S)).drained
            await router.submit(1)
            assert error_of(await router.finish(1)) == ("unavailable", "")
            registry.answers.set()

    async def test_drain_waits_for_held_blocks(self) -> None:
        async with running_worker(Role.PREFILL) as server, FakeRouter(server) as router:
            await router.submit(1, prefill=w.PrefillPhase(transfer_id="t"))
            await router.finish(1)
            drain = asyncio.create_task(router.drain(WAIT_S))
            async with asyncio.timeout(WAIT_S):
                while not (await router.status()).draining:
                    pass
            assert (await router.status()).ledger.leased_blocks == 1
            assert not drain.done()
            await router.cancel(1)
            assert await drain == w.DrainResponse(drained=True, ledger=w.KvLedger())

    async def test_drain_frees_held_blocks_that_are_not_fetched_in_time(self) -> None:
        worker = running_worker(Role.PREFILL, drain_timing=DrainTiming(move_s=0.05))
        async with worker as server, FakeRouter(server) as router:
            await router.submit(1, prefill=w.PrefillPhase(transfer_id="t"))
            await router.finish(1)
            reply = await router.drain(0.0)
            assert reply.drained
            assert server.service.ledger().is_empty
            # Another drain finds nothing, and afterwards it can be given work again.
            assert (await router.drain(0.0)).drained
            await server.readiness.undrain()
            assert not (await router.status()).draining

    @pytest.mark.parametrize("timeout_s", [WAIT_S, 0.0], ids=["waits", "moves"])
    async def test_an_undone_drain_ends_at_once(self, timeout_s: float) -> None:
        worker = running_worker(drain_timing=DrainTiming(move_s=WAIT_S))
        async with worker as server, FakeRouter(server) as router:
            await router.begin(1)
            draining = asyncio.create_task(router.drain(timeout_s))
            intake = server.intake
            async with asyncio.timeout(WAIT_S):
                while not intake.is_draining or intake.is_moving == bool(timeout_s):
                    await router.status()
            await server.readiness.undrain()
            assert not (await draining).drained
            await router.cancel(1)

    async def test_a_drain_time_that_makes_no_sense_is_refused(self) -> None:
        async with running_worker() as server, FakeRouter(server) as router:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await router.drain(float("nan"))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


class TestCancels:
    """The worker holds no stream, block or task, whoever disconnects."""

    async def test_a_cancelled_stream_sends_nothing_more_and_others_continue(self) -> None:
        async with running_worker(timing=SLOW) as server, FakeRouter(server) as router:
            await router.begin(1)
            await router.submit(2, replace(PLAIN, max_tokens=30))
            for stream_id in (1, 1, 99):
                await router.cancel(stream_id)
            assert len(token_ids(await router.finish(2))) == 30
            assert router.deltas[1][-1].finish_reason is None
            await router.until_empty()

    async def test_a_worker_that_stops_with_work_open_ends_the_streams(self) -> None:
        registry = FakeRegistry()
        async with running_worker(registry=registry, timing=SLOW) as server:
            async with FakeRouter(server) as router:
                await router.begin(1)
                await server.stop()
                await router.ended
            assert registry.left == [server.info.worker_id]
            assert server.service.open_streams == 0


@pytest.fixture
async def prefill() -> AsyncIterator[tuple[WorkerIntake, DrainManager]]:
    intake = WorkerIntake(Role.PREFILL)
    worker = WorkerService(fake_engine("e"), intake)
    drains = DrainManager(intake, worker, Registrations((), OpenLinks()))
    await worker.start()
    yield intake, drains
    drains.close()
    await worker.close()


class TestRole:
    async def test_a_role_change_is_kept_or_undone(
        self, prefill: tuple[WorkerIntake, DrainManager]
    ) -> None:
        intake, drains = prefill
        assert await drains.change_role(Role.DECODE, 1.0) == 0
        assert (intake.role, intake.role_state) == (Role.DECODE, RoleChangeState.PROVING)
        assert intake.is_draining
        assert drains.settle_role(keep=True)
        assert (intake.role, intake.role_state) == (Role.DECODE, RoleChangeState.SERVING)
        await drains.change_role(Role.PREFILL, 1.0)
        assert drains.settle_role(keep=False)
        assert (intake.role, intake.role_state) == (Role.DECODE, RoleChangeState.SERVING)
        assert not drains.settle_role(keep=True)

    async def test_a_change_that_cannot_be_is_refused(
        self, prefill: tuple[WorkerIntake, DrainManager]
    ) -> None:
        _, drains = prefill
        for role in (Role.PREFILL, Role.AGGREGATED):
            with pytest.raises(InvalidRequest):
                await drains.change_role(role, 1.0)
        changing = asyncio.create_task(drains.change_role(Role.DECODE, 1.0))
        await asyncio.sleep(0)
        with pytest.raises(Unavailable):
            await drains.change_role(Role.DECODE, 1.0)
        await changing

    async def test_an_unsettled_role_change_is_undone(self) -> None:
        timing = DrainTiming(settle_s=0.05)
        async with Cluster(prefill=2, decode=1, engine=fake(timing)) as cluster:
            worker = cluster.workers["prefill-0"]
            await worker.drains.change_role(Role.DECODE, 1.0)
            assert worker.info.role is Role.DECODE
            await wait_until(lambda: worker.intake.role_state is RoleChangeState.SERVING)
            await cluster.until_state("prefill-0", "ready")
            assert worker.info.role is Role.PREFILL


class TestFailures:
    async def test_a_dead_engine_ends_every_stream_and_is_reported(self) -> None:
        async with running_worker(timing=SLOW) as server, FakeRouter(server) as router:
            await router.begin(1)
            engine_of(server).crash()
            assert error_of(await router.finish(1))[0] == "worker_failed"
            assert server.service.failed.done()
            await router.submit(2)
            assert error_of(await router.finish(2))[0] == "unavailable"

    async def test_a_router_that_does_not_read_is_dropped_and_its_work_cancelled(self) -> None:
        async with running_worker(max_unsent_bytes=1 << 14) as server:
            deaf = FakeRouter(server, "deaf")
            await deaf.open()
            await deaf.hello(server.instance_id)
            await deaf.until(lambda: deaf.frames)
            deaf.transport.pause_reading()
            engine_of(server).faults = FakeFaults(stalled=True)
            for stream_id in range(50):
                await deaf.submit(stream_id, replace(LONG, logprobs=20))
            async with FakeRouter(server, "listening") as router:
                await router.until_open(50)
                engine_of(server).faults = FakeFaults()
                await router.until_empty()
                await router.submit(1)
                assert len(token_ids(await router.finish(1))) == PLAIN.max_tokens
            await deaf.close()


CHAT = w.ChatPrompt(
    messages_json='[{"role": "user", "content": [{"type": "text", "text": "what is"},'
    ' {"type": "image"}, {"type": "text", "text": "?"}]}]'
)
IMAGES = FakeSettings(max_images=2)


async def test_a_rendered_image_decides_the_answer() -> None:
    async with running_worker(timing=IMAGES) as server, FakeRouter(server) as router:
        answers = []
        for number, data in enumerate((b"\x89PNG red", b"\x89PNG blue", b"\x89PNG red")):
            image = w.EncodedImage(data=data)
            rendered = await router.render(w.RenderRequest(chat=CHAT, images=[image]))
            media = rendered.media
            await router.submit(number, tokens=rendered.prompt_token_ids, media=media)
            answers.append(token_ids(await router.finish(number)))
            placeholder = rendered.prompt_token_ids[media[0].offset :][: media[0].length]
            assert set(placeholder) == {IMAGE_TOKEN}
    assert answers[0] == answers[2] != answers[1]


@pytest.mark.parametrize(
    ("images", "field"),
    [
        ([b"GIF89a", b"text"], "images[1]"),
        ([b"GIF89a"], "images"),
        ([b"GIF89a"] * 3, "images"),
    ],
)
async def test_a_prompt_whose_images_do_not_fit_is_refused(images: list[bytes], field: str) -> None:
    request = w.RenderRequest(
        text="<image> and <image>", images=[w.EncodedImage(data=x) for x in images]
    )
    async with running_worker(timing=IMAGES) as server, FakeRouter(server) as router:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await router.render(request)
    error = rpc.error_from_rpc(caught.value)
    assert (caught.value.code(), error.field) == (grpc.StatusCode.INVALID_ARGUMENT, field)


@pytest.mark.parametrize(
    ("chat", "field"),
    [
        (w.ChatPrompt(), "messages_json"),
        (w.ChatPrompt(messages_json="[" * 100_000), "messages_json"),
        (w.ChatPrompt(messages_json='[{"content": "a"}]'), "messages_json"),
        (w.ChatPrompt(messages_json="[]", tools_json="{}"), "tools_json"),
        (w.ChatPrompt(messages_json="[]", variables_json="[]"), "variables_json"),
    ],
)
async def test_a_conversation_that_is_not_one_is_refused(chat: w.ChatPrompt, field: str) -> None:
    async with running_worker(timing=IMAGES) as server, FakeRouter(server) as router:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await router.render(w.RenderRequest(chat=chat))
    error = rpc.error_from_rpc(caught.value)
    assert (caught.value.code(), error.field) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        f"chat.{field}",
    )


@pytest.mark.parametrize(
    ("timing", "data", "code"),
    [(IMAGES, b"", "transfer_failed"), (FakeSettings(), b"pixels", "invalid_value")],
)
async def test_media_that_the_engine_cannot_compute_are_refused(
    timing: FakeSettings, data: bytes, code: str
) -> None:
    item = w.MediaItem(modality="image", hash="h", length=2, data=data)
    async with running_worker(timing=timing) as server, FakeRouter(server) as router:
        await router.submit(1, tokens=[3, 3, 20], media=[item])
        (last,) = await router.finish(1)
    assert last.error is not None
    assert (last.error.code, last.error.field) == (code, "media")
