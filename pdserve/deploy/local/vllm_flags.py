"""Flags of `vllm serve`, read by vLLM's parser in another process, because vLLM's import takes
seconds."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from typing import TYPE_CHECKING

from pdserve.errors import ConfigError
from pdserve.process.entry_points import PROCESSES, entry_point
from pdserve.process.forkserver import launched

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pdserve.process.forkserver import ForkServer

_TIMEOUT_S = 300.0  # a cold import of vLLM from a network disk takes minutes


async def read_flags(
    words: Sequence[str], forkserver: ForkServer | None, log: Path
) -> dict[str, object]:
    """Return the dotted keys that the words after `vllm serve` set. Raises ConfigError with vLLM's
    message."""
    line, module = b"", entry_point(PROCESSES, "vllm-flags").module
    with contextlib.suppress(TimeoutError):
        async with (
            asyncio.timeout(_TIMEOUT_S),
            launched(forkserver, module, json.dumps(words), env=os.environ, log=log) as (
                process,
                reports,
            ),
        ):
            line = await reports.readline()  # empty if the process has ended
            await process.wait()
    if not line:
        raise ConfigError(f"vLLM could not read the flags; see {log}")
    answer = json.loads(line)
    if "failed" in answer:
        raise ConfigError(answer["failed"])
    found: dict[str, object] = answer["ready"]
    return found
