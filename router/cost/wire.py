"""What is known of costs, as the registry lists it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.v1 import worker_pb2 as w

if TYPE_CHECKING:
    from collections.abc import Iterable

    from router.cost.book import CostBook
    from router.cost.step_model import StepModel


def costs_to_pb(costs: CostBook, models: Iterable[str]) -> list[w.ModelCosts]:
    """The meter and the accuracy of each model."""
    return [_model_costs(costs, model) for model in sorted(models)]


def _model_costs(costs: CostBook, model: str) -> w.ModelCosts:
    reading = costs.reading(model)
    return w.ModelCosts(
        model=model,
        text=reading.text,
        requests=reading.requests,
        measured=reading.measured,
        modelled=reading.modelled,
        aggregated=reading.aggregated,
        goodput_ratio=reading.ratio,
        stall_s=reading.stall_s,
        predictions=[
            w.PredictionRatio(what=kind, count=x.count, p10=x.p10, p50=x.p50, p90=x.p90)
            for kind, x in costs.accuracy.quantiles(model).items()
        ],
    )


def steps_to_pb(model: StepModel | None) -> w.StepCosts:
    if model is None:
        return w.StepCosts()
    return w.StepCosts(
        coefficients=model.coefficients,
        prefill_steps=model.prefill_steps,
        decode_steps=model.decode_steps,
        prefill_end=model.prefill_end,
        error=model.error,
        chunk_tokens=model.chunk_tokens,
    )
