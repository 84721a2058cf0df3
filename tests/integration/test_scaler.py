"""`pdserve scaler` as a process, between a real router and the API of Kubernetes."""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from pdserve.types import SamplingParams
from tests.support.cluster import Cluster
from tests.support.kubernetes_api import kubernetes_api, rights_in
from tests.support.timeouts import START_S, WAIT_S, wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytest.importorskip("lightkube", reason="needs the extra kubernetes")
RULES = ("--target-load", "0.5", "--up-after", "0", "--down-after", "0")


@asynccontextmanager
async def a_scaler(config: Path, *args: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run the command. End it at the exit if it still runs."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "pdserve",
        "scaler",
        "--on",
        "kubernetes",
        "--decode",
        "1:2",
        *RULES,
        *args,
        env={**os.environ, "KUBECONFIG": str(config)},
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        await asyncio.wait_for(process.communicate(), WAIT_S)


async def test_pools_follow_the_load_that_a_router_reports(tmp_path: Path) -> None:
    engine = {"max_num_seqs": 1, "step_s": 0.05}
    async with (
        Cluster(prefill=1, decode=1, engine_args=engine) as cluster,
        kubernetes_api(tmp_path) as (api, config),
    ):
        api.rights = rights_in("scaler")
        api.add("deployments", "pdserve-decode", replicas=1)
        api.add("pods", "decode-0", containers=[])
        async with a_scaler(config, "--router", cluster.grpc) as scaler:
            endless = SamplingParams(max_tokens=4000, ignore_eos=True)
            asking = asyncio.create_task(cluster.ask([20, 21], endless))
            await wait_until(lambda: api.replicas("pdserve-decode") == 2)
            asking.cancel()
            await wait_until(lambda: api.replicas("pdserve-decode") == 1)
            scaler.terminate()
            assert await asyncio.wait_for(scaler.wait(), WAIT_S) == 0
        assert [name for name, _ in api.written("pods")] == ["decode-0"]


async def test_a_missing_right_is_its_last_word(tmp_path: Path) -> None:
    async with (
        kubernetes_api(tmp_path) as (api, config),
        a_scaler(config, "--router", "127.0.0.1:1") as scaler,
    ):
        api.rights = set()
        _, text = await asyncio.wait_for(scaler.communicate(), START_S)
    assert scaler.returncode == 1
    last = text.decode().splitlines()[-1]
    assert last.startswith("pdserve: ")
    assert 'cannot get resource "leases"' in last
