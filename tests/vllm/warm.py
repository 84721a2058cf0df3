"""Processes of the tests, forked from one that has imported vLLM, as `pdserve up` does it."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pdserve.local.forkserver import Forked, ForkServer

if TYPE_CHECKING:
    from asyncio.subprocess import Process
    from collections.abc import Mapping, Sequence

ROOT = Path(__file__).parents[2]

# Set by a fixture (conftest.py) while tests that want it run.
shared: ForkServer | None = None


def fork_server() -> ForkServer:
    return ForkServer("workers.vllm.preload:preload", path=str(ROOT))


async def start_python(
    module: str, *args: str, env: Mapping[str, str] | None = None, fds: Sequence[int] = ()
) -> Process | Forked:
    """Run `python -m module *args` with `env` added, forked if `shared` is set."""
    whole = {**os.environ, "PYTHONPATH": str(ROOT), **(env or {})}
    if shared is not None:
        return await shared.start(module, *args, env=whole, fds=fds)
    command = [sys.executable, "-m", module, *args, *map(str, fds)]
    return await asyncio.create_subprocess_exec(*command, pass_fds=fds, cwd=ROOT, env=whole)
