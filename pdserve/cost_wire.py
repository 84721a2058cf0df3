"""What engine steps cost, to and from protobuf."""

from __future__ import annotations

from dataclasses import fields

from pdserve.errors import InvalidRequest
from pdserve.step_moments import Moments, StepMoments
from pdserve.v1 import worker_pb2 as w


def moments_to_pb(moments: StepMoments) -> w.StepMoments:
    return w.StepMoments(prefill=_to_pb(moments.prefill), decode=_to_pb(moments.decode))


def moments_from_pb(message: w.StepMoments) -> StepMoments:
    """Refuses what cannot be sums over steps."""
    return StepMoments(_from_pb(message.prefill, "prefill"), _from_pb(message.decode, "decode"))


def _to_pb(moments: Moments) -> w.Moments:
    return w.Moments(**{f.name: getattr(moments, f.name) for f in fields(moments)})


def _from_pb(message: w.Moments, name: str) -> Moments:
    if not message.steps:
        return Moments()
    moments = Moments(message.steps, message.end, tuple(message.xx), tuple(message.xy), message.yy)
    if not moments.is_sound:
        raise InvalidRequest(f"steps.{name}: no sums over steps", field=f"steps.{name}")
    return moments
