"""Other libraries that move KV between processes, where they are installed.

Measured like our own rows, from the target's request with its block ids until it knows that all are
in place. The request and the answer go over a plain TCP connection, the blocks over the library.
"""

from __future__ import annotations

import importlib
import os
import time
from array import array
from typing import TYPE_CHECKING, Any, Protocol

from benchmarks.errors import BenchError
from benchmarks.kv_transfer.floors import Control, page_addresses

if TYPE_CHECKING:
    from benchmarks.kv_transfer.cases import Trip
    from benchmarks.kv_transfer.ends import Cache
    from kv_transfer.layout import KvGeometry

MODULES = {"nixl": "nixl._api", "mooncake": "mooncake.engine"}
_QUIET = {"NIXL_LOG_LEVEL": "ERROR", "MC_LOG_LEVEL": "ERROR"}
_DEADLINE_S = 60.0
# Its TCP transport refuses longer ones: its queue is full.
_MOONCAKE_BATCH = 256


def missing(peer: str) -> str | None:
    """Why the peer cannot be measured here, or None."""
    for name, quiet in _QUIET.items():  # read when the libraries are loaded, here or by a child
        os.environ.setdefault(name, quiet)
    try:
        importlib.import_module(MODULES[peer])
    except ImportError as error:
        return f"not installed ({error})"
    return None


class _Library(Protocol):
    """What a peer library does for one end."""

    def facts(self) -> Any:
        """What the source's end must know of the target's."""
        ...

    def connect(self, facts: Any) -> None:
        """At the source."""
        ...

    def write(self, source_ids: list[int], target_ids: list[int]) -> None:
        """At the source: the blocks are in place when it returns."""
        ...

    def close(self) -> None:
        """Gives the memory back."""
        ...


class PeerEnd:
    """One end of a peer's way."""

    def __init__(self, way: str, role: str, cache: Cache, geometry: KvGeometry) -> None:
        self._role = role
        self._control = Control(role)
        library = Nixl if way == "nixl" else Mooncake
        self._library: _Library = library(role, cache, geometry)

    def facts(self) -> Any:
        return self._control.address, self._library.facts()

    def connect(self, facts: Any) -> None:
        address, theirs = facts
        self._control.connect(address)
        if self._role == "source":
            self._library.connect(theirs)

    def arm(self, trip: Trip) -> None:
        pass

    def go(self, trip: Trip) -> float | None:
        if self._role == "source":
            request = array("q", bytes(8 * len(trip.target_ids)))
            self._control.receive(memoryview(request).cast("B"))
            self._library.write(trip.source_ids, request.tolist())
            self._control.sock.sendall(b".")
            return None
        begun = time.perf_counter()
        self._control.sock.sendall(array("q", trip.target_ids))
        self._control.receive(memoryview(bytearray(1)))
        return time.perf_counter() - begun

    def close(self) -> None:
        self._control.close()
        self._library.close()


class Nixl:
    """An agent with its default backend, UCX, and lists of pages prepared before, as vLLM's
    NixlConnector uses it."""

    def __init__(self, role: str, cache: Cache, geometry: KvGeometry) -> None:
        api = importlib.import_module(MODULES["nixl"])
        self._geometry, self._address = geometry, cache.address
        self._agent = api.nixl_agent(f"bench-{role}-{geometry.page_bytes}", api.nixl_agent_config())
        regions = [(cache.address, cache.shared.size, 0, "")]
        self._memory = self._agent.register_memory(regions, "DRAM")
        self._ours: Any = None
        self._theirs: Any = None

    def _pages(self, address: int) -> list[tuple[int, int, int]]:
        g = self._geometry
        starts = page_addresses(address, g, list(range(g.num_blocks))).tolist()
        return [(start, g.page_bytes, 0) for start in starts]

    def _indices(self, block_ids: list[int]) -> list[int]:
        g = self._geometry
        return [layer * g.num_blocks + b for layer in range(g.num_layers) for b in block_ids]

    def facts(self) -> Any:
        return self._agent.get_agent_metadata(), self._address

    def connect(self, facts: Any) -> None:
        metadata, address = facts
        peer = self._agent.add_remote_agent(metadata)
        self._ours = self._agent.prep_xfer_dlist("", self._pages(self._address), "DRAM")
        self._theirs = self._agent.prep_xfer_dlist(peer, self._pages(address), "DRAM")

    def write(self, source_ids: list[int], target_ids: list[int]) -> None:
        ours, theirs = self._indices(source_ids), self._indices(target_ids)
        handle = self._agent.make_prepped_xfer("WRITE", self._ours, ours, self._theirs, theirs)
        end = time.monotonic() + _DEADLINE_S
        state = self._agent.transfer(handle)
        while state == "PROC" and time.monotonic() < end:
            state = self._agent.check_xfer_state(handle)
        self._agent.release_xfer_handle(handle)
        if state != "DONE":
            raise BenchError(f"the transfer ended as {state}")

    def close(self) -> None:
        for pages in (self._ours, self._theirs):
            if pages is not None:
                self._agent.release_dlist_handle(pages)
        self._agent.deregister_memory(self._memory)


class Mooncake:
    """A transfer engine over TCP, without a metadata server."""

    def __init__(self, role: str, cache: Cache, geometry: KvGeometry) -> None:
        self._geometry, self._address = geometry, cache.address
        self._engine = importlib.import_module(MODULES["mooncake"]).TransferEngine()
        if self._engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
            raise BenchError("the transfer engine did not start")
        if self._engine.register_memory(cache.address, cache.shared.size):
            raise BenchError("the transfer engine did not take the memory")
        self._peer, self._peer_address = "", 0

    def facts(self) -> Any:
        return f"127.0.0.1:{self._engine.get_rpc_port()}", self._address

    def connect(self, facts: Any) -> None:
        self._peer, self._peer_address = facts

    def write(self, source_ids: list[int], target_ids: list[int]) -> None:
        start = page_addresses(self._address, self._geometry, source_ids).tolist()
        to = page_addresses(self._peer_address, self._geometry, target_ids).tolist()
        sizes = [self._geometry.page_bytes] * len(to)
        for i in range(0, len(to), _MOONCAKE_BATCH):
            part = slice(i, i + _MOONCAKE_BATCH)
            failed = self._engine.batch_transfer_sync_write(
                self._peer, start[part], to[part], sizes[part]
            )
            if failed:
                raise BenchError(f"the transfer ended as {failed}")

    def close(self) -> None:
        self._engine.unregister_memory(self._address)
