"""What the supervisor decides, event by event, under a clock that the test holds."""

from __future__ import annotations

import signal

import pytest

from pdserve.local.supervision import (
    FORGIVEN_AFTER_S,
    QUICK_STOP_S,
    Announce,
    Explain,
    Finish,
    Order,
    Policy,
    Send,
    Start,
    Supervision,
    Tell,
)

ROUTER = "router"
WORKERS = ("prefill-0", "decode-0")
EVERYONE = (ROUTER, *WORKERS)
POLICY = Policy(start_timeout_s=60, router_grace_s=10, worker_grace_s=20, max_restarts=2)


def make(*, known: bool = True, routers: tuple[str, ...] = (ROUTER,)) -> Supervision:
    return Supervision(routers, WORKERS, POLICY, router_addresses_known=known)


def serving(now: float = 0.0) -> Supervision:
    supervision = make()
    supervision.begin(now)
    for name in EVERYONE:
        supervision.became_ready(name, now)
    assert supervision.registered(WORKERS) == [Announce(first=True)]
    return supervision


def deeds(orders: list[Order]) -> list[Order]:
    """The orders without what is only said."""
    return [order for order in orders if not isinstance(order, Tell)]


def term(*names: str) -> list[Order]:
    return [Send(name, signal.SIGTERM) for name in names]


def kill(*names: str) -> list[Order]:
    return [Send(name, signal.SIGKILL) for name in names]


def test_all_start_at_once_where_the_router_address_is_known() -> None:
    assert make().begin(0) == [Start(name) for name in EVERYONE]


def test_workers_wait_for_a_router_that_takes_a_free_port() -> None:
    supervision = make(known=False)
    assert supervision.begin(0) == [Start(ROUTER)]
    assert supervision.became_ready(ROUTER, 1) == [Start(name) for name in WORKERS]


def test_workers_wait_for_all_routers_and_outlive_them() -> None:
    routers = ("router-0", "router-1")
    supervision = make(known=False, routers=routers)
    assert supervision.begin(0) == [Start(name) for name in routers]
    assert supervision.became_ready("router-1", 1) == []
    assert supervision.became_ready("router-0", 1) == [Start(name) for name in WORKERS]
    for name in WORKERS:
        supervision.became_ready(name, 2)
    supervision.registered(WORKERS)
    assert deeds(supervision.exited("router-1", 0, 3)) == [Start("router-1")]
    supervision.became_ready("router-1", 4)
    assert deeds(supervision.stop_requested(5)) == term(*routers)
    assert supervision.exited("router-0", 0, 6) == []
    assert supervision.exited("router-1", 0, 6) == term(*WORKERS)


def test_serving_is_announced_once_everyone_is_ready_and_registered() -> None:
    supervision = make()
    supervision.begin(0)
    assert supervision.became_ready("prefill-0", 1) == []
    assert supervision.became_ready(ROUTER, 2) == []
    assert supervision.registered({"prefill-0"}) == []
    assert supervision.became_ready("decode-0", 3) == []
    assert supervision.awaited == ("decode-0",)
    assert supervision.registered(WORKERS) == [Announce(first=True)]
    assert not supervision.is_starting


@pytest.mark.parametrize(("code", "exit_code"), [(1, 1), (2, 2), (-9, 1), (0, 1)])
def test_a_death_before_all_are_ready_ends_everything(code: int, exit_code: int) -> None:
    supervision = make()
    supervision.begin(0)
    orders = deeds(supervision.exited("decode-0", code, 1))
    assert orders == [Explain("decode-0", code), *term(ROUTER, "prefill-0")]
    assert supervision.exited("prefill-0", 0, 2) == []
    assert supervision.exited(ROUTER, 0, 2) == [Finish(exit_code)]


def test_a_start_that_takes_too_long_names_who_is_awaited_and_ends() -> None:
    supervision = make()
    supervision.begin(0)
    supervision.became_ready(ROUTER, 1)
    assert supervision.wake_at() == POLICY.start_timeout_s
    assert supervision.tick(POLICY.start_timeout_s - 1) == []
    orders = supervision.tick(POLICY.start_timeout_s)
    told = [order for order in orders if isinstance(order, Tell)]
    assert [order.is_error for order in told] == [True]
    assert "prefill-0, decode-0" in told[0].text
    assert deeds(orders) == term(*EVERYONE)


def test_a_stop_lets_the_router_finish_before_the_workers_drain() -> None:
    supervision = serving()
    assert deeds(supervision.stop_requested(0)) == term(ROUTER)
    assert supervision.exited(ROUTER, 0, 1) == term(*WORKERS)
    assert supervision.exited("prefill-0", 0, 2) == []
    assert supervision.exited("decode-0", 0, 3) == [Finish(0)]


def test_whoever_outstays_its_grace_is_killed_and_the_stop_goes_on() -> None:
    supervision = serving()
    supervision.stop_requested(0)
    assert supervision.wake_at() == POLICY.router_grace_s
    assert deeds(supervision.tick(POLICY.router_grace_s)) == kill(ROUTER)
    assert supervision.tick(POLICY.router_grace_s + 1) == []
    assert supervision.exited(ROUTER, -9, 11) == term(*WORKERS)
    assert supervision.wake_at() == 11 + POLICY.worker_grace_s
    assert deeds(supervision.tick(11 + POLICY.worker_grace_s)) == kill(*WORKERS)


def test_a_second_stop_kills_at_once_and_says_so_by_its_exit_code() -> None:
    supervision = serving()
    supervision.stop_requested(0)
    assert deeds(supervision.stop_requested(1)) == kill(*EVERYONE)
    for name in (ROUTER, "prefill-0"):
        assert supervision.exited(name, -9, 2) == []
    assert supervision.exited("decode-0", -9, 2) == [Finish(130)]


def test_a_stop_while_starting_has_nothing_to_wait_for() -> None:
    supervision = make()
    supervision.begin(0)
    assert deeds(supervision.stop_requested(1)) == term(*EVERYONE)
    assert supervision.wake_at() == 1 + QUICK_STOP_S
    assert deeds(supervision.tick(1 + QUICK_STOP_S)) == kill(*EVERYONE)
    for name in WORKERS:
        supervision.exited(name, -9, 7)
    assert supervision.exited(ROUTER, 0, 7) == [Finish(0)]


def test_a_worker_that_dies_while_serving_starts_again_after_a_growing_pause() -> None:
    supervision = serving()
    assert deeds(supervision.exited("decode-0", 1, 10)) == [Explain("decode-0", 1)]
    assert supervision.wake_at() == 11
    assert supervision.tick(10.5) == []
    assert supervision.tick(11) == [Start("decode-0")]
    assert deeds(supervision.became_ready("decode-0", 20)) == [Announce(first=False)]
    supervision.exited("decode-0", 1, 30)
    assert supervision.wake_at() == 32


def test_deaths_in_close_succession_are_given_up_on() -> None:
    supervision = serving()
    now = 10.0
    for _ in range(POLICY.max_restarts):
        supervision.exited("decode-0", 1, now)
        now = supervision.wake_at() or 0.0
        assert supervision.tick(now) == [Start("decode-0")]
    orders = deeds(supervision.exited("decode-0", 1, now))
    assert orders == [Explain("decode-0", 1), *term(ROUTER, "prefill-0")]
    supervision.exited("prefill-0", 0, now)
    assert supervision.exited(ROUTER, 0, now) == [Finish(1)]


def test_a_long_life_earns_a_clean_record() -> None:
    supervision = serving()
    now = 0.0
    for _ in range(3 * POLICY.max_restarts):
        now += FORGIVEN_AFTER_S
        supervision.exited("decode-0", 1, now)
        assert supervision.wake_at() == now + 1
        now += 1
        supervision.tick(now)
        supervision.became_ready("decode-0", now)


def test_a_stop_forgets_restarts_that_are_due() -> None:
    supervision = serving()
    supervision.exited("decode-0", 1, 10)
    assert deeds(supervision.stop_requested(10.5)) == term(ROUTER)
    assert deeds(supervision.tick(12)) == []
    assert supervision.exited(ROUTER, 0, 12) == term("prefill-0")
    assert supervision.exited("prefill-0", 0, 12) == [Finish(0)]


def test_a_stop_while_the_router_is_down_goes_straight_to_the_workers() -> None:
    supervision = serving()
    supervision.exited(ROUTER, 1, 10)
    assert deeds(supervision.stop_requested(10.5)) == term(*WORKERS)


def test_a_stop_with_nothing_alive_ends_at_once() -> None:
    supervision = Supervision((ROUTER,), (), POLICY, router_addresses_known=True)
    supervision.begin(0)
    supervision.became_ready(ROUTER, 1)
    supervision.exited(ROUTER, 1, 2)
    assert deeds(supervision.stop_requested(2.5)) == [Finish(0)]


def test_a_worker_that_was_told_to_end_is_started_again_at_once_however_often() -> None:
    supervision = serving()
    for now in range(2 * POLICY.max_restarts):
        assert deeds(supervision.exited("decode-0", 0, now)) == [Start("decode-0")]
        supervision.became_ready("decode-0", now)
    # One that ends before it serves is at fault all the same.
    supervision.exited("decode-0", 0, 10)
    assert Explain("decode-0", 0) in supervision.exited("decode-0", 0, 11)
