"""Workers change between prefill and decode under load, by command and by the autoscaler. No
request is lost."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

import grpc.aio
import pytest

from pdserve import wire
from pdserve.config import RolesConfig
from pdserve.errors import InvalidRequest, PdserveError, Unavailable
from pdserve.net import rpc
from pdserve.types import Role
from pdserve.v1 import admin_pb2 as a
from pdserve.v1.admin_pb2_grpc import AdminStub
from router.fleet.open import FleetLimits
from router.main import RouterLimits
from router.request_path import PathLimits
from tests.support.cluster import (
    LONG,
    PLAIN,
    PROMPT,
    WAIT_S,
    Cluster,
    ask_and_hold,
    assert_same,
    under_load,
)
from tests.support.timeouts import wait_until
from workers.fake.settings import FakeFaults

PREFILL, DECODE = Role.PREFILL, Role.DECODE


async def change_role(
    cluster: Cluster, name: str, role: Role, *, drain_timeout_s: float = WAIT_S
) -> a.ChangeRoleResponse:
    """Raises the router's error."""

    request = a.ChangeRoleRequest(
        worker_id=name, role=wire.role_to_pb(role), drain_timeout_s=drain_timeout_s
    )
    async with rpc.open_channel(cluster.grpc) as channel:
        try:
            return await AdminStub(channel).ChangeRole(request, timeout=2 * WAIT_S)
        except grpc.aio.AioRpcError as error:
            raise rpc.error_from_rpc(error) from error


async def role_of(cluster: Cluster, name: str) -> tuple[Role, str]:
    entry = (await cluster.entries())[name]
    return wire.role_from_pb(entry.info.role), entry.state


async def test_role_changes_under_load_lose_nothing() -> None:
    async with Cluster(prefill=2, decode=2) as cluster:
        async with under_load(cluster) as counts:
            for name, role in (
                ("decode-1", PREFILL),
                ("decode-1", DECODE),
                ("prefill-0", DECODE),
                ("prefill-0", PREFILL),
            ):
                before = sum(counts)
                done = await change_role(cluster, name, role)
                assert not done.failure
                assert 0 < done.probe_s < done.total_s
                assert await role_of(cluster, name) == (role, "ready")
                await wait_until(lambda before=before: sum(counts) > before)
        assert 'outcome="done",role="decode"} 2.0' in await cluster.metrics()


async def test_streams_that_do_not_end_in_time_move() -> None:
    limits = RouterLimits(path=PathLimits(export_timeout_s=0.05))
    async with Cluster(prefill=1, decode=2, limits=limits) as cluster:
        busy, idle, asking = await ask_and_hold(cluster)
        cluster.faults(idle, FakeFaults())
        changing = asyncio.create_task(change_role(cluster, busy, PREFILL, drain_timeout_s=0.0))
        answer = await asking
        cluster.faults(busy, FakeFaults())
        done = await changing
        assert (done.failure, done.moved_streams) == ("", 1)
        assert_same(answer, cluster.expected(PROMPT, LONG))
        assert answer.fallbacks


@pytest.mark.parametrize("fault", ["drop_transfer", "fail_prefill"])
async def test_a_worker_whose_probe_fails_keeps_its_role(fault: str) -> None:
    async with Cluster(prefill=1, decode=2) as cluster, under_load(cluster, 2):
        cluster.faults("decode-1", FakeFaults(**{fault: "probe-*"}))
        done = await change_role(cluster, "decode-1", PREFILL)
        assert "fault" in done.failure or "broke" in done.failure, done.failure
        assert await role_of(cluster, "decode-1") == (DECODE, "ready")


async def test_a_change_that_would_leave_a_role_empty_is_refused() -> None:
    async with Cluster(prefill=1, decode=2) as cluster:
        for name, role, error in (
            ("prefill-0", DECODE, Unavailable),
            ("prefill-0", PREFILL, InvalidRequest),
            ("decode-0", Role.AGGREGATED, InvalidRequest),
            ("nobody", DECODE, InvalidRequest),
        ):
            with pytest.raises(error):
                await change_role(cluster, name, role)
        results = await asyncio.gather(
            *(change_role(cluster, name, PREFILL) for name in ("decode-0", "decode-1")),
            return_exceptions=True,
        )
        assert sum(isinstance(x, PdserveError) for x in results) == 1
        await cluster.until_ready()


async def test_the_command_prints_its_duration(capsys: pytest.CaptureFixture[str]) -> None:
    async with Cluster(prefill=1, decode=2) as cluster:
        assert await cluster.command("role", "decode-1", "prefill") == 0
        assert "worker decode-1 is a prefill worker after" in capsys.readouterr().out
        assert await cluster.command("role", "decode-1", "prefill") == 1
        assert "cannot become a prefill worker" in capsys.readouterr().err


QUICK = RolesConfig(auto=True, window_s=0.2)
ENGINES: dict[str, object] = {"step_s": 0.002, "prefill_s": 0.0002, "max_num_seqs": 3}
# Prompts that take longer than their answers, and answers that take longer than their prompts.
PROMPTS = [*PROMPT] * 12, replace(PLAIN, max_tokens=2)
ANSWERS = PROMPT, replace(PLAIN, max_tokens=150)


async def until_split(cluster: Cluster, prefill: int, decode: int) -> None:
    """Wait until this many workers of each role are ready."""

    async def is_split() -> bool:
        states = [await role_of(cluster, name) for name in cluster.workers]
        ready = Counter(role for role, state in states if state == "ready")
        return (ready["prefill"], ready["decode"]) == (prefill, decode)

    await wait_until(is_split)


async def test_the_split_follows_the_load_and_nothing_is_lost() -> None:
    cluster = Cluster(prefill=2, decode=2, engine_args=ENGINES, router={"roles": QUICK})
    async with cluster:
        for load, split in ((PROMPTS, (3, 1)), (ANSWERS, (1, 3))):
            async with under_load(cluster, 8, *load):
                await until_split(cluster, *split)
        roles = await cluster.roles()
        assert roles.text.startswith("1 prefill worker loaded")
        text = await cluster.metrics()
        assert 'pdserve_role_workers_wanted{model="pdserve-demo",role="decode"} 3.0' in text
        assert 'outcome="failed"' not in text


async def test_loads_and_workers_are_shown_at_zero_and_without_role_changes() -> None:
    async def until_shown(*lines: str) -> None:
        async def are_shown() -> bool:
            return set(lines) <= set((await cluster.metrics()).splitlines())

        await wait_until(are_shown)

    names = [f'model="pdserve-demo",role="{role}"' for role in ("prefill", "decode")]
    loads = [f"pdserve_role_load{{{name}}} 0.0" for name in names]
    roles = RolesConfig(window_s=0.3)
    limits = RouterLimits(fleet=FleetLimits(forget_after_s=1.0))
    async with Cluster(prefill=1, decode=1, router={"roles": roles}, limits=limits) as cluster:
        ready = [f'pdserve_workers{{{name},state="ready"}}' for name in names]
        lost = [f'pdserve_workers{{{name},state="lost"}} 0.0' for name in names]
        await until_shown(*loads, *(f"{x} 1.0" for x in ready), *lost)
        for name in ("prefill-0", "decode-0"):
            await cluster.kill(name)
        await until_shown(*loads, *(f"{x} 0.0" for x in ready))
        await wait_until(lambda: not cluster.router.fleet.models())
        await until_shown(*loads, *(f"{x} 0.0" for x in ready))
