"""Responses of the Responses API. Each response stores its own items and the id of the response
that it continues. Storing all earlier items too would grow quadratically with the conversation."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from sqlalchemy import bindparam, delete, func, literal, select, update

from pdserve.errors import InvalidRequest, QuotaExceeded
from router.store.database import insert
from router.store.schema import conversations, responses

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import Connection, Executable

    from pdserve.config import QuotaConfig
    from router.store.database import Database

# Limits of a conversation, all of which is read when it is continued.
MAX_CONVERSATION_BYTES = 16 << 20
MAX_CONVERSATION_LENGTH = 1000


# Built once, because every response is stored with these statements.
_CONVERSATION = select(responses.c.conversation).where(
    responses.c.tenant == bindparam("tenant"), responses.c.id == bindparam("id")
)
_USAGE = select(func.sum(conversations.c.responses), func.sum(conversations.c.bytes)).where(
    conversations.c.tenant == bindparam("tenant")
)


@cache
def _additions(dialect: str) -> tuple[Executable, Executable]:
    """Return two statements: one that adds a response unless its id exists, and one that adds to
    its conversation."""
    new = insert(dialect, responses).on_conflict_do_nothing().returning(responses.c.id)
    row = insert(dialect, conversations)
    more = {
        "responses": conversations.c.responses + 1,
        "bytes": conversations.c.bytes + row.excluded.bytes,
        "used_at": row.excluded.used_at,
    }
    return new, row.on_conflict_do_update(index_elements=["tenant", "id"], set_=more)


class NewResponse(NamedTuple):
    """A complete response. `body`: JSON body. `items`: input items of its own request as JSON.
    `previous`: id of the response that it continues."""

    id: str
    tenant: str
    body: bytes
    items: bytes
    previous: str | None


class _Output(msgspec.Struct):
    output: msgspec.Raw


class ResponseStore:
    """Responses of all routers that share the database. All methods raise StoreUnavailable."""

    def __init__(self, database: Database, quotas: QuotaConfig, *, retention_s: float) -> None:
        self._database, self._quotas = database, quotas
        self._retention_s = retention_s

    async def keep(self, response: NewResponse) -> None:
        """Store a response, and delete the tenant's least recently used conversations beyond its
        quota. Raises QuotaExceeded if this conversation alone exceeds it."""
        tenant, size = response.tenant, len(response.body) + len(response.items)

        def work(db: Connection) -> None:
            conversation = None
            if response.previous is not None:
                conversation = db.scalar(_CONVERSATION, {"tenant": tenant, "id": response.previous})
            conversation = conversation or response.id
            add_response, add_to_conversation = _additions(db.dialect.name)
            row = {**response._asdict(), "conversation": conversation, "bytes": size}
            if db.scalar(add_response, row) is None:
                # Clients may choose the ids of their requests and use one again.
                self._drop(db, tenant, response.id)
                db.execute(add_response, row)
            use = {"responses": 1, "bytes": size, "used_at": self._database.now()}
            db.execute(add_to_conversation, {"tenant": tenant, "id": conversation, **use})
            self._shrink(db, tenant, conversation)

        await self._database.write(work)

    def _shrink(self, db: Connection, tenant: str, newest: str) -> None:
        """Delete the least recently used conversations until the quota is met."""
        number, size = db.execute(_USAGE, {"tenant": tenant}).one()
        limit = self._quotas.responses_mib << 20
        if number <= self._quotas.responses and size <= limit:
            return
        of_tenant = conversations.c.tenant == tenant
        # Never the conversation that was just extended, because its client is using it.
        oldest = select(conversations).where(of_tenant, conversations.c.id != newest)
        for row in db.execute(oldest.order_by(conversations.c.used_at)):
            self._drop_conversation(db, tenant, row.id)
            number, size = number - row.responses, size - row.bytes
            if number <= self._quotas.responses and size <= limit:
                return
        raise QuotaExceeded(
            f"the conversation has {number} responses of {size} bytes; the limits are "
            f"{self._quotas.responses} (router.store.quotas.responses) and {limit} "
            "(router.store.quotas.responses_mib)"
        )

    def _drop_conversation(self, db: Connection, tenant: str, name: str) -> None:
        of_it = (responses.c.tenant == tenant) & (responses.c.conversation == name)
        db.execute(delete(responses).where(of_it))
        named = (conversations.c.tenant == tenant) & (conversations.c.id == name)
        db.execute(delete(conversations).where(named))

    def _drop(self, db: Connection, tenant: str, response_id: str) -> bool:
        """Delete a response. Return False if it does not exist."""
        named = (responses.c.tenant == tenant) & (responses.c.id == response_id)
        gone = delete(responses).where(named)
        row = db.execute(gone.returning(responses.c.conversation, responses.c.bytes)).first()
        if row is None:
            return False
        of_it = (conversations.c.tenant == tenant) & (conversations.c.id == row.conversation)
        less = {
            "responses": conversations.c.responses - 1,
            "bytes": conversations.c.bytes - row.bytes,
        }
        db.execute(update(conversations).where(of_it).values(less))
        db.execute(delete(conversations).where(of_it, conversations.c.responses <= 0))
        return True

    async def body(self, response_id: str, tenant: str) -> bytes | None:
        """Return the JSON body of a response, or None if it does not exist."""
        named = (responses.c.tenant == tenant) & (responses.c.id == response_id)
        query = select(responses.c.body).where(named)
        return await self._database.read(lambda db: db.scalar(query))

    async def items(self, response_id: str, tenant: str) -> tuple[bytes, str] | None:
        """Return (items of a conversation up to and including a response, as JSON; id of the
        conversation, equal to the id of its first response).

        Return None if the response does not exist. Raises InvalidRequest if the conversation is too
        long, or a response in it was deleted.
        """

        def work(db: Connection) -> tuple[bytes, str] | None:
            table = responses.alias()
            depth = literal(1).label("depth")
            chain = (
                select(responses.c.id, responses.c.previous, responses.c.bytes, depth)
                .where(responses.c.tenant == tenant, responses.c.id == response_id)
                .cte("chain", recursive=True)
            )
            chain = chain.union_all(
                select(table.c.id, table.c.previous, table.c.bytes, chain.c.depth + 1).where(
                    table.c.tenant == tenant,
                    table.c.id == chain.c.previous,
                    # Ends the recursion one above the limit, so that the check below sees it.
                    chain.c.depth <= MAX_CONVERSATION_LENGTH,
                )
            )
            found = db.execute(select(chain).order_by(chain.c.depth.desc())).all()
            if not found:
                return None
            _check_conversation(found)
            parts: list[bytes] = []
            for row in found:
                named = (responses.c.tenant == tenant) & (responses.c.id == row.id)
                query = select(responses.c["items"], responses.c.body).where(named)
                own, body = db.execute(query).one()
                # Join the JSON lists as bytes: decoding up to 16 MiB would take long.
                parts += [own[1:-1], bytes(msgspec.json.decode(body, type=_Output).output)[1:-1]]
            conversation = db.scalar(_CONVERSATION, {"tenant": tenant, "id": response_id})
            return b"[%b]" % b",".join(part for part in parts if part), conversation or response_id

        return await self._database.read(work)

    async def delete(self, response_id: str, tenant: str) -> bool:
        """Delete a response. Return False if it does not exist."""
        return await self._database.write(lambda db: self._drop(db, tenant, response_id))

    async def sweep(self) -> None:
        """Delete conversations that were not continued during the retention time."""
        before = self._database.now() - self._retention_s
        old = select(conversations.c.tenant, conversations.c.id).where(
            conversations.c.used_at < before
        )

        def work(db: Connection) -> int:
            rows = db.execute(old.limit(100)).all()
            for row in rows:
                self._drop_conversation(db, row.tenant, row.id)
            return len(rows)

        while await self._database.write(work):
            pass


def _check_conversation(found: Sequence[Any]) -> None:
    field = "previous_response_id"
    size = sum(row.bytes for row in found)
    if len(found) > MAX_CONVERSATION_LENGTH or size > MAX_CONVERSATION_BYTES:
        raise InvalidRequest(
            f"the conversation has {len(found)} responses of {size} bytes; the limits are "
            f"{MAX_CONVERSATION_LENGTH} and {MAX_CONVERSATION_BYTES}",
            field=field,
        )
    if found[0].previous is not None:
        text = f"response {found[0].previous!r}, at the conversation's beginning, was deleted"
        raise InvalidRequest(text, field=field)
