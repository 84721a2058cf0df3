"""Loaded into an engine's process: turns polling off, so that only a wake-up shows the end of a
transfer."""

from __future__ import annotations

from tests.support.timeouts import WAIT_S
from workers.vllm import engine

engine._POLL_S = engine._TRANSFER_TICK_S = 2 * WAIT_S
