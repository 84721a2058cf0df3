"""Files of tenants. Rows are in the database, bytes in a folder or bucket."""

from __future__ import annotations

import asyncio
from contextlib import closing, suppress
from functools import partial
from typing import IO, TYPE_CHECKING, Any, NamedTuple, TypeVar

from sqlalchemy import Row, delete, func, insert, select

from pdserve.errors import InvalidRequest, NotFound, QuotaExceeded
from router.store.contents import Folder, Upload, disk_errors, make_threads
from router.store.database import StoreUnavailable, new_id
from router.store.schema import files

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection, Sequence
    from pathlib import Path

    from sqlalchemy import ColumnElement, Connection, Select, Table

    from pdserve.config import QuotaConfig
    from router.store.contents import Bucket
    from router.store.database import Database

T = TypeVar("T")

_CHUNK_BYTES = 1 << 20
# Age at which an upload counts as abandoned by a dead router.
_STALE_UPLOAD_S = 24 * 3600.0
_SWEPT_AT_ONCE = 100


class StoredFile(NamedTuple):
    id: str
    tenant: str
    filename: str
    purpose: str
    bytes: int
    lines: int
    created_at: int
    expires_at: int


class FileStore:
    """Files of all routers that share the database. All methods raise StoreUnavailable."""

    def __init__(
        self,
        database: Database,
        contents: Folder | Bucket,
        quotas: QuotaConfig,
        *,
        retention_s: float,
    ) -> None:
        self._database, self._contents = database, contents
        self._quotas, self._retention_s = quotas, retention_s
        self._threads = make_threads()

    async def close(self) -> None:
        await self._threads.close()
        self._contents.close()

    async def upload(self, tenant: str) -> Upload:
        """Begin an upload of a client, limited by its quota. Raises QuotaExceeded."""
        # Limits the upload from its first byte, so that no tenant fills the disk beyond its quota.
        left = await self._database.read(partial(self._bytes_left, tenant=tenant, size=0))
        return await self.begin(left)

    async def begin(self, max_bytes: int) -> Upload:
        """Begin an upload. The caller must call `discard` on it, or `keep` or `commit` with it."""
        file_id = new_id("file")
        path = self._contents.path(file_id)
        return await self._threads.run(partial(Upload, self._threads, path, file_id, max_bytes))

    def _bytes_left(self, db: Connection, tenant: str, size: int) -> int:
        """Return the number of bytes that a tenant may still store. Raises QuotaExceeded if one
        more file of `size` bytes exceeds its quota."""
        usage = select(func.count(), func.coalesce(func.sum(files.c.bytes), 0))
        count, used = db.execute(usage.where(files.c.tenant == tenant)).one()
        limit = self._quotas.files_mib << 20
        if count >= self._quotas.files:
            raise QuotaExceeded(
                f"the tenant has {count} files; the limit is {self._quotas.files} "
                "(router.store.quotas.files)",
                field="file",
            )
        if used + size > limit:
            raise QuotaExceeded(
                f"the tenant's files have {used} bytes, with this one {used + size}; the limit is "
                f"{limit} (router.store.quotas.files_mib)",
                field="file",
            )
        return int(limit - used)

    async def keep(
        self, upload: Upload, tenant: str, filename: str, lifetime_s: int | None = None
    ) -> StoredFile:
        """Complete an upload as an input file of batches. Raises QuotaExceeded."""

        def check(db: Connection) -> None:
            # Checked again in the transaction: other uploads of the tenant may have ended since.
            self._bytes_left(db, tenant, upload.size)

        named = [(upload, filename)]
        return (await self.commit(named, tenant, "batch", check, lifetime_s))[0]

    async def commit(
        self,
        uploads: Sequence[tuple[Upload, str]],
        tenant: str,
        purpose: str,
        work: Callable[[Connection], None],
        lifetime_s: int | None = None,
    ) -> list[StoredFile]:
        """Complete uploads as files with the given names, and run `work` in the same transaction.
        Discards the uploads on failure."""
        now = int(self._database.now())
        expires_at = now + int(self._retention_s if lifetime_s is None else lifetime_s)
        kept: list[StoredFile] = []
        is_unknown = False

        def add(db: Connection) -> None:
            work(db)
            for file in kept:
                db.execute(insert(files).values(**file._asdict()))

        try:
            for upload, name in uploads:
                await self._threads.run(partial(self._contents.keep, upload))
                row = (upload.id, tenant, name, purpose, upload.size, upload.lines, now, expires_at)
                kept.append(StoredFile._make(row))
            try:
                await self._database.write(add)
            except (StoreUnavailable, asyncio.CancelledError) as error:
                # If the rows were committed, the contents must stay. If not, the sweeper deletes
                # the contents later.
                is_unknown = getattr(error, "may_be_done", True)
                raise
        except BaseException:
            for upload, _ in () if is_unknown else uploads:
                upload.discard()
                with suppress(StoreUnavailable):
                    await self._threads.run(partial(self._contents.delete, upload.id))
            raise
        return kept

    async def file(self, file_id: str, tenant: str) -> StoredFile | None:
        query = select(files).where(files.c.id == file_id, files.c.tenant == tenant)
        row = await self._database.read(
            lambda db: db.execute(query.where(files.c.expires_at > self._database.now())).first()
        )
        return None if row is None else StoredFile._make(row)

    async def files(
        self, tenant: str, after: str | None, limit: int, purpose: str | None
    ) -> tuple[list[StoredFile], bool]:
        """Return a page of the files, newest first, and True if there are more."""

        def work(db: Connection) -> tuple[list[StoredFile], bool]:
            chosen = [files.c.expires_at > self._database.now()]
            if purpose is not None:
                chosen.append(files.c.purpose == purpose)
            rows, has_more = page(db, files, tenant, after, limit, *chosen)
            return [StoredFile._make(row) for row in rows], has_more

        return await self._database.read(work)

    def path(self, file: StoredFile) -> Path | None:
        """Return the path of the contents, or None if they are in a bucket."""
        return self._contents.path(file.id) if isinstance(self._contents, Folder) else None

    async def open(self, file: StoredFile) -> IO[bytes]:
        """Open the contents. Raises NotFound if another router has just deleted them."""
        try:
            return await self._threads.run(partial(self._contents.open, file.id))
        except FileNotFoundError as error:
            raise NotFound(f"file {file.id!r} was deleted") from error

    async def chunks(self, file: StoredFile) -> AsyncIterator[bytes]:
        """Yield the contents in chunks."""
        opened = await self.open(file)
        with closing(opened), disk_errors():
            while data := await self._threads.run(partial(opened.read, _CHUNK_BYTES)):
                yield data

    async def delete(self, file: StoredFile) -> None:
        # Delete the row last, so that the sweeper finds it and completes an interrupted deletion.
        await self._threads.run(partial(self._contents.delete, file.id))
        await self._database.write(
            lambda db: db.execute(delete(files).where(files.c.id == file.id))
        )

    async def sweep(self) -> None:
        """Delete expired files."""
        expired = select(files).where(files.c.expires_at <= self._database.now())
        while rows := await self._database.read(
            lambda db: db.execute(expired.limit(_SWEPT_AT_ONCE)).all()
        ):
            for row in rows:
                await self.delete(StoredFile._make(row))

    async def sweep_uploads(self) -> None:
        """Delete the contents of abandoned uploads, which have no row."""
        stale = await self._threads.run(partial(self._contents.older_than, _STALE_UPLOAD_S))
        for i in range(0, len(stale), _SWEPT_AT_ONCE):
            some = stale[i : i + _SWEPT_AT_ONCE]
            for file_id in await self._database.read(partial(_unknown, some=some)):
                await self._threads.run(partial(self._contents.delete, file_id))


def _unknown(db: Connection, some: Collection[str]) -> set[str]:
    return set(some) - set(db.scalars(select(files.c.id).where(files.c.id.in_(some))))


def page(
    db: Connection,
    table: Table,
    tenant: str,
    after: str | None,
    limit: int,
    *chosen: ColumnElement[bool],
) -> tuple[list[Row[Any]], bool]:
    """Return up to `limit` rows of a tenant after the row `after`, newest first, and True if there
    are more. Raises InvalidRequest if there is no row `after`."""
    created, name, of_tenant = table.c.created_at, table.c.id, table.c.tenant == tenant
    query: Select[Any] = select(table).where(of_tenant, *chosen)
    if after is not None:
        last = db.execute(select(created).where(of_tenant, name == after)).first()
        if last is None:
            raise InvalidRequest(f"there is no {after!r}", field="after")
        query = query.where((created < last[0]) | ((created == last[0]) & (name > after)))
    # One row more than asked for shows whether there are more.
    rows = db.execute(query.order_by(created.desc(), name).limit(limit + 1)).all()
    return list(rows[:limit]), len(rows) > limit
