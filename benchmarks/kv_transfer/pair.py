"""The two processes, and one measurement after the other over all ways that take part."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, Self

from benchmarks.errors import BenchError
from benchmarks.kv_transfer.cases import Case, Trip, geometry, trip
from benchmarks.kv_transfer.ends import AnyCache, Cache, WayEnd, serve
from benchmarks.kv_transfer.floors import MemcpyEnd, StreamEnd
from benchmarks.kv_transfer.ours import WAYS, OurSource, OurTarget
from benchmarks.kv_transfer.peers import MODULES, PeerEnd

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kv_transfer.layout import KvGeometry

# Each way, and the one whose speed it is measured against.
CEILING = {
    "memcpy": "memcpy",
    "shm": "memcpy",
    "shm digest": "memcpy",
    "nixl": "memcpy",
    "loopback": "loopback",
    "tcp": "loopback",
    "tcp digest": "loopback",
    "mooncake": "loopback",
}
FLOORS = ("memcpy", "loopback", "copy")
PEERS = tuple(MODULES)
ANSWER_S = 120.0
# Short transfers vary more, and cost nothing.
SHORT_BYTES, SHORT_FACTOR = 32 << 20, 4


def make_end(way: str, role: str, cache: Cache, layout: KvGeometry) -> WayEnd:
    """One end of a way, in the process that it is for."""
    if way in WAYS:
        end = OurSource if role == "source" else OurTarget
        return end(way, cache, layout)
    if way in MODULES:
        return PeerEnd(way, role, cache, layout)
    floor = MemcpyEnd if way == "memcpy" else StreamEnd
    return floor(role, cache, layout)


def host_cache(size: int, role: str) -> Cache:
    """Of both roles alike."""
    return Cache(size)


@dataclass(frozen=True, slots=True)
class Ends:
    """What the two processes are made of; both can be pickled. `make` makes an end of a way,
    `make_cache` the cache of a role."""

    make: Callable[[str, str, Any, KvGeometry], WayEnd]
    make_cache: Callable[[str], AnyCache]


@dataclass(frozen=True, slots=True)
class Measured:
    """The times of one way in one case, one a round."""

    case: Case
    way: str
    seconds: tuple[float, ...]

    @property
    def gb_per_s(self) -> float:
        """10^9 bytes a second, in the median round."""
        return self.case.bytes / median(self.seconds) / 1e9


def ratio(way: Measured, ceiling: Measured) -> float:
    """How fast a way is, as a part of its ceiling: the median over the rounds, for the two of one
    round ran next to each other."""
    pairs = zip(way.seconds, ceiling.seconds, strict=True)
    return median(theirs / ours for ours, theirs in pairs)


class _Child:
    """The parent's handle on one process."""

    def __init__(self, role: str, ends: Ends) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._role = role
        self._process = context.Process(
            target=serve, args=(theirs, ends.make, role, ends.make_cache), daemon=True
        )
        self._process.start()
        assert self._process.pid is not None
        self._pid = self._process.pid
        theirs.close()

    def ask(self, method: str, *arguments: object) -> None:
        """Sends a request; `answer` waits for it."""
        self._pipe.send((method, arguments))

    def answer(self) -> Any:
        """Raises BenchError where the request failed or nothing comes."""
        try:
            if not self._pipe.poll(ANSWER_S):
                raise BenchError(f"the {self._role} did not answer in {ANSWER_S:.0f} s")
            result, error = self._pipe.recv()
        except EOFError:
            raise BenchError(f"the {self._role} ended") from None
        if error is not None:
            raise BenchError(error)
        return result

    def call(self, method: str, *arguments: object) -> Any:
        """One request and its answer."""
        self.ask(method, *arguments)
        return self.answer()

    def pause(self) -> None:
        """None of its threads runs until `go_on`."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """After `pause`, or where it runs already."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):  # `answer` says that it ended
            os.kill(self._pid, number)

    def stop(self) -> None:
        """Ends the process; it holds nothing that outlives it."""
        self.go_on()
        with contextlib.suppress(OSError):  # it may have ended by itself
            self._pipe.send(None)
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._pipe.close()


class Pair:
    """A source and a target process, and two more for each peer: a library's own threads would
    compute beside what another moves. Those whose turn it is not are stopped."""

    def __init__(self, cache_bytes: int, layers: int, ends: Ends | None = None) -> None:
        self._cache_bytes = cache_bytes
        self._layers = layers
        self._ends = ends or Ends(make_end, partial(host_cache, cache_bytes))
        self._trips = 0
        self._children: dict[str, tuple[_Child, _Child]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for children in self._children.values():
            for child in children:
                child.stop()

    def measure(
        self, cases: Sequence[Case], ways: Sequence[str], rounds: int
    ) -> Iterator[list[Measured]]:
        """The times of all ways for one case after the other, cases of one block size together.

        Every way first moves the blocks once and the bytes are compared. Raises BenchError.
        """
        for block_bytes in dict.fromkeys(case.block_bytes for case in cases):
            layout = geometry(block_bytes, self._layers, self._cache_bytes)
            for way in ways:
                self._open(way, layout)
            for case in cases:
                if case.block_bytes == block_bytes:
                    yield self._measure(case, ways, rounds, layout)
            for way in ways:
                with self._turn(way) as children:
                    for child in children:
                        child.call("close", way)

    @contextlib.contextmanager
    def _turn(self, way: str) -> Iterator[tuple[_Child, _Child]]:
        """(source, target) of this way; the others stand still."""
        owner = way if way in MODULES else ""
        if owner not in self._children:
            source, target = (_Child(role, self._ends) for role in ("source", "target"))
            self._children[owner] = source, target
        children = self._children[owner]
        for child in children:
            child.go_on()
        yield children
        for child in children:
            child.pause()

    def _open(self, way: str, layout: KvGeometry) -> None:
        with self._turn(way) as (source, target):
            source_facts = source.call("open", way, layout)
            target_facts = target.call("open", way, layout)
            target.call("connect", way, source_facts)
            source.call("connect", way, target_facts)

    def _measure(
        self, case: Case, ways: Sequence[str], rounds: int, layout: KvGeometry
    ) -> list[Measured]:
        for way in ways:
            self._prove(case, way, layout)
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for index in range(rounds * (SHORT_FACTOR if case.bytes < SHORT_BYTES else 1)):
            first = index % len(ways)
            for way in [*ways[first:], *ways[:first]]:
                seconds[way].append(self._go(way, self._next(case, layout)))
        return [Measured(case, way, tuple(times)) for way, times in seconds.items()]

    def _next(self, case: Case, layout: KvGeometry) -> Trip:
        self._trips += 1
        return trip(case, layout.num_blocks, self._trips)

    def _prove(self, case: Case, way: str, layout: KvGeometry) -> None:
        once = self._next(case, layout)
        with self._turn(way) as (_, target):
            target.call("clear")
        self._go(way, once)
        if way in FLOORS:
            return  # the one writes elsewhere, the other in one piece
        with self._turn(way) as (_, target):
            wrong = target.call("differing_blocks", layout, once)
        if wrong:
            raise BenchError(f"{way}: {wrong} of {case.count} blocks did not arrive as they were")

    def _go(self, way: str, once: Trip) -> float:
        with self._turn(way) as children:
            for child in children:
                child.call("arm", way, once)
            for child in children:
                child.ask("go", way, once)
            answers = [child.answer() for child in children]
        (seconds,) = [float(answer) for answer in answers if answer is not None]
        return seconds
