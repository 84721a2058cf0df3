"""Calls of the store when its database is locked, gone or full."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from contextlib import closing
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import text

from pdserve.errors import ConfigError
from router.store import database as database_module
from router.store.database import Database, StoreUnavailable
from tests.support.postgres import needs_postgres, running_postgres
from tests.support.timeouts import WAIT_S

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.postgres import PostgresServer
    from tests.unit.router.conftest import Open


async def test_a_locked_database_fails_calls_in_time_and_works_afterwards(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    database = Database(path, call_s=0.2)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        calls = [database.write(lambda db: db.scalar(text("SELECT 1"))) for _ in range(20)]
        found = await asyncio.gather(*calls, return_exceptions=True)
        assert {type(x) for x in found} == {StoreUnavailable}
        other.execute("ROLLBACK")
    while True:
        try:
            assert await database.write(lambda db: db.scalar(text("SELECT 1"))) == 1
            break
        except StoreUnavailable:
            pass
    await database.close()


@needs_postgres
async def test_a_server_that_goes_away_and_comes_back_is_used_again() -> None:
    with running_postgres() as server:
        database = Database(server.new_database())
        assert await database.read(lambda db: db.scalar(text("SELECT 1"))) == 1
        server.stop()
        for _ in range(3):
            with pytest.raises(StoreUnavailable):
                await database.read(lambda db: db.scalar(text("SELECT 1")))
        server.start()
        assert await database.read(lambda db: db.scalar(text("SELECT 1"))) == 1
        await database.close()


async def test_a_step_of_the_clock_changes_nothing(
    open_database: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = open_database()
    before = database.now()
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 3600)
    assert before <= database.now() < before + 1800


def test_an_address_that_is_none_fails_the_start() -> None:
    with pytest.raises(ConfigError) as raised:
        Database("postgresql://a:b:c")
    assert raised.value.field == "store"


@needs_postgres
async def test_a_server_that_refuses_us_fails_the_start(postgres: PostgresServer) -> None:
    url = postgres.new_database()
    with pytest.raises(ConfigError, match="does not exist") as raised:
        Database(f"{url}_none")
    assert raised.value.field == "store"


@needs_postgres
async def test_a_server_that_is_away_at_the_start_is_connected_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(database_module, "_RECONNECT_S", 0.01)
    with running_postgres() as server:
        url = server.new_database()
        server.stop()
        database = Database(url)
        for call in (database.read, database.write):
            with pytest.raises(StoreUnavailable, match="not connected yet"):
                await call(lambda db: db.scalar(text("SELECT 1")))
        with pytest.raises(StoreUnavailable):
            database.now()
        server.start()
        async with asyncio.timeout(WAIT_S):
            await database.connect()
        assert await database.read(lambda db: db.scalar(text("SELECT 1"))) == 1
        assert abs(database.now() - time.time()) < 60
        await database.close()


def test_the_file_is_private(tmp_path: Path) -> None:
    database = Database(tmp_path / "new" / "store.sqlite")
    asyncio.run(database.close())
    assert (tmp_path / "new" / "store.sqlite").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
