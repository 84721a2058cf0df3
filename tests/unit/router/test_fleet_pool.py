"""Membership of the fleet: transitions under a clock that the test holds."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.errors import InvalidRequest
from pdserve.types import Role, WorkerLoad
from router.fleet.pool import (
    FORGET_AFTER_S,
    REMEMBERED_STARTS,
    WorkerPool,
)
from router.health_checks import half_open_worker
from router.placement.values import MemberState
from router.placer import Charge
from tests.fakes import MODEL, worker_info

if TYPE_CHECKING:
    from router.fleet.member import Member

LOAD = WorkerLoad(1, 2, 0.5, 50)


@pytest.fixture
def pool() -> WorkerPool:
    return WorkerPool(lease_s=5.0)


def states(pool: WorkerPool) -> dict[str, str]:
    return {member.worker_id: member.state.value for member in pool.members.values()}


def test_a_worker_is_ready_while_it_is_connected(pool: WorkerPool) -> None:
    pool.register(worker_info("d", Role.DECODE), now=0.0)
    assert states(pool) == {"d": "connecting"}
    pool.attached(pool.members["d"])
    assert states(pool) == {"d": "ready"}
    pool.detached(pool.members["d"])
    assert states(pool) == {"d": "connecting"}


def test_registering_again_renews(pool: WorkerPool) -> None:
    info = worker_info("d", Role.DECODE)
    pool.register(info, now=0.0)
    member = pool.members["d"]
    pool.register(info, now=4.0)
    pool.expire(now=8.9)
    assert pool.members["d"] is member
    assert states(pool) == {"d": "connecting"}


def test_a_new_instance_id_replaces_the_old_one(pool: WorkerPool) -> None:
    pool.register(worker_info("d", Role.DECODE), now=0.0)
    first = pool.members["d"]
    pool.register(worker_info("d", Role.DECODE, instance_id="e2"), now=1.0)
    assert pool.members["d"] is not first
    assert (first.state, first.gone) == (MemberState.LOST, "it registered again")
    pool.attached(first)
    assert first.state is MemberState.LOST, "a late event must not revive it"


def test_an_earlier_start_that_speaks_late_does_not_cut_the_later_one_off(pool: WorkerPool) -> None:
    old, new = (
        worker_info("d", Role.DECODE, instance_id=instance_id) for instance_id in ("e1", "e2")
    )
    pool.register(old, now=0.0)
    pool.register(new, now=1.0)
    with pytest.raises(InvalidRequest, match="a later start of it has registered"):
        pool.register(old, now=2.0)
    assert pool.members["d"].info == new
    pool.register(new, now=2.0)
    # Where the later one is gone, the earlier one is welcome, and the other way round.
    pool.expire(now=8.0)
    pool.register(old, now=9.0)
    with pytest.raises(InvalidRequest, match="a later start"):
        pool.register(new, now=10.0)


def test_so_many_earlier_starts_are_remembered(pool: WorkerPool) -> None:
    for number in range(REMEMBERED_STARTS + 5):
        pool.register(worker_info("d", Role.DECODE, instance_id=f"e{number}"), now=1.0)
    assert len(pool.members["d"].replaced) == REMEMBERED_STARTS


def test_a_lease_that_runs_out_loses_the_worker_and_then_its_memory(pool: WorkerPool) -> None:
    pool.register(worker_info("d", Role.DECODE), now=0.0)
    pool.expire(now=4.9)
    assert states(pool) == {"d": "connecting"}
    pool.expire(now=5.0)
    assert pool.members["d"].gone == "its lease expired"
    assert states(pool) == {"d": "lost"}
    pool.expire(now=5.0 + FORGET_AFTER_S - 0.1)
    assert states(pool) == {"d": "lost"}
    pool.expire(now=5.0 + FORGET_AFTER_S)
    assert states(pool) == {}


@pytest.mark.parametrize(
    ("worker_id", "instance_id", "known"),
    [("d", "e1", True), ("d", "e0", False), ("other", "e1", False)],
)
def test_only_this_start_of_a_known_worker_renews(
    pool: WorkerPool, worker_id: str, instance_id: str, known: bool
) -> None:
    pool.register(worker_info("d", Role.DECODE), now=0.0)
    renewed = pool.renew(worker_id, instance_id, 4.0, load=LOAD, draining=False)
    assert (renewed is not None) is known
    pool.expire(now=6.0)
    assert pool.members["d"].lost is not known
    assert pool.members["d"].load == (LOAD if known else None)


def test_a_lost_worker_cannot_renew_but_can_register(pool: WorkerPool) -> None:
    info = worker_info("d", Role.DECODE)
    pool.register(info, now=0.0)
    pool.expire(now=5.0)
    assert not pool.renew("d", "e1", 5.1, load=None, draining=False)
    pool.register(info, now=5.2)
    assert states(pool) == {"d": "connecting"}


def test_a_renewal_without_load_keeps_the_last_one(pool: WorkerPool) -> None:
    pool.register(worker_info("d", Role.DECODE), now=0.0)
    assert pool.members["d"].load is None, "an unknown load is not zeros"
    pool.renew("d", "e1", 1.0, load=LOAD, draining=False)
    pool.renew("d", "e1", 2.0, load=None, draining=False)
    assert pool.members["d"].load == LOAD


def test_a_draining_worker_is_not_ready_and_can_come_back(pool: WorkerPool) -> None:
    pool.register(worker_info("d", Role.DECODE), now=0.0)
    pool.attached(pool.members["d"])
    pool.renew("d", "e1", 1.0, load=None, draining=True)
    assert states(pool) == {"d": "draining"}
    pool.renew("d", "e1", 2.0, load=None, draining=False)
    assert states(pool) == {"d": "ready"}


def test_a_worker_leaves_and_another_start_of_it_cannot_make_it_leave(pool: WorkerPool) -> None:
    pool.register(worker_info("d", Role.DECODE), now=0.0)
    pool.deregister("d", "e0", now=1.0)
    assert states(pool) == {"d": "connecting"}
    pool.deregister("d", "e1", now=1.0)
    assert pool.members["d"].gone == "it left"


def test_closing_loses_everyone(pool: WorkerPool) -> None:
    pool.register(worker_info("d", Role.DECODE), now=0.0)
    pool.register(worker_info("p", Role.PREFILL), now=0.0)
    pool.close(now=1.0)
    assert states(pool) == {"d": "lost", "p": "lost"}


@pytest.mark.parametrize(
    ("info", "field", "reason"),
    [
        (
            worker_info("x", Role.DECODE, kv=None),
            "worker.kv",
            "worker x: a decode worker needs a kv endpoint",
        ),
        (worker_info("x", Role.PREFILL, kv=None), "worker.kv", "needs a kv endpoint"),
        (
            worker_info("x", Role.DECODE, model=replace(MODEL, vocab_size=7)),
            "worker.model.vocab_size",
            "model demo has vocab_size 7, but 512 on worker p",
        ),
        (
            worker_info("x", Role.AGGREGATED, model=replace(MODEL, max_model_len=9)),
            "worker.model.max_model_len",
            "model demo has max_model_len 9, but 4096 on worker p",
        ),
    ],
)
def test_a_worker_that_cannot_serve_beside_the_others_is_refused(
    pool: WorkerPool, info: object, field: str, reason: str
) -> None:
    pool.register(worker_info("p", Role.PREFILL), now=0.0)
    with pytest.raises(InvalidRequest, match=reason) as caught:
        pool.register(info, now=1.0)  # type: ignore[arg-type]
    assert caught.value.field == field
    assert states(pool) == {"p": "connecting"}


def test_models_may_differ_once_the_others_are_gone(pool: WorkerPool) -> None:
    pool.register(worker_info("p", Role.PREFILL), now=0.0)
    pool.expire(now=5.0)
    pool.register(worker_info("x", Role.PREFILL, model=replace(MODEL, vocab_size=7)), now=6.0)
    assert pool.models()["demo"].vocab_size == 7


def test_another_model_and_another_layout_are_welcome(pool: WorkerPool) -> None:
    pool.register(worker_info("p", Role.PREFILL), now=0.0)
    pool.register(worker_info("q", Role.PREFILL, compatibility="layout-b"), now=0.0)
    pool.register(
        worker_info("r", Role.PREFILL, model=replace(MODEL, name="other", vocab_size=7)), now=0.0
    )
    assert sorted(pool.models()) == ["demo", "other"]
    assert [m.worker_id for m in pool.of_model("demo")] == ["p", "q"]


def test_what_is_known_of_a_model_follows_its_members(pool: WorkerPool) -> None:
    pool.register(worker_info("p", Role.PREFILL, total_blocks=500), now=0.0)
    assert pool.of_model("demo") == [pool.members["p"]]
    assert pool.largest("demo", prefill_only=False) == (8000, 16), "nobody decodes yet"
    pool.register(worker_info("d", Role.DECODE), now=0.0)
    assert [c.worker_id for c in pool.candidates("demo")] == ["p", "d"]
    assert pool.largest("demo", prefill_only=False) == (1600, 16)
    assert pool.largest("demo", prefill_only=True) == (8000, 16)
    pool.register(worker_info("d", Role.DECODE, instance_id="e2", total_blocks=200), now=1.0)
    assert pool.of_model("demo")[1] is pool.members["d"]
    assert pool.largest("demo", prefill_only=False) == (3200, 16)
    pool.close(now=2.0)
    pool.expire(now=2.0 + FORGET_AFTER_S)
    assert pool.of_model("demo") == pool.candidates("demo") == []


def test_a_charge_is_taken_in_blocks_and_given_back_once(pool: WorkerPool) -> None:
    pool.register(worker_info("a", Role.AGGREGATED), now=0.0)
    member = pool.members["a"]
    charge = Charge(member, prompt_tokens=20, kv_tokens=33)
    assert (member.outstanding_requests, member.outstanding_tokens) == (1, 20)
    assert (member.reserved_blocks, member.reserved_tokens) == (3, 48)
    charge.prefilled()
    charge.prefilled()
    assert (member.outstanding_requests, member.outstanding_tokens) == (1, 0)
    charge.release()
    charge.release()
    assert (member.outstanding_requests, member.outstanding_tokens) == (0, 0)
    assert member.reserved_blocks == 0


def ready(pool: WorkerPool, *names: str) -> list[Member]:
    for name in names:
        pool.register(worker_info(name, Role.DECODE), now=0.0)
        pool.attached(pool.members[name])
    return [pool.members[name] for name in names]


def seen(pool: WorkerPool) -> dict[str, str]:
    return {c.worker_id: c.state.value for c in pool.candidates(MODEL.name)}


def test_the_suspended_are_tried_where_nobody_is_ready(pool: WorkerPool) -> None:
    a, b = ready(pool, "a", "b")
    pool.stalled(a, 0.0, "it hangs")
    assert seen(pool) == {"a": "suspended", "b": "ready"}
    assert (pool.is_last(a), pool.is_last(b)) == (False, True)
    pool.stalled(b, 0.0, "it hangs")
    assert seen(pool) == {"a": "ready", "b": "ready"}
    assert states(pool) == {"a": "suspended", "b": "suspended"}
    pool.detached(a)
    assert seen(pool) == {"a": "suspended", "b": "ready"}


@pytest.mark.parametrize("change", [{"draining": True}, {"unhealthy": "hot"}])
def test_what_else_speaks_against_a_suspended_one_holds(
    pool: WorkerPool, change: dict[str, Any]
) -> None:
    (a,) = ready(pool, "a")
    pool.stalled(a, 0.0, "it hangs")
    pool.renew("a", "e1", 0.0, **{"load": None, "draining": False, **change})
    assert "ready" not in seen(pool).values()


def test_where_canaries_try_a_half_open_one_gets_no_request(pool: WorkerPool) -> None:
    a, b = ready(pool, "a", "b")
    pool.by_probe = True
    pool.stalled(a, 0.0, "it hangs")
    after = pool.breaker_limits.open_s
    pool.end_suspensions(after)
    assert half_open_worker(pool.members, after - 0.1) is None
    assert half_open_worker(pool.members, after) is a
    assert seen(pool) == {"a": "suspended", "b": "ready"}
    pool.placed(a, after)
    assert half_open_worker(pool.members, after) is None, "one tries"
    assert pool.succeeded(a, after)
    assert seen(pool) == {"a": "ready", "b": "ready"}
    pool.stalled(b, 0.0, "it hangs")
    pool.detached(b)
    assert half_open_worker(pool.members, 2 * after) is None, "it cannot be reached"


def test_the_model_of_a_lost_worker_is_known_until_it_is_forgotten(pool: WorkerPool) -> None:
    ready(pool, "a")
    assert pool.has_ready("demo")
    pool.expire(now=5.0)
    assert list(pool.models()) == ["demo"]
    assert not pool.has_ready("demo")
    pool.expire(now=5.0 + FORGET_AFTER_S)
    assert not pool.models()


@pytest.mark.parametrize(("running", "foreign"), [(1, 0), (3, 38)])
def test_blocks_of_other_routers_are_seen_in_the_load(
    pool: WorkerPool, running: int, foreign: int
) -> None:
    """100 blocks, of which 60 are used; this router placed one request, with 2 blocks."""
    (a,) = ready(pool, "a")
    Charge(a, kv_tokens=32)
    assert not pool.reported(a, WorkerLoad(0, running, 0.4, 60))
    assert a.foreign_blocks == foreign
    assert pool.reported(a, WorkerLoad(0, 1, 0.0, 98)) is bool(foreign)
    assert a.foreign_blocks == 0


def test_why_nothing_is_served(pool: WorkerPool) -> None:
    assert pool.why_none() == "no worker has registered yet"
    ready(pool, "a", "b")
    pool.expire(now=5.0)
    ran_out = "is gone: its lease expired"
    assert pool.why_none() == f"no worker is left: a {ran_out}; b {ran_out}"
