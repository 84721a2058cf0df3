"""Databases for tests: SQLite always, PostgreSQL if its server is installed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pdserve.config import StoreConfig
from router.store.database import Database
from router.store.store import make_store
from tests.support.postgres import needs_postgres, running_postgres

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

    from router.store.claims import Claims
    from router.store.store import Store
    from tests.support.postgres import PostgresServer

    Open = Callable[[], Database]
    OpenStore = Callable[..., Store]


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    with running_postgres() as server:
        yield server


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=needs_postgres)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str | Path:
    """Return the address of an empty database."""
    if request.param == "sqlite":
        return tmp_path / "store.sqlite"
    server: PostgresServer = request.getfixturevalue("postgres")
    return server.new_database()


@pytest.fixture
async def open_database(url: str | Path) -> AsyncIterator[Open]:
    """Return a function that opens the same database again, as another router does."""
    opened: list[Database] = []

    def open_one() -> Database:
        opened.append(Database(url))
        return opened[-1]

    yield open_one
    for database in opened:
        await database.close()


@pytest.fixture
async def open_store(url: str | Path, tmp_path: Path) -> AsyncIterator[OpenStore]:
    """Return a function that opens the same store again, as another router does. It takes settings
    of StoreConfig."""
    opened: list[Store] = []
    place = url if isinstance(url, str) else str(url.parent / "store")

    def open_one(router_id: str = "router-a", **settings: Any) -> Store:
        config = StoreConfig(database=place, files=str(tmp_path / "files"), **settings)
        opened.append(make_store(config, tmp_path / "store", router_id))
        return opened[-1]

    yield open_one
    for store in opened:
        await store.files.close()
        await store.database.close()


class Clock:
    """A clock that the test moves, and that advances by `step_s` at each read."""

    def __init__(self) -> None:
        self.now_s = self.step_s = 0.0

    def __call__(self) -> float:
        self.now_s += self.step_s
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


async def beat(claims: Claims) -> None:
    await claims._database.write(claims._beat)
