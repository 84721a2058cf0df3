"""Database of the store, SQLite or PostgreSQL. Calls run on own threads and have deadlines."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import sqlalchemy
from sqlalchemy import event, exc
from sqlalchemy.dialects import postgresql, sqlite

from pdserve.errors import ConfigError, Unavailable
from pdserve.net.backoff import backoff
from router.store.schema import metadata

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from sqlalchemy import Connection, Table

T = TypeVar("T")
logger = logging.getLogger(__name__)

# Deadline of one call, including its wait for a thread. A statement or a wait for a lock ends
# earlier, because a thread cannot be cancelled and must be free again.
CALL_S = 5.0
_STATEMENT_S = 3.0
_CONNECT_S = 3
# One thread for SQLite, which allows one writer at a time anyway.
_SQLITE_THREADS, _POSTGRES_THREADS = 1, 8
_MAX_WAITING = 1000
_RETRY_AFTER_S = 2.0
_RECONNECT_S, _MAX_RECONNECT_S = 1.0, 10.0
# Classes of PostgreSQL's errors: no connection, no resources, an operator's intervention.
_AWAY = ("08", "53", "57")
_REFUSED = ("authentication failed", "does not exist", "no pg_hba.conf entry", "no password")
POSTGRES = ("postgresql://", "postgres://")


class StoreUnavailable(Unavailable, code="store_unavailable"):
    """The store failed or did not answer in time. `may_be_done`: the change may still be
    committed."""

    def __init__(self, message: str, *, may_be_done: bool = False) -> None:
        super().__init__(message, retry_after_s=_RETRY_AFTER_S)
        self.may_be_done = may_be_done


class Threads:
    """Threads of the store. Every call on them has a deadline."""

    def __init__(self, count: int, call_s: float) -> None:
        self._call_s = call_s
        self._waiting = 0
        self._executor = ThreadPoolExecutor(count, "store")

    async def run(self, call: Callable[[], T]) -> T:
        """Run `call`, which may block. Raises StoreUnavailable after the deadline."""
        if self._waiting >= _MAX_WAITING:
            raise StoreUnavailable(f"{self._waiting} calls of the store are waiting")
        self._waiting += 1
        future = self._executor.submit(call)
        future.add_done_callback(_retrieve)
        try:
            async with asyncio.timeout(self._call_s):
                return await asyncio.wrap_future(future)
        except TimeoutError:
            # The timeout has cancelled the future, unless a thread had already started the call.
            text = f"the store did not answer within {self._call_s:g} s"
            raise StoreUnavailable(text, may_be_done=not future.cancelled()) from None
        finally:
            self._waiting -= 1

    async def close(self) -> None:
        """Drop waiting calls and wait for running ones."""
        # Shutdown blocks until they end, so it must not run on the event loop.
        await asyncio.to_thread(self._executor.shutdown, cancel_futures=True)


class Database:
    """A database. Owns its connections and threads, which `close` releases."""

    def __init__(self, url: str | Path, *, call_s: float = CALL_S) -> None:
        """`url` is postgresql://..., or the path of a SQLite file. Blocks. Raises ConfigError,
        but not if the server does not answer: `connect` then waits for it."""
        self._is_postgres = is_postgres = isinstance(url, str)
        self._engine = _postgres(url) if isinstance(url, str) else _sqlite(url)
        self._where = self._engine.url.render_as_string(hide_password=True)
        # Error of calls until the server has answered for the first time.
        self._away = ""
        self._started = 0.0
        try:
            self._prepare()
        except (exc.SQLAlchemyError, OSError) as error:
            if not (is_postgres and _is_away(error)):
                self._engine.dispose()
                text = f"cannot use {self._where}: {_reason(error)}"
                raise ConfigError(text, field="store") from error
            self._away = f"the store is not connected yet: {_reason(error)}"
        self._threads = Threads(_POSTGRES_THREADS if is_postgres else _SQLITE_THREADS, call_s)

    def _prepare(self) -> None:
        """Create missing tables and read the current time, from the PostgreSQL server, so that all
        routers agree, or from this machine for SQLite."""
        now = time.time()
        with self._engine.begin() as db:
            if self._is_postgres:
                # Lock, because two routers cannot create the same table at the same time.
                db.exec_driver_sql("SELECT pg_advisory_xact_lock(7064539)")
                now = float(db.scalar(sqlalchemy.text("SELECT extract(epoch FROM now())")) or now)
            metadata.create_all(db)
        # Read the clock once and count on the monotonic clock from there. Otherwise a clock step
        # would expire rows.
        self._started = now - time.monotonic()

    async def connect(self) -> None:
        """Return once the server has answered. Until then calls raise StoreUnavailable."""
        for pause_s in backoff(_RECONNECT_S, _MAX_RECONNECT_S):
            if not self._away:
                return
            logger.warning("%s: %s; next try in %.0f s", self._where, self._away, pause_s)
            await asyncio.sleep(pause_s)
            try:
                await self._threads.run(self._prepare)
            except (exc.SQLAlchemyError, OSError) as error:
                self._away = f"the store is not connected yet: {_reason(error)}"
            except StoreUnavailable as error:
                self._away = f"the store is not connected yet: {error.message}"
            else:
                self._away = ""
                logger.info("%s is connected", self._where)

    def now(self) -> float:
        """Return the time in seconds since 1970. Raises StoreUnavailable before the server has
        answered."""
        self._check_connected()
        return self._started + time.monotonic()

    def _check_connected(self) -> None:
        if self._away:
            raise StoreUnavailable(self._away)

    async def close(self) -> None:
        """Wait for running calls, which their statement timeouts bound, and close connections."""
        await self._threads.close()
        self._engine.dispose()

    async def read(self, work: Callable[[Connection], T]) -> T:
        """Run `work` on a thread in a transaction that is rolled back. Raises StoreUnavailable."""
        self._check_connected()
        return await self._threads.run(partial(self._call, work, is_write=False))

    async def write(self, work: Callable[[Connection], T]) -> T:
        """Run `work` on a thread, in one transaction. Raises StoreUnavailable."""
        self._check_connected()
        return await self._threads.run(partial(self._call, work, is_write=True))

    def _call(self, work: Callable[[Connection], T], *, is_write: bool) -> T:
        may_be_done = False
        try:
            with self._engine.connect().execution_options(is_write=is_write) as db:
                result = work(db)
                if is_write:
                    # If the connection breaks in COMMIT, the server may have committed.
                    may_be_done = True
                    db.commit()
                return result
        except (exc.SQLAlchemyError, OSError) as error:
            text = f"the store failed: {_reason(error)}"
            raise StoreUnavailable(text, may_be_done=may_be_done) from error


def insert(dialect: str, table: Table) -> postgresql.Insert | sqlite.Insert:
    """Return an INSERT that supports ON CONFLICT. `dialect`: name of the database's dialect."""
    if dialect == "postgresql":
        return postgresql.insert(table)
    return sqlite.insert(table)


def new_id(kind: str) -> str:
    return f"{kind}-{secrets.token_hex(12)}"


def _retrieve(future: Any) -> None:
    """Log the error of a call that is no longer awaited, because its deadline passed."""
    if not future.cancelled() and (error := future.exception()) is not None:
        logger.debug("store call failed after its deadline: %s", error)


def _reason(error: Exception) -> str:
    return str(getattr(error, "orig", None) or error).strip().partition("\n")[0]


def _is_away(error: Exception) -> bool:
    """Return True if a PostgreSQL server does not answer, or not yet; False if it refuses us."""
    if not isinstance(error, exc.OperationalError):
        return False
    if state := getattr(error.orig, "sqlstate", None):
        return str(state)[:2] in _AWAY
    # The driver has no state for a failed login.
    return not any(text in _reason(error) for text in _REFUSED)


def _sqlite(path: Path) -> sqlalchemy.Engine:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.touch(mode=0o600)
    path.chmod(0o600)
    engine = sqlalchemy.create_engine(
        sqlalchemy.URL.create("sqlite", database=str(path)),
        connect_args={"timeout": _STATEMENT_S, "isolation_level": None},
    )

    @event.listens_for(engine, "connect")
    def set_up(db: Any, _: object) -> None:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")

    @event.listens_for(engine, "begin")
    def begin(db: Connection) -> None:
        # IMMEDIATE, because SQLite does not wait for a lock to turn a read transaction into a
        # write: it fails at once if there was another write meanwhile.
        is_write = db.get_execution_options().get("is_write", True)
        db.exec_driver_sql("BEGIN IMMEDIATE" if is_write else "BEGIN")

    return engine


def _postgres(url: str) -> sqlalchemy.Engine:
    try:
        parsed = sqlalchemy.make_url(url).set(drivername="postgresql+psycopg")
        milliseconds = int(_STATEMENT_S * 1000)
        return sqlalchemy.create_engine(
            parsed,
            pool_size=_POSTGRES_THREADS,
            max_overflow=0,
            pool_pre_ping=True,
            connect_args={
                "connect_timeout": _CONNECT_S,
                "tcp_user_timeout": milliseconds,
                "options": f"-c statement_timeout={milliseconds}"
                f" -c idle_in_transaction_session_timeout={2 * milliseconds}",
            },
        )
    except ImportError as error:
        text = "postgresql:// needs the extra postgres: pip install 'pdserve[postgres]'"
        raise ConfigError(text, field="store") from error
    except (exc.ArgumentError, ValueError) as error:
        raise ConfigError("is no valid postgresql:// address", field="store") from error
