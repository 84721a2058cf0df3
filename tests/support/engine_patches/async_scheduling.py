"""Loaded into an engine's process: turns on asynchronous scheduling, the default on GPUs.

vLLM's CPU platform turns it off. With it, two steps are in flight: a step returns the results of an
earlier one.
"""

from __future__ import annotations

from typing import Any

from vllm.platforms.cpu import CpuPlatform

_check = CpuPlatform.check_and_update_config.__func__  # type: ignore[attr-defined]


def _checked(cls: Any, config: Any) -> None:
    _check(cls, config)
    config.scheduler_config.async_scheduling = True


CpuPlatform.check_and_update_config = classmethod(_checked)
