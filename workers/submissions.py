"""What a worker of a given role takes from a `Submit`. Raises InvalidRequest naming the field."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pdserve import wire
from pdserve.errors import InvalidRequest
from pdserve.types import Role
from workers.engine import AggregatedPhase, DecodePhase, Fork, Phase, PrefillPhase, Work

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.v1 import worker_pb2 as w

# A prefill and a decode worker also take whole requests: what the router falls back to.
_PHASES: dict[Role, tuple[type[Phase], ...]] = {
    Role.PREFILL: (PrefillPhase, AggregatedPhase),
    Role.DECODE: (DecodePhase, AggregatedPhase),
    Role.AGGREGATED: (AggregatedPhase,),
}


def work_from_pb(submit: w.Submit, *, stream_ids: Sequence[int], role: Role, has_kv: bool) -> Work:
    """The work of `submit` under the engine's own `stream_ids`: its own, and one a fork."""
    if not submit.sampling.HasField("max_tokens"):
        raise InvalidRequest("max_tokens is missing", field="max_tokens")
    phase = _phase(submit, role, has_kv=has_kv)
    if submit.forks and isinstance(phase, PrefillPhase):
        raise InvalidRequest("prefill work cannot be forked", field="forks")
    return Work(
        stream_id=stream_ids[0],
        request_id=_present("request_id", submit.request_id),
        prompt_token_ids=tuple(submit.prompt_token_ids),
        sampling=wire.sampling_from_pb(
            submit.sampling, default_max_tokens=submit.sampling.max_tokens
        ),
        phase=phase,
        resume_token_ids=tuple(submit.resume_token_ids),
        forks=tuple(
            Fork(stream_id, fork.seed if fork.HasField("seed") else None)
            for stream_id, fork in zip(stream_ids[1:], submit.forks, strict=True)
        ),
    )


def deadline_s(submit: w.Submit) -> float | None:
    """Seconds that the request has left; None for no bound."""
    seconds = submit.deadline_s
    if not math.isfinite(seconds) or seconds < 0:
        raise InvalidRequest(f"deadline_s must not be {seconds:g}", field="deadline_s")
    return seconds or None


def _phase(submit: w.Submit, role: Role, *, has_kv: bool) -> Phase:
    phase: Phase
    match submit.WhichOneof("phase"):
        case "prefill":
            phase = PrefillPhase(_present("prefill.transfer_id", submit.prefill.transfer_id))
        case "decode":
            phase = DecodePhase(
                _present("decode.transfer_id", submit.decode.transfer_id),
                _addresses(submit.decode.producer_addresses),
                _present("decode.producer_instance_id", submit.decode.producer_instance_id),
                kv_handle=submit.decode.kv_handle,
                live=submit.decode.live,
            )
        case "aggregated":
            phase = AggregatedPhase()
        case _:
            raise InvalidRequest("phase is missing", field="phase")
    if not isinstance(phase, _PHASES[role]):
        name = submit.WhichOneof("phase")
        raise InvalidRequest(f"a {role} worker takes no {name} work", field="phase")
    if not has_kv and not isinstance(phase, AggregatedPhase):
        raise InvalidRequest("this worker's engine cannot exchange KV", field="phase")
    return phase


def _addresses(values: Sequence[str]) -> tuple[str, ...]:
    if not values:
        raise InvalidRequest(
            "decode.producer_addresses is missing", field="decode.producer_addresses"
        )
    return tuple(values)


def _present(name: str, value: str) -> str:
    if not value:
        raise InvalidRequest(f"{name} is missing", field=name)
    return value
