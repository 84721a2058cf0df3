"""One engine in a process of its own, driven over a socket: what `engines.EngineProcess` starts.

Frames both ways: four bytes of length, then a pickle. The first frame in holds the settings; the
first out is ("started", EngineInfo) or ("failed", text). When the socket closes, this process ends.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import pickle
import socket
import struct
import sys
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

from pdserve.errors import PdserveError
from workers.vllm.engine import VllmEngine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.types import Adapter, StreamDelta
    from workers.engine import CacheChange

HEADER = struct.Struct("<I")


async def read_frame(reader: asyncio.StreamReader) -> Any:
    """The next frame's value. Raises asyncio.IncompleteReadError where the peer is gone."""
    (size,) = HEADER.unpack(await reader.readexactly(HEADER.size))
    return pickle.loads(await reader.readexactly(size))


def write_frame(writer: asyncio.StreamWriter, value: object) -> None:
    data = pickle.dumps(value)
    writer.write(HEADER.pack(len(data)) + data)


def _apply(cached: dict[int, None], change: CacheChange) -> None:
    for block in change.removed:
        cached.pop(block, None)
    cached.update(dict.fromkeys(change.stored))


async def _load(engine: VllmEngine, adapter: Adapter) -> PdserveError | None:
    try:
        await engine.load_adapter(adapter)
    except PdserveError as error:
        return error
    return None


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    engine = VllmEngine(await read_frame(reader))
    cached: dict[int, None] = {}
    engine.on_cache(partial(_apply, cached))

    def on_step(deltas: Sequence[StreamDelta]) -> None:
        write_frame(writer, ("deltas", list(deltas)))

    def on_failure(error: BaseException) -> None:
        write_frame(writer, ("engine_failed", repr(error)))

    try:
        info = await engine.start(on_step, on_failure)
    except Exception as error:  # noqa: BLE001 - the test reads it
        write_frame(writer, ("failed", f"{type(error).__name__}: {error}"))
        await writer.drain()
        return
    write_frame(writer, ("started", info))
    while True:
        match await read_frame(reader):
            case ("submit", work):
                engine.submit(work)
            case ("cancel" | "export" as what, *values):
                getattr(engine, what)(*values)
            case ("load_adapter", adapter):
                write_frame(writer, ("loaded", await _load(engine, adapter)))
            case ("status",):
                write_frame(writer, ("status", (engine.load(), engine.ledger())))
            case ("kv",):
                write_frame(writer, ("kv", engine.kv_state()))
            case ("cache",):
                write_frame(writer, ("cache", list(cached)))
            case ("close",):
                await engine.close()
                threads = [t.name for t in threading.enumerate() if t.name == "vllm-step"]
                write_frame(writer, ("closed", threads))
                await writer.drain()
                return


async def _main(fd: int) -> None:
    for name in ("batch_queue", "corrupt", "no_poll", "overlap"):
        if f"PDSERVE_TEST_{name.upper()}" in os.environ:
            importlib.import_module(f"tests.e2e.{name}")
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=fd))
    try:
        await _serve(reader, writer)
    except (asyncio.IncompleteReadError, ConnectionError):
        os._exit(1)  # the parent is gone; the step thread may be in the middle of anything
    writer.close()


if __name__ == "__main__":
    asyncio.run(_main(int(sys.argv[1])))
