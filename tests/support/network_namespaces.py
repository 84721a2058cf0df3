"""Hosts on one machine, and a network between them that a test can break.

A host is a network namespace whose eth0 is a TAP device. A thread of this process carries the
frames between these devices, and delays, limits or drops them, so no kernel module is needed. The
hosts have no connection to the outside. They have no names that could be left behind: the kernel
removes them when the processes that use them end.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import fcntl
import heapq
import itertools
import os
import random
import select
import shutil
import socket
import struct
import subprocess
import threading
import time
from collections import Counter
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Iterator, Sequence

_LIBC = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
_TUN = Path("/dev/net/tun")
_OWN = "/proc/thread-self/ns/net"
_FRAME_BYTES = 2048  # more than an MTU of 1500 with its header
_BURST = 64  # frames read from one host before the next host's turn
# Frames are dropped if they would wait longer than this for a link with a limit.
_LONGEST_QUEUE_S = 0.2


@dataclass(frozen=True, slots=True)
class LinkQuality:
    """One direction between two hosts. `loss` is the share of lost frames. `mbit_per_s` is 0 for no
    limit. If `is_cut`, all frames are dropped silently."""

    delay_s: float = 0.0
    loss: float = 0.0
    mbit_per_s: float = 0.0
    is_cut: bool = False


GOOD, CUT = LinkQuality(), LinkQuality(is_cut=True)


def missing_requirement() -> str:
    """Return what is missing on this machine, or ""."""
    if missing := [name for name in ("ip", "nsenter") if shutil.which(name) is None]:
        return f"needs the commands ip and nsenter; not found: {', '.join(missing)}"
    if os.geteuid() or not _TUN.exists():
        return f"needs root and {_TUN}"
    try:
        with Network(1):
            return ""
    except OSError as error:
        return f"needs the right to make network namespaces and TAP devices: {error}"


class Network:
    """`count` hosts, numbered from 0. A context manager; processes on the hosts must end before its
    exit. `sent` has the bytes that each host has sent to each other one."""

    def __init__(self, count: int) -> None:
        self.hosts = range(count)
        self._links = dict.fromkeys(itertools.permutations(self.hosts, 2), GOOD)
        self.sent = Counter[tuple[int, int]]()
        self._free_at = dict.fromkeys(self._links, 0.0)  # when a link with a limit is free again
        self._chance = random.Random(1)
        self._namespaces: list[int] = []
        self._devices: list[int] = []
        self._stop = os.eventfd(0)
        self._cable = threading.Thread(target=self._carry, name="cable", daemon=True)
        self._stack = ExitStack()

    def __enter__(self) -> Network:
        with ExitStack() as stack:
            stack.callback(os.close, self._stop)
            for host in self.hosts:
                namespace, device = _make_host()
                self._namespaces.append(namespace)
                self._devices.append(device)
                stack.callback(os.close, namespace)
                stack.callback(os.close, device)
                self._configure(host)
            self._cable.start()
            stack.callback(self._cable.join)
            stack.callback(os.eventfd_write, self._stop, 1)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def address(self, host: int) -> str:
        return f"10.77.0.{10 + host}"

    def namespace(self, host: int) -> int:
        """Return the descriptor of a host, for `enter`."""
        return self._namespaces[host]

    def command(self, host: int, words: Sequence[str]) -> list[str]:
        """Return the command that runs `words` on a host, without a further process."""
        return ["nsenter", f"--net=/proc/{os.getpid()}/fd/{self._namespaces[host]}", *words]

    def change(self, link: LinkQuality, sources: Iterable[int], targets: Iterable[int]) -> None:
        """Use `link` from now on for frames from these sources to these targets."""
        ways = itertools.product(sources, targets)
        self._links |= {(a, b): link for a, b in ways if a != b}

    def split(self, *hosts: int) -> None:
        """Cut all links between these hosts and the others."""
        others = set(self.hosts) - set(hosts)
        self.change(CUT, hosts, others)
        self.change(CUT, others, hosts)

    def heal(self) -> None:
        """Restore all links."""
        self.change(GOOD, self.hosts, self.hosts)

    @asynccontextmanager
    async def forward(self, host: int, port: int, *, at: int | None = None) -> AsyncIterator[str]:
        """Yield an address on this machine's loopback that forwards to a port of a host. The
        connections come from the host `at`, by default the same host."""
        sender = host if at is None else at
        tasks: set[asyncio.Task[None]] = set()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            tasks.add(task)
            # asyncio's streams would log the cancellation.
            with suppress(asyncio.CancelledError), self._socket(sender) as sock:
                await _join(sock, (self.address(host), port), reader, writer)
            tasks.remove(task)

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        try:
            yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def listens(self, host: int, port: int) -> bool:
        """Return True if something listens on that port of a host."""
        with self._socket(host) as sock, suppress(ConnectionRefusedError):
            await asyncio.get_running_loop().sock_connect(sock, (self.address(host), port))
            return True
        return False

    def _socket(self, host: int) -> socket.socket:
        """Return a socket in a host's namespace; any thread can use it."""
        with _inside(self._namespaces[host]):
            return socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)

    def _configure(self, host: int) -> None:
        """Bring the devices of a host up, with static neighbours. A host that is cut off is then
        silent, as behind a router; without them the kernel would report it as unreachable."""
        lines = ["link set lo up", f"link set eth0 address {_mac(host)}", "link set eth0 up"]
        lines += [f"address add {self.address(host)}/24 dev eth0"]
        for x in set(self.hosts) - {host}:
            at = f"{self.address(x)} lladdr {_mac(x)}"
            lines.append(f"neighbour add {at} dev eth0 nud permanent")
        command, text = self.command(host, ["ip", "-batch", "-"]), "\n".join(lines)
        done = subprocess.run(command, input=text, text=True, capture_output=True, check=False)
        if done.returncode:
            raise OSError(errno.EIO, f"ip: {done.stderr.strip()}")

    def _carry(self) -> None:
        waiting: list[tuple[float, int, int, bytes]] = []  # due, serial number, to, frame
        serial = itertools.count()
        poll = select.poll()
        for fd in (self._stop, *self._devices):
            poll.register(fd, select.POLLIN)
        hosts = {fd: host for host, fd in enumerate(self._devices)}
        while True:
            wait_ms = max(0.0, (waiting[0][0] - time.monotonic()) * 1e3) if waiting else None
            for fd, _ in poll.poll(wait_ms):
                if fd == self._stop:
                    return
                for frame in _frames(fd):
                    to = frame[5]  # the last byte of the MAC address
                    # The kernel's own multicast, such as of IPv6, is for nobody.
                    if not frame[0] & 1:
                        self.sent[hosts[fd], to] += len(frame)
                    due = self._due((hosts[fd], to), len(frame))
                    if due is not None:
                        heapq.heappush(waiting, (due, next(serial), to, frame))
            now = time.monotonic()
            while waiting and waiting[0][0] <= now:
                *_, to, frame = heapq.heappop(waiting)
                with suppress(OSError):
                    os.write(self._devices[to], frame)

    def _due(self, way: tuple[int, int], size: int) -> float | None:
        """Return the arrival time of a frame, or None if it is lost. Broadcasts are lost."""
        link, now = self._links.get(way, CUT), time.monotonic()
        if link.is_cut or self._chance.random() < link.loss:
            return None
        begins = now
        if link.mbit_per_s:
            begins = max(now, self._free_at[way])
            if begins - now > _LONGEST_QUEUE_S:
                return None
            begins += size * 8e-6 / link.mbit_per_s
            self._free_at[way] = begins
        return begins + link.delay_s


async def _join(
    sock: socket.socket,
    address: tuple[str, int],
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
) -> None:
    """Connect the socket and forward bytes between it and a connection until one ends."""
    with closing(writer), suppress(OSError):
        await asyncio.get_running_loop().sock_connect(sock, address)
        there_reader, there = await asyncio.open_connection(sock=sock)
        with closing(there):
            both = [_copy(reader, there), _copy(there_reader, writer)]
            tasks = [asyncio.ensure_future(each) for each in both]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()


def enter(namespace: int) -> None:
    """Move this thread to a host, which stays there."""
    _check(_LIBC.setns(namespace, _CLONE_NEWNET))


@contextmanager
def _inside(namespace: int) -> Iterator[None]:
    """Enter a namespace with this thread; leave it at the exit."""
    home = os.open(_OWN, os.O_RDONLY)
    try:
        enter(namespace)
        yield
    finally:
        _check(_LIBC.setns(home, _CLONE_NEWNET))
        os.close(home)


def _make_host() -> tuple[int, int]:
    """Make a namespace with a TAP device eth0; return their descriptors. Raises OSError."""
    home = os.open(_OWN, os.O_RDONLY)
    with ExitStack() as failed:
        try:
            _check(_LIBC.unshare(_CLONE_NEWNET))
            # The device is created in the namespace in which this file is opened.
            device = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK)
            failed.callback(os.close, device)
            request = struct.pack("16sH22x", b"eth0", _IFF_TAP | _IFF_NO_PI)
            fcntl.ioctl(device, _TUNSETIFF, request)
            namespace = os.open(_OWN, os.O_RDONLY)
        finally:
            _check(_LIBC.setns(home, _CLONE_NEWNET))
            os.close(home)
        failed.pop_all()
    return namespace, device


def _check(result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _mac(host: int) -> str:
    return f"02:00:00:00:00:{host:02x}"


def _frames(fd: int) -> Iterator[bytes]:
    """Yield the frames that a device has to send now, up to a burst."""
    for _ in range(_BURST):
        try:
            yield os.read(fd, _FRAME_BYTES)
        except BlockingIOError:
            return
