"""Intake of a worker: accepts requests by role and drain, and converts them to work."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, TypeVar

from kv_transfer.image_features import ImageFeatureSource
from pdserve import wire
from pdserve.errors import InvalidRequest
from pdserve.types import GENERATING, ModelWeights, ReasoningGate, Role
from workers.engine import (
    AggregatedPhase,
    DecodePhase,
    EncodePhase,
    Phase,
    PoolingPhase,
    PrefillPhase,
    Work,
)

if TYPE_CHECKING:
    from pdserve.v1 import worker_pb2 as w

T = TypeVar("T")
_FIRST_WEIGHTS = ModelWeights()
_EXCHANGING = (Role.PREFILL, Role.DECODE)


class RoleChangeState(StrEnum):
    """A worker accepts requests while SERVING, and only the router's probe while PROVING.

    serving ── change_role ──► draining ── empty ──► proving ── settle(keep) ──► serving, new role
                                  │ not empty            │ settle(not keep)
                                  └──────────────────────┴──► serving, former role
    """

    SERVING = "serving"
    DRAINING = "draining"
    PROVING = "proving"


@dataclass(slots=True)
class WorkerIntake:
    """Role, drain and weights of a worker. `DrainManager` and `WeightsUpdater` change them; the
    service only reads them and closes the intake.

    `is_drained`: a drain has begun and was not undone. `is_announcing`: a drain is being announced
    to routers. `is_moving`: routers should move the open streams to other workers. `updating`:
    owner and mode of a change of `weights`, those in the engine; "" without a change.
    """

    role: Role
    is_drained: bool = False
    role_state: RoleChangeState = RoleChangeState.SERVING
    is_announcing: bool = False
    is_moving: bool = False
    updating: str = ""
    weights: ModelWeights = _FIRST_WEIGHTS
    is_closed: bool = False

    @property
    def is_draining(self) -> bool:
        """True if routers should send no new requests."""
        return self.is_closed or self.is_drained or self.role_state is not RoleChangeState.SERVING

    def accepts(self, *, is_probe: bool) -> bool:
        """Return True if the worker accepts a new request."""
        if self.is_closed:
            return False
        # Routers that do not know of the drain yet still send requests.
        if self.is_announcing or not (self.is_draining or self.updating):
            return True
        return is_probe and self.role_state is RoleChangeState.PROVING and not self.is_drained

    def close(self) -> None:
        """Accept no more requests, because the engine died or the worker closes."""
        self.is_closed = True


def work_from_pb(
    submit: w.Submit, stream_id: int, role: Role, weights: ModelWeights = _FIRST_WEIGHTS
) -> Work:
    """Return the engine's work for `submit` on a worker of `role` with these weights. Raises
    InvalidRequest with the field's name."""
    if not submit.sampling.HasField("max_tokens"):
        raise InvalidRequest("max_tokens is missing", field="max_tokens")
    phase, name = _phase(submit), submit.WhichOneof("phase")
    # Every generating role accepts aggregated requests, to which routers fall back. Prefill and
    # decode workers accept both phases, because routers also copy cached KV, in either direction.
    is_exchange = role in _EXCHANGING and name in _EXCHANGING
    if name != role and not is_exchange and (name != Role.AGGREGATED or role not in GENERATING):
        raise InvalidRequest(f"a {role} worker takes no {name} requests", field="phase")
    max_tokens = submit.sampling.max_tokens
    return Work(
        stream_id=stream_id,
        request_id=_present("request_id", submit.request_id),
        prompt_token_ids=tuple(submit.prompt_token_ids[:]),  # via a list, which is faster
        sampling=wire.sampling_from_pb(submit.sampling, default_max_tokens=max_tokens),
        phase=phase,
        resume_token_ids=tuple(submit.resume_token_ids),
        adapter=submit.adapter,
        cache_salt=weights.cache_prefix + submit.cache_salt,
        reasoning_gate=_reasoning_gate(submit),
        media=wire.media_from_pb(submit.media, len(submit.prompt_token_ids)),
        next_turn_s=max(0.0, submit.next_turn_s) if submit.HasField("next_turn_s") else None,
        no_tiers=submit.no_tiers,
        scored_from=submit.scored_from,
    )


def _reasoning_gate(submit: w.Submit) -> ReasoningGate | None:
    if not submit.HasField("reasoning_gate"):
        return None
    gate = submit.reasoning_gate
    return ReasoningGate(gate.parser, gate.kwargs_json)


def _phase(submit: w.Submit) -> Phase:
    match submit.WhichOneof("phase"):
        case "prefill":
            prefill = submit.prefill
            transfer_id = _present("prefill.transfer_id", prefill.transfer_id)
            has_source = prefill.HasField("embeddings")
            source = _source(prefill.embeddings) if has_source else None
            return PrefillPhase(transfer_id, prefill.min_cached_tokens, source)
        case "encode":
            return EncodePhase(_present("encode.transfer_id", submit.encode.transfer_id))
        case "decode":
            decode = submit.decode
            return DecodePhase(
                _present("decode.transfer_id", decode.transfer_id),
                _present("decode.producer_addresses", tuple(decode.producer_addresses)),
                _present("decode.producer_instance_id", decode.producer_instance_id),
                live=decode.live,
                producer_stage_layers=wire.stages_from_pb(decode.producer_stage_layers),
            )
        case "aggregated":
            return AggregatedPhase()
        case "pooling":
            return PoolingPhase(submit.pooling.second_text_at)
    raise InvalidRequest("phase is missing", field="phase")


def _source(source: w.EmbeddingSource) -> ImageFeatureSource:
    names = ("transfer_id", "address", "instance_id", "row_bytes")
    values = [_present(f"prefill.embeddings.{name}", getattr(source, name)) for name in names]
    return ImageFeatureSource(*values)


def _present(name: str, value: T) -> T:
    if not value:
        raise InvalidRequest(f"{name} is missing", field=name)
    return value
