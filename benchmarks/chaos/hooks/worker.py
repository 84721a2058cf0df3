"""Faults inside a worker: KV that is lost, late or damaged on its way out, and a lease that is not
renewed. Wraps `kv_transfer`'s transports, the fake engine's link and `workers.registration`."""

from __future__ import annotations

import asyncio
import ctypes
import time
from typing import TYPE_CHECKING

from kv_transfer.errors import LinkClosed
from kv_transfer.memory import KvRegion
from kv_transfer.scattering import send_in_python, send_pages
from kv_transfer.transport import tcp
from kv_transfer.transport.shm import ShmSource, ShmTransport
from kv_transfer.transport.tcp import TcpSource
from workers.fake_link import LinkServer
from workers.registration import Registration

if TYPE_CHECKING:
    from asyncio import StreamWriter

    from benchmarks.chaos.orders import Order, Orders
    from kv_transfer.board import Ready
    from kv_transfer.layout import PagePart
    from kv_transfer.messages import Chunk


def install(orders: Orders) -> None:
    """From now on this worker does as ordered."""
    _install_shm(orders)
    _install_tcp(orders)
    _install_fake_link(orders)
    _install_renewals(orders)


def _dropping(orders: Orders) -> Order:
    """The order of now; raises LinkClosed where that is to drop what is sent."""
    order = orders.now
    if order.transfers == "drop":
        orders.did()
        raise LinkClosed("the link was cut, as ordered")
    return order


def _install_shm(orders: Orders) -> None:
    push, copy_from, publish = ShmSource.push, KvRegion.copy_from, ShmTransport.publish

    def faulty_push(
        self: ShmSource,
        chunk: Chunk,
        source_ids: list[int],
        target_ids: list[int],
        part: PagePart | None = None,
        skip: int = 0,
    ) -> None:
        order = _dropping(orders)
        if order.transfers == "delay":
            orders.did()
            time.sleep(order.delay_s)
        push(self, chunk, source_ids, target_ids, part, skip)

    def faulty_copy(
        self: KvRegion,
        source: KvRegion,
        source_ids: list[int],
        own_ids: list[int],
        digests: bool = False,
    ) -> int:
        mark = copy_from(self, source, source_ids, own_ids, digests)
        if orders.now.transfers == "corrupt":
            orders.did()
            g = self.geometry
            at = self.address + g.page_offset(g.num_layers - 1, own_ids[0])
            ctypes.c_uint8.from_address(at).value ^= 0x40
        return mark

    def careful_publish(self: ShmTransport, ready: Ready) -> None:
        # What a target takes by itself would not come to harm here.
        if not orders.now.transfers:
            publish(self, ready)

    ShmSource.push = faulty_push  # type: ignore[method-assign]
    ShmTransport.publish = careful_publish  # type: ignore[method-assign]
    KvRegion.copy_from = faulty_copy  # type: ignore[method-assign]
    # A push that is held must hold its link's thread and not the engine's step.
    ShmSource.unwaited_bytes = 0


class _Damaged:
    """A region whose pages are sent with one bit flipped; what it holds itself stays as it is."""

    def __init__(self, region: KvRegion, orders: Orders) -> None:
        self._region, self._orders = region, orders

    def narrowed(self, start: int, size: int) -> _Damaged:
        return _Damaged(self._region.narrowed(start, size), self._orders)

    def pages(self, block_ids: list[int]) -> list[memoryview]:
        pages = self._region.pages(block_ids)
        last = bytearray(pages[-1])
        last[0] ^= 0x40
        pages[-1] = memoryview(last)
        self._orders.did()
        return pages


def _install_tcp(orders: Orders) -> None:
    push = TcpSource.push

    def faulty_push(
        self: TcpSource,
        chunk: Chunk,
        source_ids: list[int],
        target_ids: list[int],
        part: PagePart | None = None,
        skip: int = 0,
    ) -> None:
        order = _dropping(orders)
        if order.transfers != "corrupt":
            push(self, chunk, source_ids, target_ids, part, skip)
            return
        region = self._region
        self._region = _Damaged(region, orders)  # type: ignore[assignment]
        # The other way reads the cache itself.
        tcp.send_pages = send_in_python  # type: ignore[attr-defined]
        try:
            push(self, chunk, source_ids, target_ids, part, skip)
        finally:
            self._region = region
            tcp.send_pages = send_pages  # type: ignore[attr-defined]

    TcpSource.push = faulty_push  # type: ignore[method-assign]


def _install_fake_link(orders: Orders) -> None:
    answer = LinkServer._answer

    async def faulty_answer(self: LinkServer, transfer_id: str, writer: StreamWriter) -> bool:
        order = orders.now
        if order.transfers == "drop":
            orders.did()
            raise ConnectionAbortedError("the link was cut, as ordered")
        if order.transfers == "delay":
            orders.did()
            await asyncio.sleep(order.delay_s)
        return await answer(self, transfer_id, writer)

    LinkServer._answer = faulty_answer  # type: ignore[method-assign]


def _install_renewals(orders: Orders) -> None:
    pause = Registration._pause

    async def faulty_pause(self: Registration, seconds: float) -> None:
        await pause(self, seconds)
        while orders.now.renewals == "stop":
            orders.did()
            await asyncio.sleep(0.05)

    Registration._pause = faulty_pause  # type: ignore[method-assign]
