"""Connector parameters of a request: `kv_transfer_params`, and `ec_transfer_params` for
embeddings."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kv_transfer.image_features import ImageFeatureSource
from kv_transfer.vllm.params import ConsumerParams, ProducerParams, TransferParams, parse
from workers.engine import DecodePhase, EncodePhase, PrefillPhase

if TYPE_CHECKING:
    from workers.engine import Work


def connector_params(work: Work) -> dict[str, dict[str, Any]]:
    """Return the non-empty parameters by vLLM's names. Raises InvalidRequest."""
    embeddings: dict[str, Any] = {}
    match work.phase:
        case EncodePhase(transfer_id):
            embeddings = {"transfer_id": transfer_id}
        case PrefillPhase(embeddings=ImageFeatureSource() as source):
            embeddings = asdict(source)
    found = {"kv_transfer_params": params_for(work), "ec_transfer_params": embeddings}
    return {name: values for name, values in found.items() if values}


def params_for(work: Work) -> dict[str, Any]:
    """Return the request's `kv_transfer_params`, which may be empty. Raises InvalidRequest."""
    part: ProducerParams | ConsumerParams | None = None
    match work.phase:
        case PrefillPhase(transfer_id, cached):
            part = ProducerParams(transfer_id, min_cached_tokens=cached)
        case DecodePhase(transfer_id, addresses, instance_id):
            part = ConsumerParams(
                transfer_id,
                addresses,
                instance_id,
                live=work.phase.live,
                producer_stage_layers=work.phase.producer_stage_layers,
            )
    params = TransferParams(part, work.resume_token_ids, work.no_tiers).to_dict()
    parse(params)
    return params
