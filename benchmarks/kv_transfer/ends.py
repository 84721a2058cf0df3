"""One end of the benchmark: a process with a KV cache that does what it is told over a pipe."""

from __future__ import annotations

import ctypes
import logging
import mmap
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np

from kv_transfer.memory import KvRegion, SharedMemory, prefault

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from multiprocessing.connection import Connection

    from benchmarks.kv_transfer.cases import Trip
    from kv_transfer.layout import KvGeometry


logger = logging.getLogger(__name__)


class WayEnd(Protocol):
    """One end of a way to move blocks. The calls come in this order; `arm` and `go` often."""

    def facts(self) -> Any:
        """What the other end needs to know."""
        ...

    def connect(self, facts: Any) -> None:
        """The other end's facts."""
        ...

    def arm(self, trip: Trip) -> None:
        """Everything that is not measured."""
        ...

    def go(self, trip: Trip) -> float | None:
        """Moves the trip's blocks; the end that measures returns the seconds."""
        ...

    def close(self) -> None:
        """Releases what the end holds."""
        ...


class AnyCache(Protocol):
    """A KV cache as full of words. `shared` is None where it is not in shared memory."""

    @property
    def shared(self) -> SharedMemory | None:
        """What it lies in."""
        ...

    def region(self, geometry: KvGeometry) -> KvRegion:
        """The cache as `kv_transfer` sees it."""
        ...

    def number_words(self) -> None:
        """Gives each word of the cache a value of its own."""
        ...

    def clear(self) -> None:
        """Fills the cache with what no word of a source is."""
        ...

    def differing_blocks(self, geometry: KvGeometry, trip: Trip) -> int:
        """How many of the trip's blocks here are not what a source with numbered words sent."""
        ...


CacheT = TypeVar("CacheT", bound=AnyCache)


class Cache:
    """A KV cache in shared memory, every page touched."""

    def __init__(self, size: int) -> None:
        self.shared = SharedMemory("pdserve-bench-kv")
        self.shared.grow(size)
        self.map = mmap.mmap(self.shared.fd, size)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        prefault(self.address, size)
        self.words = np.frombuffer(self.map, np.uint64)

    def region(self, geometry: KvGeometry) -> KvRegion:
        """The cache as `kv_transfer` sees it."""
        return KvRegion(self.address, self.shared.size, geometry)

    def number_words(self) -> None:
        """Gives each word of the cache a value of its own."""
        self.words[:] = np.arange(len(self.words), dtype=np.uint64)

    def clear(self) -> None:
        """Fills the cache with what no word of a source is."""
        self.words[:] = np.iinfo(np.uint64).max

    def differing_blocks(self, geometry: KvGeometry, trip: Trip) -> int:
        """How many of the trip's blocks here are not what a source with numbered words sent."""
        words = geometry.page_bytes // 8
        layers = self.words[: geometry.num_layers * geometry.num_blocks * words]
        pages = layers.reshape(geometry.num_layers, geometry.num_blocks, words)
        inside = np.arange(words, dtype=np.uint64)
        wrong = 0
        for source_id, target_id in zip(trip.source_ids, trip.target_ids, strict=True):
            starts = [geometry.page_offset(i, source_id) // 8 for i in range(geometry.num_layers)]
            expected = np.array(starts, dtype=np.uint64)[:, None] + inside
            wrong += not np.array_equal(pages[:, target_id], expected)
        return wrong


class End(Generic[CacheT]):
    """What the parent may ask of one of its two processes; each method is one request."""

    def __init__(
        self, make: Callable[[str, str, CacheT, KvGeometry], WayEnd], role: str, cache: CacheT
    ) -> None:
        self._make = make
        self._role = role
        self._cache = cache
        self._cache.number_words()
        self._ways: dict[str, WayEnd] = {}

    def open(self, way: str, geometry: KvGeometry) -> Any:
        """Makes this end of a way; returns what the other end must know."""
        self._ways[way] = self._make(way, self._role, self._cache, geometry)
        return self._ways[way].facts()

    def connect(self, way: str, facts: Any) -> None:
        """The other end is there."""
        self._ways[way].connect(facts)

    def clear(self) -> None:
        """Forgets what came."""
        self._cache.clear()

    def differing_blocks(self, geometry: KvGeometry, trip: Trip) -> int:
        """Of the trip's blocks."""
        return self._cache.differing_blocks(geometry, trip)

    def arm(self, way: str, trip: Trip) -> None:
        """Before `go`."""
        self._ways[way].arm(trip)

    def go(self, way: str, trip: Trip) -> float | None:
        """One transfer."""
        return self._ways[way].go(trip)

    def close(self, way: str) -> None:
        """This end of the way is over."""
        self._ways.pop(way).close()

    def close_all(self) -> None:
        """Whatever is open."""
        for way in list(self._ways):
            self.close(way)


def serve(
    pipe: Connection,
    make: Callable[[str, str, CacheT, KvGeometry], WayEnd],
    role: str,
    make_cache: Callable[[str], CacheT],
) -> None:
    """A child process: answers (method, arguments) with (result, error) until None comes."""
    end = End(make, role, make_cache(role))
    calls: Mapping[str, Callable[..., Any]] = {
        name: getattr(end, name)
        for name in ("open", "connect", "clear", "differing_blocks", "arm", "go", "close")
    }
    try:
        while (request := pipe.recv()) is not None:
            method, arguments = request
            problem: str | None = None
            try:
                result = calls[method](*arguments)
            except Exception as error:
                logger.exception("%s: %s", role, method)
                result, problem = None, f"{role}: {method}: {type(error).__name__}: {error}"
            pipe.send((result, problem))
    except EOFError:
        pass  # the parent is gone
    finally:
        end.close_all()
