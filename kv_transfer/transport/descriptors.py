"""Descriptors of shared memory, sent between processes, also across containers.

A path below /proc reaches another process's memory only within one PID namespace. A Unix socket in
a directory that both containers mount has no such limit; the producer sends its descriptor over it
(SCM_RIGHTS). Only this user may enter the socket's directory. A client must send the key from the
producer's offer, which under TLS only workers see, and the proof of the worker token if one is
configured (protocol/auth.py).
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import re
import secrets
import socket
import stat
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from kv_transfer.errors import HandshakeRefused, KvTransferError
from kv_transfer.protocol.auth import LinkAuth

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kv_transfer.settings import ConnectorConfig

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[0-9a-f]{16}\.sock", re.ASCII)
_MAX_REQUEST = 1024
_GRANTED = b"\1"


class Descriptors:
    """Exchange of memory descriptors between the workers of this user on this host. `share` starts
    the server; `close` stops it. Raises KvTransferError if the directory cannot be used."""

    def __init__(self, settings: ConnectorConfig) -> None:
        self.directory = _private_directory(settings.shared_dir)
        self.name = f"{secrets.token_hex(8)}.sock"
        self.key = secrets.token_bytes(16)
        self._auth = LinkAuth(settings)
        self._timeout_s = settings.handshake_timeout_s
        self._lock = threading.Lock()
        self._fd = -1
        self._listener: socket.socket | None = None
        self._thread: threading.Thread | None = None

    def share(self, path: str) -> None:
        """Serve read-only descriptors of the memory at `path`. Idempotent."""
        with self._lock:
            if self._listener is not None:
                return
            _remove_unused(self.directory)
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            hidden = self.directory / f"{self.name}.new"
            try:
                with _short(hidden) as address:
                    listener.bind(address)
                listener.listen(128)
                # Rename it after `listen`: `_remove_unused` deletes sockets that do not listen.
                hidden.rename(self.directory / self.name)
                self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                listener.close()
                raise KvTransferError(f"cannot serve {hidden}: {error}") from error
            self._listener = listener
            self._thread = threading.Thread(
                target=self._serve, args=[listener], daemon=True, name="kv-descriptors"
            )
            self._thread.start()

    def fetch(self, name: str, key: bytes) -> int:
        """Return the descriptor shared by a producer; the caller closes it. Raises OSError, and
        KvTransferError if the producer refuses."""
        if not _NAME.fullmatch(name):
            raise KvTransferError(f"{name!r} is not the name of a socket")
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.settimeout(self._timeout_s)
            try:
                with _short(self.directory / name) as address:
                    sock.connect(address)
            except FileNotFoundError:
                raise KvTransferError(
                    f"the producer's socket is not in {self.directory}: containers must mount one"
                    " directory, which worker.kv.shared_dir names"
                ) from None
            sock.sendall(key + self._auth.prove("memory", key))
            flags = socket.MSG_CMSG_CLOEXEC
            answer, fds, _, _ = socket.recv_fds(sock, len(_GRANTED), 1, flags)
        if answer != _GRANTED or not fds:
            for fd in fds:
                os.close(fd)
            raise KvTransferError("the producer does not share its memory with us")
        return fds[0]

    def _serve(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:  # closed
                return
            with sock:
                try:
                    sock.settimeout(self._timeout_s)
                    request = sock.recv(_MAX_REQUEST)
                    if self._may_map(request):
                        socket.send_fds(sock, [_GRANTED], [self._fd])
                    elif request:  # an empty request only probes the listener
                        logger.warning("refused a process that asked for the KV cache's memory")
                except OSError as error:
                    logger.info("a process that asked for the KV cache's memory left: %s", error)

    def _may_map(self, request: bytes) -> bool:
        key, proof = request[: len(self.key)], request[len(self.key) :]
        try:
            self._auth.check(proof, "memory", self.key)
        except HandshakeRefused:
            return False
        return hmac.compare_digest(key, self.key)

    def close(self) -> None:
        """Stop the server. Peers keep the memory mapped. Idempotent."""
        with self._lock:
            if self._listener is None:
                return
            (self.directory / self.name).unlink(missing_ok=True)
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes `accept`; `close` would not
            if self._thread is not None:
                self._thread.join()
            self._listener.close()
            os.close(self._fd)
            self._listener, self._fd = None, -1


def _private_directory(shared: str) -> Path:
    """Return this user's directory below `shared`, or below the directory for temporary files."""
    path = Path(shared or tempfile.gettempdir()) / f"pdserve-kv-{os.geteuid()}"
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
    except OSError as error:
        raise KvTransferError(f"kv.shared_dir: cannot use {path}: {error}") from error
    is_own = found.st_uid == os.geteuid() and not stat.S_IMODE(found.st_mode) & 0o077
    if not stat.S_ISDIR(found.st_mode) or not is_own:
        raise KvTransferError(f"kv.shared_dir: {path} is not a directory that only we may enter")
    return path


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """Yield a name of the socket at `path` within the 107 bytes that unix(7) allows."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def _remove_unused(directory: Path) -> None:
    """Remove sockets of processes that were killed."""
    for path in directory.glob("*.sock"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.setblocking(False)
            try:
                with _short(path) as address:
                    sock.connect(address)
            except ConnectionRefusedError:
                with contextlib.suppress(OSError):
                    path.unlink()
            except OSError:  # it is busy, or another process has removed it
                continue
