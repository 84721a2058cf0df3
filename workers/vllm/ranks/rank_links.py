"""A connection from each process that runs the model to the process with the step thread.

When KV transfers end, a process sends the successful ones over it, which wakes the step thread. If
the connection ends, each side knows that the other is gone. The processes may run on other hosts.

A message is a msgpack list of `Arrival` with a four-byte length before it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import struct
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import msgspec
from vllm.distributed import get_world_group
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

from kv_transfer.vllm.connector import first_of
from kv_transfer.vllm.step import Arrival
from pdserve.process.child import die_with
from pdserve.process.wakeup import Wakeup
from workers.vllm.ranks.join import JoinListener, JoinPoint

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator

_log = logging.getLogger(__name__)
_END_S = 20.0  # time for a process to end after its engine
_LENGTH = struct.Struct("<I")
_ARRIVALS = msgspec.msgpack.Decoder(list[Arrival])


class RankLinks:
    """The links of an engine, one per rank until that rank ends."""

    def __init__(self, executor: Any, host: str, lost: Callable[[int], None]) -> None:
        """Make all ranks connect to `host`, an address of this host.

        A thread calls `lost` with a rank that ended or was silent for 10 s before `close`. Raises
        OSError, and the errors of ranks.
        """
        self._lost = lost
        self._local, self._closing = executor.local_world_size, threading.Event()
        with JoinListener(host) as listener:
            wakes = executor.collective_rpc(join_in, args=(listener.point, self._local))
            self._links = listener.accept(executor.world_size)
        self._arrivals: deque[Arrival] = deque()
        self._wakeup = Wakeup()
        # Readable when a transfer has ended on a rank; () if not all ranks report that.
        self.wakeups = (self._wakeup.fileno(),) if all(wakes) else ()
        threading.Thread(target=self._watch, name="rank-links", daemon=True).start()

    def _watch(self) -> None:
        """Read what ranks send, and report ranks that are lost, also while the step thread waits
        for them in a step."""
        with selectors.DefaultSelector() as selector:
            for rank, link in self._links.items():
                selector.register(link, selectors.EVENT_READ, (rank, link, bytearray()))
            while selector.get_map():
                for key, _ in selector.select():
                    rank, link, unread = key.data
                    unread += (data := _receive(link))
                    for message in _messages_in(unread):
                        self._arrivals.extend(_ARRIVALS.decode(message))
                        self._wakeup.set()
                    if not data:
                        selector.unregister(link)
                        if not self._closing.is_set():
                            self._lost(rank)
        self._closing.wait()  # `close` may use the links
        for link in self._links.values():
            link.close()

    def take_received(self) -> list[Arrival]:
        """Return the loads that have succeeded since the last call, each once per rank."""
        return [self._arrivals.popleft() for _ in range(len(self._arrivals))]

    def close(self) -> None:
        """End the ranks on other hosts; those of this host end with their executor."""
        for rank, link in self._links.items():
            if rank >= self._local:
                with contextlib.suppress(OSError):
                    link.send(b"\1")
        self._closing.set()
        self._wakeup.close()


def join_in(worker: Any, point: JoinPoint, local: int) -> bool:
    """For `Executor.collective_rpc`: connect this process, which ends if the link ends.

    The first `local` ranks are on the first node. Return False if the connector has no wake-up for
    the end of a transfer.
    """
    # The world of a data-parallel group has the processes of all its engines.
    parallel = worker.vllm_config.parallel_config
    if (rank := get_world_group().rank % parallel.world_size) >= local:
        # When the parent ends, vLLM closes its queues, but not those from another host.
        die_with(os.getppid())
    link = point.join(rank)
    connector = first_of(get_kv_transfer_group()) if has_kv_transfer_group() else None
    threading.Thread(
        target=_serve, args=(link, point.host, connector), name="rank-link", daemon=True
    ).start()
    return connector is not None and connector.wakeup is not None


def _serve(link: socket.socket, head: str, connector: Any) -> None:
    """Send the connector's arrivals until the link ends; then end this process."""
    wakeup = None if connector is None else connector.wakeup
    with selectors.DefaultSelector() as selector:
        selector.register(link, selectors.EVENT_READ)
        if wakeup is not None:
            selector.register(wakeup, selectors.EVENT_READ)
        while all(key.fileobj is not link for key, _ in selector.select()):
            with contextlib.suppress(BlockingIOError):  # the engine's step has read it
                os.eventfd_read(wakeup)  # type: ignore[arg-type]
            message = msgspec.msgpack.encode(connector.take_received())
            with contextlib.suppress(OSError):  # the link has ended, which the selector shows
                link.sendall(_LENGTH.pack(len(message)) + message)
    if not _receive(link):
        _log.error("the head of this worker at %s is gone: this rank ends", head)
        os._exit(1)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_END_S)  # a collective operation may wait for a rank that is gone
    os._exit(1)


def _messages_in(unread: bytearray) -> Iterator[bytes]:
    """Take the complete messages from the start of `unread`."""
    while len(unread) >= _LENGTH.size:
        end = _LENGTH.size + _LENGTH.unpack_from(unread)[0]
        if len(unread) < end:
            return
        message = bytes(unread[_LENGTH.size : end])
        del unread[:end]
        yield message


def _receive(link: socket.socket) -> bytes:
    try:
        return link.recv(1 << 10)
    except OSError:  # the peer's host is gone
        return b""
