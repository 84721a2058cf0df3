"""Which workers start and stop as the load changes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pdserve.config import ScalingConfig, load_config
from pdserve.deploy.local.follower import LoadFollower
from pdserve.deploy.local.specs import PoolSpec, worker_pools
from pdserve.deploy.scaling.load import Load
from pdserve.errors import ConfigError
from pdserve.types import Role

if TYPE_CHECKING:
    from pathlib import Path

NAMES = ("decode-0", "decode-1", "decode-2")
RULES = ScalingConfig(target_load=1.0, up_after_s=1.0, down_after_s=1.0)


async def test_spare_workers_start_and_the_idlest_stop() -> None:
    need, streams = 3.0, {"decode-0": 2, "decode-1": 0, "decode-2": 1}

    async def measure() -> Load:
        return Load({Role.DECODE: need}, streams)

    follower = LoadFollower([PoolSpec("m", Role.DECODE, NAMES, 1)], RULES, measure)
    assert await follower.look(["decode-0"], (), 0.0) == []
    (change,) = await follower.look(["decode-0"], ["decode-2"], 2.0)
    assert (list(change.start), list(change.stop)) == (["decode-2"], [])
    assert change.reason == "2 decode workers instead of 1: the load needs 3.0"
    (change,) = await follower.look(["decode-0", "decode-2"], (), 4.0)
    assert (list(change.start), list(change.stop)) == (["decode-1"], [])
    need = 0.5
    assert await follower.look(NAMES, (), 4.5) == []
    (change,) = await follower.look(NAMES, (), 7.0)
    assert (list(change.start), list(change.stop)) == ([], ["decode-1"])


def test_pools_have_the_names_of_all_workers_that_may_run() -> None:
    config = load_config(None, {"up.decode.max_workers": 3})
    found = [(x.role, x.names, x.least) for x in worker_pools(config) if x.names]
    assert found == [(Role.PREFILL, ("prefill-0",), 1), (Role.DECODE, NAMES, 1)]


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"up.decode.workers": 3, "up.decode.max_workers": 2}, "up.decode.max_workers"),
        ({"up.decode.max_workers": 2, "up.decode.warm_workers": 2}, "up.decode.warm_workers"),
        ({"up.decode.max_workers": 2, "router.roles.auto": True}, "router.roles.auto"),
    ],
)
def test_a_wrong_number_and_two_masters_are_refused(
    changes: dict[str, object], key: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=key):
        load_config(None, changes)
