"""What is cached against what is loaded: a fake lookup says what workers hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from pdserve.types import Role, WorkerLoad
from router.fleet.member import Member
from router.placement.policies import POLICIES
from router.placement.values import Demand, PlacementContext
from tests.fakes import worker_info

if TYPE_CHECKING:
    from collections.abc import Mapping

P, D, A = Role.PREFILL, Role.DECODE, Role.AGGREGATED
DEMAND = Demand("demo", prompt_tokens=100, kv_tokens=150)


@dataclass
class Cached:
    """Knows of tokens by worker id, whatever the prompt."""

    tokens: Mapping[str, int]

    def cached_tokens(self, _demand: Demand) -> Mapping[str, int]:
        return self.tokens


def worker(worker_id: str, role: Role, waits: int = 0, running: int = 0) -> Member:
    """`waits` are prompt tokens outstanding, `running` requests in the engine."""
    load = WorkerLoad(0, running, running / 100, 100 - running)
    member = Member(worker_info(worker_id, role), lease_end=1.0, attached=True, load=load)
    member.outstanding_tokens = waits
    return member


def place(
    members: list[Member], cached: Mapping[str, int] | None, demand: Demand = DEMAND
) -> tuple[str | None, str]:
    context = PlacementContext(None if cached is None else Cached(cached))
    placement = POLICIES["prefix_aware"]([m.seen() for m in members], demand, 0, context).placement
    assert placement is not None
    prefill = placement.prefill
    return None if prefill is None else prefill.worker_id, placement.decode.worker_id


@pytest.mark.parametrize(
    ("members", "cached", "expected"),
    [
        pytest.param([worker("p1", P), worker("p2", P), worker("d", D)], {"p2": 32}, ("p2", "d"),
                     id="the prompt's beginning draws"),
        pytest.param([worker("p1", P), worker("p2", P), worker("d", D)], {"p1": 32, "p2": 48},
                     ("p2", "d"), id="the longer beginning draws more"),
        pytest.param([worker("p1", P), worker("p2", P, waits=90), worker("d", D)], {"p2": 100},
                     ("p2", "d"), id="as long as less waits than is saved"),
        pytest.param([worker("p1", P), worker("p2", P, waits=110), worker("d", D)], {"p2": 100},
                     ("p1", "d"), id="not where more waits than is saved"),
        pytest.param([worker("p1", P), worker("p2", P, waits=90), worker("d", D)], {"p2": 16},
                     ("p1", "d"), id="a short beginning is not worth a queue"),
        pytest.param([worker("p", P), worker("d1", D), worker("d2", D)], {"d2": 64}, ("p", "d2"),
                     id="what decode has need not travel"),
        pytest.param([worker("p", P), worker("d1", D), worker("d2", D, running=6)], {"d2": 100},
                     ("p", "d1"), id="a busy decode worker is not worth that"),
        pytest.param([worker("p", P), worker("d", D), worker("a", A)], {"a": 100}, (None, "a"),
                     id="an aggregated worker with the prompt"),
        pytest.param([worker("p1", P, waits=5), worker("p2", P), worker("d", D)], {}, ("p2", "d"),
                     id="nothing cached: the least loaded"),
        pytest.param([worker("p1", P, waits=5), worker("p2", P), worker("d", D)], None,
                     ("p2", "d"), id="no lookup: the least loaded"),
        pytest.param([worker("p1", P), worker("d", D)], {"gone": 100}, ("p1", "d"),
                     id="a worker that is not there"),
    ],
)  # fmt: skip
def test_a_request_goes_to(
    members: list[Member], cached: Mapping[str, int] | None, expected: tuple[str | None, str]
) -> None:
    assert place(members, cached) == expected
