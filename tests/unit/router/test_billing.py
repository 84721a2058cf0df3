"""Who pays: the tenant for what its answer needs, once, and waste for the rest."""

from __future__ import annotations

from collections import Counter

import pytest

from pdserve.types import IDLE, Account, PhaseReport, Role, WorkerInfo
from router.fleet.billing import (
    WORKER_LOST,
    Billing,
    StreamUsage,
    UsageCharge,
    price_s,
    sum_known,
)
from router.fleet.registry import Fleet
from tests.support.router_stack import worker_info

PRICES = {"H1": 1.0, "H100": 3600.0, "cpu": 0.0}
PREFILL = PhaseReport(prefill_busy_s=2.0, energy_j=20.0)
DECODE = PhaseReport(decode_busy_s=3.0, energy_j=30.0)


def worker(
    name: str, role: Role, device: str = "NVIDIA H100 80GB HBM3", devices: int = 2
) -> WorkerInfo:
    return worker_info(name, role, device=device, devices=devices)


class Books:
    """A Billing at 1 a second for an H100. State: what it has counted."""

    def __init__(self) -> None:
        self.counted: dict[str, Counter[tuple[str, ...]]] = {}
        self.billing = Billing(PRICES, self._count)

    def _count(self, name: str, *labels: str, by: float) -> None:
        self.counted.setdefault(name, Counter())[labels] += by  # type: ignore[assignment]

    def of(self, name: str) -> dict[tuple[str, ...], float]:
        """Counts by kind and reason."""
        return {labels[2:]: count for labels, count in self.counted.get(name, {}).items()}


@pytest.fixture
def books() -> Books:
    return Books()


def test_a_request_pays_for_its_shares_on_both_workers(books: Books) -> None:
    p, d = worker("p", Role.PREFILL), worker("d", Role.DECODE, devices=1)
    charge = books.billing.charge([StreamUsage(p, PREFILL), StreamUsage(d, DECODE)], "acme")
    assert charge == UsageCharge(cost=2 * 2.0 + 3.0, energy_j=50.0)
    assert books.of("engine_seconds") == {("prefill", ""): 2.0, ("decode", ""): 3.0}
    assert books.of("cost") == {("prefill", ""): 4.0, ("decode", ""): 3.0}
    assert books.counted["tenant_cost"] == {("acme",): 7.0}


def test_a_prompt_that_is_computed_again_is_waste(books: Books) -> None:
    a = worker("a", Role.AGGREGATED)
    again = PhaseReport(prefill_busy_s=4.0, decode_busy_s=4.0, energy_j=80.0)
    work = [StreamUsage(a, PREFILL), StreamUsage(a, None), StreamUsage(a, again, "worker_failed")]
    assert books.billing.charge(work, "") == UsageCharge(2 * (2.0 + 4.0), 20.0 + 40.0)
    assert books.of("engine_seconds")["waste", "worker_failed"] == 4.0
    assert books.of("energy_joules")["waste", "worker_failed"] == 40.0


def test_a_request_that_failed_pays_nothing(books: Books) -> None:
    work = [StreamUsage(worker("p", Role.PREFILL), PREFILL)]
    assert books.billing.charge(work, "acme", "cancelled") == UsageCharge(None, None)
    assert books.of("cost") == {("waste", "cancelled"): 4.0}
    assert "tenant_cost" not in books.counted


@pytest.mark.parametrize(
    ("device", "price"), [("NVIDIA H100 80GB HBM3", 2.0), ("cpu", 0.0), ("NVIDIA L4", None)]
)
def test_the_longest_name_that_fits_a_device_has_its_price(
    device: str, price: float | None
) -> None:
    assert price_s(PRICES, worker("p", Role.PREFILL, device)) == price


def test_a_cost_is_not_known_if_one_of_its_parts_is_not(books: Books) -> None:
    work = [
        StreamUsage(worker("p", Role.PREFILL), PREFILL),
        StreamUsage(worker("d", Role.DECODE, "NVIDIA L4"), PhaseReport(decode_busy_s=1.0)),
    ]
    assert books.billing.charge(work, "acme") == UsageCharge(None, None)
    assert (sum_known([1.0, 2.0]), sum_known([1.0, None]), sum_known([])) == (3.0, None, None)


async def test_open_work_of_a_dead_worker_counts_as_waste(books: Books) -> None:
    now = 0.0
    fleet = Fleet(lease_s=5.0, clock=lambda: now)
    info = worker("p", Role.PREFILL)
    fleet.register(info)
    account = Account({IDLE: 5.0, "cancelled": 1.0}, {IDLE: 7.0}, open_s=3.0, busy_s=9.0)
    member = fleet.renew("p", info.instance_id, load=None, draining=False, account=account)
    assert member is not None
    books.billing.reported(member.info, account)
    assert books.of("engine_seconds") == {(IDLE, ""): 5.0, ("waste", "cancelled"): 1.0}
    assert books.of("energy_joules") == {(IDLE, ""): 7.0}
    member.placed.ended_s += 1.0  # one of its open requests ended since
    member.lease_end = -1.0
    (dead,) = fleet.expire()
    books.billing.wasted(dead.info, WORKER_LOST, dead.open_s)
    assert books.of("cost")["waste", "worker_lost"] == pytest.approx(2.0 * 2.0)
    assert sum(books.of("engine_seconds").values()) == 5.0 + 1.0 + 2.0  # nothing is guessed


def test_an_encode_worker_is_paid_and_prefill_is_not_repeated_work(books: Books) -> None:
    e, p = worker("e", Role.ENCODE), worker("p", Role.PREFILL)
    encoded = PhaseReport(prefill_busy_s=1.0, energy_j=10.0)
    charge = books.billing.charge([StreamUsage(e, encoded), StreamUsage(p, PREFILL)], "")
    assert charge == UsageCharge(cost=2 * 3.0, energy_j=30.0)
    assert books.of("engine_seconds") == {("encode", ""): 1.0, ("prefill", ""): 2.0}
