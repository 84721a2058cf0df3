"""What a pair is asked (`Op`), how long it may take, and what it answers: the work to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kv_transfer.nccl.messages import PairMessage


@dataclass(frozen=True, slots=True)
class PairTimeouts:
    """How long each state may last, in seconds."""

    init_s: float = 30.0
    offer_s: float = 10.0
    idle_s: float = 300.0
    finalise_s: float = 5.0
    abort_s: float = 5.0
    quarantine_s: float = 10.0
    move_floor_s: float = 5.0
    # A tenth of the slowest wire that is worth it.
    move_bytes_per_s: float = 1e8

    def move_s(self, size_bytes: int) -> float:
        """For one operation in flight."""
        return max(self.move_floor_s, size_bytes / self.move_bytes_per_s)


@dataclass(frozen=True, slots=True)
class Op:
    """One slot's bytes, to send or to receive. Both ends know it by `op_id`."""

    op_id: str
    address: int
    size_bytes: int
    expires_at: float


@dataclass(frozen=True, slots=True)
class MakeId:
    """Make an id, tell it to the peer and join (`Init`)."""

    generation: int


@dataclass(frozen=True, slots=True)
class Init:
    """Begin to join the communicator of this id."""

    generation: int
    unique_id: bytes


@dataclass(frozen=True, slots=True)
class Tell:
    """Send the message to the other end."""

    message: PairMessage


@dataclass(frozen=True, slots=True)
class Post:
    """Enqueue the operation."""

    op: Op


@dataclass(frozen=True, slots=True)
class Finalise:
    """Begin the orderly end."""


@dataclass(frozen=True, slots=True)
class Destroy:
    """Free the communicator after its orderly end."""


@dataclass(frozen=True, slots=True)
class AbortComm:
    """Abort, then watch the stream."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The operation is over and its memory is its owner's again. `reason` is "" when all went
    well."""

    op: Op
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Lost:
    """The operation failed and its memory may yet be written to: it must not be used again."""

    op: Op
    reason: str


PairAction = MakeId | Init | Tell | Post | Finalise | Destroy | AbortComm | Finished | Lost
