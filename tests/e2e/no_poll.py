"""Loaded into an engine's process: it learns of transfers by being woken, or never."""

from __future__ import annotations

from tests.patience import WAIT_S
from workers.vllm import engine

engine._POLL_S = engine._TRANSFER_TICK_S = 2 * WAIT_S
