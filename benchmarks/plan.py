"""How many workers does a load need? Arithmetic gives a start, simulations decide."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import TYPE_CHECKING, Final

from benchmarks.errors import BenchError
from benchmarks.simulate import simulate
from benchmarks.workload import shape_workload

if TYPE_CHECKING:
    from benchmarks.metrics import Summary
    from benchmarks.progress import Progress
    from benchmarks.simulate import Setup
    from benchmarks.traces import Trace
    from benchmarks.workload import Shape
    from pdserve.config import RouterConfig

BUSY: Final = 0.8  # the share of a worker's capacity that the first guess uses
MOST_WORKERS: Final = 24  # a larger service is searched for in a smaller one
MOST_TRIES: Final = 40
_ROLES: Final = ("prefill", "decode", "aggregated")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A service that keeps the SLOs. `cost_per_million` is of output tokens, at the given price."""

    prefill: int
    decode: int
    aggregated: int
    attainment: float
    requests_per_s: float
    ttft_p99_s: float | None
    tpot_p99_s: float | None
    cost_per_million: float | None

    @property
    def workers(self) -> int:
        return self.prefill + self.decode + self.aggregated

    def row(self) -> list[object]:
        """Return the cells of the table."""
        apart = f"{self.prefill} prefill, {self.decode} decode"
        times_ms = [x if x is None else x * 1000 for x in (self.ttft_p99_s, self.tpot_p99_s)]
        rest = [f"{self.attainment:.1%}", self.requests_per_s, *times_ms, self.cost_per_million]
        return [apart if self.prefill else "aggregated", self.workers, *rest]


@dataclass(frozen=True, slots=True)
class Planner:
    """`setup` is the load; its numbers of workers do not matter."""

    setup: Setup
    config: RouterConfig
    trace: Trace
    shape: Shape
    target: float
    price: float | None
    progress: Progress

    def plans(self) -> list[Plan]:
        """Return the smallest disaggregated and the smallest aggregated service that were found.
        Raises BenchError if a single request misses the SLOs."""
        alone = replace(self.setup, prefill=1, decode=1, rate_per_s=0.01, requests=20)
        if not self._passes(self._run(alone)):
            raise BenchError("a request alone in the service misses the SLOs: no number helps")
        prefill, decode = self._guess()
        scale = max(1, ceil((prefill + decode) / MOST_WORKERS))
        small = replace(self.setup, rate_per_s=self.setup.rate_per_s / scale)
        first = replace(small, prefill=ceil(prefill / scale), decode=ceil(decode / scale))
        whole = replace(small, prefill=0, decode=0, aggregated=first.prefill + first.decode)
        return [self._search(start, scale) for start in (first, whole)]

    def _guess(self) -> tuple[int, int]:
        """Divide the load by the capacity of one worker."""
        s, costs = self.setup, self.setup.costs
        cut = shape_workload(self.trace, self.shape).cut
        answer_s = cut.mean_output * (costs.step_s + s.max_num_seqs * costs.decode_s)
        prefill_s = costs.step_s + cut.mean_input * costs.prefill_s
        prefill = s.rate_per_s * prefill_s / BUSY
        decode = s.rate_per_s * answer_s / s.max_num_seqs / BUSY
        return max(1, ceil(prefill)), max(1, ceil(decode))

    def _search(self, setup: Setup, scale: int) -> Plan:
        """Add workers of the kind that is short until the SLOs are kept, then remove what is not
        needed."""
        summary = self._run(setup)
        for _ in range(MOST_TRIES):
            if self._passes(summary):
                break
            setup = _more(setup, summary)
            summary = self._run(setup)
        else:
            raise BenchError(f"{setup.name} still misses the SLOs after {MOST_TRIES} tries")
        for kind in _ROLES:
            while (count := getattr(setup, kind)) > 1:
                less = replace(setup, **{kind: count - 1})
                found = self._run(less)
                if not self._passes(found):
                    break
                setup, summary = less, found
        counts = {role: getattr(setup, role) * scale for role in _ROLES}
        tokens_per_h = summary.output_tokens_per_s * scale * 3600
        cost = None
        if self.price is not None and tokens_per_h:
            cost = self.price * sum(counts.values()) / tokens_per_h * 1e6
        ttft, tpot = summary.latency["ttft"], summary.latency["tpot"]
        return Plan(
            **counts,
            attainment=0.0 if summary.slo is None else summary.slo.attainment,
            requests_per_s=summary.completed_per_s * scale,
            ttft_p99_s=None if ttft is None else ttft.p99,
            tpot_p99_s=None if tpot is None else tpot.p99,
            cost_per_million=cost,
        )

    def _run(self, setup: Setup) -> Summary:
        self.progress.step(f"simulating {setup.name}")
        return simulate(setup, self.config, self.trace, self.shape, self.progress).summary()

    def _passes(self, summary: Summary) -> bool:
        return summary.slo is not None and summary.slo.attainment >= self.target


def _more(setup: Setup, summary: Summary) -> Setup:
    """Add a tenth, at least one, of the kind whose limit is missed most."""

    def excess(metric: str) -> float:
        found, limit_s = summary.latency[metric], setup.slo_s.get(metric)
        return 0.0 if found is None or limit_s is None else found.p95 / limit_s

    kind = "decode" if excess("tpot") > excess("ttft") else "prefill"
    kind = "aggregated" if setup.aggregated else kind
    count = getattr(setup, kind)
    return replace(setup, **{kind: count + ceil(count / 10)})
