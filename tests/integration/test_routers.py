"""Several routers over the same workers: the loss of one, and what each learns of the others."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
from contextlib import AsyncExitStack, chdir
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import aiohttp
import grpc.aio
import pytest

from pdserve import wire
from pdserve.client import Client
from pdserve.config import RouterConfig, parse
from pdserve.demo import MODEL_DIR
from pdserve.errors import Conflict, InvalidRequest, Unavailable
from pdserve.model.tokenizer import ChatMessage, Conversation, Tokenizer, read_files
from pdserve.net import rpc
from pdserve.types import FinishReason, SamplingParams
from pdserve.v1 import generation_pb2 as g
from pdserve.v1 import worker_pb2 as w
from pdserve.v1.generation_pb2_grpc import GenerationStub
from router.api.admin import RegistryService
from router.main import RouterServer
from tests.support.cluster import (
    LEASE_S,
    LONG,
    PLAIN,
    PROMPT,
    WAIT_S,
    Cluster,
    replace_workers,
    under_load,
)
from tests.support.commands import run_cli
from tests.support.processes import router_process, until_workers, worker_process
from tests.support.timeouts import wait_until
from workers.fake.settings import FakeFaults
from workers.link import registration

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from pdserve.client import Delta

SAMPLINGS = {
    "greedy": LONG,
    "seeded": replace(LONG, temperature=1.0, seed=7),
    "logprobs": replace(LONG, logprobs=2),
    "stopped": replace(LONG, stop=("zzzz",)),
}


class Told:
    """The deltas of one request."""

    def __init__(self) -> None:
        self.token_ids: dict[int, list[int]] = {}
        self.texts: dict[int, str] = {}
        self.logprobs = 0
        self.finished: list[int] = []
        self.last: Delta | None = None

    @property
    def tokens(self) -> int:
        return sum(len(x) for x in self.token_ids.values())

    async def follow(self, deltas: AsyncIterator[Delta]) -> Told:
        async for delta in deltas:
            self.token_ids.setdefault(delta.index, []).extend(delta.token_ids)
            self.texts[delta.index] = self.texts.get(delta.index, "") + delta.text
            self.logprobs += len(delta.logprobs)
            if delta.finish_reason is not None:
                self.finished.append(delta.index)
            self.last = delta
        return self


def check(cluster: Cluster, name: str, told: Told) -> None:
    """Assert that the answer is complete and has no token twice."""
    sampling = SAMPLINGS[name]
    assert sorted(told.finished) == list(range(sampling.n))
    if sampling.n == 1 or sampling.seed is not None:
        for i, token_ids in told.token_ids.items():
            expected = cluster.expected(PROMPT, sampling.of_choice(i))
            assert token_ids == expected.token_ids, name
            assert told.texts[i] == expected.text, name
    assert told.last is not None
    assert told.last.usage is not None
    assert told.last.usage.completion_tokens == told.tokens == sampling.n * sampling.max_tokens
    if sampling.logprobs is not None:
        assert told.logprobs == told.tokens


async def http_events(
    url: str, body: dict[str, Any], headers: dict[str, str]
) -> AsyncIterator[dict[str, Any]]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/completions", json=body, headers=headers) as response,
    ):
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])


async def test_a_killed_router_costs_its_streams_a_pause() -> None:
    slow = {"step_s": 0.002}
    async with (
        router_process() as other,
        Cluster(prefill=1, decode=2, engine_args=slow, other_routers=[other.grpc]) as cluster,
        Client([other.grpc, cluster.grpc]) as client,
    ):
        await until_workers(other.grpc, 3)
        tolds = {name: Told() for name in SAMPLINGS}
        following = [
            asyncio.create_task(told.follow(client.generate(PROMPT, SAMPLINGS[name])))
            for name, told in tolds.items()
        ]
        # And one over HTTP, which does by hand what the client does.
        body: dict[str, Any] = {"model": "pdserve-demo", "prompt": PROMPT, "max_tokens": 400}
        body |= {"temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True}
        key = {"idempotency-key": "one-and-the-same"}
        text, token_ids = "", []

        async def take(url: str, **more: Any) -> None:
            nonlocal text
            async for event in http_events(url, {**body, **more}, key):
                (choice,) = event["choices"]
                text += choice["text"]
                token_ids.extend(choice["token_ids"])

        over_http = asyncio.create_task(take(other.http))
        await wait_until(lambda: min(len(token_ids), *(x.tokens for x in tolds.values())) > 20)
        await other.kill()
        with pytest.raises(aiohttp.ClientError):
            await over_http
        assert 20 < len(token_ids) < LONG.max_tokens
        await take(f"http://{cluster.http}", resume_token_ids=token_ids[:])
        expected = cluster.expected(PROMPT, LONG)
        assert (token_ids, text) == (expected.token_ids, expected.text)
        await asyncio.gather(*following)
        for name, told in tolds.items():
            check(cluster, name, told)


async def test_routers_and_workers_are_restarted_under_load_and_no_request_fails() -> None:
    values: dict[str, Any] = {"http": {"port": 0}, "grpc": {"port": 0}, "lease_s": LEASE_S}
    values["stop_grace_s"] = 0.0
    other = RouterServer(parse(RouterConfig, values))
    address = (await other.start()).grpc
    values["grpc"] = {"port": int(address.rpartition(":")[2])}
    try:
        async with (
            Cluster(
                prefill=2, decode=2, engine_args={"step_s": 0.003}, other_routers=[address]
            ) as cluster,
            Client([cluster.grpc, address]) as client,
        ):
            await until_workers(address, 4)
            async with under_load(cluster, 3, client=client) as counts:
                await wait_until(lambda: all(counts))
                await cluster.router.stop()
                await cluster.start_router()
                await until_workers(cluster.grpc, 4)
                await other.stop()
                other = RouterServer(parse(RouterConfig, values))
                await other.start()
                await until_workers(address, 4)
                await replace_workers(cluster, ["prefill-0", "prefill-1", "decode-0", "decode-1"])
                before = counts[:]
                await wait_until(lambda: all(x > y for x, y in zip(counts, before, strict=True)))
    finally:
        await other.stop()


async def test_workers_follow_the_routers_of_a_file_and_no_answer_is_lost(tmp_path: Path) -> None:
    """The file names another router under load, and the former one stops."""
    listed, replaced = tmp_path / "routers", tmp_path / "routers.new"
    listed.write_text("")
    common: dict[str, Any] = {"routers": [f"file:{listed}"], "engine_args": "{step_s: 0.001}"}
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        for role, name in (("prefill", "p-0"), ("decode", "d-0"), ("decode", "d-1")):
            await enter(worker_process(role=role, worker_id=name, **common))
        former, later = (
            await enter(router_process(stop_grace_s=WAIT_S)),
            await enter(router_process()),
        )
        listed.write_text(former.grpc)
        await until_workers(former.grpc, 3)
        client = await enter(Client([former.grpc, later.grpc]))
        answers: list[list[int]] = []
        is_over = asyncio.Event()

        async def ask() -> None:
            while not is_over.is_set():
                told = await Told().follow(client.generate(PROMPT, LONG))
                answers.append(told.token_ids[0])

        asking = [asyncio.create_task(ask()) for _ in range(4)]
        replaced.write_text(later.grpc)
        replaced.rename(listed)
        await until_workers(later.grpc, 3)
        await former.end()
        is_over.set()
        await asyncio.gather(*asking)
        undisturbed = await Told().follow(client.generate(PROMPT, LONG))
        assert undisturbed.tokens == LONG.max_tokens
        assert answers == [undisturbed.token_ids[0]] * len(answers)


async def test_a_router_sees_the_room_that_another_has_given_away() -> None:
    async with router_process() as other:
        args = {"step_s": 0.001, "total_blocks": 32, "block_size": 16}
        async with (
            Cluster(prefill=1, decode=1, engine_args=args, other_routers=[other.grpc]) as cluster,
            Client(other.grpc) as elsewhere,
        ):
            await until_workers(other.grpc, 2)
            cluster.faults("decode-0", FakeFaults(stall_at_step=30))
            theirs = asyncio.create_task(Told().follow(elsewhere.generate(PROMPT, LONG)))
            await wait_until(lambda: cluster.busy("decode-0"))
            cluster.workers["decode-0"].routers.renew()
            member = cluster.router.fleet.members["decode-0"]
            await wait_until(lambda: member.reported.foreign_blocks)
            ours = asyncio.create_task(cluster.ask(PROMPT, LONG))
            await wait_until(lambda: cluster.router.requests.admission.queued)
            assert member.placed.reserved_blocks == 0
            cluster.faults("decode-0", FakeFaults())
            expected = cluster.expected(PROMPT, LONG).token_ids
            assert (await theirs).token_ids[0] == expected
            cluster.workers["decode-0"].routers.renew()  # no test waits for a renewal
            assert (await ours).token_ids == expected


class TestLeases:
    async def test_workers_with_a_link_renew_without_calls(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        called: list[str] = []
        renew = RegistryService.Renew

        async def count(service: RegistryService, request: w.RenewRequest, context: Any) -> Any:
            called.append(request.worker_id)
            return await renew(service, request, context)

        monkeypatch.setattr(RegistryService, "Renew", count)
        monkeypatch.setattr(registration, "_RPC_S", WAIT_S)
        async with Cluster(prefill=1, decode=1) as cluster:
            members = cluster.router.fleet.members
            before = {name: member.renewals for name, member in members.items()}
            called.clear()
            for worker in cluster.workers.values():
                await worker.routers.renewed()
            assert called == []
            assert all(members[name].renewals > number for name, number in before.items())

    async def test_a_silent_worker_is_lost_and_returns(self) -> None:
        async with (
            Cluster(aggregated=1, router={"lease_s": 1.0}) as cluster,
            worker_process(worker_id="other", routers=f"[{cluster.grpc}]") as other,
        ):
            members = cluster.router.fleet.members

            async def until(state: str) -> None:
                await wait_until(lambda: "other" in members and members["other"].state == state)

            await until("ready")
            other.process.send_signal(signal.SIGSTOP)
            await until("lost")
            other.process.send_signal(signal.SIGCONT)
            await until("ready")


class TestResume:
    """The other router keeps serving."""

    async def test_a_key_has_one_request_at_a_time_and_moves_to_the_resuming_client(self) -> None:
        async with Cluster(prefill=1, decode=1) as cluster:
            cluster.faults("decode-0", FakeFaults(stall_at_step=30))
            told = Told()
            first = asyncio.create_task(
                told.follow(cluster.client.generate(PROMPT, LONG, request_id="r"))
            )
            await wait_until(lambda: told.tokens > 20)
            with pytest.raises(Conflict):
                await cluster.ask(PROMPT, LONG, request_id="r")
            assert not first.done()
            had, text = told.token_ids[0][:], told.texts[0]
            rest = asyncio.create_task(resume(cluster, had, request_id="r"))
            with pytest.raises(Conflict, match="by another connection"):
                await first
            cluster.faults("decode-0", FakeFaults())
            messages = await rest
            token_ids = had + [x for m in messages for x in m.token_ids]
            expected = cluster.expected(PROMPT, LONG)
            assert token_ids == expected.token_ids
            assert text + "".join(m.text for m in messages) == expected.text
            usage = messages[-1].usage
            assert usage.completion_tokens == LONG.max_tokens
            assert usage.prompt_tokens == len(PROMPT)
            assert messages[-1].receipt.prefill_worker == "prefill-0"

    @pytest.mark.parametrize("had", [1, 39, 40])
    async def test_the_rest_is_what_is_missing_however_little(self, had: int) -> None:
        async with Cluster(prefill=1, decode=1) as cluster:
            expected = cluster.expected(PROMPT, PLAIN).token_ids
            messages = await resume(cluster, expected[:had], PLAIN)
            assert [x for m in messages for x in m.token_ids] == expected[had:]
            assert wire.finish_from_pb(messages[-1].finish_reason) is FinishReason.LENGTH
            assert messages[-1].usage.completion_tokens == PLAIN.max_tokens

    @pytest.mark.parametrize(
        ("token_ids", "sampling", "message"),
        [
            ([1] * 41, PLAIN, "has 41 tokens; the answer may have 40"),
            ([1 << 30], PLAIN, "token id"),
            ([1], replace(PLAIN, n=2), "requires n to be 1"),
        ],
    )
    async def test_contradictory_options_are_refused(
        self, token_ids: list[int], sampling: SamplingParams, message: str
    ) -> None:
        async with Cluster(aggregated=1) as cluster:
            with pytest.raises(InvalidRequest, match=message) as caught:
                await resume(cluster, token_ids, sampling)
            assert caught.value.field == "resume_token_ids"


async def resume(
    cluster: Cluster, had: list[int], sampling: SamplingParams = LONG, *, request_id: str = ""
) -> list[g.GenerateResponse]:
    """Asks for the rest of an answer; raises the router's error."""
    request = g.GenerateRequest(
        token_ids=g.TokenIds(ids=PROMPT),
        sampling=wire.sampling_to_pb(sampling),
        request_id=request_id,
        resume_token_ids=had,
    )
    async with rpc.open_channel(cluster.grpc) as channel:
        try:
            return [m async for m in GenerationStub(channel).Generate(request, timeout=WAIT_S)]
        except grpc.aio.AioRpcError as error:
            raise rpc.error_from_rpc(error) from error


async def test_a_client_gives_up_when_all_routers_are_away_for_too_long() -> None:
    async with Client(["127.0.0.1:1", "127.0.0.1:2"], patience_s=0.2) as client:
        with pytest.raises(Unavailable):
            await Told().follow(client.generate(PROMPT, PLAIN))


async def test_a_router_without_the_model_has_its_tokenizer_from_the_worker(tmp_path: Path) -> None:
    """The model is at a relative path, which only the worker can read."""
    shutil.copytree(MODEL_DIR, tmp_path / "model")
    async with AsyncExitStack() as stack:
        router = await stack.enter_async_context(router_process())
        stack.enter_context(chdir(tmp_path))
        worker = worker_process(model="model", model_names="[m]", routers=f"[{router.grpc}]")
        await stack.enter_async_context(worker)
        http = await stack.enter_async_context(aiohttp.ClientSession(router.http))
        await until_workers(router.grpc, 1)
        tokenizer = Tokenizer.load(read_files(MODEL_DIR))
        message = {"role": "user", "content": "What is prefill?"}
        chat = tokenizer.encode_chat(Conversation([ChatMessage(**message)]))
        for path, prompt, wanted in (
            ("/v1/completions", {"prompt": "What is"}, tokenizer.encode("What is")),
            ("/v1/chat/completions", {"messages": [message]}, chat),
        ):
            body = {"model": "m", "max_tokens": 2, **prompt}
            async with http.post(path, json=body) as answer:
                assert answer.status == 200, await answer.text()
                usage = (await answer.json())["usage"]
            assert usage["prompt_tokens"] == len(wanted)


async def test_status_shows_where_routers_and_workers_run() -> None:
    async with (
        router_process(**{"topology.zone": "b"}) as router,
        worker_process(
            routers=f"[{router.grpc}]", **{"topology.region": "eu", "topology.zone": "a"}
        ),
    ):
        await until_workers(router.grpc, 1)
        told = await asyncio.to_thread(run_cli, "status", "--grpc", router.grpc)
    assert f"workers of {router.grpc} in b" in told.stdout
    assert "eu/a" in told.stdout
