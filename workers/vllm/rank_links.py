"""A connection from each process that runs the model to the process with the step thread.

A process sends a byte over it when a KV transfer ended, which wakes the step thread. If the
connection ends, each side knows that the other is gone. The processes may run on other hosts.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import select
import selectors
import signal
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

from vllm.distributed import get_world_group
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

from kv_transfer.vllm.connector import first_of
from pdserve.net.sockets import detect_dead_peer
from pdserve.process.child import die_with

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_log = logging.getLogger(__name__)
_TOKEN_BYTES, _RANK_BYTES = 16, 2
_JOIN_S = 30.0
_DEAD_PEER_S = 10
_END_S = 20.0  # time for a process to end after its engine


class RankLinks:
    """The links of an engine, one per rank until that rank ends."""

    def __init__(self, executor: Any, host: str, lost: Callable[[int], None]) -> None:
        """Make all ranks connect to `host`, an address of this host.

        A thread calls `lost` with a rank that ended or was silent for 10 s before `close`. Raises
        OSError, and the errors of ranks.
        """
        self._lost = lost
        self._local, self._closing = executor.local_world_size, threading.Event()
        token = secrets.token_bytes(_TOKEN_BYTES)
        with socket.create_server((host, 0), family=_family(host), backlog=1024) as listener:
            address = listener.getsockname()[:2]
            wakes = executor.collective_rpc(join_in, args=(address, token, self._local))
            self._links = _accept(listener, token, executor.world_size)
        # Each is readable when its rank found that a transfer ended; () if not all ranks do that.
        self.wakeups = tuple(x.fileno() for x in self._links.values()) if all(wakes) else ()
        threading.Thread(target=self._watch, name="rank-links", daemon=True).start()

    def _watch(self) -> None:
        """Report ranks that are lost, also while the step thread waits for them in a step. That
        thread reads the links, so this one looks only for their ends."""
        ranks = {link.fileno(): rank for rank, link in self._links.items()}
        poll = select.poll()
        for descriptor in ranks:
            poll.register(descriptor, select.POLLRDHUP)
        while ranks:
            for descriptor, _ in poll.poll():
                poll.unregister(descriptor)
                rank = ranks.pop(descriptor)
                if not self._closing.is_set():
                    self._lost(rank)
        self._closing.wait()  # until the step thread reads the links no more
        for link in self._links.values():
            link.close()

    def close(self) -> None:
        """End the ranks on other hosts; those of this host end with their executor."""
        for rank, link in self._links.items():
            if rank >= self._local:
                with contextlib.suppress(OSError):
                    link.send(b"\1")
        self._closing.set()


def join_in(worker: Any, address: tuple[str, int], token: bytes, local: int) -> bool:
    """For `Executor.collective_rpc`: connect this process, which ends if the link ends.

    The first `local` ranks are on the first node. Return False if the connector has no wake-up for
    the end of a transfer.
    """
    link = socket.create_connection(address, _JOIN_S)
    link.settimeout(None)
    detect_dead_peer(link, _DEAD_PEER_S)
    # The world of a data-parallel group has the processes of all its engines.
    parallel = worker.vllm_config.parallel_config
    if (rank := get_world_group().rank % parallel.world_size) >= local:
        # When the parent ends, vLLM closes its queues, but not those from another host.
        die_with(os.getppid())
    link.sendall(token + rank.to_bytes(_RANK_BYTES))
    wakeup = first_of(get_kv_transfer_group()).wakeup if has_kv_transfer_group() else None
    threading.Thread(
        target=_serve, args=(link, address, wakeup), name="rank-link", daemon=True
    ).start()
    return wakeup is not None


def _serve(link: socket.socket, address: tuple[str, int], wakeup: int | None) -> None:
    """Forward the connector's wake-ups until the link ends; then end this process."""
    with selectors.DefaultSelector() as selector:
        selector.register(link, selectors.EVENT_READ)
        if wakeup is not None:
            selector.register(wakeup, selectors.EVENT_READ)
        while all(key.fileobj is not link for key, _ in selector.select()):
            # A full socket already has a wake-up to read. The end of a closed one is noticed above.
            with contextlib.suppress(OSError):
                os.eventfd_read(wakeup)  # type: ignore[arg-type]
                link.send(b"\1", socket.MSG_DONTWAIT)
    if not _receive(link):
        _log.error("the head of this worker at %s is gone: this rank ends", address[0])
        os._exit(1)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_END_S)  # a collective operation may wait for a rank that is gone
    os._exit(1)


def _accept(listener: socket.socket, token: bytes, count: int) -> Mapping[int, socket.socket]:
    links: dict[int, socket.socket] = {}
    deadline = time.monotonic() + _JOIN_S
    while len(links) < count:
        listener.settimeout(max(0.001, deadline - time.monotonic()))
        link, _ = listener.accept()
        link.settimeout(_JOIN_S)
        hello = link.recv(_TOKEN_BYTES + _RANK_BYTES, socket.MSG_WAITALL)
        if not secrets.compare_digest(hello[:_TOKEN_BYTES], token):
            link.close()
            continue
        link.settimeout(None)
        detect_dead_peer(link, _DEAD_PEER_S)
        links[int.from_bytes(hello[_TOKEN_BYTES:])] = link
    return links


def _receive(link: socket.socket) -> bytes:
    try:
        return link.recv(1 << 10)
    except OSError:  # the peer's host is gone
        return b""


def _family(host: str) -> socket.AddressFamily:
    return socket.getaddrinfo(host, None)[0][0]
