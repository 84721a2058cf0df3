"""Digests of one block in several: which blocks they are, and what is found by them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from kv_transfer.cache.geometry import KvGroup, PagePart
from kv_transfer.cache.gpu_memory import DeviceRegion
from kv_transfer.cache.host_memory import DIGEST_BYTES, checked_blocks
from kv_transfer.protocol.consumer import Consumer, Received
from kv_transfer.protocol.messages import (
    Ack,
    ChunkReady,
    GroupBlocks,
    Nack,
    Send,
    Subscribe,
    TransferDone,
    decode,
    encode,
)
from kv_transfer.protocol.plan import CopyPlan, Shard
from kv_transfer.protocol.producer import Producer
from kv_transfer.settings import read_extra_config
from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from kv_transfer.protocol.messages import KvMessage

PAGE, BLOCKS, IDS = 64, 12, [7, 2, 9, 0, 5]
PART = PagePart(0, 0, 0, PAGE, 0, 0, 1)
HEADS = LAYERS = [0, 1, 0]


def digests(*numbers: int) -> bytes:
    return b"".join(bytes([n]) * DIGEST_BYTES for n in numbers)


@pytest.mark.parametrize(
    ("first", "count", "one_in", "want"),
    [(0, 5, 2, [0, 2, 4]), (3, 5, 4, [1]), (1, 2, 8, []), (0, 1, 1024, [0]), (6, 3, 3, [0])],
)
def test_every_so_many_th_block_of_a_sequence_is_checked(
    first: int, count: int, one_in: int, want: list[int]
) -> None:
    assert [*(checked_blocks(first, count, one_in) or ())] == want
    assert checked_blocks(first, count, 1) is None


def region(layers: int = 3, content: int = 16) -> DeviceRegion:
    dice = torch.Generator().manual_seed(layers)
    shape = (BLOCKS, layers, 2, 4, content)
    memory = torch.randint(0, 256, shape, dtype=torch.uint8, generator=dice)
    return DeviceRegion(list(memory.transpose(0, 1)))


@pytest.mark.parametrize("checked", [range(1, 5, 2), range(0, 5, 8), range(7, 5, 8)])
@pytest.mark.parametrize("content", [16, 24], ids=["runs", "through-staging"])
def test_blocks_that_are_not_checked_have_no_digest(content: int, checked: range) -> None:
    of = region(content=content)
    every = np.frombuffer(of.digests(IDS), np.uint64)
    copy = of.begin_digests(IDS, checked)
    assert copy.has_ended
    made = np.frombuffer(copy.wait(), np.uint64)
    assert len(made) == len(IDS)
    for n, digest in enumerate(made):
        assert digest == (every[n] if n in checked else 0)


def received(one_in: int, damaged: int, told: int = 1) -> KvMessage:
    """Return the answer to the end of a transfer of two groups, of which a block is damaged."""
    consumer: Consumer[str] = Consumer(10.0, one_in)
    groups = [
        GroupBlocks(0, 2, [4, 5, 6, 7], HEADS, LAYERS),
        GroupBlocks(1, 5, [8], HEADS, LAYERS),
    ]
    parts = [PART, replace(PART, group=1)]
    consumer.subscribe("r", [("link", Subscribe("t", 6, groups), parts)], 0.0)
    want = digests(1, 2, 3, 4, 5)
    for first, count in ((0, 4), (4, 1)):
        chunk = ChunkReady("t", first, count, count * PAGE)
        place = consumer.begin_chunk("link", chunk)
        assert place is not None
        assert place.checked == checked_blocks((2, 5)[first == 4], count, one_in)
        made = bytearray(want[DIGEST_BYTES * first : DIGEST_BYTES * (first + count)])
        if first <= damaged < first + count:
            made[DIGEST_BYTES * (damaged - first)] ^= 1
        consumer.end_chunk("link", chunk, 0.0, 0.0, bytes(made))
    done = TransferDone("t", [1], want, 0.0, 0.0, told - 1)
    ((send),) = consumer.on_message("link", done, 0.0, "nccl", is_pull=False)
    assert isinstance(send, Send)
    if isinstance(send.message, Ack):
        assert isinstance(consumer.take_outcomes()[0], Received)
    return send.message


@pytest.mark.parametrize("damaged", range(5))
def test_by_default_damage_to_any_block_is_found(damaged: int) -> None:
    assert received(1, damaged) == Nack("t", damaged)


@pytest.mark.parametrize(
    ("one_in", "told", "found"),
    [(2, 1, {0, 2}), (1, 2, {0, 2}), (2, 2, {0, 2}), (5, 1, {3, 4}), (4, 2, {2}), (2, 3, set())],
)
def test_damage_is_found_in_the_blocks_that_both_workers_digest(
    one_in: int, told: int, found: set[int]
) -> None:
    """The first group begins at block 2 of the sequence, the second at block 5."""
    for damaged in range(5):
        want = Nack("t", damaged) if damaged in found else Ack("t")
        assert received(one_in, damaged, told) == want


def test_a_producer_makes_and_tells_digests_of_one_block_in_several() -> None:
    plan = CopyPlan((Shard(1, PAGE, KvGroup(0, 1), (1,)),))
    producer: Producer[str] = Producer(
        plan=plan, chunk_blocks={0: 3}, hold_s=30.0, heartbeat_s=5.0, digest_one_in=4
    )
    producer.expect("t", "r", 0.0)
    producer.progress("t", [list(range(BLOCKS))], 8, 0.0)
    producer.end("t", (1,), 0.0, held=True)
    found = []
    while (of := producer.undigested("t")) is not None:
        assert of.checked is not None
        found += [of.first + n for n in of.checked]
        producer.begin_digests(of)
        producer.digested(of, bytes(DIGEST_BYTES * len(of.block_ids)), 0.0)
    assert found == [0, 4]
    blocks = GroupBlocks(0, 0, list(range(8)), HEADS, LAYERS)
    actions = producer.subscribe("link", Subscribe("t", 8, [blocks]), 0.0)
    while not isinstance(actions[0], Send):
        assert producer.begin_copy(actions[0])  # type: ignore[arg-type]
        actions = producer.end_copy(actions[0], 0.0, 0.0, 1)  # type: ignore[arg-type]
    assert isinstance(actions[0].message, TransferDone)
    assert actions[0].message.undigested == 3


def test_an_older_worker_reads_the_end_of_a_transfer_without_sampling() -> None:
    done = TransferDone("t", [1], b"", 0.0, 0.0)
    assert b"undigested" not in encode(done)
    sampled = TransferDone("t", [1], b"", 0.0, 0.0, 2)
    assert decode(encode(sampled)[4:]) == sampled


@pytest.mark.parametrize("value", [0, -1, 1025, "2"])
def test_a_wrong_number_is_refused_by_name(value: object) -> None:
    with pytest.raises(ConfigError, match="digest_one_in"):
        read_extra_config({"digest_one_in": value})
