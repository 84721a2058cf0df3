"""What is kept of files and batches: a SQLite database, with the files' bytes beside it.

Several routers may share one folder. A batch belongs to one of them at a time, by a lease that it
renews; who lets it lapse, or is killed, loses the batch to another. A line's answer is one commit,
and the files of a batch are written from the committed answers: whenever a router is killed, no
line is lost, and none is in a file twice.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from typing import IO, TYPE_CHECKING, Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import msgspec

from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator
    from pathlib import Path

P = ParamSpec("P")
T = TypeVar("T")

# How long a statement waits for another router's. Theirs take milliseconds.
BUSY_S = 20.0
# An upload that its router did not live to finish.
_STALE_UPLOAD_S = 24 * 3600.0
# Stored responses: OpenAI's lifetime of them, and how many of all tenants are kept at most.
RESPONSE_S = 30 * 86_400
MAX_RESPONSES = 100_000
# Of a stored line's number, these bits are its line in the input, the others its place in the order
# in which lines are answered.
_LINE_BITS = 20
_SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, filename TEXT NOT NULL, purpose TEXT NOT NULL,
    bytes INTEGER NOT NULL, sha256 TEXT NOT NULL, created_at INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS batches (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, endpoint TEXT NOT NULL,
    input_file_id TEXT NOT NULL, completion_window TEXT NOT NULL, metadata TEXT NOT NULL,
    status TEXT NOT NULL, errors TEXT NOT NULL DEFAULT '[]', times TEXT NOT NULL,
    created_at INTEGER NOT NULL, expires_at INTEGER NOT NULL,
    output_file_id TEXT, error_file_id TEXT,
    owner TEXT NOT NULL DEFAULT '', leased_until REAL NOT NULL DEFAULT 0
);
CREATE TABLE IF NOT EXISTS lines (
    batch_id TEXT NOT NULL, number INTEGER NOT NULL, custom_id TEXT NOT NULL, body BLOB NOT NULL,
    result BLOB, succeeded INTEGER,
    PRIMARY KEY (batch_id, number), UNIQUE (batch_id, custom_id)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS responses (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL, tenant TEXT NOT NULL,
    created_at INTEGER NOT NULL, body BLOB NOT NULL, items BLOB NOT NULL, UNIQUE (tenant, id)
);
"""


class Status(StrEnum):
    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


OPEN = (Status.VALIDATING, Status.IN_PROGRESS, Status.FINALIZING, Status.CANCELLING)


class StoredFile(NamedTuple):
    id: str
    tenant: str
    filename: str
    purpose: str
    bytes: int
    sha256: str
    created_at: int


class StoredBatch(NamedTuple):
    """A batch. `times` has the moment of each status that it has had, in seconds since 1970;
    `errors` are those of its validation, as the API shows them."""

    id: str
    tenant: str
    endpoint: str
    input_file_id: str
    completion_window: str
    metadata: dict[str, str]
    status: Status
    errors: list[dict[str, Any]]
    times: dict[str, int]
    created_at: int
    expires_at: int
    output_file_id: str | None
    error_file_id: str | None
    total: int
    completed: int
    failed: int


class StoredResponse(NamedTuple):
    """An answer of the Responses API: its JSON body, and as JSON the items of the conversation up
    to its end."""

    id: str
    tenant: str
    created_at: int
    body: bytes
    items: bytes


class Line(NamedTuple):
    """A line of a batch: `body` is the JSON body of its request. Lines are answered by `number`."""

    number: int
    custom_id: str
    body: bytes


class LeaseLost(Exception):
    """Another router has this batch now."""


_BATCH = """
SELECT id, tenant, endpoint, input_file_id, completion_window, metadata, status, errors, times,
    created_at, expires_at, output_file_id, error_file_id,
    (SELECT count(*) FROM lines WHERE batch_id = batches.id),
    (SELECT count(*) FROM lines WHERE batch_id = batches.id AND succeeded = 1),
    (SELECT count(*) FROM lines WHERE batch_id = batches.id AND succeeded = 0)
FROM batches
"""


class Upload:
    """A file that is being written. `discard` removes it; `BatchStore.keep` makes it a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self._digest = hashlib.sha256()
        self._file: IO[bytes] = path.open("xb")

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self._digest.update(data)
        self.size += len(data)

    def close(self) -> str:
        """Make its bytes durable. Return their SHA-256."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return self._digest.hexdigest()

    def discard(self) -> None:
        self._file.close()
        self.path.unlink(missing_ok=True)


def _on_thread(
    work: Callable[Concatenate[BatchStore, P], T],
) -> Callable[Concatenate[BatchStore, P], Awaitable[T]]:
    """Run a method of BatchStore on its thread."""

    async def run(store: BatchStore, /, *args: P.args, **options: P.kwargs) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(store._thread, partial(work, store, *args, **options))

    return run


class BatchStore:
    """Owns the connection to the database, on a thread of its own. Released by `close`."""

    def __init__(self, folder: Path, owner: str) -> None:
        """`owner` names this router in leases. Raises ConfigError if the folder cannot be used."""
        self._folder, self._owner = folder, owner
        self._thread = ThreadPoolExecutor(1, "batch-store")
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._db = self._thread.submit(self._open).result()
        except (OSError, sqlite3.Error) as error:
            self._thread.shutdown()
            raise ConfigError(f"cannot use {folder}: {error}", field="batch.directory") from error

    async def close(self) -> None:
        await self._close()
        self._thread.shutdown()

    @_on_thread
    def _close(self) -> None:
        self._db.close()

    def _open(self) -> sqlite3.Connection:
        path = self._folder / "batches.sqlite"
        db = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None)
        path.chmod(0o600)
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        db.executescript(_SCHEMA)
        known = {row[0] for row in db.execute("SELECT id FROM files")}
        for path in self._folder.glob("file-*"):
            if path.name not in known and path.stat().st_mtime < time.time() - _STALE_UPLOAD_S:
                path.unlink(missing_ok=True)
        return db

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield self._db
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    # Files.

    def upload(self) -> Upload:
        """Begin a file. Blocks for a moment, as do the upload's own methods."""
        return Upload(self._folder / _new_id("file"))

    @_on_thread
    def keep(self, upload: Upload, tenant: str, filename: str, purpose: str) -> StoredFile:
        return self._keep(upload, tenant, filename, purpose)

    def _keep(self, upload: Upload, tenant: str, filename: str, purpose: str) -> StoredFile:
        digest = upload.close()
        file = StoredFile(
            upload.path.name, tenant, filename, purpose, upload.size, digest, int(time.time())
        )
        self._db.execute("INSERT INTO files VALUES (?, ?, ?, ?, ?, ?, ?)", file)
        return file

    @_on_thread
    def file(self, file_id: str, tenant: str) -> StoredFile | None:
        return next(self._files("id = ? AND tenant = ?", file_id, tenant), None)

    @_on_thread
    def files(self, tenant: str) -> list[StoredFile]:
        """The newest first."""
        return list(self._files("tenant = ?", tenant))

    def _files(self, where: str, *values: str) -> Iterator[StoredFile]:
        sql = f"SELECT * FROM files WHERE {where} ORDER BY created_at DESC, id"
        return (StoredFile(*row) for row in self._db.execute(sql, values).fetchall())

    def path(self, file: StoredFile) -> Path:
        return self._folder / file.id

    @_on_thread
    def delete(self, file: StoredFile) -> None:
        self._db.execute("DELETE FROM files WHERE id = ?", (file.id,))
        self.path(file).unlink(missing_ok=True)

    # Batches.

    @_on_thread
    def create(
        self, file: StoredFile, endpoint: str, window: str, window_s: int, metadata: dict[str, str]
    ) -> StoredBatch:
        batch_id, now = _new_id("batch"), int(time.time())
        self._db.execute(
            "INSERT INTO batches (id, tenant, endpoint, input_file_id, completion_window, metadata,"
            " status, times, created_at, expires_at) VALUES (?, ?, ?, ?, ?, ?, ?, '{}', ?, ?)",
            (
                *(batch_id, file.tenant, endpoint, file.id, window, _json(metadata)),
                *(Status.VALIDATING, now, now + window_s),
            ),
        )
        return self._batches("id = ?", batch_id)[0]

    @_on_thread
    def batch(self, batch_id: str, tenant: str) -> StoredBatch | None:
        found = self._batches("id = ? AND tenant = ?", batch_id, tenant)
        return found[0] if found else None

    @_on_thread
    def batches(self, tenant: str) -> list[StoredBatch]:
        """The newest first."""
        return self._batches("tenant = ?", tenant)

    def _batches(self, where: str, *values: str) -> list[StoredBatch]:
        rows = self._db.execute(f"{_BATCH} WHERE {where} ORDER BY created_at DESC, id", values)
        return [_batch(row) for row in rows]

    @_on_thread
    def cancel(self, batch: StoredBatch) -> None:
        """Ask the router that has the batch to end it."""
        with self._transaction():
            batch = self._batches("id = ?", batch.id)[0]
            if batch.status in (Status.VALIDATING, Status.IN_PROGRESS):
                self._set(batch, Status.CANCELLING)

    # For the router that works on a batch: all raise LeaseLost, except `claim`.

    @_on_thread
    def claim(self, lease_s: float) -> StoredBatch | None:
        """Return an open batch that no router works on, and lease it."""
        now = time.time()
        row = self._db.execute(
            "UPDATE batches SET owner = ?, leased_until = ? WHERE id = (SELECT id FROM batches"
            f" WHERE status IN ({', '.join('?' * len(OPEN))}) AND leased_until < ?"
            " ORDER BY created_at, id LIMIT 1) RETURNING id",
            (self._owner, now + lease_s, *OPEN, now),
        ).fetchone()
        return None if row is None else self._batches("id = ?", row[0])[0]

    def _check_lease(self, batch_id: str) -> None:
        """As `_mine`, without counting the lines: for what is done once a line."""
        found = self._db.execute(
            "SELECT 1 FROM batches WHERE id = ? AND owner = ?", (batch_id, self._owner)
        ).fetchone()
        if found is None:
            raise LeaseLost(batch_id)

    def _mine(self, batch_id: str) -> StoredBatch:
        found = self._batches("id = ? AND owner = ?", batch_id, self._owner)
        if not found:
            raise LeaseLost(batch_id)
        return found[0]

    @_on_thread
    def renew(self, batch_id: str, lease_s: float) -> StoredBatch:
        self._db.execute(
            "UPDATE batches SET leased_until = ? WHERE id = ? AND owner = ?",
            (time.time() + lease_s, batch_id, self._owner),
        )
        return self._mine(batch_id)

    @_on_thread
    def start(self, batch_id: str, lines: Iterable[Line]) -> None:
        """The input was valid: these are its lines. They are answered in the order of their bodies:
        of prompts with the same prefix, one after the other, workers compute it once."""
        placed = enumerate(sorted(lines, key=lambda line: line.body))
        numbered = (x._replace(number=place << _LINE_BITS | x.number) for place, x in placed)
        with self._transaction() as db:
            batch = self._mine(batch_id)
            db.executemany(
                "INSERT INTO lines (batch_id, number, custom_id, body) VALUES (?, ?, ?, ?)",
                ((batch_id, *line) for line in numbered),
            )
            # It may have been cancelled meanwhile.
            if batch.status is Status.VALIDATING:
                self._set(batch, Status.IN_PROGRESS)

    @_on_thread
    def pending(self, batch_id: str, after: int, limit: int) -> list[Line]:
        """Return lines without an answer whose number is above `after`."""
        self._check_lease(batch_id)
        rows = self._db.execute(
            "SELECT number, custom_id, body FROM lines WHERE batch_id = ? AND result IS NULL"
            " AND number > ? ORDER BY number LIMIT ?",
            (batch_id, after, limit),
        )
        return [Line(*row) for row in rows]

    @_on_thread
    def answer(self, batch_id: str, number: int, result: bytes, *, succeeded: bool) -> None:
        """Commit a line's answer, as a line of the output or the error file. The first one
        counts."""
        with self._transaction() as db:
            self._check_lease(batch_id)
            db.execute(
                "UPDATE lines SET result = ?, succeeded = ?, body = x''"
                " WHERE batch_id = ? AND number = ? AND result IS NULL",
                (result, succeeded, batch_id, number),
            )

    @_on_thread
    def fail(self, batch_id: str, errors: list[dict[str, Any]]) -> None:
        """The input was not valid."""
        with self._transaction() as db:
            batch = self._mine(batch_id)
            db.execute("UPDATE batches SET errors = ? WHERE id = ?", (_json(errors), batch_id))
            self._set(batch, Status.FAILED)

    @_on_thread
    def finish(self, batch_id: str, status: Status, unanswered: Callable[[str], bytes]) -> None:
        """Write the files and end the batch. `unanswered` makes the error line of a custom id that
        has no answer."""
        batch = self._mine(batch_id)
        uploads: dict[str, Upload] = {}
        try:
            for column, succeeded in (("output_file_id", 1), ("error_file_id", 0)):
                rows = self._db.execute(
                    "SELECT custom_id, result FROM lines WHERE batch_id = ?"
                    " AND ifnull(succeeded, 0) = ? ORDER BY number & ?",
                    (batch_id, succeeded, (1 << _LINE_BITS) - 1),
                )
                for custom_id, result in rows:
                    upload = uploads.get(column) or uploads.setdefault(column, self.upload())
                    upload.write((result or unanswered(custom_id)) + b"\n")
            # One commit makes the files known and ends the batch.
            with self._transaction() as db:
                self._check_lease(batch_id)
                for column, upload in uploads.items():
                    name = f"{batch_id}_{column.removesuffix('_file_id')}.jsonl"
                    kept = self._keep(upload, batch.tenant, name, "batch_output")
                    db.execute(f"UPDATE batches SET {column} = ? WHERE id = ?", (kept.id, batch_id))
                self._set(batch, status)
                # The counts are of these rows; their answers are in the files now.
                db.execute(
                    "UPDATE lines SET succeeded = ifnull(succeeded, 0), result = x'', body = x''"
                    " WHERE batch_id = ?",
                    (batch_id,),
                )
        except BaseException:
            for upload in uploads.values():
                upload.discard()
            raise

    def _set(self, batch: StoredBatch, status: Status) -> None:
        times = batch.times | {status: int(time.time())}
        self._db.execute(
            "UPDATE batches SET status = ?, times = ? WHERE id = ?",
            (status, _json(times), batch.id),
        )

    # Responses.

    @_on_thread
    def keep_response(self, response: StoredResponse) -> None:
        """Keep a response, and drop those that are too old or too many."""
        with self._transaction() as db:
            row = db.execute(
                "INSERT OR REPLACE INTO responses (id, tenant, created_at, body, items)"
                " VALUES (?, ?, ?, ?, ?) RETURNING number",
                response,
            ).fetchone()
            db.execute(
                "DELETE FROM responses WHERE (number <= ? OR created_at < ?)"
                " AND number IN (SELECT number FROM responses ORDER BY number LIMIT 10)",
                (row[0] - MAX_RESPONSES, response.created_at - RESPONSE_S),
            )

    @_on_thread
    def response(self, response_id: str, tenant: str) -> StoredResponse | None:
        row = self._db.execute(
            "SELECT id, tenant, created_at, body, items FROM responses"
            " WHERE id = ? AND tenant = ? AND created_at >= ?",
            (response_id, tenant, int(time.time()) - RESPONSE_S),
        ).fetchone()
        return None if row is None else StoredResponse(*row)

    @_on_thread
    def delete_response(self, response: StoredResponse) -> None:
        sql = "DELETE FROM responses WHERE tenant = ? AND id = ?"
        self._db.execute(sql, (response.tenant, response.id))


def _batch(row: tuple[Any, ...]) -> StoredBatch:
    found = StoredBatch(*row)
    return found._replace(
        metadata=msgspec.json.decode(row[5]),
        status=Status(row[6]),
        errors=msgspec.json.decode(row[7]),
        times=msgspec.json.decode(row[8]),
    )


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _new_id(kind: str) -> str:
    return f"{kind}-{secrets.token_hex(12)}"
