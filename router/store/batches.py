"""Batches and their lines.

A claim assigns a batch to one router at a time. The answer of a line is one commit, and the files
of a batch are written from the committed answers. No line is therefore lost or written twice,
whenever a router is killed.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from sqlalchemy import bindparam, delete, exists, func, insert, select, update

from pdserve.errors import QuotaExceeded
from router.store.database import insert as insert_new
from router.store.database import new_id
from router.store.files import page
from router.store.schema import batches, lines

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from sqlalchemy import Connection, Row

    from pdserve.config import QuotaConfig
    from router.store.claims import Claims
    from router.store.contents import Upload
    from router.store.database import Database
    from router.store.files import FileStore, StoredFile

# Lines per transaction. Bounded, because other writers wait for the transaction.
_LINES_AT_ONCE = 500
# Lines per page, read with bodies or results. Bounded, because bodies may be large.
_PAGE = 64
_SWEPT_AT_ONCE = 100
# The low bits of a stored line's number are its line in the input file. The high bits are its place
# in the order in which lines are answered.
_LINE_BITS = 20
_ANY_SIZE = 1 << 62
# Built once, because every line is answered with these statements.
_ANSWER = (
    update(lines)
    .where(
        lines.c.batch_id == bindparam("line_of"),
        lines.c.number == bindparam("line"),
        lines.c.result.is_(None),
    )
    .values(result=bindparam("answer"), succeeded=bindparam("good"), body=b"")
)
_COUNT = (
    update(batches)
    .where(batches.c.id == bindparam("batch"), batches.c.owner == bindparam("claimed_by"))
    .values(
        completed=batches.c.completed + bindparam("good"),
        failed=batches.c.failed + bindparam("bad"),
    )
)


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


class StoredBatch(NamedTuple):
    """A batch. `times`: when each status began, in seconds since 1970. `errors`: validation errors
    in the format of the API."""

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


class Line(NamedTuple):
    """A line of a batch. `body`: JSON body of its request. Lines are answered in order of
    `number`."""

    number: int
    custom_id: str
    body: bytes


class ClaimLost(Exception):
    """Another router has claimed this batch."""


class BatchStore:
    """Batches of all routers that share the database. All methods raise StoreUnavailable. The
    methods for the router that runs a batch also raise ClaimLost."""

    def __init__(
        self,
        database: Database,
        claims: Claims,
        files: FileStore,
        quotas: QuotaConfig,
        *,
        retention_s: float,
    ) -> None:
        self._database, self._claims, self._files = database, claims, files
        self._quotas, self._retention_s = quotas, retention_s

    def now(self) -> float:
        """Return the time of the store, which decides when batches expire."""
        return self._database.now()

    async def create(
        self, file: StoredFile, endpoint: str, window: str, window_s: int, metadata: dict[str, str]
    ) -> StoredBatch:
        """Create a batch. Raises QuotaExceeded."""
        batch_id, now = new_id("batch"), int(self.now())

        def work(db: Connection) -> StoredBatch:
            self._check_quotas(db, file)
            db.execute(
                insert(batches).values(
                    id=batch_id,
                    tenant=file.tenant,
                    endpoint=endpoint,
                    input_file_id=file.id,
                    completion_window=window,
                    metadata=msgspec.json.encode(metadata),
                    status=Status.VALIDATING,
                    created_at=now,
                    expires_at=now + window_s,
                    lines=file.lines,
                )
            )
            return _batch(db.execute(select(batches).where(batches.c.id == batch_id)).one())

        return await self._database.write(work)

    def _check_quotas(self, db: Connection, file: StoredFile) -> None:
        of_tenant, limits = batches.c.tenant == file.tenant, self._quotas
        kept = db.scalar(select(func.count()).select_from(batches).where(of_tenant)) or 0
        if kept >= limits.batches:
            raise QuotaExceeded(
                f"the tenant has {kept} batches; the limit is {limits.batches} "
                "(router.store.quotas.batches)"
            )
        is_open = batches.c.status.in_(OPEN)
        queued = db.scalar(select(func.sum(batches.c.lines)).where(of_tenant, is_open)) or 0
        if queued + file.lines > limits.batch_lines:
            raise QuotaExceeded(
                f"the tenant's open batches have {queued} lines and the file {file.lines}; "
                f"the limit is {limits.batch_lines} (router.store.quotas.batch_lines)",
                field="input_file_id",
            )

    async def batch(self, batch_id: str, tenant: str) -> StoredBatch | None:
        query = select(batches).where(batches.c.id == batch_id, batches.c.tenant == tenant)

        def work(db: Connection) -> StoredBatch | None:
            row = db.execute(query).first()
            return None if row is None else _batch(row)

        return await self._database.read(work)

    async def batches(
        self, tenant: str, after: str | None, limit: int
    ) -> tuple[list[StoredBatch], bool]:
        """Return a page of the batches, newest first, and True if there are more."""

        def work(db: Connection) -> tuple[list[StoredBatch], bool]:
            rows, has_more = page(db, batches, tenant, after, limit)
            return [_batch(row) for row in rows], has_more

        return await self._database.read(work)

    async def cancel(self, batch: StoredBatch) -> None:
        """Mark a batch for cancellation. The router that runs it reads the status and ends it."""

        def work(db: Connection) -> None:
            row = db.execute(
                select(batches).where(batches.c.id == batch.id).with_for_update()
            ).one()
            found = _batch(row)
            if found.status in (Status.VALIDATING, Status.IN_PROGRESS):
                self._set(db, found, Status.CANCELLING)

        await self._database.write(work)

    # For the router that runs a batch.

    async def claim(self, under_way: Mapping[str, int], most: int) -> StoredBatch | None:
        """Claim a batch that has no live router. Return None if there is none.

        `under_way`: number of batches that this router runs, by tenant. The tenant with the fewest
        is served first, its oldest batch first. Tenants with `most` are skipped.
        """
        claims, owner = self._claims, batches.c.owner
        is_open = batches.c.status.in_(OPEN)

        def work(db: Connection) -> StoredBatch | None:
            owners = db.scalars(select(owner).where(is_open).distinct()).all()
            dead = [x for x in owners if claims.is_dead(db, x)]
            # A batch that this router claimed but stopped running after an error is free too.
            mine = (owner == claims.owner) & batches.c.id.not_in(claims.held)
            oldest = (
                select(batches.c.tenant, func.min(batches.c.created_at).label("since"))
                .where(is_open, owner.in_(dead) | mine)
                .group_by(batches.c.tenant)
            )
            waiting = [
                row for row in db.execute(oldest).all() if under_way.get(row.tenant, 0) < most
            ]
            if not waiting:
                return None
            chosen = min(waiting, key=lambda row: (under_way.get(row.tenant, 0), row.since))
            free = (
                select(batches.c.id)
                .where(is_open, owner.in_(dead) | mine, batches.c.tenant == chosen.tenant)
                .order_by(batches.c.created_at, batches.c.id)
                .limit(1)
                # Routers that claim at the same time get different batches, and do not wait.
                .with_for_update(skip_locked=True)
            )
            claimed = update(batches).where(batches.c.id == free.scalar_subquery())
            row = db.execute(claimed.values(owner=claims.owner).returning(*batches.c)).first()
            return None if row is None else _batch(row)

        batch = await self._database.write(work)
        if batch is not None:
            claims.hold(batch.id)
        return batch

    def release(self, batch_id: str) -> None:
        """Record that this router no longer runs the batch."""
        self._claims.release(batch_id)

    def _mine(self, db: Connection, batch_id: str) -> StoredBatch:
        # Locked, so that no other router can claim the batch before this transaction ends.
        query = select(batches).where(batches.c.id == batch_id).with_for_update()
        row = db.execute(query.where(batches.c.owner == self._claims.owner)).first()
        if row is None:
            raise ClaimLost(batch_id)
        return _batch(row)

    async def look(self, batch_id: str) -> StoredBatch:
        """Return the current state of a claimed batch."""
        return await self._database.read(lambda db: self._mine(db, batch_id))

    async def start(self, batch_id: str, given: Sequence[Line]) -> None:
        """Store the lines of a valid input and begin the batch.

        Lines are answered in the order of their bodies. Prompts with a common prefix then follow
        each other, and workers compute the prefix once.
        """
        placed = enumerate(sorted(given, key=lambda line: line.body))
        rows = [
            line._replace(number=place << _LINE_BITS | line.number)._asdict()
            | {"batch_id": batch_id}
            for place, line in placed
        ]
        for i in range(0, len(rows), _LINES_AT_ONCE):
            some = rows[i : i + _LINES_AT_ONCE]

            def add(db: Connection, some: list[dict[str, Any]] = some) -> None:
                self._mine(db, batch_id)
                # Lines may exist already, if another router died here.
                db.execute(insert_new(db.dialect.name, lines).on_conflict_do_nothing(), some)

            await self._database.write(add)

        def begin(db: Connection) -> None:
            batch = self._mine(db, batch_id)
            db.execute(update(batches).where(batches.c.id == batch_id).values(total=len(rows)))
            # A client may have cancelled it meanwhile.
            if batch.status is Status.VALIDATING:
                self._set(db, batch, Status.IN_PROGRESS)

        await self._database.write(begin)

    async def pending(self, batch_id: str, after: int) -> list[Line]:
        """Return the next lines with a number above `after` and without an answer."""
        query = (
            select(lines.c.number, lines.c.custom_id, lines.c.body)
            .where(lines.c.batch_id == batch_id, lines.c.result.is_(None), lines.c.number > after)
            .order_by(lines.c.number)
            .limit(_PAGE)
        )

        def work(db: Connection) -> list[Line]:
            self._mine(db, batch_id)
            return [Line(*row) for row in db.execute(query)]

        return await self._database.read(work)

    async def answer(self, batch_id: str, number: int, result: bytes, *, succeeded: bool) -> None:
        """Commit the answer of a line, as a line of the output or the error file. Later answers of
        the same line are ignored."""
        line = {"line_of": batch_id, "line": number, "answer": result, "good": int(succeeded)}

        def work(db: Connection) -> None:
            more = db.execute(_ANSWER, line).rowcount
            count = {"good": more * succeeded, "bad": more * (not succeeded)}
            named = {"batch": batch_id, "claimed_by": self._claims.owner}
            if not db.execute(_COUNT, named | count).rowcount:
                raise ClaimLost(batch_id)

        await self._database.write(work)

    async def fail(self, batch_id: str, errors: list[dict[str, Any]]) -> None:
        """End a batch whose input is invalid."""
        encoded = msgspec.json.encode(errors)

        def work(db: Connection) -> None:
            batch = self._mine(db, batch_id)
            db.execute(update(batches).where(batches.c.id == batch_id).values(errors=encoded))
            self._set(db, batch, Status.FAILED)

        await self._database.write(work)

    async def finish(
        self, batch_id: str, status: Status, unanswered: Callable[[str], bytes]
    ) -> None:
        """Write the files and end the batch. `unanswered` returns the error line of a custom id
        without an answer. May be called again after StoreUnavailable."""
        batch = await self.look(batch_id)
        if batch.status not in OPEN:
            return  # an earlier call ended it, although its answer was lost
        uploads: list[tuple[Upload, str]] = []
        try:
            for succeeded, name in ((1, "output"), (0, "error")):
                await self._write(batch_id, succeeded, name, unanswered, uploads)
        except BaseException:
            for upload, _ in uploads:
                upload.discard()
            raise

        def end(db: Connection) -> None:
            self._set(db, self._mine(db, batch_id), status)
            for upload, name in uploads:
                change = {f"{name}_file_id": upload.id}
                db.execute(update(batches).where(batches.c.id == batch_id).values(change))

        named = [(x, f"{batch_id}_{name}.jsonl") for x, name in uploads]
        await self._files.commit(named, batch.tenant, "batch_output", end)
        await self._drop_lines(batch_id)

    async def _write(
        self,
        batch_id: str,
        succeeded: int,
        name: str,
        unanswered: Callable[[str], bytes],
        uploads: list[tuple[Upload, str]],
    ) -> None:
        """Write the lines with this value of `succeeded`, in order of the input, to a new upload.
        Append it to `uploads`. Without lines there is no upload."""
        # Only the low bits, because lines are answered in an order other than the input's.
        place = lines.c.number.op("&")((1 << _LINE_BITS) - 1)
        upload, last = None, 0

        def next_page(db: Connection) -> Sequence[Row[int, str, bytes | None]]:
            query = (
                select(place, lines.c.custom_id, lines.c.result)
                .where(lines.c.batch_id == batch_id, lines.c.succeeded == succeeded, place > last)
                .order_by(place)
                .limit(_PAGE)
            )
            return db.execute(query).all()

        while rows := await self._database.read(next_page):
            if upload is None:
                upload = await self._files.begin(_ANY_SIZE)
                uploads.append((upload, name))
            last = rows[-1][0]
            for _, custom_id, result in rows:
                await upload.write((unanswered(custom_id) if result is None else result) + b"\n")

    async def _drop_lines(self, batch_id: str) -> None:
        """Delete the lines of an ended batch, which its files contain."""
        of_batch = lines.c.batch_id == batch_id
        some = select(lines.c.number).where(of_batch).order_by(lines.c.number).limit(_LINES_AT_ONCE)
        dropped = delete(lines).where(of_batch, lines.c.number.in_(some))
        while await self._database.write(lambda db: db.execute(dropped).rowcount):
            pass

    def _set(self, db: Connection, batch: StoredBatch, status: Status) -> None:
        now = int(self.now())
        times = msgspec.json.encode(batch.times | {status: now})
        change = {"status": status, "times": times, "ended_at": 0 if status in OPEN else now}
        db.execute(update(batches).where(batches.c.id == batch.id).values(change))

    async def sweep(self) -> None:
        """Delete ended batches after their retention, and lines left by a router that stopped."""
        ended = batches.c.ended_at > 0
        has_lines = exists().where(lines.c.batch_id == batches.c.id)
        old = select(batches.c.id).where(ended, has_lines).limit(_SWEPT_AT_ONCE)
        for batch_id in await self._database.read(lambda db: db.scalars(old).all()):
            await self._drop_lines(batch_id)
        expired = delete(batches).where(ended, batches.c.ended_at < self.now() - self._retention_s)
        await self._database.write(lambda db: db.execute(expired))


def _batch(row: Row[Any]) -> StoredBatch:
    values = [getattr(row, name) for name in StoredBatch._fields]
    found = StoredBatch(*values)
    return found._replace(
        metadata=msgspec.json.decode(row.metadata),
        status=Status(row.status),
        errors=msgspec.json.decode(row.errors),
        times=msgspec.json.decode(row.times),
    )
