"""The program that times placement."""

from __future__ import annotations

import json

import pytest

from benchmarks.placement.__main__ import main
from benchmarks.placement.pool import MODEL, busy_pool
from router.placement.policies.by_name import POLICIES


def test_every_policy_is_timed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json", "--quick"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {row["name"] for row in rows} >= set(POLICIES)
    assert all(0 < row["fastest_us"] <= row["median_us"] for row in rows)


def test_its_pool_can_be_placed_on() -> None:
    candidates = busy_pool(10).candidates(MODEL.name)
    assert len(candidates) == 10
    assert all(c.has_room(2300) for c in candidates)
    assert len({c.reserved_blocks for c in candidates}) > 5


@pytest.mark.parametrize("workers", ["1", "0", "4,x"])
def test_a_pool_that_cannot_be_is_refused(workers: str) -> None:
    with pytest.raises(SystemExit):
        main(["--workers", workers])
