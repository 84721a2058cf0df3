"""The parts of the router that a request uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve.types import Adapter
    from router.admission import AdmissionController
    from router.admission.memory import MediaMemory
    from router.fleet.accounting import Accounting
    from router.fleet.connection import Links
    from router.fleet.on_demand import OnDemandModels
    from router.fleet.registry import Fleet
    from router.metrics import RouterMetrics
    from router.placement.cost import CostModel
    from router.request.placer import Placer
    from router.request.prefix_fetch import PrefixFetcher
    from router.request.retry import RetryBudget
    from router.request.sessions import Sessions
    from router.request.suspects import Suspects


# One engine step and one network round trip.
EXPORT_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Services:
    """`media_memory`: of the images of open requests. `adapters`: the served LoRA adapters by name.
    `queue_timeout_s`: longest wait of a stream that lost its worker for another one.
    `export_timeout_s`: time of a worker to export a stream.
    """

    fleet: Fleet
    links: Links
    admission: AdmissionController
    placer: Placer
    costs: CostModel
    metrics: RouterMetrics
    accounting: Accounting
    budget: RetryBudget
    suspects: Suspects
    sessions: Sessions
    media_memory: MediaMemory
    adapters: Mapping[str, Adapter]
    fetcher: PrefixFetcher
    queue_timeout_s: float = 30.0
    on_demand: OnDemandModels | None = None
    export_timeout_s: float = EXPORT_TIMEOUT_S
