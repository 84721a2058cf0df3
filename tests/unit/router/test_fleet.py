"""Membership of the fleet: transitions under a clock that the test holds, without connections."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING

import pytest

from pdserve.errors import InvalidRequest
from pdserve.types import ModelWeights, Role, WorkerLoad
from router.attempt.placer import Charge
from router.fleet.member import PlacedLoad
from router.fleet.registry import FORGET_AFTER_S, Fleet
from router.fleet.view import worker_views
from router.placement.values import MemberState
from tests.support.router_stack import MODEL, Clock, worker_info

if TYPE_CHECKING:
    from pdserve.types import WorkerInfo
    from router.fleet.member import Member

LOAD = WorkerLoad(1, 2, 0.5, 50)
DECODE, PREFILL = Role.DECODE, Role.PREFILL


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def fleet(clock: Clock) -> Fleet:
    return Fleet(lease_s=5.0, clock=clock, max_tick_s=inf)


def states(fleet: Fleet) -> dict[str, str]:
    return {member.worker_id: member.state.value for member in fleet.members.values()}


def add(fleet: Fleet, *infos: WorkerInfo) -> list[Member]:
    """Register workers that are connected."""
    for info in infos:
        fleet.register(info)
        fleet.members[info.worker_id].attached = True
    return [fleet.members[info.worker_id] for info in infos]


def test_a_worker_is_ready_while_it_is_connected(fleet: Fleet) -> None:
    fleet.register(worker_info("d", DECODE))
    assert states(fleet) == {"d": "connecting"}
    fleet.members["d"].attached = True
    assert states(fleet) == {"d": "ready"}
    fleet.members["d"].attached = False
    assert states(fleet) == {"d": "connecting"}


def test_registering_again_renews(fleet: Fleet, clock: Clock) -> None:
    (member,) = add(fleet, worker_info("d", DECODE))
    clock.now = 4.0
    fleet.register(member.info)
    clock.now = 8.9
    fleet.expire()
    assert fleet.members["d"] is member
    assert states(fleet) == {"d": "ready"}


def test_a_new_instance_id_replaces_the_old_one(fleet: Fleet) -> None:
    (first,) = add(fleet, worker_info("d", DECODE))
    fleet.register(worker_info("d", DECODE, instance_id="e2"))
    assert fleet.members["d"] is not first
    assert (first.state, first.gone) == (MemberState.LOST, "it registered again")
    first.attached = True
    assert first.state is MemberState.LOST, "a late event must not revive it"


def test_a_late_message_of_an_earlier_start_does_not_replace_the_later_one(
    fleet: Fleet, clock: Clock
) -> None:
    old, new = (worker_info("d", DECODE, instance_id=x) for x in ("e1", "e2"))
    fleet.register(old)
    fleet.register(new)
    with pytest.raises(InvalidRequest, match="a later start of it has registered"):
        fleet.register(old)
    assert fleet.members["d"].info == new
    # Once the later one is gone, the earlier one is welcome.
    clock.now = 8.0
    fleet.expire()
    fleet.register(old)
    with pytest.raises(InvalidRequest, match="a later start"):
        fleet.register(new)


def test_a_lease_that_expires_loses_the_worker_and_later_its_memory(
    fleet: Fleet, clock: Clock
) -> None:
    (member,) = add(fleet, worker_info("d", DECODE))
    seen = []
    for clock.now in (4.9, 5.0, 4.9 + FORGET_AFTER_S, 5.0 + FORGET_AFTER_S):
        fleet.expire()
        seen.append(states(fleet).get("d"))
    assert seen == ["ready", "lost", "lost", None]
    assert member.gone == "its lease expired"


@pytest.mark.parametrize(
    ("worker_id", "instance_id", "known"),
    [("d", "e1", True), ("d", "e0", False), ("other", "e1", False)],
)
def test_only_the_registered_start_of_a_worker_renews(
    fleet: Fleet, clock: Clock, worker_id: str, instance_id: str, known: bool
) -> None:
    fleet.register(worker_info("d", DECODE))
    clock.now = 4.0
    renewed = fleet.renew(worker_id, instance_id, load=LOAD, draining=False)
    assert renewed is (fleet.members["d"] if known else None)
    clock.now = 6.0
    fleet.expire()
    assert fleet.members["d"].lost is not known
    assert fleet.members["d"].reported.load == (LOAD if known else None)


def test_a_worker_that_keeps_dying_is_shown_while_it_is_reported(
    fleet: Fleet, clock: Clock
) -> None:
    """This includes unknown and forgotten workers, but not one that has returned."""
    info = worker_info("d", DECODE)
    add(fleet, info)

    def report() -> dict[str, tuple[str, str]]:
        for name in ("d", "new"):
            fleet.report_crash_loop(name, DECODE, MODEL.name, "signal 9")
        return {x.info.worker_id: (x.state.value, x.reason) for x in worker_views(fleet)}

    crash_looping = ("crash-looping", "signal 9")
    assert report() == {"d": ("ready", ""), "new": crash_looping}
    fleet.members["d"].attached = False
    for clock.now in (1.0, 6.0, 7.0 + FORGET_AFTER_S):
        fleet.expire()
        assert report() == {"d": crash_looping, "new": crash_looping}
    assert not fleet.members
    add(fleet, info)
    assert fleet.with_crash_loops()["d"].state is MemberState.READY
    clock.now += 5.0
    fleet.expire()
    assert set(fleet.with_crash_loops()) == {"d"}


def test_a_lost_worker_cannot_renew_but_can_register(fleet: Fleet, clock: Clock) -> None:
    fleet.register(worker_info("d", DECODE))
    clock.now = 5.0
    fleet.expire()
    assert not fleet.renew("d", "e1", load=None, draining=False)
    fleet.register(worker_info("d", DECODE))
    assert states(fleet) == {"d": "connecting"}


def test_a_renewal_without_load_keeps_the_last_one(fleet: Fleet) -> None:
    (member,) = add(fleet, worker_info("d", DECODE))
    assert member.reported.load is None, "an unknown load is not zeros"
    fleet.renew("d", "e1", load=LOAD, draining=False)
    fleet.renew("d", "e1", load=None, draining=False)
    assert member.reported.load == LOAD


def test_a_draining_worker_is_not_ready_and_can_come_back(fleet: Fleet) -> None:
    add(fleet, worker_info("d", DECODE))
    fleet.renew("d", "e1", load=None, draining=True)
    assert states(fleet) == {"d": "draining"}
    fleet.renew("d", "e1", load=None, draining=False)
    assert states(fleet) == {"d": "ready"}


def test_of_two_updates_with_one_number_one_is_outdated(fleet: Fleet) -> None:
    add(fleet, worker_info("d", DECODE), worker_info("p", PREFILL))
    first, second = (ModelWeights(1, "one", "/w", digest) for digest in ("a", "b"))
    fleet.renew("d", "e1", load=None, draining=False, weights=second)
    assert states(fleet) == {"d": "ready", "p": "updating"}
    fleet.renew("p", "e1", load=None, draining=False, weights=first)
    assert states(fleet) == {"d": "ready", "p": "updating"}
    assert fleet.weights_of(MODEL.name) == second
    fleet.renew("p", "e1", load=None, draining=False, weights=second)
    assert states(fleet) == {"d": "ready", "p": "ready"}


def test_only_the_registered_start_of_a_worker_leaves(fleet: Fleet) -> None:
    (member,) = add(fleet, worker_info("d", DECODE))
    fleet.deregister("d", "e0")
    assert not member.lost
    fleet.deregister("d", "e1")
    assert (member.gone, member.lost) == ("it left", True)
    assert states(fleet) == {"d": "left"}, "a rollout loses no worker"


def test_a_worker_that_leaves_because_it_failed_is_lost_with_its_reason(fleet: Fleet) -> None:
    (member,) = add(fleet, worker_info("d", DECODE))
    fleet.deregister("d", "e1", failure="the engine died: x")
    assert (member.gone, states(fleet)) == ("the engine died: x", {"d": "lost"})


@pytest.mark.parametrize(
    ("info", "field", "reason"),
    [
        (
            worker_info("x", DECODE, kv=None),
            "worker.kv",
            "worker x: a decode worker needs a kv endpoint",
        ),
        (
            worker_info("x", DECODE, model=replace(MODEL, vocab_size=7)),
            "worker.model.vocab_size",
            "model demo has vocab_size 7, but 512 on worker p",
        ),
        (
            worker_info("x", Role.AGGREGATED, model=replace(MODEL, max_model_len=9)),
            "worker.model.max_model_len",
            "model demo has max_model_len 9, but 4096 on worker p",
        ),
        (
            worker_info("x", DECODE, model=replace(MODEL, modalities={"image": 2})),
            "worker.model.modalities",
            "model demo has modalities {'image': 2}, but {} on worker p",
        ),
        (
            worker_info("x", DECODE, model=replace(MODEL, name="other", aliases=("demo",))),
            "worker.model.aliases",
            r"\['demo'\] is a name of model demo on worker p",
        ),
    ],
)
def test_a_worker_incompatible_with_the_others_is_refused(
    fleet: Fleet, info: WorkerInfo, field: str, reason: str
) -> None:
    add(fleet, worker_info("p", PREFILL))
    with pytest.raises(InvalidRequest, match=reason) as caught:
        fleet.register(info)
    assert caught.value.field == field
    assert states(fleet) == {"p": "ready"}


def test_models_may_differ_once_the_others_are_gone(fleet: Fleet) -> None:
    fleet.register(worker_info("p", PREFILL))
    fleet.deregister("p", "e1")
    fleet.register(worker_info("x", PREFILL, model=replace(MODEL, vocab_size=7)))
    assert fleet.models()["demo"].vocab_size == 7


def test_views_of_a_model_follow_its_members(fleet: Fleet, clock: Clock) -> None:
    fleet.register(worker_info("p", PREFILL, total_blocks=500))
    fleet.register(worker_info("r", PREFILL, model=replace(MODEL, name="other", vocab_size=7)))
    assert sorted(fleet.models()) == ["demo", "other"]
    assert fleet.of_model("demo") == [fleet.members["p"]]
    assert fleet.largest("demo", prefill_only=False) == (8000, 16), "nobody decodes yet"
    fleet.register(worker_info("d", DECODE))
    assert [c.worker_id for c in fleet.candidates("demo")] == ["p", "d"]
    assert fleet.largest("demo", prefill_only=False) == (1600, 16)
    assert fleet.largest("demo", prefill_only=True) == (8000, 16)
    fleet.register(worker_info("d", DECODE, instance_id="e2", total_blocks=200))
    assert fleet.of_model("demo")[1] is fleet.members["d"]
    assert fleet.largest("demo", prefill_only=False) == (3200, 16)
    fleet.close()
    assert list(fleet.models()) == ["demo", "other"], "requests wait for a lost worker"
    clock.now = FORGET_AFTER_S
    fleet.expire()
    assert fleet.of_model("demo") == fleet.candidates("demo") == []


def test_a_charge_is_taken_in_blocks_and_given_back_once(fleet: Fleet) -> None:
    (member,) = add(fleet, worker_info("a", Role.AGGREGATED))
    charge = Charge(member, prompt_tokens=20, kv_tokens=33)
    assert member.placed == PlacedLoad(1, 20, reserved_blocks=3)
    charge.prefilled()
    charge.prefilled()
    assert member.placed == PlacedLoad(1, 0, reserved_blocks=3)
    charge.release()
    charge.release()
    assert member.placed == PlacedLoad()


def seen(fleet: Fleet) -> dict[str, str]:
    return {c.worker_id: c.state.value for c in fleet.candidates(MODEL.name)}


def test_suspended_workers_are_used_if_none_is_ready(fleet: Fleet) -> None:
    a, b = add(fleet, worker_info("a", DECODE), worker_info("b", DECODE))
    a.breaker.trip(0.0, "it hangs")
    assert seen(fleet) == {"a": "suspended", "b": "ready"}
    assert (fleet.is_last(a), fleet.is_last(b)) == (False, True)
    b.breaker.trip(0.0, "it hangs")
    assert seen(fleet) == {"a": "ready", "b": "ready"}
    assert states(fleet) == {"a": "suspended", "b": "suspended"}
    a.attached = False
    assert seen(fleet) == {"a": "suspended", "b": "ready"}
    b.breaker.close()
    assert states(fleet) == {"a": "suspended", "b": "ready"}
