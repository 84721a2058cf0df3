"""What a vLLM engine is given, as far as it can be said without vLLM."""

from __future__ import annotations

import pytest

from pdserve.errors import ConfigError
from workers.vllm_settings import KvSettings, memory_left_to_kv

EXTRA = {"transports": ["nccl"], "staging_slots": 2, "staging_slot_bytes": 50}
KV = KvSettings("instance_id", {**EXTRA, "nccl_budget_bytes": 100})


@pytest.mark.parametrize(
    ("args", "left"),
    [
        ({}, {"gpu_memory_utilization": pytest.approx(0.6)}),
        ({"gpu_memory_utilization": 0.45}, {"gpu_memory_utilization": pytest.approx(0.15)}),
        ({"kv_cache_memory_bytes": 1}, {}),
    ],
)
def test_what_transports_may_hold_is_not_given_to_the_kv_cache(
    args: dict[str, object], left: dict[str, float]
) -> None:
    assert memory_left_to_kv(KV, args, 1000, 0.9) == left


def test_transports_that_leave_nothing_to_the_kv_cache_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"300 bytes are more than 0\.90 of a GPU of 300"):
        memory_left_to_kv(KV, {}, 300, 0.9)
    assert memory_left_to_kv(KvSettings("instance_id", connector="nixl"), {}, 300, 0.9) == {}
