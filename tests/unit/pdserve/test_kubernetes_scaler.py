"""Numbers of workers written to Kubernetes by one leader, on a clock that the tests move."""

from __future__ import annotations

import asyncio
import sys
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from msgspec import structs

from pdserve.cli import main
from pdserve.config import ScalingConfig
from pdserve.deploy.scaling.load import Load
from pdserve.deploy.scaling.scaler import Bounds
from pdserve.errors import ClientError, ConfigError, PermissionDenied, Unavailable
from pdserve.types import Role
from tests.support.kubernetes_api import KubernetesApi, Right, kubernetes_api, rights_in
from tests.support.timeouts import WAIT_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytest.importorskip("lightkube", reason="needs the extra kubernetes")
from pdserve.deploy.kubernetes.api import connect, repeat, scale_of
from pdserve.deploy.kubernetes.lease import DURATION_S, LeaderLease
from pdserve.deploy.kubernetes.scaler import ReplicaScaler, ScalablePool

RULES = ScalingConfig(target_load=0.5, up_after_s=0.0, down_after_s=0.0)
COST = "controller.kubernetes.io/pod-deletion-cost"
LEASE = "pdserve-scaler"
# Those of the manifest are enough, and each is needed.
RIGHTS = rights_in("scaler")


class Setup:
    """Scalers of one cluster. The test sets its load and clock."""

    def __init__(self, api: KubernetesApi, stack: AsyncExitStack) -> None:
        self.api = api
        self.now, self.measuring_s = 1000.0, 0.0
        self.load = Load({Role.PREFILL: 0.5, Role.DECODE: 1.0}, {})
        self.leases: dict[ReplicaScaler, LeaderLease] = {}
        self._stack = stack
        self.decode = "deployments.v1.apps/pdserve-decode"

    async def start(self, rules: ScalingConfig = RULES) -> ReplicaScaler:
        client = await self._stack.enter_async_context(connect())
        pools = {
            Role.PREFILL: ScalablePool(
                *scale_of("deployments.v1.apps/pdserve-prefill"), Bounds(1, 4)
            ),
            Role.DECODE: ScalablePool(*scale_of(self.decode), Bounds(1, 8)),
        }
        lease = LeaderLease(client, LEASE, lambda: self.now)
        scaler = ReplicaScaler(client, lease, pools, rules, self._measure, lambda: self.now)
        self.leases[scaler] = lease
        return scaler

    async def _measure(self) -> Load:
        self.now += self.measuring_s
        return self.load

    def needs(self, decode: float, **streams: int) -> None:
        needs = {**self.load.needs, Role.DECODE: decode}
        self.load = replace(self.load, needs=needs, streams=streams)

    async def look(self, scaler: ReplicaScaler) -> int:
        """Return the decode workers after another look, a second later."""
        self.now += 1.0
        await scaler.look()
        return self.api.replicas("pdserve-decode")

    def scaled(self) -> list[tuple[str, int]]:
        writes = self.api.written("deployments/scale")
        return [(name, change["spec"]["replicas"]) for name, change in writes]


@pytest.fixture
async def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Setup]:
    async with AsyncExitStack() as stack:
        api, config = await stack.enter_async_context(kubernetes_api(tmp_path))
        monkeypatch.setenv("KUBECONFIG", str(config))
        api.add("deployments", "pdserve-prefill", replicas=1)
        api.add("deployments", "pdserve-decode", replicas=2)
        api.rights = RIGHTS
        yield Setup(api, stack)


async def test_replicas_follow_the_load_within_their_bounds(setup: Setup) -> None:
    scaler = await setup.start()
    setup.needs(2.0)
    assert [await setup.look(scaler) for _ in range(3)] == [4, 4, 4]
    setup.needs(9.0)
    assert [await setup.look(scaler) for _ in range(2)] == [8, 8]
    setup.needs(0.0)
    assert [await setup.look(scaler) for _ in range(9)] == [7, 6, 5, 4, 3, 2, 1, 1, 1]
    assert {name for name, _ in setup.scaled()} == {"pdserve-decode"}


async def test_a_model_that_waits_for_requests_goes_to_zero_and_comes_back(setup: Setup) -> None:
    scaler = await setup.start(structs.replace(RULES, to_zero_after_s=2.0))
    setup.load = Load({Role.PREFILL: 0.0, Role.DECODE: 0.0}, {})
    with pytest.raises(ConfigError, match="on_demand_models"):
        await setup.look(scaler)
    setup.load = replace(setup.load, on_demand=True)
    assert [await setup.look(scaler) for _ in range(4)] == [1, 1, 0, 0]
    assert setup.api.replicas("pdserve-prefill") == 0
    setup.needs(0.01)
    assert await setup.look(scaler) == 1
    assert setup.api.replicas("pdserve-prefill") == 1


async def test_it_waits_while_some_routers_have_not_been_replaced(setup: Setup) -> None:
    scaler = await setup.start(structs.replace(RULES, to_zero_after_s=2.0))
    setup.load = replace(setup.load, on_demand_somewhere=True)
    with pytest.raises(Unavailable, match="on_demand_models of a router lacks"):
        await setup.look(scaler)


async def test_a_released_lease_can_be_acquired_at_once(setup: Setup) -> None:
    first, second = await setup.start(), await setup.start()
    setup.needs(2.0)
    assert [await setup.look(x) for x in (first, second)] == [4, 4]
    await setup.leases[second].release()  # which it does not hold
    assert setup.leases[first].is_held
    await setup.leases[first].release()
    assert not setup.leases[first].is_held
    await setup.look(second)
    assert setup.leases[second].is_held


async def test_each_look_shows_that_the_process_is_alive(tmp_path: Path) -> None:
    alive, looks = tmp_path / "alive", 0

    async def look() -> None:
        nonlocal looks
        looks += 1
        if looks > 1:
            assert alive.exists(), "a look that failed counts, too"
            raise PermissionDenied("enough")
        raise Unavailable("nobody answers")

    with pytest.raises(PermissionDenied):
        await asyncio.wait_for(repeat(look, ClientError, alive, pause_s=0.0), WAIT_S)


async def test_a_restarted_scaler_continues_from_the_current_replicas(setup: Setup) -> None:
    first = await setup.start()
    setup.needs(2.0)
    assert await setup.look(first) == 4
    setup.needs(1.9)
    second = await setup.start()
    assert {await setup.look(second) for _ in range(DURATION_S + 2)} == {4}
    assert setup.leases[second].is_held
    assert setup.scaled() == [("pdserve-decode", 4)]


async def test_one_leads_and_another_follows_when_its_lease_has_ended(setup: Setup) -> None:
    one, other = await setup.start(), await setup.start()
    setup.needs(2.0)
    await asyncio.gather(one.look(), other.look())
    held = {x: setup.leases[x].is_held for x in (one, other)}
    assert sorted(held.values()) == [False, True]
    leader, follower = (one, other) if held[one] else (other, one)
    assert await setup.look(leader) == 4
    setup.needs(4.0)
    assert await setup.look(follower) == 4  # from here on the leader is dead
    setup.now += DURATION_S - 2.0
    assert await setup.look(follower) == 4
    assert await setup.look(follower) == 8
    assert setup.scaled() == [("pdserve-decode", 4), ("pdserve-decode", 8)]


async def test_nothing_is_written_once_the_lease_may_be_anothers(setup: Setup) -> None:
    scaler = await setup.start()
    await setup.look(scaler)
    setup.needs(4.0)
    setup.measuring_s = DURATION_S - 2.0
    with pytest.raises(Unavailable, match="lease"):
        await setup.look(scaler)
    assert setup.scaled() == []


async def test_a_leader_that_finds_another_one_stops_at_once(setup: Setup) -> None:
    scaler = await setup.start()
    await setup.look(scaler)
    setup.api.objects["leases", LEASE]["spec"]["holderIdentity"] = "somebody"
    setup.api.touch("leases", LEASE)
    setup.needs(4.0)
    assert await setup.look(scaler) == 2
    assert not setup.leases[scaler].is_held


async def test_a_conflict_is_retried_over_the_current_state(setup: Setup) -> None:
    scaler = await setup.start()
    setup.needs(2.0)
    setup.api.races = 3
    assert await setup.look(scaler) == 4
    assert setup.scaled() == [("pdserve-decode", 4)]
    setup.needs(4.0)
    setup.api.races = 1000
    with pytest.raises(Unavailable, match="pdserve-decode changed"):
        await setup.look(scaler)
    setup.api.races = 0
    assert await setup.look(scaler) == 8


async def test_pods_cost_their_open_streams_before_there_are_fewer(setup: Setup) -> None:
    scaler = await setup.start()
    streams = {"decode-a": 7, "decode-b": 0}
    for name in streams:
        setup.api.add("pods", name, containers=[])
    await setup.look(scaler)
    assert setup.api.written("pods") == []  # costs that change often are work for the API server
    setup.needs(0.1, **streams, not_a_pod=3)
    assert await setup.look(scaler) == 1
    kinds = [kind for kind, *_ in setup.api.writes if kind != "leases"]
    assert kinds == ["pods", "pods", "deployments/scale"]
    for name, count in streams.items():
        metadata = setup.api.objects["pods", name]["metadata"]
        assert metadata["annotations"] == {COST: str(count)}


@pytest.mark.parametrize("missing", sorted(RIGHTS))
async def test_a_missing_right_ends_it_and_is_named(setup: Setup, missing: Right) -> None:
    setup.api.add("pods", "decode-a", containers=[])
    setup.api.rights = RIGHTS - {missing}
    setup.needs(0.1, **{"decode-a": 1})
    scaler = await setup.start()
    verb, kind, _ = missing
    with pytest.raises(PermissionDenied, match=f'cannot {verb} resource "{kind}"'):
        await asyncio.wait_for(repeat(scaler.look, ClientError), WAIT_S)
    assert setup.scaled() == []


async def test_anything_with_a_scale_is_scaled(setup: Setup) -> None:
    plural = "disaggregatedsetrolescalers"
    setup.api.add(plural, "pd-decode", replicas=1)
    setup.api.rights = RIGHTS | {(verb, f"{plural}/scale", ()) for verb in ("get", "patch")}
    setup.decode = f"{plural}.v1.disaggregatedset.x-k8s.io/pd-decode"
    scaler = await setup.start()
    await setup.look(scaler)
    assert setup.api.replicas("pd-decode", plural) == 2


@pytest.mark.parametrize("text", ["pdserve-decode", "deployments/pdserve-decode", "a.v1.b/"])
def test_a_target_that_names_no_resource_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="such as decode=deployments"):
        scale_of(text)


def test_the_error_names_the_package_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "pdserve.deploy.kubernetes.api")
    monkeypatch.setitem(sys.modules, "lightkube", None)
    assert main(["scaler", "--on", "kubernetes", "--decode", "1:2"]) == 2
    assert "pip install 'pdserve[kubernetes]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ((), "--decode LEAST:MOST"),
        (("--decode", "1:2", "--target", "decode=x"), "not 'x'"),
        (("--decode", "1:2", "--target", "prefill=deployments.v1.apps/x"), "--prefill"),
        (("--decode", "1:2", "--target-load", "2"), "target_load"),
        (("--decode", "1:2", "--router", "nowhere"), "worker.routers"),
    ],
)
def test_wrong_options_are_refused(
    capsys: pytest.CaptureFixture[str], args: tuple[str, ...], reason: str
) -> None:
    assert main(["scaler", "--on", "kubernetes", *args]) == 2
    assert reason in capsys.readouterr().err
