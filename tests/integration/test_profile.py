"""`pdserve profile` of a service whose engines take as long as they are told."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from pdserve.cli import USAGE, main
from pdserve.errors import ConfigError, InvalidRequest
from pdserve.profiling.document import Profile, parse, read
from pdserve.profiling.measure import Grid, Service, measure
from pdserve.types import Role
from tests.cluster import Cluster

if TYPE_CHECKING:
    from pathlib import Path

GRID = Grid(prompts=(50, 200, 400), concurrency=(1, 3), output_tokens=4, rounds=1)
TIMING: dict[str, object] = {"step_s": 0.002, "prefill_s": 0.0001}


async def profiled() -> tuple[Profile, list[tuple[int, int, int]]]:
    told: list[tuple[int, int, int]] = []
    async with Cluster(prefill=1, decode=1, engine_args=TIMING) as cluster:
        profile = await measure(
            Service(cluster.grpc), GRID, lambda done, n, found: told.append((done, n, len(found)))
        )
        too_long = replace(GRID, prompts=(10**7,))
        with pytest.raises(InvalidRequest, match="do not fit"):
            await measure(Service(cluster.grpc), too_long, lambda *_: None)
        with pytest.raises(InvalidRequest, match="served models"):
            await measure(Service(cluster.grpc, "other"), GRID, lambda *_: None)
    return profile, told


async def test_a_service_is_measured_and_read_back(tmp_path: Path) -> None:
    profile, told = await profiled()
    assert told == [(i, 6, 1 if i % 2 else 3) for i in range(1, 7)]
    assert len(profile.samples) == 12
    assert {x.prompt_tokens for x in profile.samples} == set(GRID.prompts)
    assert all(x.output_tokens == 4 and x.ttft_s > 0 for x in profile.samples)
    assert all(x.decode_worker == "decode-0" and x.transfer_bytes for x in profile.samples)
    prefill = next(x for x in profile.workers if x.role is Role.PREFILL)
    assert prefill.steps is not None
    assert prefill.steps.coefficients[1] / 1e3 == pytest.approx(TIMING["prefill_s"], rel=0.2)
    path = tmp_path / "profile.json"
    path.write_text(profile.to_json(), encoding="utf-8")
    assert read(path) == profile


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"schema": "pdserve-profile/0"}, "schema"),
        ({"samples": [{"prompt_tokens": 1}]}, "not complete"),
        ({"workers": None}, "not complete"),
        ({"wings": 2}, "not complete"),
    ],
)
def test_what_is_no_profile_is_refused(change: dict[str, object], reason: str) -> None:
    empty = Profile("demo", "2026-01-01T00:00:00+00:00", 1, {}, (), ())
    raw = json.loads(empty.to_json())
    assert parse(raw) == empty
    with pytest.raises(ConfigError, match=reason):
        parse({**raw, **change})


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the profile"):
        read(tmp_path / "none.json")


def test_wrong_counts_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "--prompts", "0"]) == USAGE
    assert "at least 1" in capsys.readouterr().err
