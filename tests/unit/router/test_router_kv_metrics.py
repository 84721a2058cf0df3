"""The KV plane and the load of every worker on the router's /metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pdserve.config import QueueConfig, SloConfig
from pdserve.types import KvLedger, KvReport, Role, WorkerLoad
from router.admission import AdmissionController
from router.fleet.registry import Fleet
from router.metrics import RouterMetrics
from router.placement.revisions import RevisionShares
from tests.support.router_stack import Clock, worker_info

if TYPE_CHECKING:
    from collections.abc import Iterable

REPORT = KvReport(
    KvLedger(3, 2, 4, 4),
    quarantined_slots=1,
    links={"shm": 2, "tcp": 1},
    totals={"push_s": 0.5, "failures": 6},
    held_bytes=1024,
)
PREFILL = '{model="demo",role="prefill",worker="p"}'
DECODE = '{model="demo",role="decode",worker="d"}'


@pytest.fixture
def fleet() -> Fleet:
    fleet = Fleet(clock=Clock())
    for worker_id, role in (("p", Role.PREFILL), ("d", Role.DECODE)):
        fleet.register(worker_info(worker_id, role))
    return fleet


def samples(fleet: Fleet, prefix: str = "pdserve_worker_kv_") -> list[str]:
    metrics = RouterMetrics(SloConfig())
    metrics.watch(
        fleet,
        AdmissionController(QueueConfig(), clock=fleet.now),
        None,
        RevisionShares(),
        tuple,
        tuple,
    )
    lines: Iterable[str] = metrics.render()[0].decode().splitlines()
    return [line for line in lines if line.startswith(prefix)]


def report(fleet: Fleet, worker_id: str, kv: KvReport | None) -> None:
    assert fleet.renew(worker_id, "e1", load=None, draining=False, kv=kv)


def test_every_worker_that_has_reported_is_shown(fleet: Fleet) -> None:
    assert samples(fleet) == []
    report(fleet, "p", REPORT)
    report(fleet, "d", KvReport(KvLedger(), totals={"received_bytes": 7}))
    assert samples(fleet) == [
        f"pdserve_worker_kv_pinned_blocks{PREFILL} 5.0",
        f"pdserve_worker_kv_pinned_blocks{DECODE} 0.0",
        f"pdserve_worker_kv_in_flight_blocks{PREFILL} 3.0",
        f"pdserve_worker_kv_in_flight_blocks{DECODE} 0.0",
        f"pdserve_worker_kv_leased_blocks{PREFILL} 2.0",
        f"pdserve_worker_kv_leased_blocks{DECODE} 0.0",
        f"pdserve_worker_kv_transfers{PREFILL} 4.0",
        f"pdserve_worker_kv_transfers{DECODE} 0.0",
        f"pdserve_worker_kv_quarantined_slots{PREFILL} 1.0",
        f"pdserve_worker_kv_quarantined_slots{DECODE} 0.0",
        f"pdserve_worker_kv_transport_bytes{PREFILL} 1024.0",
        f"pdserve_worker_kv_transport_bytes{DECODE} 0.0",
        'pdserve_worker_kv_links{model="demo",role="prefill",transport="shm",worker="p"} 2.0',
        'pdserve_worker_kv_links{model="demo",role="prefill",transport="tcp",worker="p"} 1.0',
        f"pdserve_worker_kv_failures_total{PREFILL} 6.0",
        f"pdserve_worker_kv_push_seconds_total{PREFILL} 0.5",
        f"pdserve_worker_kv_received_bytes_total{DECODE} 7.0",
    ]


def test_a_report_is_shown_until_the_worker_is_lost(fleet: Fleet) -> None:
    report(fleet, "p", REPORT)
    before = samples(fleet)
    report(fleet, "p", None)
    assert samples(fleet) == before != [], "a renewal without a report leaves the last one"
    fleet.deregister("p", "e1")
    assert samples(fleet) == []


def test_load_is_shown_for_every_worker_that_reported_it(fleet: Fleet) -> None:
    assert samples(fleet, "pdserve_worker_") == []
    load = WorkerLoad(
        num_waiting_reqs=2,
        num_running_reqs=5,
        kv_cache_usage=0.25,
        free_blocks=48,
        session_blocks=9,
        retentions_ended={"expired": 3},
        preemptions=4,
        draft_tokens=20,
        accepted_draft_tokens=15,
    )
    assert fleet.renew("d", "e1", load=load, draining=False)
    shown = [
        f"pdserve_worker_num_running_reqs{DECODE} 5.0",
        f"pdserve_worker_num_waiting_reqs{DECODE} 2.0",
        f"pdserve_worker_kv_cache_usage{DECODE} 0.25",
        f"pdserve_worker_session_blocks{DECODE} 9.0",
        f"pdserve_worker_preemptions_total{DECODE} 4.0",
        f"pdserve_worker_draft_tokens_total{DECODE} 20.0",
        f"pdserve_worker_accepted_draft_tokens_total{DECODE} 15.0",
        "pdserve_worker_retentions_ended_total"
        + DECODE.replace(",role", ',reason="expired",role')
        + " 3.0",
    ]
    assert samples(fleet, "pdserve_worker_") == shown
