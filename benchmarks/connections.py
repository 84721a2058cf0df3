"""What connections that ask nothing cost a router.

    python -m benchmarks.connections [--connections 10000] [--json]

A `pdserve up` with scripted engines is started, so many connections are opened to its HTTP port and
then, those closed again, to its gRPC port (with HTTP/2's preface and settings sent). The router's
resident memory is taken before, beside them, and after; a request is timed beside them, and one
answer of eight tokens must come. Both this process and the router need that many open files.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import socket
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import aiohttp
import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.compare.stack import Stack
from benchmarks.errors import BenchError
from benchmarks.report import stdout_console
from pdserve.client import Client
from pdserve.types import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

# RFC 9113, 3.4 and 6.5: the client's preface, and a SETTINGS frame without settings.
_HTTP2: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
_MIB: Final = 1 << 20
_SPARE_FILES: Final = 200
_CONNECT_S: Final = 10.0
_AT_ONCE: Final = 64  # below the backlog of a listening socket
_SETTLE_S: Final = 1.0
_ASKED: Final = 21
_ANSWER: Final = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.0)


@dataclass(frozen=True, slots=True)
class Row:
    """``open`` is how many were still open when all was measured; ``health_ms`` the median of
    requests for `/health` beside them, ``alone_ms`` without them."""

    face: str
    connections: int
    open: int
    kib_each: float
    before_mib: float
    beside_mib: float
    after_mib: float
    alone_ms: float
    health_ms: float


async def run(connections: int) -> list[Row]:
    """Both faces, one after the other. Raises :class:`BenchError`."""
    _check_files(connections)
    config: dict[str, Any] = {
        "router": {"http_port": 0, "grpc_port": 0},
        "worker": {"engine": "fake"},
        "up": {"prefill": 1, "decode": 1},
    }
    with tempfile.TemporaryDirectory() as directory:
        stack = Stack("pdserve", config, Path(directory))
        try:
            await stack.start()
            assert stack.ready is not None
            router = psutil.Process(stack.ready["router"]["pid"])
            http, grpc = stack.ready["http"], stack.ready["grpc"]
            async with aiohttp.ClientSession() as session, Client(grpc) as client:
                await _answer(client)
                at = urlsplit(http)
                assert at.hostname is not None
                assert at.port is not None
                host, _, port = grpc.rpartition(":")
                faces = {
                    "http": ((at.hostname, at.port), b""),
                    "grpc": ((host, int(port)), _HTTP2),
                }
                rows = []
                for face, (address, hello) in faces.items():
                    alone_ms = await _health_ms(session, http)
                    before = router.memory_info().rss
                    opened = await _open(address, hello, connections)
                    try:
                        await asyncio.sleep(_SETTLE_S)
                        beside = router.memory_info().rss
                        health_ms = await _health_ms(session, http)
                        await _answer(client)
                        still = sum(map(_is_open, opened))
                    finally:
                        for sock in opened:
                            sock.close()
                    await asyncio.sleep(_SETTLE_S)
                    after = router.memory_info().rss
                    each = (beside - before) / 1024 / connections
                    rows.append(
                        Row(
                            face,
                            connections,
                            still,
                            kib_each=round(each, 2),
                            before_mib=round(before / _MIB, 1),
                            beside_mib=round(beside / _MIB, 1),
                            after_mib=round(after / _MIB, 1),
                            alone_ms=alone_ms,
                            health_ms=health_ms,
                        )
                    )
                return rows
        finally:
            await stack.stop()


def _check_files(connections: int) -> None:
    """Take as many open files as are allowed, which what is started inherits."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < connections + _SPARE_FILES:
        raise BenchError(
            f"--connections: {connections} need {connections + _SPARE_FILES} open files; "
            f"this process may have {most} (ulimit -n)"
        )
    wanted = connections + _SPARE_FILES if most == resource.RLIM_INFINITY else most
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


async def _open(address: tuple[str, int], hello: bytes, count: int) -> list[socket.socket]:
    loop = asyncio.get_running_loop()
    opened: list[socket.socket] = []

    async def one() -> None:
        sock = socket.socket(socket.AF_INET)
        sock.setblocking(False)
        opened.append(sock)
        await loop.sock_connect(sock, address)
        if hello:
            await loop.sock_sendall(sock, hello)

    try:
        for begin in range(0, count, _AT_ONCE):
            async with asyncio.timeout(_CONNECT_S):
                await asyncio.gather(*(one() for _ in range(min(_AT_ONCE, count - begin))))
    except (OSError, TimeoutError) as error:
        for sock in opened:
            sock.close()
        raise BenchError(f"connection {len(opened)} of {count} was not made: {error}") from error
    return opened


def _is_open(sock: socket.socket) -> bool:
    """The other side has not ended it; what it has sent is read."""
    try:
        while sock.recv(1 << 16):
            pass
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


async def _health_ms(session: aiohttp.ClientSession, http: str) -> float:
    taken = []
    for _ in range(_ASKED):
        began_s = time.perf_counter()
        async with session.get(f"{http}/health") as response:
            response.raise_for_status()
            await response.read()
        taken.append(time.perf_counter() - began_s)
    return round(1000 * statistics.median(taken), 2)


async def _answer(client: Client) -> None:
    deltas = client.generate([5] * 16, _ANSWER)
    tokens = sum([len(delta.token_ids) async for delta in deltas])
    if tokens != _ANSWER.max_tokens:
        raise BenchError(f"an answer had {tokens} tokens, not {_ANSWER.max_tokens}")


def show(rows: Sequence[Row]) -> None:
    table = Table(title="connections that ask nothing; memory of the router, MiB")
    for column in ("face", "connections", "still open", "KiB each", "before", "beside", "after"):
        table.add_column(column, justify="right")
    table.add_column("/health ms alone, beside", justify="right")
    for row in rows:
        table.add_row(
            row.face,
            str(row.connections),
            str(row.open),
            f"{row.kib_each:.1f}",
            f"{row.before_mib:.1f}",
            f"{row.beside_mib:.1f}",
            f"{row.after_mib:.1f}",
            f"{row.alone_ms:.2f}, {row.health_ms:.2f}",
        )
    stdout_console().print(table)


def main() -> int:
    """Exit status 0 once everything was measured, 2 where it could not be."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--connections", type=int, default=10_000)
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    options = parser.parse_args()
    try:
        rows = asyncio.run(run(options.connections))
    except BenchError as error:
        Console(stderr=True).print(f"error: {error}", markup=False)
        return 2
    if options.json:
        sys.stdout.write(json.dumps([asdict(x) for x in rows], indent=1) + "\n")
    else:
        show(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
