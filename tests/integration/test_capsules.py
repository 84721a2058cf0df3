"""Incident capsules of a whole service with fake engines, and their replay."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.cli import main
from pdserve.config import AuditConfig
from pdserve.errors import WorkerFailed
from pdserve.observe.capsules import unseal
from tests.support.cluster import LEASE_S, PLAIN, PROMPT, Cluster
from tests.support.timeouts import wait_until
from workers.fake.settings import FakeFaults

if TYPE_CHECKING:
    from pathlib import Path

KEY = "capsules-of-the-test-" + "k" * 32
SAME, REFUSED, DIFFERENT, FAILS, UNDECIDED = 0, 1, 3, 4, 5


def keeping(tmp_path: Path, **more: Any) -> dict[str, Any]:
    return {"capsules": {"directory": str(tmp_path / "kept"), "prompts": True, **more}}


class Operator:
    """Runs the commands, as an administrator types them."""

    def __init__(self, cluster: Cluster, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self._cluster, self._capsys, self.file = cluster, capsys, folder / "r.capsule"

    async def fetch(self, request_id: str) -> int:
        words = "capsule", request_id, "--out", str(self.file), "--json"
        return await self._cluster.command(*words)

    async def listed(self) -> list[dict[str, Any]]:
        self._capsys.readouterr()
        assert await self._cluster.command("capsule", "--json") == 0
        found: list[dict[str, Any]] = json.loads(self._capsys.readouterr().out)
        return found

    async def replay(self, *words: str) -> tuple[int, dict[str, Any]]:
        self._capsys.readouterr()
        url = f"http://{self._cluster.http}"
        command = ["replay", str(self.file), "--url", url, "--json", *words]
        code = await asyncio.to_thread(main, command)
        out = self._capsys.readouterr().out
        return code, json.loads(out) if out else {}


async def test_an_audited_answer_differs_on_a_faulty_service_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a second service, because audits of the replays would eject its workers."""
    wrong = FakeFaults(wrong_kv_from="prefill-0-*")
    audited = {"audit": AuditConfig(one_in=1, max_age_s=LEASE_S)}
    async with Cluster(prefill=1, decode=1, router=keeping(tmp_path) | audited) as cluster:
        operator = Operator(cluster, tmp_path, capsys)
        cluster.faults("decode-0", wrong)
        await cluster.ask(PROMPT, PLAIN, request_id="wrong")
        right = cluster.expected(PROMPT, PLAIN).token_ids

        async def is_kept() -> bool:
            return [x["reason"] for x in await operator.listed()] == ["audit"]

        await wait_until(is_kept)
        assert await operator.fetch("wrong") == 0
        found = unseal(operator.file.read_bytes())
        assert "an audit by prefill-0 found another token at 1" in found.message
        assert "suspects: prefill-0 and decode-0" in found.message
        assert found.answers[0].expected == right[:2]

    async with Cluster(prefill=1, decode=1, router={"capsules": {"recent": 0}}) as cluster:
        operator = Operator(cluster, tmp_path, capsys)
        cluster.faults("decode-0", wrong)
        code, verdict = await operator.replay()
        assert (code, verdict["result"]) == (DIFFERENT, "different")
        assert (verdict["difference"]["token"], verdict["difference"]["want"]) == (1, right[1])
        assert (verdict["worker"], verdict["blocks"]) == ("decode-0", "0-4")
        assert verdict["points_to"][0].startswith("worker decode-0: all 3 answers that differ")
        sampled = "token 1 of answer 0 was wrong; decode-0 sampled it with KV from prefill-0"
        assert any(sampled in x for x in verdict["points_to"])
        cluster.faults("decode-0", FakeFaults())
        code, verdict = await operator.replay()
        assert (code, verdict["result"], verdict["tokens"]) == (SAME, "same", 2)


async def test_a_failed_request_leaves_a_capsule_that_says_whether_it_fails_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with Cluster(aggregated=1, router=keeping(tmp_path)) as cluster:
        operator = Operator(cluster, tmp_path, capsys)
        cluster.faults("aggregated-0", FakeFaults(fail_prefill="*"))
        with pytest.raises(WorkerFailed):
            await cluster.ask(PROMPT, PLAIN, request_id="failed")
        assert await operator.fetch("failed") == 0
        (listed,) = await operator.listed()
        assert (listed["reason"], listed["code"]) == ("failure", "worker_failed")
        code, verdict = await operator.replay("--times", "1")
        assert code == FAILS
        assert "the failure repeats: worker_failed" in verdict["points_to"]
        cluster.faults("aggregated-0", FakeFaults())
        assert (await operator.replay("--times", "1"))[0] == SAME


async def test_a_capsule_made_on_demand_has_all_that_a_router_knows_and_is_encrypted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "keys").write_text(f"{KEY}\n")
    router = keeping(tmp_path, key_file=str(tmp_path / "keys"))
    async with Cluster(prefill=1, decode=1, router=router) as cluster:
        operator = Operator(cluster, tmp_path, capsys)
        answer = await cluster.ask(PROMPT, PLAIN, request_id="asked")
        assert await operator.listed() == []
        assert await operator.fetch("asked") == 0
        assert [x["reason"] for x in await operator.listed()] == ["demand"]
        data = operator.file.read_bytes()
        assert [x.read_bytes() for x in (tmp_path / "kept").iterdir()] == [data]
        found = unseal(data, [KEY])
        (one,) = found.answers
        assert (found.prompt, one.tokens) == (PROMPT, answer.token_ids)
        assert [(x.worker, x.start, x.end, x.source) for x in one.spans] == [
            ("prefill-0", 0, 1, ""),
            ("decode-0", 1, 40, "prefill-0"),
        ]
        assert found.workers.keys() == {"prefill-0", "decode-0"}
        assert len(found.blocks["16"]) == len(PROMPT) // 16
        (decision,) = found.placement["decisions"]
        assert (decision["prefill"], decision["decode"]) == ("prefill-0", "decode-0")
        assert found.receipt is not None
        assert found.receipt["decode_worker"] == "decode-0"
        assert one.streams[0].report is not None
        assert found.sampling["max_tokens"] == 40
        assert {"policy", "retry"} <= found.settings.keys()
        # Without the key, and with it.
        assert (await operator.replay())[0] == 2
        code, _ = await operator.replay("--key-file", str(tmp_path / "keys"), "--times", "1")
        assert code == SAME
        assert await operator.fetch("never-seen") == REFUSED


async def test_a_capsule_without_prompts_has_neither_prompt_nor_texts_and_is_not_replayed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with Cluster(aggregated=1, router=keeping(tmp_path, prompts=False)) as cluster:
        operator = Operator(cluster, tmp_path, capsys)
        await cluster.ask(PROMPT, PLAIN, request_id="asked")
        assert await operator.fetch("asked") == 0
        found = unseal(operator.file.read_bytes())
        assert (found.prompt, found.blocks, found.prompt_tokens) == (None, {}, len(PROMPT))
        code, verdict = await operator.replay()
        assert code == UNDECIDED
        assert "router.capsules.prompts" in verdict["points_to"][0]
