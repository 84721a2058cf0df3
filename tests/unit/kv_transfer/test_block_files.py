"""Files of KV blocks: what is read is what was written, and the quota holds."""

from __future__ import annotations

import fcntl
import os
from typing import TYPE_CHECKING

import pytest

from kv_transfer.tiers.block_files import BlockFiles
from pdserve.errors import ConfigError
from tests.support.kv_caches import HostCache, geometry

if TYPE_CHECKING:
    from pathlib import Path

QUOTA = 64 << 10


@pytest.fixture
def cache() -> HostCache:
    return HostCache(geometry(layers=1, page=4000), seed=1)


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*/*/*"))


def test_a_block_is_read_as_it_was_written(tmp_path: Path, cache: HostCache) -> None:
    BlockFiles(tmp_path, "model", QUOTA).store("abc", cache.region, 3)
    files, want = BlockFiles(tmp_path, "model", QUOTA), cache.block(3)
    assert files.load("abc", cache.region, 5)
    assert cache.block(5) == want
    assert not files.load("abd", cache.region, 5)
    assert not BlockFiles(tmp_path, "other", QUOTA).has("abc")


@pytest.mark.parametrize("damage", ["a bit", "cut", "another block's"])
def test_a_damaged_file_is_missing_and_removed(
    tmp_path: Path, cache: HostCache, damage: str
) -> None:
    files = BlockFiles(tmp_path, "model", QUOTA)
    files.store("abc", cache.region, 3)
    files.store("abd", cache.region, 4)
    path = tmp_path / "model/ab/abc"
    content = bytearray(path.read_bytes())
    if damage == "a bit":
        content[-1] ^= 1
    if damage == "another block's":
        content = bytearray((tmp_path / "model/ab/abd").read_bytes())
    path.write_bytes(content[:-1] if damage == "cut" else content)
    assert not files.load("abc", cache.region, 5)
    assert not path.exists()


def test_the_files_used_longest_ago_make_room(tmp_path: Path, cache: HostCache) -> None:
    one, other = (BlockFiles(tmp_path, name, QUOTA) for name in ("a", "b"))
    for number in range(40):
        files = one if number % 2 else other
        files.store(f"{number:02}", cache.region, 3)
        assert size_of(tmp_path) <= QUOTA
        for path in tmp_path.glob("*/*/*"):
            if path.name != "00":
                os.utime(path, (int(path.name), int(path.name)))
        assert other.load("00", cache.region, 5)
    assert one.has("39")
    assert not one.has("01")


def test_files_of_a_killed_writer_are_removed_at_the_next_start(tmp_path: Path) -> None:
    BlockFiles(tmp_path, "model", QUOTA)
    (tmp_path / "unfinished").write_bytes(b"half")
    BlockFiles(tmp_path, "model", QUOTA)
    assert not (tmp_path / "unfinished").exists()


def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match=r"kv\.tiers\.disk_path"):
        BlockFiles(tmp_path, "model", QUOTA)


def test_a_folder_that_stays_locked_is_named(tmp_path: Path) -> None:
    BlockFiles(tmp_path, "model", QUOTA)
    with (tmp_path / "lock").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match=r"has held .*/lock for 0.01 s") as refused:
            BlockFiles(tmp_path, "model", QUOTA, start_timeout_s=0.01)
    assert refused.value.field == "kv.tiers.disk_path"
