"""What a handoff (router/handoff.py) asks its caller to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve.lean import lean

if TYPE_CHECKING:
    from pdserve.errors import PdserveError
    from pdserve.types import FinishReason, StreamDelta
    from router.ladder import Rung
    from router.leg import Leg


@lean
@dataclass(frozen=True, slots=True)
class Deliver:
    """Tokens for the client; what the delta says of finishing is not for the client."""

    delta: StreamDelta


@lean
@dataclass(frozen=True, slots=True)
class Finish:
    """The last tokens, and why there are no more."""

    delta: StreamDelta
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Fail:
    """The answer ends with an error."""

    error: PdserveError


@dataclass(frozen=True, slots=True)
class SubmitDecode:
    """Prefill has ended: submit the decode leg, to go on after `resume` with the KV that
    `kv_handle` tells of."""

    leg: Leg
    kv_handle: bytes
    resume: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TakeOver:
    """A leg was exported: submit the new decode leg, to go on after `resume`; then `open_live`."""

    resume: tuple[int, ...]


@lean
@dataclass(frozen=True, slots=True)
class CancelLeg:
    """Tell the leg's worker to stop."""

    leg: Leg


@dataclass(frozen=True, slots=True)
class Resubmit:
    """Place and submit the request anew by `rung`, after the tokens of `resume`; then call
    `open_pair` or `open_whole`, or `unplaced` where the rung leads nowhere, or `give_up`. `reason`
    is a word for receipts."""

    rung: Rung
    resume: tuple[int, ...]
    reason: str
    cause: PdserveError


Action = Deliver | SubmitDecode | TakeOver | Finish | Fail | CancelLeg | Resubmit
