"""Turns a `Submit` into work for the engine. Raises InvalidRequest naming the field."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve import wire
from pdserve.errors import InvalidRequest
from pdserve.types import Role
from workers.engine import AggregatedPhase, DecodePhase, Phase, PrefillPhase, Work

if TYPE_CHECKING:
    from pdserve.v1 import worker_pb2 as w

# Every role takes aggregated requests: routers fall back to them.
_PHASES: dict[Role, tuple[type[Phase], ...]] = {
    Role.PREFILL: (PrefillPhase, AggregatedPhase),
    Role.DECODE: (DecodePhase, AggregatedPhase),
    Role.AGGREGATED: (AggregatedPhase,),
}


def work_from_pb(submit: w.Submit, stream_id: int, *, role: Role, has_kv: bool) -> Work:
    """Return the work of `submit` under the engine's `stream_id`."""
    if not submit.sampling.HasField("max_tokens"):
        raise InvalidRequest("max_tokens is missing", field="max_tokens")
    phase = _phase(submit, role, has_kv=has_kv)
    return Work(
        stream_id=stream_id,
        request_id=_present("request_id", submit.request_id),
        prompt_token_ids=tuple(submit.prompt_token_ids),
        sampling=wire.sampling_from_pb(
            submit.sampling, default_max_tokens=submit.sampling.max_tokens
        ),
        phase=phase,
        resume_token_ids=tuple(submit.resume_token_ids),
    )


def _phase(submit: w.Submit, role: Role, *, has_kv: bool) -> Phase:
    phase: Phase
    name = submit.WhichOneof("phase")
    match name:
        case "prefill":
            phase = PrefillPhase(_present("prefill.transfer_id", submit.prefill.transfer_id))
        case "decode":
            decode = submit.decode
            if not decode.producer_addresses:
                field = "decode.producer_addresses"
                raise InvalidRequest(f"{field} is missing", field=field)
            phase = DecodePhase(
                _present("decode.transfer_id", decode.transfer_id),
                tuple(decode.producer_addresses),
                _present("decode.producer_instance_id", decode.producer_instance_id),
                kv_handle=decode.kv_handle,
                live=decode.live,
            )
        case "aggregated":
            phase = AggregatedPhase()
        case _:
            raise InvalidRequest("phase is missing", field="phase")
    if not isinstance(phase, _PHASES[role]):
        raise InvalidRequest(f"a {role} worker takes no {name} requests", field="phase")
    if not has_kv and not isinstance(phase, AggregatedPhase):
        raise InvalidRequest("this worker's engine cannot exchange KV", field="phase")
    return phase


def _present(name: str, value: str) -> str:
    if not value:
        raise InvalidRequest(f"{name} is missing", field=name)
    return value
