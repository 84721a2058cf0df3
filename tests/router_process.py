"""A router in a process of its own, so that a test can kill it."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.patience import START_S, WAIT_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

_ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class RouterProcess:
    """Where it serves, and its process."""

    http: str
    grpc: str
    process: asyncio.subprocess.Process

    async def kill(self) -> None:
        """SIGKILL, and the end of it."""
        self.process.kill()
        await self.process.wait()


@asynccontextmanager
async def a_router(**options: object) -> AsyncIterator[RouterProcess]:
    """`pdserve router` with the configuration of `options`; ended at the end, if it still runs."""
    settings = {"http_port": 0, "grpc_port": 0, "stop_grace_s": 0, "lease_s": 60, **options}
    settings["health.stall_s"] = 60  # a test that holds a worker still means no failure
    read_fd, write_fd = os.pipe()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pdserve", "router", "--report-fd", str(write_fd)),
        *(word for key, value in settings.items() for word in ("--set", f"router.{key}={value}")),
        cwd=_ROOT,
        pass_fds=(write_fd,),
    )
    os.close(write_fd)
    try:
        with os.fdopen(read_fd) as pipe:
            line = await asyncio.wait_for(asyncio.to_thread(pipe.readline), START_S)
        ready = json.loads(line)["ready"]
        yield RouterProcess(ready["http"], ready["grpc"], process)
    finally:
        if process.returncode is None:
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), WAIT_S)
        except TimeoutError:
            process.kill()
            await process.wait()
            raise
