"""Billing: charges requests for the time of workers, and counts waste and idle time.

A request pays for its share of each engine step, in seconds as reported at its end, times the price
of the worker's devices. It pays for its prompt once. If a worker computes the prompt again after a
failure or a move, that time is waste, and so is all work of a failed request. Workers report idle
time and work for cancelled requests themselves. The sum over all routers is the time that the
workers were up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pdserve.types import IDLE, Role

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from pdserve.types import Account, PhaseReport, WorkerInfo

_HOUR_S = 3600.0
# Kinds of time in the metrics: the phases, IDLE, and this one.
WASTE = "waste"
WORKER_LOST, REPEATED = "worker_lost", "repeated"  # reasons of waste


class StreamUsage(NamedTuple):
    """Work of one stream for an answer. `cause`: why the previous attempt ended, "" in the first
    attempt."""

    worker: WorkerInfo
    report: PhaseReport | None
    cause: str = ""


class UsageCharge(NamedTuple):
    """Price and energy of a request. None if a worker has no price, or measures no energy."""

    cost: float | None = None
    energy_j: float | None = None


def price_s(prices: Mapping[str, float], info: WorkerInfo) -> float | None:
    """Return the price of one second of a worker, None if its device has no price.

    `prices` (`router.prices`) has the price of one hour of one device, by a part of its name.
    """
    # The longest name wins: "H100 NVL" is more specific than "H100".
    fitting = [name for name in prices if name.casefold() in info.device.casefold()]
    return prices[max(fitting, key=len)] * info.devices / _HOUR_S if fitting else None


class Billing:
    """Counts seconds, costs and energy with `count`, which is RouterMetrics.count. `prices` are
    `router.prices`."""

    def __init__(self, prices: Mapping[str, float], count: Callable[..., None]) -> None:
        self.prices, self._count = prices, count

    def _add(
        self, info: WorkerInfo, kind: str, reason: str, seconds: float, energy_j: float | None
    ) -> float | None:
        """Count time and energy of a worker. Return their price, None if it has none."""
        labels = (info.model.name, info.role.value, kind, reason)
        self._count("engine_seconds", *labels, by=seconds)
        if energy_j is not None:
            self._count("energy_joules", *labels, by=energy_j)
        if (price := price_s(self.prices, info)) is None:
            return None
        self._count("cost", *labels, by=price * seconds)
        return price * seconds

    def reported(self, info: WorkerInfo, account: Account) -> None:
        """Count the idle time and waste that a worker reported to this router."""
        for kind, seconds in account.seconds.items():
            is_idle = kind == IDLE
            energy_j = account.energy_j.get(kind)
            self._add(info, IDLE if is_idle else WASTE, "" if is_idle else kind, seconds, energy_j)

    def wasted(self, info: WorkerInfo, reason: str, seconds: float) -> None:
        """Count work that no answer uses. Its energy is not known."""
        if seconds:
            self._add(info, WASTE, reason, seconds, None)

    def charge(self, work: Iterable[StreamUsage], tenant: str, failed: str = "") -> UsageCharge:
        """Count the work for an answer, in order, and return the charge of its request. All work is
        waste with reason `failed` if that is set; the request then pays nothing."""
        costs: list[float | None] = []
        energies: list[float | None] = []
        paid_prompt = False
        for worker, report, cause in work:
            if report is None:
                continue
            busy_s = report.prefill_busy_s + report.decode_busy_s
            encodes = worker.role is Role.ENCODE
            for phase, seconds in (
                ("encode" if encodes else "prefill", report.prefill_busy_s),
                ("decode", report.decode_busy_s),
            ):
                if not seconds:
                    continue
                # A worker reports one energy for both phases: split it by time.
                share = seconds / busy_s
                energy_j = None if report.energy_j is None else report.energy_j * share
                waste = failed
                if phase == "prefill" and paid_prompt:
                    waste = failed or cause or REPEATED
                cost = self._add(worker, WASTE if waste else phase, waste, seconds, energy_j)
                if not waste:
                    costs.append(cost)
                    energies.append(energy_j)
            paid_prompt |= report.prefill_busy_s > 0 and not encodes
        charge = UsageCharge(sum_known(costs), sum_known(energies))
        if tenant and charge.cost:
            self._count("tenant_cost", tenant, by=charge.cost)
        return charge

    def saved(self, info: WorkerInfo, seconds: float) -> None:
        """Count the price of the prefill that a worker's prefix cache saved."""
        if price := price_s(self.prices, info):
            self._count("cost_saved", info.model.name, "prefix_cache", by=price * seconds)


def sum_known(parts: Iterable[float | None]) -> float | None:
    """Return the sum of `parts`. Return None if a part is None or there are no parts."""
    total: float | None = None
    for part in parts:
        if part is None:
            return None
        total = part if total is None else total + part
    return total
