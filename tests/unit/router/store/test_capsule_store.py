"""The folder of incident capsules: what is listed, and what is deleted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pdserve.config import CapsulesConfig
from pdserve.errors import ConfigError
from pdserve.observe.capsules import Capsule as Content
from pdserve.observe.capsules import CapsuleHeader, seal
from router.store.capsules import CapsuleStore

if TYPE_CHECKING:
    from pathlib import Path

DAY_S = 86_400.0
NOW = 20_000 * DAY_S


def store(folder: Path, **limits: float) -> CapsuleStore:
    config = CapsulesConfig(directory=str(folder / "capsules"), **limits)  # type: ignore[arg-type]
    return CapsuleStore(config, lambda: NOW)


def keep(capsules: CapsuleStore, name: str, *, age_s: float = 0.0, tenant: str = "", mib: int = 0):  # type: ignore[no-untyped-def]
    header = CapsuleHeader(request_id=name, model="m", tenant=tenant, created=NOW - age_s)
    data = seal(Content(header=header, prompt_tokens=0, sampling={})) + bytes(mib << 20)
    capsules.keep(header, data)


def names(capsules: CapsuleStore) -> list[str]:
    return [x.header.request_id for x in capsules.listed()]


def test_capsules_are_listed_newest_first_and_private(tmp_path: Path) -> None:
    capsules = store(tmp_path)
    for number in range(3):
        keep(capsules, f"r{number}/../\0", age_s=number)
    assert names(capsules) == [f"r{number}/../\0" for number in range(3)]
    assert [x.path.stat().st_mode & 0o777 for x in capsules.listed()] == [0o600] * 3
    assert (tmp_path / "capsules").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("limits", "left"),
    [
        ({"max_capsules": 2}, ["r0", "r1"]),
        ({"max_capsules_per_tenant": 1}, ["r0", "r2"]),
        ({"max_mib": 3}, ["r0", "r1"]),
        ({"days": 1.5}, ["r0", "r1"]),
    ],
)
def test_the_oldest_are_deleted(tmp_path: Path, limits: dict[str, float], left: list[str]) -> None:
    capsules = store(tmp_path, **limits)
    for name, age_s, tenant in (("r2", 2, "b"), ("r1", 1, "a"), ("r0", 0, "a")):
        keep(capsules, name, age_s=age_s * DAY_S, tenant=tenant, mib=1)
    assert names(capsules) == left


def test_time_alone_deletes_too_and_other_files_are_left_alone(tmp_path: Path) -> None:
    old = CapsuleStore(CapsulesConfig(directory=str(tmp_path / "capsules")), lambda: 0.0)
    keep(old, "r", age_s=30 * DAY_S)
    for name in ("notes.capsule", "0.a.b.txt"):
        (tmp_path / "capsules" / name).write_text("mine")
    capsules = store(tmp_path)
    capsules.prune()
    assert names(capsules) == []
    assert len(list((tmp_path / "capsules").iterdir())) == 2


def test_a_folder_that_cannot_be_used_is_refused_by_its_key(tmp_path: Path) -> None:
    (tmp_path / "capsules").write_text("a file")
    with pytest.raises(ConfigError) as refused:
        store(tmp_path)
    assert refused.value.field == "router.capsules.directory"
