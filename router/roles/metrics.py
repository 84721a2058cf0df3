"""What the rebalancer makes of the roles, in figures."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from prometheus_client import Counter
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from pdserve.types import Role

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from prometheus_client import CollectorRegistry

    from router.roles.controller import Verdict


class _Verdicts(Collector):
    """Of the models that are watched."""

    def __init__(self, verdicts: Mapping[str, Verdict]) -> None:
        self._verdicts = verdicts

    def collect(self) -> Iterator[GaugeMetricFamily]:
        load = GaugeMetricFamily(
            "pdserve_role_load",
            "Average load of a role's workers; 1 is all that they can do.",
            labels=("model", "role"),
        )
        wanted = GaugeMetricFamily(
            "pdserve_role_workers_wanted",
            "Workers of a role that the load asks for.",
            labels=("model", "role"),
        )
        for model, verdict in sorted(self._verdicts.items()):
            for role, value, count in (
                (Role.PREFILL, verdict.loads.prefill, verdict.wanted.prefill_workers),
                (Role.DECODE, verdict.loads.decode, verdict.wanted.decode_workers),
            ):
                wanted.add_metric((model, role.value), count)
                if math.isfinite(value):
                    load.add_metric((model, role.value), value)
        yield load
        yield wanted


class RoleMetrics:
    """Counts verdicts, and reports the last ones."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._decisions = Counter(
            "pdserve_role_decisions",
            "Looks at the split of roles, by what followed.",
            ["model", "decision"],
            registry=registry,
        )

    def watch(self, verdicts: Mapping[str, Verdict]) -> None:
        """Report these, as they are at any time, from now on."""
        self._registry.register(_Verdicts(verdicts))

    def decided(self, model: str, verdict: Verdict) -> None:
        """A look at a model's workers was over."""
        self._decisions.labels(model, verdict.stance.value).inc()
