"""Arms as they are written, their equal shares of a machine, and what must be alike in them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.compare.arms import Arm, arm_changes, parse_arms, share_cores, with_overrides
from benchmarks.compare.settings import ArmSettings, differences, settings_of
from benchmarks.errors import BenchError

PD, TWO, ONE = Arm("1P1D", 1, 1), Arm("2A", aggregated=2), Arm("1A", aggregated=1)
PEER = Arm("peer", url="http://127.0.0.1:9")
NIXL = Arm("nixl", 1, 1, is_nixl=True)


def worker(role: str = "aggregated", **changes: Any) -> dict[str, Any]:
    values = {"role": role, "model": "m", "block_size": 16, "total_blocks": 100}
    settings = {"cores": "2", "max_num_batched_tokens": "2048"} | changes.pop("settings", {})
    return values | changes | {"settings": settings}


def test_arms_are_read_as_they_are_written() -> None:
    found = parse_arms(["1P1D", " 2A ", "2P3D1A", "small=1A", "peer=http://127.0.0.1:9"])
    assert found == (PD, TWO, Arm("2P3D1A", 2, 3, 1), Arm("small", aggregated=1), PEER)
    assert [arm.workers for arm in found] == [2, 2, 6, 1, 0]
    assert parse_arms(["nixl", "other=nixl"]) == (NIXL, replace(NIXL, name="other"))
    assert [arm.needs_http for arm in (PD, NIXL, PEER)] == [False, True, True]


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["1P1D"], "at least two arms"),
        (["2A", "2A"], "two arms are called 2A"),
        (["1P", "2A"], "'1P' is not an arm"),
        (["2D", "2A"], "'2D' is not an arm"),
        (["0A", "2A"], "'0A' is not an arm"),
        (["", "2A"], "cannot be called ''"),
        (["x=", "2A"], "'x=' is not an arm"),
        (["x=ftp://h", "2A"], "is not an arm"),
        (["../x=2A", "1A"], "cannot be called '../x'"),
    ],
)
def test_what_is_no_arm_is_refused(texts: list[str], message: str) -> None:
    with pytest.raises(BenchError, match=message.replace("(", r"\(")):
        parse_arms(texts)


@pytest.mark.parametrize(
    ("arms", "available", "wanted", "cores"),
    [
        ((PD, TWO), 2, None, 2),
        ((PD, TWO), 3, None, 2),
        ((PD, TWO), 4, None, 2),
        ((PD, TWO), 16, None, 14),
        ((PD, TWO), 16, 4, 4),
        ((PD, ONE), 8, None, 6),
        ((Arm("1P2D", 1, 2), TWO), 8, None, 6),
        ((TWO, PEER), 8, None, 6),
    ],
)
def test_every_arm_has_equally_many_cores(
    arms: tuple[Arm, ...], available: int, wanted: int | None, cores: int
) -> None:
    assert share_cores(arms, available, wanted) == cores
    assert all(cores % arm.workers == 0 for arm in arms if arm.url is None)


@pytest.mark.parametrize(
    ("available", "wanted", "message"),
    [(2, 4, "may use 2"), (8, 3, "use a multiple of 2"), (1, None, "need 2 cores")],
)
def test_cores_that_cannot_be_equal_are_refused(
    available: int, wanted: int | None, message: str
) -> None:
    with pytest.raises(BenchError, match=message):
        share_cores((PD, TWO), available, wanted)


def test_a_kv_cache_is_shared_between_an_arms_workers() -> None:
    of_two = arm_changes(PD, cores=4, kv_cache_bytes=64 << 20, engine="vllm")
    of_one = arm_changes(ONE, cores=4, kv_cache_bytes=64 << 20, engine="vllm")
    assert of_two["worker.engine_args.kv_cache_memory_bytes"] == 32 << 20
    assert of_one["worker.engine_args.kv_cache_memory_bytes"] == 64 << 20
    assert (of_two["up.cores_per_worker"], of_one["up.cores_per_worker"]) == (2, 4)
    fake = arm_changes(PD, cores=2, kv_cache_bytes=1 << 20, engine="fake")
    assert fake["worker.engine_args.total_blocks"] == 128
    with pytest.raises(BenchError, match="less than a block"):
        arm_changes(PD, cores=2, kv_cache_bytes=4096, engine="fake")


def test_an_override_is_one_arms_alone() -> None:
    arms = with_overrides((PD, TWO), ["2A:worker.engine_args.max_num_batched_tokens=256"])
    key = "worker.engine_args.max_num_batched_tokens"
    assert arm_changes(arms[1], cores=2, kv_cache_bytes=None, engine="vllm")[key] == 256
    assert key not in arm_changes(arms[0], cores=2, kv_cache_bytes=None, engine="vllm")
    with pytest.raises(BenchError, match=r"has no router\.policy"):
        with_overrides((NIXL, TWO), ["nixl:router.policy=round_robin"])
    with pytest.raises(BenchError, match="has no engine fake"):
        arm_changes(NIXL, cores=2, kv_cache_bytes=None, engine="fake")
    for text in ("3A:x=1", "2A", "2A:x", "2A:=1"):
        with pytest.raises(BenchError, match="--arm-set"):
            with_overrides((PD, TWO), [text])


def test_settings_are_summed_over_an_arms_workers() -> None:
    found = settings_of([worker("decode"), worker("prefill"), worker("prefill", model="other")])
    assert found == ArmSettings(
        workers={"prefill": 2, "decode": 1},
        cores=6,
        kv_cache_tokens=4800,
        of_workers={
            "block_size": ("16",),
            "max_num_batched_tokens": ("2048",),
            "model": ("m", "other"),
        },
    )
    assert list(found.workers) == ["prefill", "decode"]


ALIKE = settings_of([worker(), worker()])


@pytest.mark.parametrize(
    ("workers", "said"),
    [
        ([worker("prefill"), worker("decode")], []),
        ([worker(), worker(total_blocks=98)], []),  # profiled, within a hundredth
        ([worker(), worker(total_blocks=90)], ["kv_cache_tokens: a 3200, b 3040"]),
        ([worker()], ["cores: a 4, b 2", "kv_cache_tokens: a 3200, b 1600"]),
        ([worker(), worker(model="n")], ["model: a m, b m/n"]),
        (
            [worker(settings={"max_num_batched_tokens": "256"})] * 2,
            ["max_num_batched_tokens: a 2048, b 256"],
        ),
        ([worker(settings={"cudagraph_mode": "FULL"})] * 2, ["cudagraph_mode: a -, b FULL"]),
        ([worker(settings={"cores": "1"})] * 2, ["cores: a 4, b 2"]),
        ([worker(settings={"gpus": "0,1"}), worker(settings={"gpus": "1,2"})], ["gpus: a 0, b 3"]),
    ],
)
def test_a_difference_that_matters_is_found(workers: list[dict[str, Any]], said: list[str]) -> None:
    found = differences({"a": ALIKE, "b": settings_of(workers), "peer": None})
    assert [str(difference) for difference in found] == said
    assert differences({"a": ALIKE, "b": settings_of(workers)}, [x.name for x in found]) == []
