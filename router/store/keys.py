"""Idempotency keys: the claim of the router that generates an answer, and complete answers."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from sqlalchemy import delete, func, select, update

from pdserve.errors import KeyReused
from router.store.database import StoreUnavailable, insert
from router.store.schema import keys

if TYPE_CHECKING:
    from collections.abc import Collection

    from sqlalchemy import Connection

    from router.store.claims import Claims
    from router.store.database import Database

# Limit of the complete answers of one tenant. The oldest ones are dropped.
MAX_TENANT_BYTES = 64 << 20
# Lifetime of an unfinished claim. Requests end earlier.
_UNFINISHED_S = 2 * 86_400.0


class KeyState(NamedTuple):
    """Result of a claim. With `claim`, the caller generates the answer. With `answer`, the answer
    is complete. With neither, another router generates it. `request_id`: id of the first
    request."""

    request_id: str
    claim: str = ""
    answer: bytes | None = None


class IdempotencyKeys:
    """Keys of all routers that share the database. All methods raise StoreUnavailable."""

    def __init__(
        self, database: Database, claims: Claims, *, max_tenant_bytes: int = MAX_TENANT_BYTES
    ) -> None:
        self._database, self._claims = database, claims
        self._max_bytes = max_tenant_bytes
        self._undoing = set[asyncio.Task[None]]()

    async def claim(
        self, tenant: str, key: str, digest: bytes, request_id: str, *, take_over: bool = False
    ) -> KeyState:
        """Claim a key that is new, whose answer has expired, or whose router is dead.

        `take_over` claims it in any case; its former holder detects it with `held`. Call again
        about once a second while another router generates the answer. `digest` identifies the
        content of the request. Raises KeyReused if the key was used with another digest.
        """
        claiming = asyncio.create_task(self._claim(tenant, key, digest, request_id, take_over))
        try:
            return await asyncio.shield(claiming)
        except asyncio.CancelledError:
            # The claim may be committed nevertheless, and no router would generate its answer.
            undoing = asyncio.create_task(self._undo(claiming))
            self._undoing.add(undoing)
            undoing.add_done_callback(self._undoing.discard)
            raise

    async def _undo(self, claiming: asyncio.Task[KeyState]) -> None:
        with suppress(StoreUnavailable, KeyReused):
            if claim := (await claiming).claim:
                await self.release(claim)

    async def _claim(
        self, tenant: str, key: str, digest: bytes, request_id: str, take_over: bool
    ) -> KeyState:
        # Random for each claim, so that after a take-over `finish` of the former holder finds no
        # row.
        token = secrets.token_hex(16)

        def work(db: Connection) -> KeyState:
            now = self._database.now()
            mine = {
                "digest": digest,
                "request_id": request_id,
                "owner": self._claims.owner,
                "claim": token,
                "answer": None,
                "bytes": 0,
                "expires_at": now + _UNFINISHED_S,
            }
            # Insert first and look later: of two requests with the same new key, one wins.
            new = (
                insert(db.dialect.name, keys)
                .values(tenant=tenant, key=key, **mine)
                .on_conflict_do_nothing()
            )
            if db.scalar(new.returning(keys.c.claim)) is not None:
                return KeyState(request_id, token)
            named = (keys.c.tenant == tenant) & (keys.c.key == key)
            found = db.execute(select(keys).where(named).with_for_update()).one()
            has_expired = found.expires_at < now
            if not (take_over or has_expired):
                if found.digest != digest:
                    text = f"the idempotency key {key!r} was used with another request"
                    raise KeyReused(text, field="idempotency-key")
                if found.answer is not None:
                    return KeyState(found.request_id, answer=found.answer)
                if not self._claims.is_dead(db, found.owner):
                    return KeyState(found.request_id)
            db.execute(update(keys).where(named).values(**mine))
            return KeyState(request_id, token)

        try:
            state = await self._database.write(work)
        except StoreUnavailable as error:
            if not error.may_be_done:
                raise
            # The claim may be committed. Continue as if it were: `finish` checks it, and `release`
            # ends it.
            state = KeyState(request_id, token)
        if state.claim:
            self._claims.hold(state.claim)
        return state

    async def finish(self, claim: str, answer: bytes, lifetime_s: float) -> bool:
        """Store a complete answer and end the claim. Return False if the claim was taken over."""

        def work(db: Connection) -> bool:
            values = {"answer": answer, "bytes": len(answer)}
            expires_at = self._database.now() + lifetime_s
            kept = update(keys).where(keys.c.claim == claim).values(**values, expires_at=expires_at)
            tenant = db.scalar(kept.returning(keys.c.tenant))
            if tenant is None:
                return False
            of_tenant = (keys.c.tenant == tenant) & keys.c.answer.is_not(None)
            over = (
                db.scalar(select(func.sum(keys.c.bytes)).where(of_tenant)) or 0
            ) - self._max_bytes
            if over > 0:
                oldest = select(keys.c.claim, keys.c.bytes).where(of_tenant)
                for row in db.execute(oldest.order_by(keys.c.expires_at)).all():
                    if over <= 0:
                        break
                    db.execute(delete(keys).where(keys.c.claim == row.claim))
                    over -= row.bytes
            return True

        try:
            return await self._database.write(work)
        finally:
            self._claims.release(claim)

    async def release(self, claim: str) -> None:
        """End a claim without an answer. The next request with the key generates one."""
        try:
            await self._database.write(
                lambda db: db.execute(delete(keys).where(keys.c.claim == claim))
            )
        finally:
            self._claims.release(claim)

    async def held(self, claims: Collection[str]) -> set[str]:
        """Return the claims in `claims` that no other request has taken over."""
        query = select(keys.c.claim).where(keys.c.claim.in_(claims))
        return await self._database.read(lambda db: set(db.scalars(query)))

    async def sweep(self) -> None:
        """Delete expired keys."""
        await self._database.write(
            lambda db: db.execute(delete(keys).where(keys.c.expires_at < self._database.now()))
        )
