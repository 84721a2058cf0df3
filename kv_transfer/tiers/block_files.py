"""Blocks of KV as files that the workers of one host share.

`ROOT/NAMESPACE/ab/NAME` is one block: a line with its name and digest, then its bytes. A process
that writes or removes files holds a lock on the file `ROOT/lock`, which contains the number of
bytes in use. A killed writer leaves at most `ROOT/unfinished`, which the next writer removes.
"""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kv_transfer.cache.host_memory import DIGEST_BYTES
from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kv_transfer.cache.host_memory import KvRegion

_LOCK_TIMEOUT_S = 5.0
# A worker counts all files at its start; other workers that start then wait for it.
_START_TIMEOUT_S = 60.0
_LOCK_POLL_S = 0.002
_COUNT = b"%32d"
# At the quota, 1/16 of it is freed at once, because finding the oldest files is slow.
_FREED_SHARE = 16


class BlockFiles:
    """The files of one namespace. Several processes and threads may use the same folder.

    `quota_bytes` limits the files of all namespaces together; the least recently used are removed
    first. Raises ConfigError if other users may write to the folder, or if another process does
    not release its lock.
    """

    def __init__(
        self,
        root: Path,
        namespace: str,
        quota_bytes: int,
        *,
        start_timeout_s: float = _START_TIMEOUT_S,
    ) -> None:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = root.stat()
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise ConfigError(
                f"kv.tiers.disk_path: {root} must belong to this user, and be writable by no other",
                field="kv.tiers.disk_path",
            )
        self._root = root
        self._namespace = namespace
        self._quota = quota_bytes
        self._unfinished = root / "unfinished"
        (root / namespace).mkdir(mode=0o700, exist_ok=True)
        try:
            with self._locked(start_timeout_s) as lock:
                self._unfinished.unlink(missing_ok=True)
                os.pwrite(lock, _COUNT % self._trim(quota_bytes), 0)
        except TimeoutError as error:
            raise ConfigError(
                f"kv.tiers.disk_path: {error}; if it has very many files, remove some or name "
                "another folder",
                field="kv.tiers.disk_path",
            ) from None

    def has(self, name: str) -> bool:
        return self._path(name).exists()

    def load(self, name: str, region: KvRegion, block_id: int) -> bool:
        """Read a file into a block. Return False if it is missing or corrupt; a corrupt file is
        removed. Raises OSError."""
        path, page = self._path(name), region.pages([block_id])[0]
        header = bytearray(len(self._header(name, bytes(DIGEST_BYTES))))
        try:
            fd = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            return False
        try:
            is_whole = os.readv(fd, [header, page]) == len(header) + len(page)
            if is_whole and header == self._header(name, region.digests([block_id])):
                os.utime(fd)
                return True
        finally:
            os.close(fd)
        with self._locked():
            path.unlink(missing_ok=True)
        return False

    def store(self, name: str, region: KvRegion, block_id: int) -> None:
        """Write a block, unless its file exists or exceeds the quota. Raises OSError."""
        path, page = self._path(name), region.pages([block_id])[0]
        header = self._header(name, region.digests([block_id]))
        size = len(header) + len(page)
        if path.exists() or size > self._quota:
            return
        with self._locked() as lock:
            used = int(os.pread(lock, 32, 0))
            if used + size > self._quota:
                used = self._trim(self._quota - max(size, self._quota // _FREED_SHARE))
            os.pwrite(lock, _COUNT % (used + size), 0)
            path.parent.mkdir(mode=0o700, exist_ok=True)
            try:
                fd = os.open(self._unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                with os.fdopen(fd, "wb") as file:
                    file.writelines((header, page))
                self._unfinished.replace(path)
            finally:
                self._unfinished.unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self._root / self._namespace / name[:2] / name

    def _header(self, name: str, digest: bytes) -> bytes:
        return f"{self._namespace} {name} {digest.hex()}\n".encode()

    @contextmanager
    def _locked(self, timeout_s: float = _LOCK_TIMEOUT_S) -> Iterator[int]:
        """Hold the folder's lock and yield the descriptor of the lock file. Raises
        TimeoutError."""
        fd = os.open(self._root / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            deadline = time.monotonic() + timeout_s
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        text = f"another process has held {self._root}/lock for {timeout_s:g} s"
                        raise TimeoutError(text) from None
                    time.sleep(_LOCK_POLL_S)
            yield fd
        finally:
            os.close(fd)

    def _trim(self, limit: int) -> int:
        """Remove the least recently used files until at most `limit` bytes are left. Return the
        bytes left."""
        found = [(path.stat(), path) for path in self._root.glob("*/*/*")]
        left = sum(status.st_size for status, _ in found)
        for status, path in sorted(found, key=lambda each: each[0].st_mtime_ns):
            if left <= limit:
                break
            path.unlink()
            left -= status.st_size
        return left
