"""`python -m benchmarks.connections`, small."""

from __future__ import annotations

import pytest

from benchmarks.connections import run
from benchmarks.errors import BenchError
from tests.patience import HUNG_S

pytestmark = pytest.mark.timeout(HUNG_S)


async def test_connections_that_ask_nothing_stay_and_cost_little() -> None:
    rows = await run(100)
    assert [(row.face, row.connections, row.open) for row in rows] == [
        ("http", 100, 100),
        ("grpc", 100, 100),
    ]
    assert all(row.beside_mib >= row.before_mib > 0 for row in rows)


async def test_more_connections_than_files_are_refused_before_anything_starts() -> None:
    with pytest.raises(BenchError, match="--connections: 100000000000 need"):
        await run(100_000_000_000)
