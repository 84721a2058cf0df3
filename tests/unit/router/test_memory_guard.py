"""The router refuses requests before the kernel ends it for its memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pdserve.background import background
from pdserve.errors import Overloaded, Refusal
from pdserve.model.pixels import Pixels
from pdserve.process.memory import cgroup_limit_bytes, free_bytes
from pdserve.types import MediaItem
from router.admission.memory import (
    MediaMemory,
    MemoryGuard,
    resident_bytes,
    trim,
    used_bytes,
)
from router.api.open_requests import OpenRequests
from tests.support.timeouts import wait_until

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20


@pytest.mark.parametrize(
    ("groups", "limits", "expected"),
    [
        ("0::/pod/main", {"memory.max": "max", "pod/memory.max": "4096"}, 4096),
        ("0::/pod", {"memory.max": "1024", "pod/memory.max": "4096"}, 1024),
        ("0::/", {}, 0),
        (
            "4:memory:/pod\n3:cpuset:/\n0::/",
            {
                "memory/pod/memory.limit_in_bytes": "2048",
                "memory/memory.limit_in_bytes": "9223372036854771712",
            },
            2048,
        ),
        ("4:memory:/pod", {"memory/memory.limit_in_bytes": "9223372036854771712"}, 0),
    ],
)
def test_the_limit_is_the_lowest_of_the_control_groups(
    tmp_path: Path, groups: str, limits: dict[str, str], expected: int
) -> None:
    for name, text in limits.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    (tmp_path / "groups").write_text(groups)
    assert cgroup_limit_bytes(tmp_path / "groups", tmp_path) == expected


def test_free_memory_is_what_the_control_group_leaves_with_the_cache_that_can_go(
    tmp_path: Path,
) -> None:
    files = {
        "memory.max": "8192",
        "memory.current": "6000",
        "memory.stat": "anon 1\ninactive_file 500",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "groups").write_text("0::/")
    assert free_bytes(tmp_path / "groups", tmp_path) == 8192 - 6000 + 500


async def test_new_requests_are_refused_near_the_limit() -> None:
    used = used_bytes()
    assert used > 10 * MIB
    OpenRequests(MemoryGuard(0)).check_new()
    OpenRequests(MemoryGuard(2 * used, measure=lambda: used)).check_new()
    guard = MemoryGuard(used, measure=lambda: used)
    requests = OpenRequests(guard)
    requests.check_open()  # readiness: other routers have no more memory
    with pytest.raises(Overloaded) as refused, requests.enter():
        pass
    assert (refused.value.http_status, refused.value.reason) == (429, Refusal.MEMORY)
    assert refused.value.retry_after_s
    assert guard.refused == 1


async def test_images_are_refused_if_no_file_can_be_made_for_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    memory = MediaMemory(0, disk_limit=100)
    image = MediaItem("image", "hash", 0, 1, data=b"pixels")
    with pytest.raises(Overloaded, match="disk_mib"):
        async with memory.keep(Pixels([image])):
            raise AssertionError
    assert memory.on_disk == 0


async def test_freed_memory_is_given_back() -> None:
    """glibc keeps small blocks below one that is in use."""
    # Without child processes, such as services of other tests that end or grow meanwhile.
    trim()  # what earlier tests freed would be used again, without growth
    guard = MemoryGuard(0, poll_s=0.0, measure=resident_bytes)
    blocks = [bytes(2000) for _ in range(200_000)]
    held = resident_bytes()
    assert held > guard.used + 150 * MIB
    last = blocks[-1]
    del blocks
    assert resident_bytes() > held - 50 * MIB
    async with background("memory", guard.run):
        await wait_until(lambda: resident_bytes() <= held - 150 * MIB)
    assert last
