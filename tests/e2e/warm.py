"""Processes of the tests, forked from one that has imported vLLM, as `pdserve up` does it."""

from __future__ import annotations

import atexit
import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING

from pdserve.local.forkserver import ForkServer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pdserve.local.forkserver import Forked

ROOT = Path(__file__).parents[2]


@functools.cache
def _server() -> ForkServer:
    server = ForkServer("workers.vllm.preload:preload")
    atexit.register(server.close)
    return server


async def start_python(
    module: str, *args: str, env: Mapping[str, str] | None = None, fds: Sequence[int] = ()
) -> Forked:
    """Run `python -m module *args` with `env` added."""
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    whole = {**os.environ, "PYTHONPATH": os.pathsep.join(path), **(env or {})}
    return await _server().start(module, *args, env=whole, fds=fds)
