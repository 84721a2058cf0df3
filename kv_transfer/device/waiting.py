"""Waiting for a copy of our own on the GPU, by asking: who must be able to give up does not block
in a call of CUDA."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kv_transfer.errors import KvTransferError

if TYPE_CHECKING:
    from kv_transfer.device.base import Event, StreamOps

# How long a copy may take, and how often it is asked.
COPY_S = 10.0
ASK_S = 0.0002


def wait_for(device: StreamOps, event: Event) -> None:
    """Until the event has fired. Raises StreamError, and KvTransferError when it takes too long."""
    end = time.monotonic() + COPY_S
    while not device.query(event):
        if time.monotonic() >= end:
            raise KvTransferError(f"a copy on the GPU did not end in {COPY_S:g} s")
        time.sleep(ASK_S)
