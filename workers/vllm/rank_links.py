"""A connection from each process that runs the model, on whichever host, to the one that steps it:
it wakes the step thread where KV arrives, and each side learns from its end that the other is gone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import selectors
import signal
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

from vllm.distributed import get_world_group
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

from kv_transfer.vllm.connector import first_of
from pdserve.dead_peer import detect_dead_peer
from pdserve.local.child import die_with

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_log = logging.getLogger(__name__)
_TOKEN_BYTES, _RANK_BYTES = 16, 2
_JOIN_S = 30.0
_DEAD_PEER_S = 10
_END_S = 20.0  # from the end of the engine to that of its processes


class RankLinks:
    """The links of an engine. State: the links, until their ranks end."""

    def __init__(
        self,
        executor: Any,
        host: str,
        wake: Callable[[], None],
        lost: Callable[[int], None],
    ) -> None:
        """Have all ranks connect to `host`, an address of this one. `wake` and `lost` are called on
        a thread; `lost` with a rank that ended, or that has not been heard of for 10 s, before
        `close`. `wakes` says whether all ranks say when a transfer ends. Raises OSError or what a
        rank raises."""
        self._wake, self._lost = wake, lost
        self._local, self._is_closing = executor.local_world_size, False
        token = secrets.token_bytes(_TOKEN_BYTES)
        with socket.create_server((host, 0), family=_family(host), backlog=1024) as listener:
            address = listener.getsockname()[:2]
            self.wakes: bool = all(
                executor.collective_rpc(join_in, args=(address, token, self._local))
            )
            self._links = _accept(listener, token, executor.world_size)
        threading.Thread(target=self._read, name="rank-links", daemon=True).start()

    def _read(self) -> None:
        with selectors.DefaultSelector() as selector:
            for rank, link in self._links.items():
                selector.register(link, selectors.EVENT_READ, rank)
            while selector.get_map():
                for key, _ in selector.select():
                    link = self._links[key.data]
                    if _receive(link):
                        self._wake()
                        continue
                    selector.unregister(link)
                    link.close()
                    if not self._is_closing:
                        self._lost(key.data)

    def close(self) -> None:
        """Have the ranks on other hosts end; those of this one end with their executor."""
        self._is_closing = True
        for rank, link in self._links.items():
            if rank >= self._local:
                with contextlib.suppress(OSError):
                    link.send(b"\1")


def join_in(_worker: Any, address: tuple[str, int], token: bytes, local: int) -> bool:
    """For `Executor.collective_rpc`: connect the process that runs this. It ends if the link does.
    The first `local` ranks are on the first node. Return False if its connector cannot say that a
    transfer ended."""
    link = socket.create_connection(address, _JOIN_S)
    link.settimeout(None)
    detect_dead_peer(link, _DEAD_PEER_S)
    if (rank := get_world_group().rank) >= local:
        # vLLM shuts queues down when the parent ends, but not those that come from another host.
        die_with(os.getppid())
    link.sendall(token + rank.to_bytes(_RANK_BYTES))
    threading.Thread(target=_end_with, args=(link, address), name="rank-link", daemon=True).start()
    if not has_kv_transfer_group():
        return False

    def wake() -> None:
        # Full: the thread wakes all the same. Closed: the engine has ended.
        with contextlib.suppress(OSError):
            link.send(b"\1", socket.MSG_DONTWAIT)

    does_wake: bool = first_of(get_kv_transfer_group()).wake_with(wake)
    return does_wake


def _end_with(link: socket.socket, address: tuple[str, int]) -> None:
    if not _receive(link):
        _log.error("the head of this worker at %s is gone: its ranks end", address[0])
        os._exit(1)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_END_S)  # a collective operation that waits for a rank that is gone
    os._exit(1)


def _accept(listener: socket.socket, token: bytes, count: int) -> Mapping[int, socket.socket]:
    links: dict[int, socket.socket] = {}
    deadline = time.monotonic() + _JOIN_S
    while len(links) < count:
        listener.settimeout(max(0.001, deadline - time.monotonic()))
        link, _ = listener.accept()
        link.settimeout(_JOIN_S)
        said = link.recv(_TOKEN_BYTES + _RANK_BYTES, socket.MSG_WAITALL)
        if not secrets.compare_digest(said[:_TOKEN_BYTES], token):
            link.close()
            continue
        link.settimeout(None)
        detect_dead_peer(link, _DEAD_PEER_S)
        links[int.from_bytes(said[_TOKEN_BYTES:])] = link
    return links


def _receive(link: socket.socket) -> bytes:
    try:
        return link.recv(1 << 10)
    except OSError:  # the peer's host is gone
        return b""


def _family(host: str) -> socket.AddressFamily:
    return socket.getaddrinfo(host, None)[0][0]
