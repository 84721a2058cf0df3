"""Weights that change while a model is served, over a router and fake engines. Each token of a fake
engine depends on its weights and on the KV before it, so a token from KV of other weights is wrong
(tests of real reloads: tests/e2e/test_weights_reload.py)."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec
import pytest

from pdserve.cli.verify.endpoint import Endpoint
from pdserve.cli.verify.outcome import Passed
from pdserve.cli.verify.report import run_check
from pdserve.cli.verify.weights import WEIGHTS_CHECKS
from pdserve.errors import InvalidRequest, Unavailable
from pdserve.model.weight_deltas import find_files, read_weights, write_delta
from pdserve.types import FinishReason, ModelWeights, QuiesceMode
from tests.support.checkpoints import assert_spans, checkpoint, continued, post, trained
from tests.support.cluster import LONG, PLAIN, PROMPT, Answer, Cluster, Trigger
from tests.support.timeouts import WAIT_S, wait_until
from workers.fake.settings import FakeFaults

if TYPE_CHECKING:
    from pathlib import Path

    from pdserve.model.weight_deltas import WeightFiles


async def streamed(cluster: Cluster, path: str, **body: object) -> list[dict[str, Any]]:
    """Return the events of a streamed answer."""
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=WAIT_S)) as session,
        session.post(f"http://{cluster.http}{path}", json={**body, "stream": True}) as reply,
    ):
        lines = (await reply.text()).split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [msgspec.json.decode(x.removeprefix("data: ")) for x in lines[:-2]]


async def asked(cluster: Cluster) -> tuple[asyncio.Task[Answer], Answer]:
    """Send a long request, and return it once it has tokens from decode."""
    trigger, shown = Trigger(20), Answer()
    asking = asyncio.create_task(cluster.ask(PROMPT, LONG, on_token=trigger))
    await asyncio.wait_for(trigger.fired.wait(), WAIT_S)
    return asking, shown


async def test_all_workers_take_new_weights_and_each_token_names_them(tmp_path: Path) -> None:
    async with trained(tmp_path, prefill=1, decode=2, engine_args={"prefix_cache": True}) as (
        cluster,
        digests,
    ):
        first = await cluster.ask(PROMPT, PLAIN)
        assert first.receipt is not None
        assert first.receipt.spans == ()  # nobody asks while there is one version
        status, said = await post(
            cluster, "/update_weights", weight_dir=str(tmp_path / "1"), weight_version="step 1"
        )
        assert (status, said["weight_version"]) == (200, "step 1")
        second = await cluster.ask(PROMPT, PLAIN)
        assert second.token_ids != first.token_ids  # nothing of the cached prompt was used
        assert second.usage is not None
        assert second.usage.cached_tokens == 0
        assert_spans(second, {"step 1": digests[1]}, cluster)
        assert second.receipt is not None
        roles = [x.worker.partition("-")[0] for x in second.receipt.spans]
        assert roles == ["prefill", "decode"]  # prefill samples the first token
        again = await cluster.ask(PROMPT, PLAIN)
        assert again.usage is not None
        assert again.usage.cached_tokens > 0
        assert again.token_ids == second.token_ids


async def test_token_ids_in_and_out_have_the_versions_of_their_weights(tmp_path: Path) -> None:
    async with trained(tmp_path, prefill=1, decode=1) as (cluster, digests):
        await post(cluster, "/update_weights", weight_dir=str(tmp_path / "1"))
        sampling = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, "n": 2, "logprobs": 1}
        body = {"token_ids": PROMPT, "sampling_params": sampling, "return_token_ids": True}
        status, whole = await post(cluster, "/inference/v1/generate", **body)
        assert status == 200
        assert whole["prompt_token_ids"] == PROMPT
        expected = continued(cluster, digests[1], (), 12)
        first, second = whole["choices"]
        assert first["token_ids"] == expected
        assert [x["token_id"] for x in first["logprobs"]["content"]] == expected
        for choice in (first, second):
            spans = choice["weight_versions"]
            assert [(x["version"], x["end"]) for x in spans][-1] == ("1", 12)
            assert spans[0]["start"] == 0
        events = await streamed(cluster, "/inference/v1/generate", **body)
        for choice in (first, second):
            pieces = [x for e in events for x in e["choices"] if x["index"] == choice["index"]]
            assert [t for x in pieces for t in x["token_ids"]] == choice["token_ids"]
            versions = [x["weight_versions"] for x in pieces if x["weight_versions"]]
            assert [[y["version"] for y in x][-1] for x in versions] == ["1"]
        sampling["stream"] = True
        status, said = await post(cluster, "/inference/v1/generate", **body)
        assert (status, said["error"]["param"]) == (400, "sampling_params.stream")


async def test_kept_answers_continue_with_the_new_weights_computed_again(tmp_path: Path) -> None:
    async with trained(tmp_path, prefill=1, decode=1, hold_s=0.4) as (cluster, digests):
        asking, _ = await asked(cluster)
        await post(cluster, "/pause", mode="keep")
        entries = await cluster.entries()
        assert {x.state for x in entries.values()} == {"updating"}
        assert "its weights change" in entries["decode-0"].reason
        waiting = asyncio.create_task(cluster.ask(PROMPT, PLAIN))
        await wait_until(lambda: cluster.router.requests.admission.queued == 1)
        # Longer than the hold of the workers, which the router renews.
        await asyncio.sleep(0.6)
        status, _ = await post(cluster, "/update_weights", weight_dir=str(tmp_path / "1"))
        assert status == 200
        await asyncio.sleep(0.6)  # the pause goes on after the update
        assert not waiting.done()
        await post(cluster, "/resume")
        answer = await asking
        assert len(answer.token_ids) == LONG.max_tokens
        assert {x.version for x in answer.receipt.spans} == {"default", "1"}  # type: ignore[union-attr]
        assert_spans(answer, {"default": "", "1": digests[1]}, cluster)
        assert_spans(await waiting, {"1": digests[1]}, cluster)


async def test_aborted_answers_end_with_what_they_have(tmp_path: Path) -> None:
    async with trained(tmp_path, prefill=1, decode=1) as (cluster, _):
        asking, _ = await asked(cluster)
        path = str(tmp_path / "1")
        status, _ = await post(
            cluster, "/update_weights_from_disk", model_path=path, abort_all_requests=True
        )
        assert status == 200
        answer = await asking
        assert answer.finish_reason is FinishReason.ABORT
        whole = cluster.expected(PROMPT, LONG).token_ids
        assert answer.token_ids == whole[: len(answer.token_ids)]
        assert 20 <= len(answer.token_ids) < len(whole)


async def test_answers_that_must_not_mix_weights_end_with_what_they_have(tmp_path: Path) -> None:
    async with trained(tmp_path, aggregated=2, stale_kv="abort") as (cluster, digests):
        asking, _ = await asked(cluster)
        (name,) = cluster.busy(*cluster.workers)
        cluster.faults(name, FakeFaults(stalled=True))  # so that no answer ends before the update
        body = {"weight_dir": str(tmp_path / "1"), "mode": "keep"}
        assert (await post(cluster, "/update_weights", **body))[0] == 200
        first = await asking
        cluster.faults(name, FakeFaults())
        # The other worker gets newer weights, then that of the answer dies.
        asking, _ = await asked(cluster)
        (name,) = cluster.busy(*cluster.workers)
        cluster.faults(name, FakeFaults(stalled=True))
        (other,) = cluster.workers.keys() - {name}
        intake = cluster.workers[other].intake
        intake.weights = replace(intake.weights, sequence=7, version="7")
        cluster.workers[other].routers.renew()
        await wait_until(lambda: cluster.router.fleet.members[name].is_outdated)
        await cluster.kill(name)
        second = await asking
        for answer, digest in ((first, ""), (second, digests[1])):
            assert answer.finish_reason is FinishReason.ABORT
            assert len(answer.token_ids) >= 20
            assert answer.token_ids == continued(cluster, digest, (), len(answer.token_ids))


@pytest.mark.parametrize(
    ("path", "status", "said"),
    [
        ("missing", 400, "has no .safetensors files"),
        ("cut", 400, "is not complete"),
        ("../elsewhere", 403, "router.weights.directories"),
    ],
)
async def test_a_refusal_leaves_all_workers_with_their_weights(
    tmp_path: Path, path: str, status: int, said: str
) -> None:
    async with trained(tmp_path, prefill=1, decode=1) as (cluster, _):
        checkpoint(tmp_path / "cut", 4)
        cut = tmp_path / "cut" / "model.safetensors"
        cut.write_bytes(cut.read_bytes()[:-1])
        found, body = await post(cluster, "/update_weights", weight_dir=f"{tmp_path}/{path}")
        assert found == status
        assert said in str(body)
        await cluster.until_ready()
        assert (await cluster.ask(PROMPT, PLAIN)).token_ids == (
            cluster.expected(PROMPT, PLAIN).token_ids
        )


async def test_a_worker_that_was_away_joins_with_the_newest_weights(tmp_path: Path) -> None:
    async with trained(tmp_path, prefill=1, decode=2) as (cluster, digests):
        # One worker dies when it loads the weights. The others serve them.
        cluster.faults("decode-0", FakeFaults(fail_weights=True))
        status, _ = await post(cluster, "/update_weights", weight_dir=str(tmp_path / "1"))
        assert status == 200
        shown = await cluster.metrics()
        for line in (
            'weights_updates_total{model="pdserve-demo",result="done"} 1.0',
            'weights_update{model="pdserve-demo"} 1.0',
            'weights_laggards{model="pdserve-demo"} 1.0',
        ):
            assert f"pdserve_{line}" in shown
        entry = (await cluster.entries())["decode-1"]
        assert (entry.state, entry.weights_version) == ("ready", "1")
        answer = await cluster.ask(PROMPT, PLAIN)
        assert_spans(answer, {"1": digests[1]}, cluster)
        await cluster.kill("decode-0")
        await cluster.add("decode-0")
        await cluster.until_ready()  # repaired
        assert cluster.workers["decode-0"].intake.weights.digest == digests[1]
        await cluster.kill("decode-1")
        answer = await cluster.ask(PROMPT, PLAIN)
        assert answer.receipt is not None
        assert answer.receipt.decode_worker == "decode-0"
        assert_spans(answer, {"1": digests[1]}, cluster)


async def test_a_worker_without_the_newest_weights_refuses_requests_for_them(
    tmp_path: Path,
) -> None:
    async with trained(tmp_path, aggregated=1) as (cluster, _):
        intake = cluster.workers["aggregated-0"].intake
        # Routers do not know it yet: the next report is a third of a lease away.
        intake.weights = replace(intake.weights, sequence=7, version="7", digest="x")
        asking = asyncio.create_task(cluster.ask(PROMPT, PLAIN))
        await wait_until(lambda: cluster.router.requests.admission.running == 1)
        cluster.workers["aggregated-0"].routers.renew()
        answer = await asyncio.wait_for(asking, WAIT_S)
        assert answer.receipt is not None
        assert {x.version for x in answer.receipt.spans} == {"7"}


async def test_workers_resume_by_themselves_when_their_router_is_gone(tmp_path: Path) -> None:
    async with trained(tmp_path, aggregated=1) as (cluster, _):
        updater = cluster.workers["aggregated-0"].weights
        await updater.quiesce("gone", "router elsewhere", 0.2, QuiesceMode.KEEP, 0.0)
        status, said = await post(cluster, "/update_weights", weight_dir=str(tmp_path / "1"))
        assert status == 503
        assert "router elsewhere is changing the weights" in str(said)
        await cluster.until_ready()
        with pytest.raises(Unavailable, match="the change has ended"):
            await updater.commit("gone", 1.0)
        status, _ = await post(cluster, "/update_weights", weight_dir=str(tmp_path / "1"))
        assert status == 200


async def test_workers_that_loaded_first_wait_for_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with trained(tmp_path, prefill=1, decode=1) as (cluster, _):
        await post(cluster, "/pause", mode="keep")
        may_load, decode = asyncio.Event(), cluster.engine("decode-0")
        load = decode.update_weights

        async def slow(files: WeightFiles) -> None:
            await may_load.wait()
            await load(files)

        monkeypatch.setattr(decode, "update_weights", slow)
        updating = asyncio.create_task(
            post(cluster, "/update_weights", weight_dir=str(tmp_path / "1"))
        )
        prefill = cluster.workers["prefill-0"].weights
        await wait_until(lambda: prefill.weights.version == "1")
        await wait_until(lambda: prefill.resumes_at is not None)
        before = prefill.resumes_at
        assert before is not None
        await cluster.router.weights.hold()
        assert prefill.resumes_at is not None
        assert prefill.resumes_at > before
        # The other one loads, and has no time at which it resumes.
        assert cluster.workers["decode-0"].weights.resumes_at is None
        may_load.set()
        assert (await updating)[0] == 200
        await post(cluster, "/resume")
        await cluster.until_ready()


async def test_a_worker_that_hangs_ends_an_update_once_it_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with trained(tmp_path, prefill=1, decode=1) as (cluster, _):
        is_asked, never = asyncio.Event(), asyncio.Event()

        async def hang(_: WeightFiles) -> str:
            is_asked.set()
            await never.wait()
            return ""

        with monkeypatch.context() as patch:
            patch.setattr(cluster.engine("decode-0"), "check_weights", hang)
            path = str(tmp_path / "1")
            updating = asyncio.create_task(post(cluster, "/update_weights", weight_dir=path))
            await asyncio.wait_for(is_asked.wait(), WAIT_S)
            info = cluster.workers["decode-0"].info
            cluster.router.fleet.deregister(info.worker_id, info.instance_id, failure="it hangs")
            status, said = await asyncio.wait_for(updating, WAIT_S)
            assert (status, "worker decode-0 is lost: it hangs" in str(said)) == (503, True)
        never.set()
        cluster.workers["decode-0"].routers.renew()
        await cluster.until_ready()
        await wait_until(lambda: not cluster.workers["decode-0"].intake.updating)


async def test_a_difference_is_updated_to_like_a_whole_checkpoint(tmp_path: Path) -> None:
    async with trained(tmp_path, prefill=1, decode=1) as (cluster, whole):
        write_delta(tmp_path / "1", tmp_path / "2", tmp_path / "delta")
        digests = {"1": whole[1]}
        for version in ("1", "delta"):
            body = {"weight_dir": str(tmp_path / version), "weight_version": version}
            assert (await post(cluster, "/update_weights", **body))[0] == 200
        files = find_files(tmp_path / "delta", field="path")
        digests["delta"] = read_weights(files, field="path").digest
        assert_spans(await cluster.ask(PROMPT, PLAIN), digests, cluster)
        # A worker that starts has the first weights, and joins through the base.
        await cluster.kill("decode-0")
        await cluster.add("decode-0")
        await cluster.until_ready()
        assert_spans(await cluster.ask(PROMPT, PLAIN), digests, cluster)
        checkpoint(tmp_path / "1", 3)
        status, said = await post(cluster, "/update_weights", weight_dir=str(tmp_path / "delta"))
        assert (status, said["error"]["param"]) == (400, "weights.path")
        assert "it was made for" in said["error"]["message"]
        assert_spans(await cluster.ask(PROMPT, PLAIN), digests, cluster)


async def test_the_checks_of_verify_hold(tmp_path: Path) -> None:
    engine = {"prefix_cache": True}
    async with (
        trained(tmp_path, prefill=1, decode=1, engine_args=engine) as (cluster, _),
        Endpoint.connect(
            f"http://{cluster.http}", key="", tls=True, weights=str(tmp_path / "1")
        ) as endpoint,
    ):
        await endpoint.discover()
        for check in WEIGHTS_CHECKS:
            found = (await run_check(endpoint, check)).outcome
            assert isinstance(found, Passed), found


@pytest.mark.parametrize("stale_kv", ["recompute", "allow"])
async def test_updates_under_load_and_deaths_mix_no_weights(tmp_path: Path, stale_kv: str) -> None:
    shape = {"prefill": 2, "decode": 2, "router": {"retry": {"tokens_per_s": 0}}}
    async with trained(tmp_path, **shape, stale_kv=stale_kv) as (cluster, digests):
        versions, is_over, counts = {"default": ""}, asyncio.Event(), [0] * 8

        async def ask(i: int) -> None:
            while not is_over.is_set():
                answer = await cluster.ask(PROMPT, LONG)
                if answer.receipt is not None and answer.receipt.spans:
                    assert_spans(answer, versions, cluster)
                counts[i] += 1

        asking = [asyncio.create_task(ask(i)) for i in range(8)]
        try:
            for step in range(1, 7):
                name = f"{'prefill' if step % 2 else 'decode'}-0"
                if step % 3 == 0:
                    await cluster.kill(name)
                versions[f"step {step}"] = digests[1 + step % 3]
                mode = "abort" if step % 2 else "keep"
                body = {"weight_dir": str(tmp_path / str(1 + step % 3)), "mode": mode}
                status, _ = await post(
                    cluster, "/update_weights", weight_version=f"step {step}", **body
                )
                assert status == 200
                if step % 3 == 0:
                    await cluster.add(name)
                    await cluster.until_ready()
                before = sum(counts)
                await wait_until(lambda before=before: sum(counts) > before)
        finally:
            is_over.set()
            await asyncio.gather(*asking)
        assert min(counts) > 0


async def test_weights_loaded_in_advance_are_freed_when_the_update_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with trained(tmp_path, prefill=1, decode=1) as (cluster, _):
        decode, held = cluster.engine("decode-0"), []

        async def refuse(files: WeightFiles) -> str:
            held.append(decode.weights.staged == files)
            raise InvalidRequest("not these", field="weights.path")

        monkeypatch.setattr(cluster.engine("prefill-0"), "check_weights", refuse)
        status, _ = await post(cluster, "/update_weights", weight_dir=str(tmp_path / "1"))
        assert (status, held) == (400, [True])
        assert decode.weights.staged is None


async def test_weights_loaded_in_advance_are_freed_when_the_router_is_gone(
    tmp_path: Path,
) -> None:
    async with trained(tmp_path, aggregated=1) as (cluster, _):
        updater, engine = cluster.workers["aggregated-0"].weights, cluster.engine("aggregated-0")
        gone, new = ("gone", "router elsewhere"), ModelWeights(1, "1", str(tmp_path / "1"))
        await updater.prepare(*gone, WAIT_S, new)
        assert engine.weights.staged is not None
        await updater.quiesce(*gone, 0.1, QuiesceMode.KEEP, 0.0)
        await wait_until(lambda: engine.weights.staged is None)
        await cluster.until_ready()


async def test_weights_are_not_loaded_in_advance_while_no_requests_are_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with trained(tmp_path, aggregated=1) as (cluster, _):
        staged = list[object]()

        async def stage(files: WeightFiles) -> None:
            staged.append(files)

        monkeypatch.setattr(cluster.engine("aggregated-0"), "stage_weights", stage)
        await post(cluster, "/pause", mode="keep")
        assert (await post(cluster, "/update_weights", weight_dir=str(tmp_path / "1")))[0] == 200
        await post(cluster, "/resume")
        assert staged == []
        assert (await post(cluster, "/update_weights", weight_dir=str(tmp_path / "2")))[0] == 200
        assert len(staged) == 1


async def test_an_answer_that_leaves_one_worker_begins_on_none_that_is_about_to_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with trained(tmp_path, aggregated=2) as (cluster, _):
        asking, _ = await asked(cluster)
        workers = cluster.workers.values()
        (first,) = [x for x in workers if x.service.open_streams]
        (last,) = [x for x in workers if x is not first]
        quiesce, begun = last.weights.quiesce, list[int]()

        async def late(*stage: Any) -> int:
            await wait_until(lambda: not first.service.open_streams)
            for _ in range(50):  # the router has heard of it, and could place the answer
                await asyncio.sleep(0.002)
            begun.append(last.service.open_streams)
            return await quiesce(*stage)

        monkeypatch.setattr(last.weights, "quiesce", late)
        path = str(tmp_path / "1")
        assert (await post(cluster, "/update_weights", weight_dir=path, mode="keep"))[0] == 200
        await asking
        assert begun == [0]
