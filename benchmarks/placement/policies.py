"""What a decision costs, by policy: the look at the pool included, of which three workers changed
since the last decision, as one request's start and another's end change them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from benchmarks.placement.pool import MODEL, busy_pool, occupy
from benchmarks.placement.timing import Case
from router.placement.context import NO_CONTEXT
from router.placement.policies.by_name import POLICIES
from router.placement.values import Demand

if TYPE_CHECKING:
    from router.member import Member
    from router.placement.policies.by_name import Policy
    from router.pool import WorkerPool

DEMAND = Demand(MODEL.name, prompt_tokens=2000, kv_tokens=2300)


def cases(workers: int) -> list[Case]:
    """Every policy on a pool of its own."""
    found = []
    for name, policy in POLICIES.items():
        pool = busy_pool(workers)
        run = partial(_decide, policy, pool, list(pool.members.values()))
        found.append(Case(name, workers, run))
    return found


def _decide(policy: Policy, pool: WorkerPool, members: list[Member], call: int) -> None:
    for change in range(3):
        seed = 3 * call + change
        occupy(members[seed * 31 % len(members)], seed * 7919)
    policy(pool.candidates(MODEL.name), DEMAND, call, NO_CONTEXT)
