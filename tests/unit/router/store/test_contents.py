"""Files on disks that are full or fail, their expiry, and what a killed router leaves."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import sqlite3
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pdserve.config import StoreConfig
from pdserve.errors import ConfigError
from router.store import contents
from router.store.database import StoreUnavailable
from router.store.store import DATABASE_FILE, make_store

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.unit.router.conftest import OpenStore

HOUR_S = 3600


@contextmanager
def full_disk() -> Iterator[None]:
    """Limit files to 1 MiB; beyond it, writes fail as on a full disk."""
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)


def left(folder: Path) -> list[str]:
    return [path.name for path in (folder / "files").glob("file-*")]


async def test_an_upload_to_a_full_disk_leaves_nothing(
    open_store: OpenStore, tmp_path: Path
) -> None:
    upload = await open_store().files.upload("acme")
    await upload.write(bytes(1 << 20))
    with full_disk(), pytest.raises(StoreUnavailable, match="too large"):
        await upload.write(bytes(1 << 20))
    upload.discard()
    assert left(tmp_path) == []


async def test_a_file_that_cannot_be_made_durable_is_none_and_leaves_nothing(
    open_store: OpenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store()
    upload = await store.files.upload("acme")
    await upload.write(b"{}\n")

    def fails(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(contents.os, "fsync", fails)
    with pytest.raises(StoreUnavailable, match="Input/output error"):
        await store.files.keep(upload, "acme", "in.jsonl")
    assert left(tmp_path) == []
    assert await store.files.files("acme", None, 10, None) == ([], False)


async def test_the_folder_is_durable_before_the_row(
    open_store: OpenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, synced = open_store(), list[str]()
    sync, write = os.fsync, store.database.write

    def fsync(descriptor: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        sync(descriptor)

    async def committing(work: object) -> object:
        synced.append("row")
        return await write(work)  # type: ignore[arg-type]

    upload = await store.files.upload("acme")
    monkeypatch.setattr(contents.os, "fsync", fsync)
    monkeypatch.setattr(store.database, "write", committing)
    await store.files.keep(upload, "acme", "in.jsonl")
    assert synced == [str(upload.path), str(tmp_path / "files"), "row"]
    assert upload.path.stat().st_mode & 0o777 == 0o600


async def test_files_expire_and_unfinished_uploads_are_removed(
    open_store: OpenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store()
    short, long, broken = [await store.files.upload("acme") for _ in range(3)]
    await store.files.keep(short, "acme", "short", lifetime_s=HOUR_S)
    kept = await store.files.keep(long, "acme", "long")
    os.utime(broken.path, (1, 1))
    os.utime(long.path, (1, 1))
    now = store.database.now
    monkeypatch.setattr(store.database, "now", lambda: now() + 2 * HOUR_S)
    await store.files.sweep()
    await store.files.sweep_uploads()
    assert left(tmp_path) == [kept.id]
    assert (await store.files.files("acme", None, 10, None))[0] == [kept]
    broken.discard()


def test_a_folder_that_everyone_may_write_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match="writable by everyone"):
        make_store(StoreConfig(database=str(tmp_path)), tmp_path, "router")


def test_postgresql_needs_a_place_for_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        make_store(StoreConfig(database="postgresql://h/d"), tmp_path, "router")
    assert raised.value.field == "store.files"


async def test_a_backup_of_a_folder_in_use_is_a_store(tmp_path: Path) -> None:
    """As docs/operations.md makes it: the database first, then the files."""
    used, backup = tmp_path / "used", tmp_path / "backup"
    for folder in (used, backup):
        folder.mkdir(mode=0o700)
    stores = [make_store(StoreConfig(), used, "router-a")]
    try:
        upload = await stores[0].files.upload("acme")
        await upload.write(b"{}\n")
        kept = await stores[0].files.keep(upload, "acme", "in.jsonl")
        with (
            closing(sqlite3.connect(used / DATABASE_FILE)) as source,
            closing(sqlite3.connect(backup / DATABASE_FILE)) as copy,
        ):
            source.backup(copy)
        for path in used.glob("file-*"):
            shutil.copy2(path, backup)
        stores.append(make_store(StoreConfig(), backup, "router-b"))
        assert await stores[1].files.file(kept.id, "acme") == kept
        assert [x async for x in stores[1].files.chunks(kept)] == [b"{}\n"]
    finally:
        for store in stores:
            await store.files.close()
            await store.database.close()
