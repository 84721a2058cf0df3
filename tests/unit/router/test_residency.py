"""No byte of a constrained request gets to a worker outside of its regions, whatever the fleet."""

from __future__ import annotations

import asyncio
import re
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from pdserve.config import (
    ResidencyConfig,
    RouterConfig,
    TenantConfig,
    TopologyConfig,
    parse,
)
from pdserve.errors import ConfigError, InvalidRequest, Refusal, Unavailable
from pdserve.types import Role
from router.admission import NoRoom
from router.attempt.placer import Placer
from router.attempt.pooling_placer import PoolingPlacer
from router.attempt.recovery import Constraints, RetryStep
from router.fleet.registry import Fleet
from router.placement.decisions import DecisionLog, explained
from router.placement.policies import POLICIES
from router.placement.residency import Residency, cache_namespace
from router.placement.values import Demand, PlacementContext, PrefixFetch, may_hold
from tests.support.placement import FixedLookups, decide, worker
from tests.support.router_stack import MODEL, request, worker_info

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdserve.types import Regions
    from router.attempt.placer import Reservation
    from router.placement.values import Candidate

REGIONS = ("ap", "eu", "us")
ROLES = (Role.PREFILL, Role.DECODE, Role.AGGREGATED, Role.POOLING, Role.ENCODE)
NUMBERS = range(12)
COPY = PrefixFetch("", 96, 96, 1, 0.001, 1.0, 0.001, 90)

# Each worker: its role, its region, and whether it can take requests.
fleets = st.lists(
    st.tuples(
        st.sampled_from(ROLES),
        st.sampled_from([*REGIONS, ""]),
        st.sampled_from([True, True, False]),
    ),
    min_size=1,
    max_size=len(NUMBERS),
)
constraints = st.frozensets(st.sampled_from(REGIONS), min_size=1)


async def fleet_of(members: list[tuple[Role, str, int]]) -> Fleet:
    fleet = Fleet(lease_s=3600.0)
    for number, (role, region, is_ready) in enumerate(members):
        info = worker_info(f"{role}-{number}", role, topology={"region": region} if region else {})
        if role is Role.POOLING:
            info = replace(info, kv=None, model=replace(MODEL, name="vectors"))
        if role is Role.ENCODE and info.kv is not None:
            info = replace(info, kv=replace(info.kv, embedding_bytes=64))
        fleet.register(info)
        fleet.members[info.worker_id].attached = bool(is_ready)
    return fleet


def held_by(reservation: Reservation) -> Iterator[str]:
    """Yield the workers that an attempt with this reservation sends bytes to or takes them from."""
    yield from (x.worker_id for x in reservation.members)
    if reservation.producer is not None:
        yield reservation.producer.worker_id
    if reservation.encode_charge is not None:
        yield reservation.encode_charge.member.worker_id
    if reservation.fetch is not None:
        yield reservation.fetch.holder


class HolderLookups(FixedLookups):
    """All workers have the prompt cached, and copies of it always pay."""

    def fetch(
        self, _demand: Demand, worker: Candidate, holder: Candidate, _cached: int, _held: int
    ) -> PrefixFetch:
        self.copied.add((worker.worker_id, holder.worker_id))
        return structs.replace(COPY, holder=holder.worker_id)

    def distance_s(self, model: str, prefill: Candidate, decode: Candidate) -> float:
        return 0.0


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=40, deadline=None)
@given(fleets, constraints, st.data())
def test_every_placement_keeps_to_the_regions(
    policy: str, members: list[tuple[Role, str, int]], regions: Regions, data: st.DataObject
) -> None:
    """First placements, retries with and without a pair, moves of live KV, other answers of
    parallel sampling, encode workers, copies of cached KV, and embeddings; also after workers have
    changed their roles."""

    async def check() -> None:
        fleet = await fleet_of(members)
        _place_everything(policy, fleet, regions, data)
        other = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}
        for member in [x for x in fleet.members.values() if x.info.role in other]:
            if data.draw(st.booleans()):
                is_ready = member.attached
                fleet.register(replace(member.info, role=other[member.info.role]))
                fleet.members[member.worker_id].attached = is_ready
        _place_everything(policy, fleet, regions, data)

    asyncio.run(check())


def _place_everything(policy: str, fleet: Fleet, regions: Regions, data: st.DataObject) -> None:
    known = HolderLookups(dict.fromkeys(fleet.members, 32))
    placer = Placer(fleet, POLICIES[policy], PlacementContext(known, known))
    topology = {name: x.info.topology for name, x in fleet.members.items()}
    demand = Demand(
        "demo",
        prompt_tokens=100,
        kv_tokens=150,
        prefill_only=data.draw(st.booleans()),
        media=data.draw(st.sampled_from([(), (("image", 40, 30),)])),
        regions=regions,
    )
    names = st.frozensets(st.sampled_from([*fleet.members]), max_size=3)
    again = Constraints(data.draw(st.sampled_from(RetryStep)), *[data.draw(names) for _ in "wa"])
    some = data.draw(st.sampled_from([*fleet.members.values()]))
    pooling, vectors = PoolingPlacer(fleet), structs.replace(demand, model="vectors")
    calls = [
        lambda: placer.reserve(demand),
        lambda: placer.reserve_again(demand, again, cause="test"),
        lambda: placer.reserve_on(some, demand),
        lambda: pooling.reserve(vectors),
        lambda: pooling.reserve_again(vectors, again, cause="test"),
    ]
    if may_hold(regions, some.info.topology) and some.info.role is Role.DECODE:
        calls.append(lambda: placer.reserve_live(demand, some.worker_id, cause="drain"))
    for call in calls:
        with suppress(Unavailable), call() as reservation:
            used = {x: topology[x].get("region") for x in held_by(reservation)}
            assert regions is None or set(used.values()) <= regions, used
    for copy in known.copied:
        assert all(may_hold(regions, topology[x]) for x in copy)


@settings(max_examples=40, deadline=None)
@given(fleets, st.sampled_from(REGIONS))
def test_a_region_with_workers_serves_whatever_the_others_do(
    members: list[tuple[Role, str, int]], region: str
) -> None:
    """The filter excludes no worker of the region, and others change no decision there."""

    async def check() -> None:
        demand = Demand("demo", 100, 150, regions=frozenset({region}))
        own = [x for x in members if x[1] == region]
        both = [await fleet_of(members), await fleet_of(own)]
        roles: list[object] = []
        for fleet in both:
            placer = Placer(fleet, POLICIES["least_loaded"], prefill_chunks_ahead=2)
            try:
                with placer.reserve(demand) as reservation:
                    roles.append([x.info.role for x in reservation.members])
            except NoRoom:
                roles.append("waits")
            except Unavailable as error:
                roles.append(error.reason)
        refused = not own and roles[0] == Refusal.NO_WORKER_IN_REGION
        assert roles[0] == roles[1] or refused

    asyncio.run(check())


async def test_a_refusal_names_the_region_and_explain_says_who_was_left_out() -> None:
    fleet = await fleet_of(
        [
            (Role.AGGREGATED, "us", True),
            (Role.AGGREGATED, "", True),
            (Role.AGGREGATED, "eu", False),
        ]
    )
    log = DecisionLog(1)
    placer = Placer(fleet, POLICIES["least_loaded"], log=log)
    demand = placer.demand(request(regions=frozenset({"eu"})))
    with pytest.raises(Unavailable, match="demo in region eu: aggregated-2 is connecting") as error:
        placer.reserve(demand)
    assert error.value.reason == Refusal.NO_WORKER_IN_REGION
    found = explained(log.of("r1")).decisions[0]
    assert {x.worker_id: x.why_not for x in found.candidates} == {
        "aggregated-0": "it is in region us, and the request may be in eu alone",
        "aggregated-1": "it has no region, and the request may be in eu alone",
        "aggregated-2": "connecting",
    }


def test_busy_workers_of_other_regions_are_no_reason_to_wait() -> None:
    """And busy ones of the region are no reason to refuse."""
    demand = Demand("demo", 100, 150, regions=frozenset({"eu"}))
    busy = {"outstanding_tokens": 10_000, "outstanding_requests": 1}
    found = [worker("a0", **busy), worker("a1"), worker("a2")]
    for member, region in zip(found, ("us", "us", "eu"), strict=True):
        member.info = replace(member.info, topology={"region": region})
    assert [c.decode.worker_id for c in [decide(found, demand=demand).placement] if c] == ["a2"]


RULES = RouterConfig(
    topology=TopologyConfig(region="eu"),
    residency=ResidencyConfig(regions=REGIONS),
    tenants=(
        TenantConfig(name="eu", allowed_inference_geos=("eu",)),
        TenantConfig(name="both", allowed_inference_geos=("eu", "us"), default_inference_geo="eu"),
        TenantConfig(name="us", allowed_inference_geos=("us",)),
        TenantConfig(name="stored", storage_geo="us"),
        TenantConfig(name="free"),
    ),
)
EU, BOTH = frozenset({"eu"}), frozenset({"eu", "us"})


@pytest.mark.parametrize(
    ("tenant", "geo", "found"),
    [
        ("eu", "", EU),
        ("eu", "eu", EU),
        ("eu", "us", "'inference_geo' is 'us', and tenant eu may use eu alone"),
        ("eu", "global", "'inference_geo' is 'global', and tenant eu may use eu alone"),
        ("eu", "eU", "'inference_geo' must be one of ap, eu, us, global, not 'eU'"),
        ("both", "", EU),
        ("both", "us", "the request may be in us alone, and this router is in eu: use one of us"),
        ("us", "", "the request may be in us alone, and this router is in eu: use one of us"),
        ("free", "", None),
        ("free", "global", None),
        ("free", "eu", EU),
        ("stored", "", None),
    ],
)
def test_a_request_may_narrow_the_regions_of_its_tenant(
    tenant: str, geo: str, found: Regions | str
) -> None:
    rules = Residency(RULES.residency, RULES.topology.labels, RULES.tenants)
    if not isinstance(found, str):
        assert rules.regions_of(tenant, geo) == found
        return
    with pytest.raises(InvalidRequest, match=re.escape(found)) as error:
        rules.regions_of(tenant, geo)
    assert (error.value.field, error.value.reason) == ("inference_geo", Refusal.REGION_NOT_ALLOWED)


def test_a_forwarded_request_is_admitted_where_both_regions_allow_it() -> None:
    rules = Residency(RULES.residency, RULES.topology.labels, RULES.tenants)
    here, there = frozenset({"eu"}), frozenset({"us"})
    assert rules.admits("free", None)
    assert rules.admits("both", here | there)
    assert not rules.admits("both", there)  # of the request
    assert not rules.admits("us", None)  # of its tenant here


def test_a_store_keeps_only_what_may_be_in_its_region() -> None:
    rules = Residency(RULES.residency, RULES.topology.labels, RULES.tenants)
    for tenant in ("eu", "both", "free"):
        rules.check_store(tenant, "file")
    for tenant in ("stored", "us"):
        with pytest.raises(InvalidRequest, match="'file': data is kept in us alone") as error:
            rules.check_store(tenant, "file")
        assert error.value.field == "file"


@given(
    st.frozensets(st.sampled_from(REGIONS)),
    st.sampled_from([*REGIONS, ""]),
    st.sampled_from(REGIONS),
)
def test_every_store_and_tier_keeps_to_the_regions(
    allowed: frozenset[str], storage: str, here: str
) -> None:
    """`here`: the region of a router with a store, and of a worker with tiers."""
    tenant = TenantConfig(name="a", allowed_inference_geos=tuple(allowed), storage_geo=storage)
    topology = {"region": here}
    rules = Residency(ResidencyConfig(regions=REGIONS), topology, [tenant])
    kept = {storage} if storage else allowed or {*REGIONS}
    assert may_hold(rules.storage_of("a"), topology) == (here in kept)
    if here in kept:
        rules.check_store("a", "file")
    else:
        with pytest.raises(InvalidRequest):
            rules.check_store("a", "file")


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"residency": {"regions": ["eu"]}}, "topology.region"),
        ({"residency": {"regions": ["global"]}}, "residency.regions"),
        ({"residency": {"regions": ["a+b"]}}, "residency.regions"),
        ({"tenants": [{"name": "a", "storage_geo": "eu"}]}, "tenants[0].storage_geo"),
        (
            {
                "topology": {"region": "eu"},
                "residency": {"regions": ["eu"]},
                "tenants": [{"name": "a", "allowed_inference_geos": ["ue"]}],
            },
            "tenants[0].allowed_inference_geos",
        ),
    ],
)
def test_a_rule_that_could_not_hold_is_refused_at_start(values: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(RouterConfig, values)
    assert error.value.field.endswith(field)


def test_kv_is_found_only_by_requests_of_the_same_regions() -> None:
    spaces = {cache_namespace(x, y) for x in (None, EU, BOTH) for y in ("", "a", "eu")}
    assert len(spaces) == 9
    with pytest.raises(InvalidRequest, match="NUL"):
        cache_namespace(None, "eu\0")
