"""Connector parameters of a request: `kv_transfer_params` for our connector or one of vLLM's, and
`ec_transfer_params` for embeddings.

With a connector of vLLM, decode starts after prefill: prefill keeps its KV and reports its
location. Decode receives this report as the opaque `kv_handle`, JSON in UTF-8.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kv_transfer.image_features import ImageFeatureSource
from kv_transfer.vllm.params import ConsumerParams, ProducerParams, TransferParams, parse
from pdserve.errors import InvalidRequest
from pdserve.types import HandoffStyle
from workers.engine import DecodePhase, EncodePhase, PrefillPhase

if TYPE_CHECKING:
    from collections.abc import Mapping

    from workers.engine import Work


def connector_params(work: Work, style: HandoffStyle) -> dict[str, dict[str, Any]]:
    """Return the non-empty parameters by vLLM's names. Raises InvalidRequest."""
    embeddings: dict[str, Any] = {}
    match work.phase:
        case EncodePhase(transfer_id):
            embeddings = {"transfer_id": transfer_id}
        case PrefillPhase(embeddings=ImageFeatureSource() as source):
            embeddings = asdict(source)
    found = {"kv_transfer_params": params_for(work, style), "ec_transfer_params": embeddings}
    return {name: values for name, values in found.items() if values}


def params_for(work: Work, style: HandoffStyle) -> dict[str, Any]:
    """Return the request's `kv_transfer_params`, which may be empty. Raises InvalidRequest."""
    if style is HandoffStyle.CONCURRENT:
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
        ours = TransferParams(part, work.resume_token_ids, work.no_tiers).to_dict()
        parse(ours)
        return ours
    params: dict[str, Any] = {}
    match work.phase:
        case PrefillPhase():
            params = {"do_remote_decode": True, "do_remote_prefill": False}
        case DecodePhase(kv_handle=handle):
            params = _read_handle(handle)
    if work.resume_token_ids:
        params["resume"] = list(work.resume_token_ids)
    return params


def handle_of(params: Mapping[str, Any] | None) -> bytes:
    """Return the KV handle from the output parameters of a prefill, or b""."""
    return json.dumps(params).encode() if params else b""


def _read_handle(handle: bytes) -> dict[str, Any]:
    try:
        params = json.loads(handle)
    except ValueError:
        params = None
    if not isinstance(params, dict) or not params.get("do_remote_prefill"):
        raise InvalidRequest("decode.kv_handle names no KV", field="decode.kv_handle")
    return params
