"""What the console, the Admin API and the metrics show of a worker."""

from __future__ import annotations

from pdserve.types import Role, WorkerLoad
from router.fleet.health import BreakerState
from router.fleet.registry import Fleet
from router.fleet.view import WorkerView, pair_views, worker_views
from tests.support.router_stack import worker_info

LOAD = WorkerLoad(num_waiting_reqs=0, num_running_reqs=1, kv_cache_usage=0.5, free_blocks=10)


def fleet_of(name: str) -> Fleet:
    fleet = Fleet(clock=lambda: 0.0)
    fleet.register(worker_info(name, Role.DECODE))
    fleet.renew(name, "e1", load=LOAD, draining=False)
    fleet.members[name].attached = True
    return fleet


def view_of(fleet: Fleet) -> WorkerView:
    (view,) = worker_views(fleet)
    return view


def test_a_ready_worker_has_a_load_and_no_reason() -> None:
    view = view_of(fleet_of("d"))
    assert (view.state, view.reason, view.breaker, view.load) == ("ready", "", None, LOAD)


def test_a_suspended_worker_has_the_reason_of_its_breaker() -> None:
    fleet = fleet_of("d")
    fleet.members["d"].breaker.trip(0.0, "no frame for 3.0 s")
    view = view_of(fleet)
    assert (view.state, view.reason) == ("suspended", "no frame for 3.0 s")
    assert view.breaker is not None
    assert (view.breaker.state, view.breaker.failures) == (BreakerState.OPEN, 1)


def test_the_last_reports_of_a_lost_worker_are_not_shown() -> None:
    fleet = fleet_of("d")
    fleet.deregister("d", "e1", failure="its engine died")
    view = view_of(fleet)
    assert (view.state, view.reason, view.load) == ("lost", "its engine died", None)


def test_a_pair_is_ejected_after_damaged_kv_but_not_after_one_failure() -> None:
    fleet = fleet_of("d")
    fleet.outliers.corrupted(("p", "d"), 0.0, "digest mismatch")
    fleet.outliers.failed(("q", "d"), 0.0, "timeout")
    assert [(x.prefill, x.is_ejected) for x in pair_views(fleet)] == [("p", True), ("q", False)]
