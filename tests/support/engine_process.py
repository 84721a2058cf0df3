"""The program that `engines.EngineProcess` starts: one engine in its own process, driven over a
socket.

Frames in both directions: four bytes of length, then a pickle. The first frame received has the
settings; the first one sent is ("started", EngineInfo) or ("failed", text). The process ends when
the socket closes.
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
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdserve.errors import PdserveError
from pdserve.v1 import worker_pb2 as w
from workers.vllm.engine import VllmEngine
from workers.vllm.start.settings import prepare_ranks

if TYPE_CHECKING:
    from pdserve.types import Adapter
    from workers.engine import CacheChange
    from workers.vllm.start.settings import VllmSettings

# PDSERVE_TEST_NAME in the environment loads the patch of this name.
_PATCHES = tuple(x.stem for x in (Path(__file__).parent / "engine_patches").glob("*.py"))
HEADER = struct.Struct("<I")


async def read_frame(reader: asyncio.StreamReader) -> Any:
    """Return the value of the next frame. Raises asyncio.IncompleteReadError if the peer is
    gone."""
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


async def _render(engine: VllmEngine, request: bytes) -> bytes | PdserveError:
    try:
        response = await engine.render(w.RenderRequest.FromString(request))
    except PdserveError as error:
        return error
    return response.SerializeToString()


async def _read_results(
    engine: VllmEngine, writer: asyncio.StreamWriter, cached: dict[int, None]
) -> None:
    async for result in engine.results:
        if result.cache is not None:
            _apply(cached, result.cache)
        if result.deltas:
            write_frame(writer, ("deltas", list(result.deltas)))
        if result.failure is not None:
            write_frame(writer, ("engine_failed", repr(result.failure)))


async def _serve(
    settings: VllmSettings, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    engine = VllmEngine(settings)
    cached: dict[int, None] = {}
    try:
        info = await engine.start()
    except Exception as error:  # noqa: BLE001 - the test reads it
        write_frame(writer, ("failed", f"{type(error).__name__}: {error}"))
        await writer.drain()
        return
    write_frame(writer, ("started", info))
    results = asyncio.create_task(_read_results(engine, writer, cached))
    while True:
        match await read_frame(reader):
            case ("submit", work):
                engine.submit(work)
            case ("cancel" | "export" as what, *values):
                getattr(engine, what)(*values)
            case ("load_adapter", adapter):
                write_frame(writer, ("loaded", await _load(engine, adapter)))
            case ("stage_weights" | "update_weights" as what, files):
                await getattr(engine, what)(files)
                write_frame(writer, ("changed", engine._staged is not None))
            case ("render", request):
                write_frame(writer, ("rendered", await _render(engine, request)))
            case ("status",):
                write_frame(writer, ("status", (engine.load(), engine.ledger())))
            case ("kv",):
                write_frame(writer, ("kv", engine.kv_state()))
            case ("cache",):
                write_frame(writer, ("cache", list(cached)))
            case ("close",):
                await engine.close()
                await results
                threads = [t.name for t in threading.enumerate() if t.name == "vllm-step"]
                write_frame(writer, ("closed", threads))
                await writer.drain()
                return


async def _run(settings: VllmSettings, sock: socket.socket) -> None:
    for name in _PATCHES:
        if f"PDSERVE_TEST_{name.upper()}" in os.environ:
            importlib.import_module(f"tests.support.engine_patches.{name}")
    reader, writer = await asyncio.open_connection(sock=sock)
    try:
        await _serve(settings, reader, writer)
    except (asyncio.IncompleteReadError, ConnectionError):
        os._exit(1)  # the parent is gone; do not wait for the step thread
    writer.close()


def _main(fd: int) -> None:
    sock = socket.socket(fileno=fd)
    size = sock.recv(HEADER.size, socket.MSG_WAITALL)
    settings = pickle.loads(sock.recv(HEADER.unpack(size)[0], socket.MSG_WAITALL))
    prepare_ranks(settings.engine_args)  # as a worker does, before it has threads
    asyncio.run(_run(settings, sock))


if __name__ == "__main__":
    _main(int(sys.argv[1]))
