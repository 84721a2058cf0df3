"""Bits that flip: in what a transport has just put in place, in what is read, and on the wire."""

from __future__ import annotations

import contextlib
import ctypes
import socket
import threading
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from kv_transfer.transport.base import Takes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kv_transfer.board import Found
    from kv_transfer.layout import PagePart
    from kv_transfer.memory import KvRegion
    from kv_transfer.messages import Chunk
    from kv_transfer.transport.base import (
        LocalKv,
        SourceChannel,
        TargetChannel,
        Transport,
        Wire,
    )


def flip(region: KvRegion, block: int, bit: int) -> None:
    """Flips one bit of the block, counted over its layers."""
    g = region.geometry
    layer, byte = divmod(bit // 8 % g.block_bytes, g.page_bytes)
    cell = ctypes.c_uint8.from_address(region.address + g.page_offset(layer, block) + byte)
    cell.value ^= 1 << bit % 8


@dataclass(slots=True)
class Flips:
    """How many of the next chunks come damaged, and where; `seen` counts all chunks in place. With
    `read`, the source's cache, what a target takes is damaged as it is read, else in place."""

    left: int = 0
    bit: int = 0
    seen: int = 0
    read: KvRegion | None = None

    @contextlib.contextmanager
    def reading(self, block_ids: list[int]) -> Iterator[None]:
        """Damages the last block meanwhile, if it is the turn."""
        if self.read is None or not self.left:
            yield
            return
        self.left -= 1
        flip(self.read, block_ids[-1], self.bit)
        yield
        flip(self.read, block_ids[-1], self.bit)

    def strike(self, region: KvRegion, block_ids: list[int]) -> None:
        """Damages the last block of a chunk, if it is the turn."""
        self.seen += 1
        if self.left:
            self.left -= 1
            flip(region, block_ids[-1], self.bit)


class FlippingTransport:
    """`inner`, and `flips` at the receiving end."""

    lost_slots = 0

    def __init__(self, inner: Transport, flips: Flips) -> None:
        self.name = inner.name
        self._inner = inner
        self._flips = flips

    def offer(self, local: LocalKv, slot: int) -> dict[str, Any] | None:
        return self._inner.offer(local, slot)

    def target(self, local: LocalKv, slot: int, wire: Wire) -> TargetChannel:
        channel = self._inner.target(local, slot, wire)
        return _FlippingTarget(channel, self._flips, local.region)

    def source(self, local: LocalKv, offer: dict[str, Any], wire: Wire) -> SourceChannel:
        return self._inner.source(local, offer, wire)

    def close(self) -> None:
        self._inner.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _FlippingTarget:
    def __init__(self, inner: TargetChannel, flips: Flips, region: KvRegion) -> None:
        self.name = inner.name
        self._inner = inner
        self._flips = flips
        self._strike = partial(flips.strike, region)

    def receive(
        self, chunk: Chunk, block_ids: list[int] | None, part: PagePart | None = None
    ) -> None:
        self._inner.receive(chunk, block_ids, part)
        if block_ids is not None:
            self._strike(block_ids)

    def take(self, found: Found, source_ids: list[int], own_ids: list[int]) -> int | None:
        inner = self._inner
        assert isinstance(inner, Takes)
        with self._flips.reading(source_ids):
            mark = inner.take(found, source_ids, own_ids)
        if self._flips.read is None:
            self._strike(own_ids)
        return mark

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def idle(self) -> bool:
        return self._inner.idle()

    def close(self) -> None:
        self._inner.close()


class FlippingWire:
    """Stands between a target and the source at `address`, for one connection, and flips one bit
    of what goes one way. `carried` counts bytes by way. Used by its `with`."""

    def __init__(self, address: str, way: str = "", bit: int = 0) -> None:
        host, _, port = address.rpartition(":")
        self._source = (host, int(port))
        self._way, self._bit = way, bit
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = "{}:{}".format(*self._listener.getsockname())
        self.carried = {"to source": 0, "to target": 0}
        self._ends: list[socket.socket] = []
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        self._spawn(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        # A thread that waits in accept is not woken by close: a connection wakes it.
        with contextlib.suppress(OSError), socket.create_connection(self._listener.getsockname()):
            self._listener.close()
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for end in self._ends:
            end.close()

    def _spawn(self, run: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=run, args=arguments)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        target, _ = self._listener.accept()
        source = socket.create_connection(self._source)
        self._ends += target, source
        self._spawn(self._carry, "to source", target, source)
        self._spawn(self._carry, "to target", source, target)

    def _carry(self, way: str, from_: socket.socket, to: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := bytearray(from_.recv(1 << 16)):
                at = self._bit // 8 - self.carried[way]
                if way == self._way and 0 <= at < len(data):
                    data[at] ^= 1 << self._bit % 8
                self.carried[way] += len(data)
                to.sendall(data)
        with contextlib.suppress(OSError):
            to.shutdown(socket.SHUT_RDWR)
