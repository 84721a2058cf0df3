"""Image features between two planes: they arrive whole or not at all, and leave no block behind."""

from __future__ import annotations

import random
import threading
import time
from typing import TYPE_CHECKING

import pytest
from msgspec import structs

from kv_transfer.image_features import (
    BLOCK_BYTES,
    FetchEnded,
    ImageFeaturePlane,
    ImageFeatureSource,
)
from kv_transfer.settings import ConnectorConfig
from tests.support.kv_pair import PATIENT, TRANSPORTS
from tests.support.timeouts import WAIT_S

if TYPE_CHECKING:
    from collections.abc import Iterator

ROW, BLOCKS = 1000, 8
LAYOUT = {"model": "tiny"}


class Planes:
    """An encode worker's plane, and a prefill worker's."""

    def __init__(self, **settings: object) -> None:
        config = structs.replace(ConnectorConfig(), **{**PATIENT, **settings})
        self.encode = ImageFeaturePlane(config, "encode", LAYOUT, BLOCKS * BLOCK_BYTES)
        self.prefill = ImageFeaturePlane(config, "prefill", LAYOUT, BLOCKS * BLOCK_BYTES)

    def source(self, transfer_id: str, **other: str) -> ImageFeatureSource:
        values = {"address": self.encode.address, "instance_id": "encode", **other}
        return ImageFeatureSource(transfer_id, row_bytes=ROW, **values)

    def ended(self, count: int = 1) -> list[FetchEnded]:
        """Wait for the ends of `count` fetches."""
        found: list[FetchEnded] = []
        end, pause = time.monotonic() + WAIT_S, threading.Event()
        while len(found) < count:
            assert time.monotonic() < end, found
            pause.wait(0.002)
            self.encode.collect()
            found += self.prefill.collect()
        return found

    def assert_nothing_left(self) -> None:
        end, pause = time.monotonic() + WAIT_S, threading.Event()
        while {self.encode.free_blocks, self.prefill.free_blocks} != {BLOCKS}:
            assert time.monotonic() < end, (self.encode.free_blocks, self.prefill.free_blocks)
            pause.wait(0.002)
            self.encode.collect()


@pytest.fixture(params=[*TRANSPORTS, "tls"])
def planes(
    request: pytest.FixtureRequest, encrypted: dict[str, object], clean: None
) -> Iterator[Planes]:
    is_tls = request.param == "tls"
    made = Planes(transports=("tcp" if is_tls else request.param,), **encrypted if is_tls else {})
    yield made
    made.encode.close()
    made.prefill.close()


def _data(rows: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(rows * ROW)


def test_features_arrive_whole_whoever_is_first(planes: Planes) -> None:
    early, late = _data(131, 1), _data(66, 2)
    assert planes.prefill.fetch(planes.source("a"), 0, 131)
    assert planes.encode.offer("a/0", memoryview(early))
    assert planes.encode.offer("a/1", memoryview(late))
    assert planes.prefill.fetch(planes.source("a"), 1, 66)
    assert set(planes.ended(2)) == {FetchEnded("a/0"), FetchEnded("a/1")}
    assert planes.prefill.free_blocks == BLOCKS - 4
    assert (planes.prefill.take("a/0"), planes.prefill.take("a/1")) == (early, late)
    planes.assert_nothing_left()


def test_a_fetch_ends_if_no_features_will_follow(planes: Planes) -> None:
    """Refused, of another size, declined, or of a worker that was restarted or has gone."""
    assert planes.prefill.fetch(planes.source("a"), 0, 10)
    planes.encode.refuse("a/0")
    assert planes.prefill.fetch(planes.source("a"), 1, 10)
    planes.encode.offer("a/1", memoryview(_data(9)))
    assert planes.prefill.fetch(planes.source("a"), 5, 10)
    planes.encode.offer("a/5", memoryview(_data(11)))
    planes.encode.offer("a/2", memoryview(_data(9)))
    planes.prefill.decline(planes.source("a"), 2)
    assert planes.prefill.fetch(planes.source("a", instance_id="before"), 3, 10)
    assert planes.prefill.fetch(planes.source("a"), 4, 10)
    planes.prefill.cancel("a/4", "too late")
    found = planes.ended(5)
    assert {x.transfer_id for x in found} == {"a/0", "a/1", "a/3", "a/4", "a/5"}
    assert all(x.reason for x in found)
    planes.assert_nothing_left()
    assert planes.prefill.fetch(planes.source("b"), 0, 10)
    planes.encode.close()
    (failed,) = planes.prefill.collect() or planes.ended()
    assert failed.reason


def test_a_fetch_that_fails_without_a_reason_has_not_arrived(clean: None) -> None:
    planes = Planes()
    assert planes.prefill.fetch(planes.source("a"), 0, 10)
    planes.prefill.cancel("a/0", "")  # as with a producer's Fail that has none
    (failed,) = planes.ended()
    assert failed.reason
    planes.assert_nothing_left()
    planes.encode.close()
    planes.prefill.close()


def test_a_full_pool_refuses_and_frees_what_has_ended(planes: Planes) -> None:
    half = BLOCKS * BLOCK_BYTES // ROW // 2
    assert not planes.prefill.fetch(planes.source("a"), 0, 3 * half)
    for index in range(2):
        assert planes.encode.offer(f"a/{index}", memoryview(_data(half)))
    assert not planes.encode.offer("a/2", memoryview(_data(half)))
    for index in range(2):
        assert planes.prefill.fetch(planes.source("a"), index, half)
    assert not planes.prefill.fetch(planes.source("a"), 2, half)
    assert {x.reason for x in planes.ended(2)} == {""}
    for index in range(2):
        planes.prefill.drop(f"a/{index}")
    planes.assert_nothing_left()


def test_planes_of_other_models_exchange_nothing(clean: None) -> None:
    planes = Planes()
    other = ImageFeaturePlane(ConnectorConfig(), "other", {"model": "large"}, BLOCK_BYTES)
    planes.encode.offer("a/0", memoryview(_data(9)))
    assert other.fetch(planes.source("a"), 0, 9)
    planes.prefill, kept = other, planes.prefill
    (failed,) = planes.ended()
    assert "layout" in failed.reason
    for each in (planes.encode, other, kept):
        each.close()


def test_features_that_nobody_fetches_are_freed_when_their_hold_ends(clean: None) -> None:
    planes = Planes(hold_s=0.05)
    planes.encode.offer("a/0", memoryview(_data(9)))
    planes.assert_nothing_left()
    planes.encode.close()
    planes.prefill.close()
