"""What a request needs of workers."""

from __future__ import annotations

from pdserve.types import Role, SamplingParams
from router.attempt.placer import Placer
from router.fleet.registry import Fleet
from router.placement.policies import POLICIES
from tests.support.router_stack import request, worker_info


async def test_a_prompt_whose_experts_are_wanted_is_expected_nowhere() -> None:
    fleet = Fleet()
    fleet.register(worker_info("aggregated-0", Role.AGGREGATED))
    placer = Placer(fleet, POLICIES["prefix_aware"])

    def needed(*, experts: bool, resume: tuple[int, ...] = ()) -> tuple[int, bool]:
        n = 1 if resume else 3
        sampling = SamplingParams(max_tokens=8, n=n, routed_experts=experts)
        demand = placer.demand(request(sampling=sampling, resume=resume))
        return demand.kv_tokens, bool(demand.block_hashes(16))

    shared, is_looked_up = needed(experts=False)
    assert is_looked_up
    # Each answer computes the prompt for itself.
    own, is_looked_up = needed(experts=True)
    assert not is_looked_up
    assert own > shared
    # Its experts have left already.
    _, is_looked_up = needed(experts=True, resume=(7, 8))
    assert is_looked_up
