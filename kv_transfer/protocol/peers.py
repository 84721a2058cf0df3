"""A worker's links to its peers: the listener, and the table of links."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from typing import TYPE_CHECKING

from kv_transfer.protocol.driver import COPY_END_S, Driver
from kv_transfer.protocol.handshake import Handshake
from kv_transfer.protocol.link import Link
from kv_transfer.protocol.link_threads import start_digester, start_reader

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kv_transfer.protocol.plan import CopyPlan
    from kv_transfer.protocol.transport import LocalKv, Transport
    from kv_transfer.settings import ConnectorConfig

logger = logging.getLogger(__name__)

# Connections without a completed handshake; each has a thread.
MAX_UNFINISHED = 256
# Each link has two threads.
MAX_LINKS = 2048
_TICK_S = 0.5


class Peers:
    """The links of one worker. Accepts links from the constructor on. Released by `close`."""

    def __init__(
        self,
        settings: ConnectorConfig,
        instance_id: str,
        transports: Sequence[Transport],
        *,
        local: LocalKv,
        compatibility: str,
        plan: CopyPlan,
        max_links: int = MAX_LINKS,
        max_unfinished: int = MAX_UNFINISHED,
    ) -> None:
        """`max_links`: limit of links that peers open. `max_unfinished`: limit of links without a
        completed handshake."""
        self._max_links, self._max_unfinished = max_links, max_unfinished
        self.instance_id = instance_id
        self.transports = {transport.name: transport for transport in transports}
        self.links: set[Link] = set()  # guarded by the lock of `driver`, like `_dialled`
        self.driver = Driver(settings, local, plan)
        self._handshake_timeout_s = settings.handshake_timeout_s
        self._handshake = Handshake(settings, instance_id, compatibility, self.transports, local)
        self._dialled: dict[tuple[str, str], Link] = {}
        _warm_up(local, self.driver.producer.chunk_blocks)
        for transport in transports:
            transport.prepare(local)
        self._listener = socket.create_server((settings.host, 0), backlog=64)
        host, port = self._listener.getsockname()[:2]
        self.address = f"{host}:{port}"
        self._listener.settimeout(_TICK_S)
        self._digester = start_digester(self.driver)
        self._acceptor = self.driver.start_thread("kv-accept", self._accept)

    def close(self) -> None:
        """End every link and the listener. Idempotent."""
        self.driver.is_closing = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes `accept`; `close` would not
        self.driver.undigested.put(None)
        for thread in (self._acceptor, self._digester):
            thread.join(COPY_END_S)
        self._listener.close()
        with self.driver.lock:
            links = list(self.links)
        for link in links:
            self.driver.drop_link(link, "the worker stops")
        end = time.monotonic() + COPY_END_S
        for link in links:
            if link.thread is not None and link.thread is not threading.current_thread():
                link.thread.join(max(0.0, end - time.monotonic()))
            if not link.is_over:
                logger.error("the KV link to %s did not end", link.peer)
        self.driver.close()

    def link_to(self, address: str, instance_id: str) -> Link:
        """Return the link to a producer; dial if there is none. The caller holds the lock of
        `driver`."""
        key = address, instance_id
        link = self._dialled.get(key)
        if link is None or link.is_down or link.is_worn:
            link = self._dialled[key] = self._new_link(address, is_dialled=True)
            self._start(link, lambda: self._dial(link, address, instance_id))
        return link

    def _dial(self, link: Link, address: str, instance_id: str) -> None:
        self._handshake.dial(link, address, instance_id)
        with self.driver.lock:
            self.driver.counters.downgrades += bool(link.downgrade)

    def _accept(self) -> None:
        """Acceptor thread."""
        driver = self.driver
        while not driver.is_closing:
            try:
                sock, address = self._listener.accept()
            except TimeoutError:
                # An idle engine does not call `take_results`, but holds still end.
                driver.drive(driver.producer.tick)
                self._end_worn()
                continue
            except OSError as error:
                if not driver.is_closing:  # out of descriptors, or the peer went away
                    logger.warning("cannot accept a KV link: %s", error)
                    time.sleep(0.1)
                continue
            self._serve(self._new_link("{}:{}".format(*address[:2]), is_dialled=False), sock)

    def _end_worn(self) -> None:
        """End links to producers that others have replaced, once nothing uses them."""
        with self.driver.lock:
            used = {part.link for _, part in self.driver.consumer} | {*self._dialled.values()}
            worn = [x for x in self.links - used if x.is_dialled and x.is_worn and not x.has_items]
        for link in worn:
            self.driver.drop_link(link, "another one replaced it")

    def _serve(self, link: Link, sock: socket.socket) -> None:
        """Start the threads of an accepted connection."""
        with self.driver.lock:
            accepted = [x for x in self.links if not (x.is_dialled or x.is_down)]
        unfinished = [x for x in accepted if x.producer is None]
        # Drop the oldest, because the new one may be a worker.
        if len(unfinished) >= self._max_unfinished:
            oldest = min(unfinished, key=lambda x: x.opened_at)
            self.driver.drop_link(oldest, "too many unfinished handshakes")
        is_full = len(accepted) - len(unfinished) >= self._max_links
        refusal = f"{self._max_links} links are open" if is_full else ""
        with self.driver.lock:
            try:
                self._start(link, lambda: self._handshake.accept(link, sock, refusal))
            except RuntimeError as error:  # no more threads
                sock.close()
                logger.warning("cannot serve a KV link: %s", error)

    def _new_link(self, address: str, *, is_dialled: bool) -> Link:
        timeout_s = self._handshake_timeout_s
        return Link(address, is_dialled=is_dialled, handshake_timeout_s=timeout_s)

    def _start(self, link: Link, handshake: Callable[[], None]) -> None:
        """Start the link's threads and enter it in the table. The caller holds the lock."""
        self.links = {each for each in self.links if not each.is_over}
        self._dialled = {key: each for key, each in self._dialled.items() if not each.is_over}
        start_reader(link, self.driver, handshake)
        self.links.add(link)


def _warm_up(local: LocalKv, chunk_blocks: Mapping[int, int]) -> None:
    """Copy some blocks of a GPU cache onto themselves, because the first use of a kernel loads its
    code, which may wait for the whole GPU."""
    if (zeroed := local.memory.step_end()) is not None:
        # vLLM has just enqueued zeros for the whole cache. A copy below that runs before them would
        # read old memory, perhaps NaN, and write it back after the zeros.
        zeroed.synchronize()
    for group, region in local.regions.items():
        for count in () if region.is_host else (1, chunk_blocks[group]):
            ids = list(range(min(count, region.geometry.num_blocks)))
            region.copy_from(region, ids, ids)
            region.digests(ids)
