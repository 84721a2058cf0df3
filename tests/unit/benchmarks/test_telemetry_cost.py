"""The benchmark of traces and metrics: every arm is driven in every round."""

from __future__ import annotations

from benchmarks.telemetry import ARMS, Load, run


async def test_every_arm_is_driven_in_every_round() -> None:
    samples = await run("fake", [Load(streams=2, requests=2, tokens=1)], 1)
    assert sorted(sample.arm for sample in samples) == sorted(ARMS)
    for sample in samples:
        assert sample.tokens == 1
        assert sample.request_ms * 1e3 >= sample.router_us >= 0
        assert sample.requests_per_s > 0
