"""Workers for placement tests, and the placement of a request by a policy."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from pdserve.types import Role, WorkerLoad
from router.fleet.member import Member, PlacedLoad, Reported
from router.placement.policies import POLICIES
from router.placement.values import Demand, PlacementContext, Prediction
from tests.support.router_stack import worker_info

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from router.placement.values import Candidate, Decision, Placement, PrefixFetch

ROLES = {"p": Role.PREFILL, "d": Role.DECODE, "a": Role.AGGREGATED, "e": Role.ENCODE}
DEMAND = Demand("demo", prompt_tokens=100, kv_tokens=150)
IDLE = WorkerLoad(0, 0, 0.0, 100)
HALF = WorkerLoad(0, 4, 0.5, 50)
FULL = WorkerLoad(8, 8, 1.0, 0)


def busy(requests: int) -> WorkerLoad:
    """Return the load of a worker with this many running requests, one block each."""
    return WorkerLoad(0, requests, requests / 100, 100 - requests)


def worker(
    name: str,
    load: WorkerLoad | None = None,
    *,
    compatibility: str = "layout-a",
    transports: tuple[str, ...] = ("loopback",),
    blocks: int = 100,
    **state: Any,
) -> Member:
    """Return a ready worker. The first letter of its name is its role. `state` are fields of
    Member, Reported and PlacedLoad."""
    info = worker_info(name, ROLES[name[0]], compatibility=compatibility, total_blocks=blocks)
    if info.kv is not None:
        info = replace(info, kv=replace(info.kv, transports=transports))
    state = {"lease_end": 1.0, "attached": True, "load": load} | state
    reported = {x: state.pop(x) for x in Reported.__struct_fields__ if x in state}
    placed = {x.name: state.pop(x.name) for x in fields(PlacedLoad) if x.name in state}
    return Member(info, reported=Reported(**reported), placed=PlacedLoad(**placed), **state)


def seen(members: Sequence[Member]) -> list[Candidate]:
    return [member.snapshot() for member in members]


class FixedLookups:
    """Lookups with given results: cached tokens by worker, costs by (prefill, decode), and copies
    of cached KV by the worker that receives them. `asked` has the prefill workers of the cost
    lookups so far, `copied` the copies that were looked up: worker and holder."""

    def __init__(
        self,
        cached: Mapping[str, int] | None = None,
        costs: Mapping[tuple[str | None, str], float | None] | None = None,
        fetches: Mapping[str, PrefixFetch] | None = None,
    ) -> None:
        self.cached, self.costs, self.fetches = cached or {}, costs or {}, fetches or {}
        self.asked: list[str | None] = []
        self.copied: set[tuple[str, str]] = set()

    def cached_tokens(self, _demand: Demand) -> Mapping[str, int]:
        return self.cached

    def tokens_with_tiers(self, _demand: Demand) -> Mapping[str, int]:
        return {}

    def tier_worth(self, _demand: Demand, _worker: Candidate, _cached: int, in_tiers: int) -> int:
        return in_tiers

    def fetch(
        self, _demand: Demand, worker: Candidate, holder: Candidate, _cached: int, _held: int
    ) -> PrefixFetch | None:
        if worker.worker_id in self.fetches:
            self.copied.add((worker.worker_id, holder.worker_id))
        return self.fetches.get(worker.worker_id)

    def predict(
        self,
        demand: Demand,
        prefill: Candidate | None,
        decode: Candidate,
        cached: Mapping[str, int],
    ) -> Prediction | None:
        name = None if prefill is None else prefill.worker_id
        self.asked.append(name)
        cost = self.costs.get((name, decode.worker_id))
        return None if cost is None else Prediction(name, decode.worker_id, cost, 0.0, cost_s=cost)


def decide(
    members: Sequence[Member],
    policy: str = "least_loaded",
    *,
    demand: Demand = DEMAND,
    turn: int = 0,
    known: FixedLookups | None = None,
) -> Decision:
    return POLICIES[policy](seen(members), demand, turn, PlacementContext(known, known))


def names(placement: Placement | None) -> tuple[str | None, str] | None:
    """Return the names of the prefill and the decode worker, or None if the request waits."""
    if placement is None:
        return None
    prefill = placement.prefill
    return None if prefill is None else prefill.worker_id, placement.decode.worker_id


def place(
    members: Sequence[Member], policy: str = "least_loaded", **arguments: Any
) -> tuple[str | None, str] | None:
    return names(decide(members, policy, **arguments).placement)
