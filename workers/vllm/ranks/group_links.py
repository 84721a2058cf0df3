"""Connections between the ranks of a data-parallel group: rank 0 accepts one from each other rank.

They carry the starts of waves (lockstep.py) and the end of the group. If a connection ends before
that, each rank knows that another has died, also while no rank computes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import struct
import threading
import time
from typing import TYPE_CHECKING

import torch
from torch import distributed

from workers.vllm.ranks.join import JoinListener, JoinPoint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_log = logging.getLogger(__name__)
# After the loss of a rank, for the step to fail and the engine to close.
_FAIL_S = 10.0
# What a message says, and a number: of the wave, or of a rank.
_MESSAGE = struct.Struct("!cQ")
_WAVE, _LEAVING, _LOST, _END = b"w", b"l", b"x", b"e"


class GroupLinks:
    """The links of one rank. State: the last wave that another rank has started, the ranks that
    want to end, and the first rank that was lost. A thread reads the links, any thread looks.

    The group ends as one: a rank that wants to end serves the others until all do. If a rank is
    lost and this one does not close the links within _FAIL_S, its process ends: a step waits
    without limit for an unreachable host.
    """

    def __init__(
        self,
        group: distributed.ProcessGroup,
        host: str,
        *,
        rank: int,
        size: int,
        wake: Callable[[], None],
    ) -> None:
        """Connect all `size` ranks of `group`, whose rank 0 listens on `host`. A thread calls
        `wake` after each change. Raises OSError."""
        self._rank, self._size, self._wake = rank, size, wake
        self.wave = -1
        self.lost: int | None = None
        self.has_ended = False
        self._leaving: set[int] = set()
        self._closing, self._changed = threading.Event(), threading.Event()
        self._sending = threading.Lock()
        self._links = self._listen(group, host) if rank == 0 else self._join(group, host)
        threading.Thread(target=self._read, name="group-links", daemon=True).start()

    def _listen(self, group: distributed.ProcessGroup, host: str) -> dict[int, socket.socket]:
        with JoinListener(host) as listener:
            _share(group, listener.point.to_bytes())
            return listener.accept(self._size - 1)

    def _join(self, group: distributed.ProcessGroup, host: str) -> dict[int, socket.socket]:
        shared = _share(group, bytes(JoinPoint.SIZE))
        return {0: JoinPoint.from_bytes(host, shared).join(self._rank)}

    def start_wave(self, number: int) -> None:
        """Notify all other ranks that a wave has started."""
        self._send(self._links, _WAVE, number)

    def leave(self) -> None:
        """Announce that this rank wants to end. Idempotent."""
        if self._rank == 0:
            self._note_leaving(0)
        elif not self._leaving:
            self._leaving.add(self._rank)
            self._send(self._links, _LEAVING, self._rank)

    def wait(self, timeout_s: float) -> None:
        """Wait for a change since the last call."""
        self._changed.wait(timeout_s)
        self._changed.clear()

    def until_lost(self, timeout_s: float) -> None:
        """Wait until a rank is lost, at most for `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while self.lost is None and (left_s := deadline - time.monotonic()) > 0:
            self.wait(left_s)

    def close(self) -> None:
        """Close the links. Ranks that have not agreed to end take this one for lost."""
        self._closing.set()
        for link in self._links.values():
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)  # ends the thread, which closes it

    def _send(self, ranks: Iterable[int], what: bytes, number: int) -> None:
        message = _MESSAGE.pack(what, number)
        with self._sending:
            for rank in ranks:
                with contextlib.suppress(OSError):  # its end is noticed by the thread
                    self._links[rank].sendall(message)

    def _read(self) -> None:
        ranks = {link.fileno(): rank for rank, link in self._links.items()}
        poll = select.poll()
        for descriptor in ranks:
            poll.register(descriptor, select.POLLIN)
        while ranks:
            for descriptor, _ in poll.poll():
                rank = ranks[descriptor]
                try:
                    message = self._links[rank].recv(_MESSAGE.size, socket.MSG_WAITALL)
                except OSError:
                    message = b""
                if len(message) == _MESSAGE.size:
                    self._take(rank, *_MESSAGE.unpack(message))
                    continue
                poll.unregister(descriptor)
                del ranks[descriptor]
                self._note_lost(rank)
        for link in self._links.values():
            link.close()

    def _take(self, sender: int, what: bytes, number: int) -> None:
        if what == _WAVE:
            self.wave = max(self.wave, number)
            self._send(self._others(sender), _WAVE, number)
        elif what == _LEAVING:
            self._note_leaving(number)
        elif what == _LOST:
            self._note_lost(number)
        else:
            self.has_ended = True
        self._note_change()

    def _others(self, sender: int) -> list[int]:
        return [rank for rank in self._links if rank != sender] if self._rank == 0 else []

    def _note_leaving(self, rank: int) -> None:
        with self._sending:
            self._leaving.add(rank)
            is_last = len(self._leaving) == self._size and not self.has_ended
        if is_last:
            self._send(self._links, _END, 0)
            self.has_ended = True

    def _note_lost(self, rank: int) -> None:
        if self._closing.is_set() or self.has_ended or self.lost is not None:
            return
        self.lost = rank
        self._send(self._others(rank), _LOST, rank)
        self._note_change()
        threading.Thread(target=self._end_late, name="group-end", daemon=True).start()

    def _end_late(self) -> None:
        if not self._closing.wait(_FAIL_S):
            _log.error("the step waits for rank %d, which is lost: this process ends", self.lost)
            os._exit(1)

    def _note_change(self) -> None:
        self._changed.set()
        self._wake()


def _share(group: distributed.ProcessGroup, of_first: bytes) -> bytes:
    """Return the bytes of rank 0, if all others give zeros: the sum, as `group` may only reduce."""
    values = torch.tensor(list(of_first), dtype=torch.int32)
    distributed.all_reduce(values, group=group)
    return bytes(values.tolist())
