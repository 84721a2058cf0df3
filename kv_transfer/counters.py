"""What a worker's KV plane has done."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class TransferCounters:
    """Totals since the worker started."""

    pushed_bytes: int = 0
    pushed_blocks: int = 0
    push_s: float = 0.0
    received_bytes: int = 0
    digest_s: float = 0.0  # spent by the producer on digests
    digest_mismatches: int = 0  # chunks that came here damaged
    failures: int = 0
    downgrades: int = 0  # transports that were preferred and could not be used
    dropped_links: int = 0  # connections without a valid handshake, or that broke the protocol
