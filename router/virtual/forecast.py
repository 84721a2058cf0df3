"""What a model would do with a request now: its predicted TTFT and price under its load."""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING

from msgspec.structs import astuple

from pdserve.errors import Unavailable
from pdserve.types import Role
from router.fleet.billing import price_s
from router.placement.cost import Batch, decode_batch
from router.placement.filters import check_servable
from router.placement.values import MemberState, may_hold, shown_regions
from router.virtual.rules import ModelFacts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.types import ModelInfo, Regions
    from router.admission import AdmissionController
    from router.fleet.billing import Billing
    from router.fleet.peers import RegionPeers
    from router.fleet.registry import Fleet
    from router.placement.cost import CostModel
    from router.placement.values import Candidate


class Forecast:
    """Reads the state of the fleet, the queue and the cost model; has none of its own."""

    def __init__(
        self,
        fleet: Fleet,
        costs: CostModel,
        admission: AdmissionController,
        billing: Billing,
        peers: RegionPeers,
    ) -> None:
        self._fleet, self._costs, self._peers = fleet, costs, peers
        self._admission, self._billing = admission, billing

    def of(
        self,
        model: ModelInfo,
        prompt_tokens: int,
        max_tokens: int,
        regions: Regions,
        *,
        has_images: bool,
        starts: bool,
    ) -> ModelFacts:
        """Return the facts of a model. `max_tokens`: limit of the answer. `starts`: the model is
        started on demand."""
        cannot = ""
        if prompt_tokens >= model.max_model_len:
            cannot = f"its context is {model.max_model_len} tokens"
        elif has_images and not model.modalities.get("image"):
            cannot = "it takes no images"
        ready = self._ready(model.name, regions)
        busy = ""
        try:
            check_servable(ready, model.name, aggregated=True)
        except Unavailable as error:
            place = "" if regions is None else f" in region {shown_regions(regions)}"
            is_elsewhere = starts or model.name in self._peers.models()
            busy = "" if is_elsewhere else f"{error.message}{place}"
        means = self._costs.means(model.name)
        usual = max_tokens if means is None else min(max_tokens, means.gaps.value + 1)
        return ModelFacts(
            self._ttft_s(model.name, prompt_tokens, regions),
            self._price(model.name, ready, prompt_tokens, usual),
            cannot,
            busy,
        )

    def cost(self, model: str, prompt_tokens: int, output_tokens: int) -> float | None:
        """Predict the price of a request under the model's load, None if it is not known."""
        return self._price(model, self._ready(model, None), prompt_tokens, output_tokens)

    def _ready(self, model: str, regions: Regions) -> list[Candidate]:
        return [
            x
            for x in self._fleet.candidates(model)
            if x.state is MemberState.READY and may_hold(regions, x.info.topology)
        ]

    def _ttft_s(self, model: str, prompt_tokens: int, regions: Regions) -> float | None:
        first_s = self._costs.soonest_s(model, max(1, prompt_tokens), regions)
        return None if first_s is None else first_s + self._admission.queue_wait_s(model)

    def _price(
        self, model: str, ready: Sequence[Candidate], prompt_tokens: int, output_tokens: float
    ) -> float | None:
        by_phase = [
            [x for x in ready if x.role in (role, Role.AGGREGATED)]
            for role in (Role.PREFILL, Role.DECODE)
        ]
        prices = []
        for workers in by_phase:
            known = [price_s(self._billing.prices, x.info) for x in workers]
            if not known or None in known:
                return None
            prices.append(fmean(x for x in known if x is not None))
        batches = [decode_batch(x) for x in by_phase[1]]
        batch = Batch(*(round(fmean(x)) for x in zip(*map(astuple, batches), strict=True)))
        busy = self._costs.busy_s(model, batch, prompt_tokens, output_tokens)
        return None if busy is None else busy[0] * prices[0] + busy[1] * prices[1]
