"""Metrics by tenant. Their labels are the names of the configuration, so there are no more of them
than the operator chose."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import Counter
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client import CollectorRegistry

    from pdserve.errors import PdserveError
    from pdserve.types import Usage
    from router.admission.tenants import Tenants


class _Open(Collector):
    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants

    def collect(self) -> Iterator[GaugeMetricFamily]:
        family = GaugeMetricFamily(
            "pdserve_tenant_requests_open", "Requests waiting and running.", labels=("tenant",)
        )
        for name in self._tenants.names():
            family.add_metric((name,), self._tenants.concurrent(name))
        yield family


class TenantMetrics:
    """Counts what each tenant was given and refused; requests without a tenant are not counted."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._answers = self._counter("answers", "Requests answered in full.")
        self._tokens = self._counter("tokens", "Tokens of answered requests.", "kind")
        self._refusals = self._counter("refusals", "Refused before any work.", "code", "reason")

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        labelled = ["tenant", *labels]
        return Counter(f"pdserve_tenant_{name}", text, labelled, registry=self._registry)

    def watch(self, tenants: Tenants) -> None:
        """Report the requests that each has open from now on."""
        self._registry.register(_Open(tenants))

    def answered(self, tenant: str, usage: Usage) -> None:
        if tenant:
            self._answers.labels(tenant).inc()
            self._tokens.labels(tenant, "prompt").inc(usage.prompt_tokens)
            self._tokens.labels(tenant, "generated").inc(usage.completion_tokens)

    def refused(self, tenant: str, error: PdserveError) -> None:
        if tenant:
            self._refusals.labels(tenant, error.code, error.reason).inc()
