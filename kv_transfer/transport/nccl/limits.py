"""Limits of NCCL in one process, from the settings."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kv_transfer.settings import SLOT_BYTES, SLOTS

if TYPE_CHECKING:
    from kv_transfer.settings import ConnectorConfig

SENDER, RECEIVER = 0, 1
# NCCL's buffers for one channel (one thread block) between two Hopper GPUs, at each end.
CHANNEL_BYTES = {SENDER: 2 << 20, RECEIVER: 10 << 20}


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one process. `slots` applies to each direction, `budget_bytes` to both together.

    `part_bytes`: bytes of a slot that are gathered, sent and scattered together. `max_group`:
    operations per NCCL group. `min_direct_bytes`: smaller blocks are staged.

    Deadlines in seconds: `init_s` for two ranks to join, `op_s` to wait for a slot, a communicator
    or the peer's answer, `min_move_s` for a small chunk to move, `quarantine_s` for the streams of
    an aborted communicator to become idle. `keep_s`: time for which a communicator is kept after
    its last use while another one waits for a place; about the time of a join.
    """

    budget_bytes: int = 512 << 20
    max_ctas: int = 4
    slots: int = SLOTS
    slot_bytes: int = SLOT_BYTES
    part_bytes: int = 8 << 20
    max_group: int = 256  # larger groups have hung (pytorch#174288)
    # NCCL runs smaller operations with one thread block each, one after the other (enqueue.cc).
    min_direct_bytes: int = (64 << 10) + 1
    init_s: float = 20.0
    op_s: float = 60.0
    min_move_s: float = 5.0
    quarantine_s: float = 10.0
    keep_s: float = 1.0

    def communicator_bytes(self, rank: int) -> int:
        """Return the estimated GPU memory of this end of a communicator."""
        return CHANNEL_BYTES[rank] * self.max_ctas


def limits_from(settings: ConnectorConfig) -> Limits:
    """Derive the limits from the settings. Raises ValueError if the budget does not allow one
    communicator in each direction."""
    # NCCL takes this variable before the number that a communicator is opened with (init.cc), so
    # the budget has to count with it.
    max_ctas = int(os.environ.get("NCCL_MAX_CTAS") or settings.nccl_max_ctas)
    pair = sum(CHANNEL_BYTES.values()) * max_ctas
    if settings.nccl_budget_bytes < pair:
        raise ValueError(
            f"nccl_budget_bytes {settings.nccl_budget_bytes} is less than the {pair} of {max_ctas}"
            " thread blocks"
        )
    return Limits(settings.nccl_budget_bytes, max_ctas, op_s=settings.receive_timeout_s)
