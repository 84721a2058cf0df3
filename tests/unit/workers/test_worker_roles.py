"""A worker's role as a state machine, and at one worker that nobody settles."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pdserve.errors import InvalidRequest, Unavailable
from pdserve.types import Role
from tests.cluster import Cluster
from workers import server
from workers.roles import RoleChange, RoleState

if TYPE_CHECKING:
    from collections.abc import Callable

PREFILL, DECODE = Role.PREFILL, Role.DECODE


def test_a_role_changes_when_work_has_ended_and_stays_when_it_was_proved() -> None:
    change = RoleChange(PREFILL)
    change.begin(DECODE)
    assert (change.role, change.state) == (PREFILL, RoleState.DRAINING)
    change.drained()
    assert (change.role, change.state) == (DECODE, RoleState.PROVING)
    assert change.settle(keep=True)
    assert (change.role, change.state) == (DECODE, RoleState.SERVING)


@pytest.mark.parametrize(
    "ends",
    [
        lambda change: change.give_up(),
        lambda change: (change.drained(), change.settle(keep=False)),
    ],
    ids=["work did not end", "not proved"],
)
def test_a_role_that_does_not_come_to_be_leaves_the_former_one(
    ends: Callable[[RoleChange], object],
) -> None:
    change = RoleChange(DECODE)
    change.begin(PREFILL)
    ends(change)
    assert (change.role, change.state) == (DECODE, RoleState.SERVING)
    assert not change.settle(keep=True)
    change.begin(PREFILL)


def test_what_cannot_be_is_refused_and_changes_nothing() -> None:
    change = RoleChange(PREFILL)
    for role in (PREFILL, Role.AGGREGATED):
        with pytest.raises(InvalidRequest):
            change.begin(role)
    with pytest.raises(InvalidRequest):
        RoleChange(Role.AGGREGATED).begin(DECODE)
    change.begin(DECODE)
    with pytest.raises(Unavailable):
        change.begin(DECODE)
    assert (change.role, change.state) == (PREFILL, RoleState.DRAINING)


async def test_a_role_that_nobody_settles_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "SETTLE_S", 0.05)
    async with Cluster(prefill=2, decode=1) as cluster:
        worker = cluster.workers["prefill-0"]
        await worker.set_role(DECODE, 1.0)
        await cluster.until(lambda: worker.worker.roles.state is RoleState.SERVING)
        await cluster.until_state("prefill-0", "ready")
        assert worker.info.role is PREFILL
        assert not worker.settle_role(keep=True)
