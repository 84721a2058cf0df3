"""What the machine can do at most: a plain memcpy of the same blocks, and a bare TCP stream."""

from __future__ import annotations

import ctypes
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.errors import BenchError
from benchmarks.kv_transfer.ends import Cache
from kv_transfer.stream import SOCKET_BUFFER_BYTES

if TYPE_CHECKING:
    from benchmarks.kv_transfer.cases import Trip
    from kv_transfer.layout import KvGeometry

_COPY_PAGES = """
#include <stddef.h>
#include <string.h>
void copy_pages(char *const *to, char *const *from, size_t count, size_t size) {
    for (size_t i = 0; i < count; i++) memcpy(to[i], from[i], size);
}
"""
CopyPages = Callable[[Any, Any, int, int], None]


def compiled_copy() -> CopyPages:
    """The loop without Python between the pages. Raises BenchError where no C compiler is."""
    compiler = shutil.which("cc")
    if compiler is None:
        raise BenchError("the memcpy row needs a C compiler, cc")
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "copy.c"), Path(folder, "copy.so")
        source.write_text(_COPY_PAGES, encoding="ascii")
        command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(source)]
        subprocess.run(command, check=True)
        function = ctypes.CDLL(str(library)).copy_pages
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
    function.restype = None
    return function


def page_addresses(base: int, geometry: KvGeometry, block_ids: list[int]) -> np.ndarray[Any, Any]:
    """Of all layers, as void * in C."""
    layers = np.arange(geometry.num_layers, dtype=np.uint64)[:, None] * geometry.layer_stride_bytes
    blocks = np.array(block_ids, dtype=np.uint64) * geometry.block_stride_bytes
    return (base + layers + blocks).astype(np.uint64).ravel()


class MemcpyEnd:
    """One process copies the source's blocks into other shared memory of its own."""

    def __init__(self, role: str, cache: Cache, geometry: KvGeometry) -> None:
        self._cache, self._geometry = cache, geometry
        self._spare = Cache(cache.shared.size) if role == "source" else None
        self._copy = compiled_copy()
        self._to = self._from = np.empty(0, np.uint64)

    def facts(self) -> Any:
        return None

    def connect(self, facts: Any) -> None:
        pass

    def arm(self, trip: Trip) -> None:
        if self._spare is not None:
            self._to = page_addresses(self._spare.address, self._geometry, trip.target_ids)
            self._from = page_addresses(self._cache.address, self._geometry, trip.source_ids)

    def go(self, trip: Trip) -> float | None:
        if self._spare is None:
            return None
        to, start = self._to.ctypes.data, self._from.ctypes.data
        begun = time.perf_counter()
        self._copy(to, start, len(self._to), self._geometry.page_bytes)
        return time.perf_counter() - begun

    def close(self) -> None:
        if self._spare is not None:
            self._spare.shared.close()


class Control:
    """A plain TCP connection, tuned like a link's, between the two ends of a way."""

    def __init__(self, role: str) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0)) if role == "source" else None
        self._sock: socket.socket | None = None

    @property
    def address(self) -> Any:
        """Where the source listens; None at the target."""
        return None if self._listener is None else self._listener.getsockname()

    @property
    def sock(self) -> socket.socket:
        """The connection; the source accepts it when it first asks."""
        if self._sock is None:
            assert self._listener is not None, "the target connects first"
            self._sock = _tuned(self._listener.accept()[0])
        return self._sock

    def connect(self, address: Any) -> None:
        """At the target; nothing at the source."""
        if self._listener is None:
            self._sock = _tuned(socket.create_connection(address))

    def receive(self, view: memoryview) -> None:
        """Fills the view."""
        while view.nbytes:
            count = self.sock.recv_into(view)
            if not count:
                raise BenchError("the other end is gone")
            view = view[count:]

    def close(self) -> None:
        """Idempotent."""
        for sock in (self._sock, self._listener):
            if sock is not None:
                sock.close()


class StreamEnd:
    """As many bytes as the trip has, in one piece: one `sendall` into `recv_into`. They begin at
    the trip's first block: the same ones every time would lie in the processor's cache. The target
    asks and measures."""

    def __init__(self, role: str, cache: Cache, geometry: KvGeometry) -> None:
        self._role = role
        self._view = memoryview(cache.map)
        self._block_bytes = geometry.block_bytes
        self._control = Control(role)

    def facts(self) -> Any:
        return self._control.address

    def connect(self, facts: Any) -> None:
        self._control.connect(facts)

    def arm(self, trip: Trip) -> None:
        pass

    def go(self, trip: Trip) -> float | None:
        ids = trip.source_ids if self._role == "source" else trip.target_ids
        size = len(ids) * self._block_bytes
        start = min(ids[0] * self._block_bytes, len(self._view) - size)
        view = self._view[start : start + size]
        if self._role == "source":
            self._control.sock.recv(1)
            self._control.sock.sendall(view)
            return None
        begun = time.perf_counter()
        self._control.sock.sendall(b"?")
        self._control.receive(view)
        return time.perf_counter() - begun

    def close(self) -> None:
        self._control.close()


def _tuned(sock: socket.socket) -> socket.socket:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)
    return sock
