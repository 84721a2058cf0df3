"""The transports by name. A worker offers some in its order of preference; the source takes the
first it can use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kv_transfer.transport.shm import ShmTransport
from kv_transfer.transport.tcp import TcpTransport

if TYPE_CHECKING:
    from kv_transfer.transport.base import Transport


def by_name() -> dict[str, Transport]:
    """Every transport that a configuration may name."""
    return {"shm": ShmTransport(), "tcp": TcpTransport()}
