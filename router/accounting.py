"""What the time of workers costs, and who pays for it.

A request pays for the seconds that its prompt and its tokens took of each engine step, as workers
report at its end, times the price of their devices. It pays for its prompt once: if that is
computed again, after a failure or a move, the second time is waste. So is all of a request that
fails. Workers report the rest themselves: idle time, and work for requests that were cancelled.
Together this is the time that workers were there. With several routers it is so over all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pdserve.types import IDLE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from pdserve.types import Account, PhaseReport, WorkerInfo

_HOUR_S = 3600.0
# Kinds of the metrics, beside IDLE and the phases.
WASTE = "waste"
WORKER_LOST, REPEATED = "worker_lost", "repeated"  # reasons of waste


class Done(NamedTuple):
    """What a worker did for an answer. `cause` is why an attempt before it was not enough."""

    worker: WorkerInfo
    report: PhaseReport | None
    cause: str = ""


class Charge(NamedTuple):
    """What a request pays: None if a worker has no price, or measures no energy."""

    cost: float | None = None
    energy_j: float | None = None


def price_s(prices: Mapping[str, float], info: WorkerInfo) -> float | None:
    """Return the price of a second of a worker, given those of an hour of one device by its name
    (`router.prices`). None if its device has none."""
    fitting = [name for name in prices if name.casefold() in info.device.casefold()]
    return prices[max(fitting, key=len)] * info.devices / _HOUR_S if fitting else None


class Accounting:
    """Counts seconds, costs and energy with `count`, which is RouterMetrics.count. `prices` are
    `router.prices`."""

    def __init__(self, prices: Mapping[str, float], count: Callable[..., None]) -> None:
        self._prices, self._count = prices, count

    def _add(
        self, info: WorkerInfo, kind: str, reason: str, seconds: float, energy_j: float | None
    ) -> float | None:
        """Count it, and return what it cost."""
        labels = (info.model.name, info.role.value, kind, reason)
        self._count("engine_seconds", *labels, by=seconds)
        if energy_j is not None:
            self._count("energy_joules", *labels, by=energy_j)
        if (price := price_s(self._prices, info)) is None:
            return None
        self._count("cost", *labels, by=price * seconds)
        return price * seconds

    def reported(self, info: WorkerInfo, account: Account) -> None:
        """Count what a worker told this router."""
        for kind, seconds in account.seconds.items():
            is_idle = kind == IDLE
            energy_j = account.energy_j.get(kind)
            self._add(info, IDLE if is_idle else WASTE, "" if is_idle else kind, seconds, energy_j)

    def wasted(self, info: WorkerInfo, reason: str, seconds: float) -> None:
        """Count work that no answer has, and of which its worker told only the seconds."""
        if seconds:
            self._add(info, WASTE, reason, seconds, None)

    def charge(self, work: Iterable[Done], tenant: str, failed: str = "") -> Charge:
        """Count what was done for an answer, in order, and return what the request pays: nothing if
        it `failed`, for that reason."""
        costs: list[float | None] = []
        energies: list[float | None] = []
        paid_prompt = False
        for worker, report, cause in work:
            if report is None:
                continue
            busy_s = report.prefill_busy_s + report.decode_busy_s
            for phase, seconds in (
                ("prefill", report.prefill_busy_s),
                ("decode", report.decode_busy_s),
            ):
                if not seconds:
                    continue
                share = seconds / busy_s
                energy_j = None if report.energy_j is None else report.energy_j * share
                waste = failed
                if phase == "prefill" and paid_prompt:
                    waste = failed or cause or REPEATED
                cost = self._add(worker, WASTE if waste else phase, waste, seconds, energy_j)
                if not waste:
                    costs.append(cost)
                    energies.append(energy_j)
            paid_prompt |= report.prefill_busy_s > 0
        charge = Charge(sum_known(costs), sum_known(energies))
        if tenant and charge.cost:
            self._count("tenant_cost", tenant, by=charge.cost)
        return charge

    def saved(self, info: WorkerInfo, seconds: float) -> None:
        """Count the price of the prefill that a worker's prefix cache saved."""
        if price := price_s(self._prices, info):
            self._count("cost_saved", info.model.name, "prefix_cache", by=price * seconds)


def sum_known(parts: Iterable[float | None]) -> float | None:
    """Return the sum; None if a part is not known, or if there are none."""
    total: float | None = None
    for part in parts:
        if part is None:
            return None
        total = part if total is None else total + part
    return total
