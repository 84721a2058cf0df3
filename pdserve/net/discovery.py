"""Addresses of routers: fixed, from DNS, or from a file."""

from __future__ import annotations

import asyncio
import logging
import socket
from pathlib import Path

from pdserve.config import DNS_ENTRY, FILE_ENTRY, is_address, refuse
from pdserve.errors import ConfigError
from pdserve.net.sockets import join_address

logger = logging.getLogger(__name__)

LOOKUP_TIMEOUT_S = 5.0


class Discovery:
    """Resolves the entries of `worker.routers`: `host:port`, `dns:NAME:PORT` for every address of a
    name, or `file:/PATH` with one address per line.

    State: the last addresses of each entry, and its last failure. An entry that cannot be read
    keeps its last addresses, because routers stay up when a name server fails.
    """

    def __init__(self, entries: tuple[str, ...]) -> None:
        self.changes = any(entry.startswith((DNS_ENTRY, FILE_ENTRY)) for entry in entries)
        self._found: dict[str, list[str] | None] = dict.fromkeys(entries)
        self._failures = dict.fromkeys(entries, "")

    async def addresses(self) -> list[str]:
        """Return the current addresses of all entries, each once.

        Raises ConfigError for an invalid line of a file that has not been read successfully before.
        """
        for entry, before in self._found.items():
            failure = ""
            try:
                self._found[entry] = await _look_up(entry)
            except ConfigError as error:
                if before is None:
                    raise
                failure = error.message
            # getaddrinfo raises UnicodeError for a name with an empty or too long label.
            except (OSError, UnicodeError) as error:
                failure = str(error) or type(error).__name__
            if failure != self._failures[entry]:
                self._failures[entry] = failure
                logger.warning("routers at %s: %s", entry, failure or "found again")
        return list(dict.fromkeys(x for found in self._found.values() for x in found or ()))


async def _look_up(entry: str) -> list[str]:
    if entry.startswith(DNS_ENTRY):
        return await _resolve(entry.removeprefix(DNS_ENTRY))
    if entry.startswith(FILE_ENTRY):
        return await asyncio.to_thread(_read, Path(entry.removeprefix(FILE_ENTRY)))
    return [entry]


def _read(path: Path) -> list[str]:
    """Return the addresses in a file with one per line. Raises OSError, and ConfigError for a line
    that is not an address."""
    found = []
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        address = line.partition("#")[0].strip()
        if address and not is_address(address):
            refuse("worker.routers", f"{path}, line {number}: {address!r} is not host:port")
        found += [address] if address else []
    return found


async def _resolve(name_and_port: str) -> list[str]:
    """Return every address of NAME:PORT, or an empty list if the name has none. Raises OSError,
    also after LOOKUP_TIMEOUT_S."""
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
    return [join_address(host, port) for host in hosts]
