"""``python -m benchmarks.kv_transfer`` on its smallest cases: what is said, and that bytes that did
not come are noticed. How fast it was is nobody's business here."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest

from benchmarks.errors import BenchError
from benchmarks.kv_transfer import pair
from benchmarks.kv_transfer.__main__ import main
from benchmarks.kv_transfer.cases import Case, geometry, trip
from benchmarks.kv_transfer.ends import Cache
from benchmarks.kv_transfer.pair import Measured, ratio

if TYPE_CHECKING:
    from collections.abc import Iterator

WAYS = {
    **dict.fromkeys(("memcpy", "shm", "shm digest"), "memcpy"),
    **dict.fromkeys(("loopback", "tcp", "tcp digest"), "loopback"),
}


@pytest.fixture
def no_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take seconds, where they are installed."""
    monkeypatch.setattr("benchmarks.kv_transfer.__main__.missing", lambda peer: "not here")


@pytest.mark.parametrize("layers", [1, 4])
@pytest.mark.usefixtures("no_peers")
def test_every_way_has_its_times_in_every_case(
    capsys: pytest.CaptureFixture[str], layers: int
) -> None:
    assert main(["--quick", "--json", "--layers", str(layers)]) == 0
    result = json.loads(capsys.readouterr().out)
    rows = [(r["blocks"], r["block_bytes"], r["way"], r["ceiling"]) for r in result["rows"]]
    assert rows == [
        (count, 16 << 10, way, ceiling) for count in (1, 16) for way, ceiling in WAYS.items()
    ]
    assert all(time > 0 for row in result["rows"] for time in row["seconds"])
    assert result["notes"] == ["nixl: not here", "mooncake: not here"]


@pytest.mark.usefixtures("no_peers")
def test_the_table_has_a_row_for_each_case(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quick"]) == 0
    out = capsys.readouterr().out
    assert [line.split()[1::2][:2] for line in out.splitlines() if line.startswith("│")] == [
        ["1", "16"],
        ["16", "16"],
    ]
    assert "nixl: not here" in out


def test_a_block_that_no_layers_can_share_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quick", "--layers", "3"]) == 2
    assert "cannot be cut into 3 pages" in capsys.readouterr().err


@pytest.fixture
def cache() -> Iterator[Cache]:
    cache = Cache(64 << 10)
    yield cache
    cache.shared.close()


@pytest.mark.parametrize("layers", [1, 2])
def test_one_wrong_word_is_one_wrong_block(cache: Cache, layers: int) -> None:
    layout = geometry(4096, layers, 64 << 10)
    once = trip(Case(3, 4096), layout.num_blocks, 1)
    source = Cache(64 << 10)
    source.number_words()
    cache.clear()
    assert cache.differing_blocks(layout, once) == 3
    cache.region(layout).copy_from(source.region(layout), once.source_ids, once.target_ids)
    assert cache.differing_blocks(layout, once) == 0
    last = layout.page_offset(layers - 1, once.target_ids[1]) + layout.page_bytes - 8
    cache.words[last // 8] ^= np.uint64(1 << 63)
    assert cache.differing_blocks(layout, once) == 1
    source.shared.close()


def test_a_way_that_moves_nothing_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair, "FLOORS", ())  # of memcpy, the target sees nothing
    with (
        pair.Pair(1 << 20, 1) as both,
        pytest.raises(BenchError, match="memcpy: 2 of 2 blocks did not arrive"),
    ):
        list(both.measure([Case(2, 4096)], ["memcpy"], 1))


def test_trips_are_scattered_differ_and_are_the_same_in_every_run() -> None:
    case = Case(8, 4096)
    once, again, other = (trip(case, 64, number) for number in (1, 1, 2))
    assert once == again
    assert once.source_ids != other.source_ids
    for ids in (once.source_ids, once.target_ids):
        assert len(set(ids)) == 8
        assert ids != sorted(ids)


def test_a_ratio_is_of_rounds_that_ran_side_by_side() -> None:
    case = Case(1, 4096)
    way, ceiling = Measured(case, "a", (2.0, 20.0, 4.0)), Measured(case, "b", (1.0, 10.0, 1.0))
    assert ratio(way, ceiling) == 0.5
