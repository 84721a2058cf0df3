"""A collector of spans that throws them away: `python -m benchmarks.collector --port-file FILE`.

It reads no message, so that what it takes of the machine is as little as can be.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from benchmarks.processes import Child

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

READY_S = 60.0
_SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"


@asynccontextmanager
async def collecting(directory: Path) -> AsyncIterator[str]:
    """The endpoint of one, ended when it is left. Raises BenchError where it does not start."""
    child = Child("the collector", directory / "collector.log")
    port_file = directory / "collector.port"
    child.start([sys.executable, "-m", "benchmarks.collector", "--port-file", str(port_file)])
    try:
        await child.until_file(port_file, READY_S)
        port = await asyncio.to_thread(port_file.read_text, encoding="ascii")
        yield f"http://127.0.0.1:{port}"
    finally:
        await child.stop()


def _export(_message: bytes, _context: Any) -> bytes:
    return b""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port-file", type=Path, required=True)
    port_file: Path = parser.parse_args().port_file
    server = grpc.server(ThreadPoolExecutor(2))
    method: Any = grpc.unary_unary_rpc_method_handler(_export)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(_SERVICE, {"Export": method}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    # A reader sees the whole number or no file.
    part = port_file.with_suffix(".part")
    part.write_text(str(port), encoding="ascii")
    part.rename(port_file)
    server.wait_for_termination()


if __name__ == "__main__":
    main()
