"""Answers that keep their KV while the weights change (`stale_kv: allow`), over a router and fake
engines, whose tokens depend on the weights of each position. A real engine:
tests/slow/test_weights_reload.py."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.types import QuiesceMode, StaleKv
from tests.support.checkpoints import assert_spans, post, trained
from tests.support.cluster import LONG, PLAIN, PROMPT, Answer, Cluster, Trigger
from tests.support.timeouts import WAIT_S, wait_until
from workers.fake.settings import FakeFaults

if TYPE_CHECKING:
    from pathlib import Path

_GOES, _STANDS = FakeFaults(), FakeFaults(stalled=True)


class Held:
    """An answer whose worker stands still after some of its tokens, so that it cannot end."""

    def __init__(self, cluster: Cluster) -> None:
        self.shown = Answer()
        self._trigger = Trigger(20)
        asking = cluster.ask(PROMPT, LONG, on_token=self._note, stale_kv=StaleKv.ALLOW)
        self.asking = asyncio.create_task(asking)
        self._cluster = cluster
        self.worker = ""

    def _note(self, answer: Answer) -> None:
        self.shown = answer
        self._trigger(answer)

    async def decodes(self) -> None:
        await asyncio.wait_for(self._trigger.fired.wait(), WAIT_S)
        cluster = self._cluster
        names = [x for x in cluster.workers if not x.startswith("prefill")]
        (self.worker,) = cluster.busy(*names)
        cluster.faults(self.worker, _STANDS)

    async def end(self) -> Answer:
        return await asyncio.wait_for(self.asking, WAIT_S)


async def held(cluster: Cluster) -> Held:
    answer = Held(cluster)
    await answer.decodes()
    return answer


async def pause(cluster: Cluster) -> None:
    status, said = await post(cluster, "/pause", mode="keep")
    assert status == 200, said


async def update(cluster: Cluster, path: Path) -> None:
    """Update the weights, as soon as the router knows which workers are lost."""

    async def is_done() -> bool:
        body = {"weight_dir": str(path), "mode": "keep"}
        return (await post(cluster, "/update_weights", **body))[0] == 200

    await wait_until(is_done)


def kinds(answer: Answer) -> list[tuple[str, str, bool]]:
    """Return version and worker of each span, and whether its tokens attended to older KV."""
    assert answer.receipt is not None
    spans = answer.receipt.spans
    return [(x.version, x.worker, x.stale_kv_tokens > 0) for x in spans]


async def test_an_answer_goes_on_in_its_stream_with_the_kv_that_it_has(tmp_path: Path) -> None:
    engine = {"prefix_cache": True}
    async with trained(tmp_path, prefill=1, decode=1, engine_args=engine) as (cluster, digests):
        answer = await held(cluster)
        await pause(cluster)
        cluster.faults("decode-0", _GOES)
        before = cluster.engine("decode-0").load()
        assert not before.has_work  # so that its silence is not taken for a stall
        for step in (1, 2):
            await update(cluster, tmp_path / str(step))
        assert cluster.engine("decode-0").load() == before  # no step was made
        await post(cluster, "/resume")
        found = await answer.end()
        prefilled, decoded, later = kinds(found)
        assert prefilled == ("default", "prefill-0", False)
        assert decoded == ("default", "decode-0", False)
        assert later == ("2", "decode-0", True)
        assert_spans(found, {"default": "", "2": digests[2]}, cluster)
        assert found.fallbacks == ()
        # Nobody finds its blocks, neither those of before nor of after the update.
        prompt = [*PROMPT, *found.token_ids]
        assert not cluster.workers["decode-0"].service.cache.blocks
        again = await cluster.ask(prompt, PLAIN)
        assert again.usage is not None
        assert again.usage.cached_tokens == 0


async def test_token_ids_have_the_positions_with_older_kv(tmp_path: Path) -> None:
    async with trained(tmp_path, prefill=1, decode=1, stale_kv="allow") as (cluster, _):
        sampling = {"temperature": 0, "max_tokens": 100, "ignore_eos": True}
        engine = cluster.engine("decode-0")
        for step, asked in enumerate((None, "recompute"), 1):
            at = engine.load().progress + 40
            cluster.faults("decode-0", FakeFaults(stall_at_step=at + 1))
            body: dict[str, Any] = {"token_ids": PROMPT, "sampling_params": sampling}
            body |= {} if asked is None else {"stale_kv": asked}
            asking = asyncio.create_task(post(cluster, "/inference/v1/generate", **body))
            await wait_until(lambda at=at: engine.load().progress == at)
            await update(cluster, tmp_path / str(step))
            cluster.faults("decode-0", _GOES)
            _, whole = await asyncio.wait_for(asking, WAIT_S)
            (choice,) = whole["choices"]
            last = choice["weight_versions"][-1]
            assert (last["version"], last["end"]) == (str(step), 100)
            wanted = 0 if asked else len(PROMPT) + last["start"] - 1
            assert last["stale_kv_tokens"] == choice["stale_kv_tokens"] == wanted


@pytest.mark.parametrize("phase", ["prefill", "transfer"])
async def test_what_has_not_arrived_in_decode_is_computed_again(tmp_path: Path, phase: str) -> None:
    async with trained(tmp_path, prefill=1, decode=1) as (cluster, digests):
        is_prefill = phase == "prefill"
        faults = _STANDS if is_prefill else FakeFaults(delay_transfer_s=WAIT_S)
        cluster.faults("prefill-0", faults)
        answer = Held(cluster)
        await wait_until(lambda: cluster.engine("decode-0").ledger().transfers == 1)
        await wait_until(lambda: is_prefill or bool(answer.shown.token_ids))
        # It would compute the prompt alone if the prefill worker pauses first.
        cluster.faults("decode-0", _STANDS)
        await pause(cluster)
        for name in cluster.workers:
            cluster.faults(name, _GOES)
        await update(cluster, tmp_path / "1")
        await post(cluster, "/resume")
        found = await answer.end()
        assert [x for *_, x in kinds(found)].count(True) == 0
        versions = [x for x, *_ in kinds(found)]
        assert versions[0] == ("1" if is_prefill else "default")
        assert versions[-1] == "1"
        assert_spans(found, {"default": "", "1": digests[1]}, cluster)


async def test_without_an_update_nothing_has_changed(tmp_path: Path) -> None:
    async with trained(tmp_path, aggregated=1) as (cluster, _):
        updater = cluster.workers["aggregated-0"].weights
        for ends_by_itself in (False, True):
            answer = await held(cluster)
            if ends_by_itself:
                await updater.quiesce("gone", "router elsewhere", 0.2, QuiesceMode.KEEP, 0.0)
            else:
                await pause(cluster)
            cluster.faults("aggregated-0", _GOES)
            assert cluster.workers["aggregated-0"].service.open_streams == 1
            if not ends_by_itself:
                await post(cluster, "/resume")
            found = await answer.end()
            assert found.token_ids == cluster.expected(PROMPT, LONG).token_ids
            assert found.receipt is not None
            assert (found.receipt.spans, found.receipt.stale_kv_tokens) == ((), 0)
            assert found.fallbacks == ()


@pytest.mark.parametrize("when", ["paused", "committed", "resumed"])
async def test_an_answer_whose_worker_dies_is_computed_again(tmp_path: Path, when: str) -> None:
    async with trained(tmp_path, prefill=1, decode=2) as (cluster, digests):
        answer = await held(cluster)
        await pause(cluster)
        if when == "paused":
            await cluster.kill(answer.worker)
        await update(cluster, tmp_path / "1")
        if when == "committed":
            await cluster.kill(answer.worker)
        if when == "resumed":
            at = cluster.engine(answer.worker).load().progress + 30
            cluster.faults(answer.worker, FakeFaults(stall_at_step=at))
        await post(cluster, "/resume")
        if when == "resumed":
            before = len(answer.shown.token_ids)
            await wait_until(lambda: len(answer.shown.token_ids) > before + 10)
            await cluster.kill(answer.worker)
        found = await answer.end()
        stale = [x for *_, x in kinds(found)]
        assert stale.index(True) == 2 if when == "resumed" else True not in stale
        assert kinds(found)[-1][0] == "1"
        assert not stale[-1]
        assert_spans(found, {"default": "", "1": digests[1]}, cluster)


async def test_older_kv_does_not_move_to_another_worker(tmp_path: Path) -> None:
    async with trained(tmp_path, prefill=1, decode=2) as (cluster, digests):
        answer = await held(cluster)
        await update(cluster, tmp_path / "1")
        before = len(answer.shown.token_ids)
        at = cluster.engine(answer.worker).load().progress + 30
        cluster.faults(answer.worker, FakeFaults(stall_at_step=at))
        await wait_until(lambda: len(answer.shown.token_ids) > before + 10)
        cluster.faults(answer.worker, _GOES)
        moved = cluster.router.requests.generating.move_off(answer.worker, "the worker drains")
        assert moved == 1
        found = await answer.end()
        stale = [x for *_, x in kinds(found)]
        assert stale.index(True) == 2
        assert not stale[-1]
        assert_spans(found, {"default": "", "1": digests[1]}, cluster)
