"""What a worker's KV plane has done, in totals."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class TransferCounters:
    """Totals since the worker started."""

    pushed_bytes: int = 0
    pushed_blocks: int = 0
    push_s: float = 0.0
    received_bytes: int = 0
    # Of these, what this worker copied by itself (kv_transfer/taking.py).
    # Making digests, as source and as target; not those that a copy makes on its way.
    digest_s: float = 0.0
    # Chunks that came here and did not have their digest.
    digest_mismatches: int = 0
    failures: int = 0
    downgrades: int = 0
    # Connections of others that were ended before they were a worker's, or for what they said.
    dropped_links: int = 0
    # Asked for without a right to it.
    # Asked for a second time, too late, or with blocks that do not fit.
    refused_grants: int = 0
