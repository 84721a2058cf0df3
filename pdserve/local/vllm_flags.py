"""Flags of `vllm serve`, read by vLLM's parser in another process: vLLM's import takes seconds."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from typing import TYPE_CHECKING

from pdserve.errors import ConfigError
from pdserve.local.forkserver import launch

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pdserve.local.forkserver import Forked, ForkServer

_MODULE = "workers.vllm.flags"
_MAX_ANSWER_BYTES = 1 << 20
_TIMEOUT_S = 300.0  # a cold import of vLLM from a network disk takes minutes


async def read_flags(
    words: Sequence[str], forkserver: ForkServer | None, log: Path
) -> dict[str, object]:
    """Return the dotted keys that the words after `vllm serve` set. Raises ConfigError with vLLM's
    message."""
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=ours, limit=_MAX_ANSWER_BYTES)
    text, line = json.dumps(words), b""
    process: asyncio.subprocess.Process | Forked | None = None
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            with theirs:
                fd = theirs.fileno()
                process = await launch(
                    forkserver, _MODULE, text, env=os.environ, log=log, report_fd=fd
                )
            line = await reader.readline()  # empty if the process has ended
            await process.wait()
    except TimeoutError:
        line = b""
    finally:
        writer.close()
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()
    if not line:
        raise ConfigError(f"vLLM could not read the flags; see {log}")
    answer = json.loads(line)
    if "failed" in answer:
        raise ConfigError(answer["failed"])
    found: dict[str, object] = answer["ready"]
    return found
