"""Where the routers of a worker are: at fixed addresses, behind a DNS name, or in a file."""

from __future__ import annotations

import asyncio
import logging
import socket
from pathlib import Path

logger = logging.getLogger(__name__)

LOOKUP_TIMEOUT_S = 5.0


class Discovery:
    """Finds routers by the entries of `worker.routers`: `host:port`, `dns:NAME:PORT` for every
    address of a name, or `file:PATH` with one address a line.

    State: what each entry gave last. An entry that cannot be read keeps that, because a router does
    not go when a name server does.
    """

    def __init__(self, entries: tuple[str, ...]) -> None:
        self.changes = any(entry.startswith(("dns:", "file:")) for entry in entries)
        self._found: dict[str, list[str]] = {entry: [] for entry in entries}

    async def addresses(self) -> list[str]:
        """Return the addresses that the entries give now, each once."""
        for entry in self._found:
            kind, _, rest = entry.partition(":")
            try:
                if kind == "dns":
                    self._found[entry] = await _resolve(rest)
                elif kind == "file":
                    self._found[entry] = (await asyncio.to_thread(Path(rest).read_text)).split()
                else:
                    self._found[entry] = [entry]
            except (OSError, TimeoutError) as error:
                logger.warning("looking up routers at %s failed: %s", entry, error)
        return list(dict.fromkeys(x for found in self._found.values() for x in found))


async def _resolve(name_and_port: str) -> list[str]:
    """Return every address of NAME:PORT; none for a name without any. Raises OSError."""
    name, _, port = name_and_port.rpartition(":")
    try:
        async with asyncio.timeout(LOOKUP_TIMEOUT_S):
            found = await asyncio.get_running_loop().getaddrinfo(
                name, int(port), type=socket.SOCK_STREAM
            )
    except socket.gaierror as error:
        if error.errno in (socket.EAI_NONAME, socket.EAI_NODATA):
            return []
        raise
    hosts = sorted({str(info[4][0]) for info in found})
    return [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts]
