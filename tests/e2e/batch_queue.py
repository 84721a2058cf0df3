"""Loaded into an engine's process: two steps are in flight, as GPUs have it by default.

vLLM's CPU platform schedules synchronously. With a queue of two batches the engine core takes the
path of asynchronous scheduling: a step returns what an earlier one found.
"""

from __future__ import annotations

from vllm.config import VllmConfig

VllmConfig.max_concurrent_batches = property(lambda _: 2)  # type: ignore[assignment, method-assign]
