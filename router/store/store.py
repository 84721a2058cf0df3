"""The store of a router: opens all its parts, removes expired rows, and closes it."""

from __future__ import annotations

import asyncio
import logging
import tempfile
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pdserve.background import background
from pdserve.errors import ConfigError
from router.store.batches import BatchStore
from router.store.claims import Claims
from router.store.contents import open_contents
from router.store.database import POSTGRES, Database, StoreUnavailable
from router.store.files import FileStore
from router.store.keys import IdempotencyKeys
from router.store.responses import ResponseStore

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from pdserve.config import StoreConfig

logger = logging.getLogger(__name__)

_SWEEP_S = 60.0
# Sweeps per sweep of abandoned uploads, which are rare and require listing the whole bucket. The
# first is not at the start, because a router that keeps failing to start would list it each time.
_SWEEPS_OF_UPLOADS, _FIRST_SWEEP = 60, 10
_DAY_S = 86_400.0
DATABASE_FILE = "store.sqlite"


class Store(NamedTuple):
    database: Database
    claims: Claims
    files: FileStore
    batches: BatchStore
    responses: ResponseStore
    keys: IdempotencyKeys

    async def sweep(self) -> None:
        """Delete expired files, batches, responses and keys until cancelled."""
        sweeps = 0
        while True:
            try:
                if sweeps % _SWEEPS_OF_UPLOADS == _FIRST_SWEEP:
                    await self.files.sweep_uploads()
                await self.files.sweep()
                await self.batches.sweep()
                await self.responses.sweep()
                await self.keys.sweep()
                await self.claims.sweep()
            except StoreUnavailable as error:
                logger.warning("cannot delete expired rows and files: %s", error)
            sweeps += 1
            await asyncio.sleep(_SWEEP_S)


def make_store(config: StoreConfig, folder: Path, router_id: str) -> Store:
    """Open the store that `config` names. `folder` holds the database and the files if `config`
    does not name them. Blocks. Raises ConfigError."""
    is_postgres = config.database.startswith(POSTGRES)
    if is_postgres and not config.files:
        raise ConfigError("is required with PostgreSQL: a folder or s3://...", field="store.files")
    contents = open_contents(config.files or str(folder))
    database = Database(config.database if is_postgres else folder / DATABASE_FILE)
    claims, quotas, retention = Claims(database, router_id), config.quotas, config.retention
    files = FileStore(database, contents, quotas, retention_s=retention.files_days * _DAY_S)
    return Store(
        database,
        claims,
        files,
        BatchStore(database, claims, files, quotas, retention_s=retention.batches_days * _DAY_S),
        ResponseStore(database, quotas, retention_s=retention.responses_days * _DAY_S),
        IdempotencyKeys(database, claims),
    )


@asynccontextmanager
async def open_store(config: StoreConfig, router_id: str) -> AsyncIterator[Store]:
    """Open the store for the context. Meanwhile, connect to an unavailable database, renew this
    router's claims and delete expired rows."""
    async with AsyncExitStack() as stack:
        folder = config.database
        if not folder or folder.startswith(POSTGRES):
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="pdserve-store-"))
        # On a thread, because a database or bucket may take seconds to answer.
        store = await asyncio.to_thread(make_store, config, Path(folder), router_id)
        # Closed in reverse order: background tasks and files still use the database.
        stack.push_async_callback(store.database.close)
        stack.push_async_callback(store.files.close)
        await stack.enter_async_context(background("store-connection", store.database.connect))
        await stack.enter_async_context(background("claims", store.claims.run))
        await stack.enter_async_context(background("store-sweeper", store.sweep))
        yield store
