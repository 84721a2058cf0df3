"""Workers of several ranks exchange KV over each transport: the heads that each rank needs, from
the ranks that have them; and what happens where one rank of several breaks off."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from kv_transfer.protocol.plan import Shard
from kv_transfer.vllm.step import SourceEnded, SourceExpected, SourceProgress, TargetStart, Unneeded
from pdserve.capability import KEY_BYTES, Capability, CapabilityKey, WorkerStart, mint
from tests.unit.kv_transfer.caches import geometry
from tests.unit.kv_transfer.rig import BLOCK_SIZE, FROM, TO, TOKENS, N, Rig, Worker, until

if TYPE_CHECKING:
    from typing import Any

    from kv_transfer.link import Link

HEADS, HEAD_BYTES = 4, 4
HEAD_PAGE = BLOCK_SIZE * HEAD_BYTES
PAIRS = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 2), (2, 4), (8, 2), (2, 8), (8, 8)]


@dataclass
class Pool:
    """The ranks of one worker, stepped together as an engine does. One instance id for all."""

    ranks: list[Worker]

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(rank.half.address for rank in self.ranks)

    @property
    def instance_id(self) -> str:
        return self.ranks[0].instance_id

    def step(self, **parts: Any) -> None:
        for rank in self.ranks:
            rank.step(**parts)

    def prefill(self, *, held: bool = True) -> None:
        """A whole prefill of "t"."""
        self.step(expected=[SourceExpected("t", "p-t")])
        self.step(progress=[SourceProgress("t", FROM, N)])
        self.step(ended=[SourceEnded("t", TOKENS if held else (), held)])

    def start(self, source: Pool, addresses: tuple[str, ...] = ()) -> None:
        where = addresses or source.addresses
        start = TargetStart("t", "d-t", where, source.instance_id, 0, N, TO)
        self.step(starts=[start])

    def heads(self, block: int) -> list[list[bytes]]:
        """The block's KV by head of the model and layer; of replicas, the last."""
        found: dict[int, list[bytes]] = {}
        for rank in self.ranks:
            shard = rank.shard
            assert shard is not None
            for i, head in enumerate(range(shard.heads.start, shard.heads.stop)):
                pages = rank.cache.block(block)
                found[head] = [page[i * HEAD_PAGE : (i + 1) * HEAD_PAGE] for page in pages]
        return [found[head] for head in sorted(found)]


def pool(rig: Rig, tp: int, **settings: Any) -> Pool:
    ranks = []
    for i in range(tp):
        shard = Shard(HEADS, HEAD_PAGE, BLOCK_SIZE, tp, i)
        shape = geometry(page=len(shard.heads) * HEAD_PAGE)
        name = f"instance-of-{tp}-{settings.get('name', '')}"
        rest = {k: v for k, v in settings.items() if k != "name"}
        ranks.append(rig.worker(shape=shape, shard=shard, instance_id=name, **rest))
    made = Pool(ranks)
    # Ranks that hold the same heads hold the same bytes.
    for block in FROM:
        for rank in ranks:
            for layer, page in enumerate(rank.cache.block(block)):
                assert rank.shard is not None
                content = b"".join(
                    bytes([1 + block, 1 + layer, 1 + head, 7]) * (HEAD_PAGE // 4)
                    for head in range(rank.shard.heads.start, rank.shard.heads.stop)
                )
                assert len(content) == len(page)
                rank.cache.put(block, layer, content)
    return made


def settle(*pools: Pool) -> None:
    """Until no rank knows of any transfer."""
    ranks = [rank for each in pools for rank in each.ranks]
    until(lambda: all(rank.is_empty for rank in ranks), *ranks)
    for rank in ranks:  # what a thread has reported since the last look
        rank.collect()


def ended(each: Pool) -> list[list[str]]:
    return [rank.ended for rank in each.ranks]


@pytest.mark.parametrize(("source_tp", "target_tp"), PAIRS)
def test_every_head_lands_where_its_rank_reads_it(rig: Rig, source_tp: int, target_tp: int) -> None:
    source, target = pool(rig, source_tp, name="s"), pool(rig, target_tp, name="t")
    outside = {
        id(rank): [b for i, b in enumerate(rank.cache.blocks()) if i not in TO]
        for rank in target.ranks
    }
    target.start(source)
    source.prefill()
    settle(source, target)
    for s, t in zip(FROM, TO, strict=True):
        assert target.heads(t) == source.heads(s)
    for rank in target.ranks:
        assert (rank.ended, rank.failed) == (["d-t"], [])
        assert rank.arrivals["d-t"].token_ids == TOKENS
        assert rank.arrivals["d-t"].report.blocks == len(TO)
        assert [b for i, b in enumerate(rank.cache.blocks()) if i not in TO] == outside[id(rank)]
    # Each once, also those whose heads were read from another rank.
    assert [rank.sent for rank in source.ranks] == [["p-t"]] * source_tp
    total = sum(rank.arrivals["d-t"].report.bytes for rank in target.ranks)
    copies = max(1, target_tp // HEADS)
    assert total == len(TO) * 3 * HEADS * HEAD_PAGE * copies


@pytest.mark.parametrize(("source_tp", "target_tp"), [(2, 1), (1, 2), (4, 2), (8, 2)])
def test_a_source_that_is_not_needed_is_told_on_every_rank(
    rig: Rig, source_tp: int, target_tp: int
) -> None:
    source, target = pool(rig, source_tp, name="s"), pool(rig, target_tp, name="t")
    source.prefill()
    target.step(unneeded=[Unneeded("t", source.addresses, source.instance_id)])
    settle(source, target)
    assert [rank.sent for rank in source.ranks] == [["p-t"]] * source_tp


@pytest.mark.parametrize(("source_tp", "target_tp"), [(2, 1), (1, 2), (2, 2), (8, 2)])
def test_a_cancel_ends_every_share(rig: Rig, source_tp: int, target_tp: int) -> None:
    source, target = pool(rig, source_tp, name="s"), pool(rig, target_tp, name="t")
    target.start(source)
    source.step(expected=[SourceExpected("t", "p-t")])
    source.step(progress=[SourceProgress("t", FROM[:2], 8)])
    target.step(cancels=["t"])
    settle_targets(target)
    source.step(ended=[SourceEnded("t", TOKENS, held=True)])
    settle(source, target)
    assert ended(target) == [["d-t"]] * target_tp
    assert all(rank.failed == ["d-t"] for rank in target.ranks)
    assert [rank.sent for rank in source.ranks] == [["p-t"]] * source_tp


def settle_targets(target: Pool) -> None:
    until(lambda: all(rank.ended for rank in target.ranks), *target.ranks)


def links_between(source: Worker, target: Worker) -> list[Link]:
    addresses = {key[0]: link for key, link in target.half.links._outgoing.items()}
    return [link for address, link in addresses.items() if address == source.half.address]


@pytest.mark.parametrize("broken", [0, 1])
def test_one_lost_link_of_two_fails_the_request_once_and_frees_both_source_ranks(
    rig: Rig, broken: int
) -> None:
    source, target = pool(rig, 2, name="s"), pool(rig, 1, name="t")
    target.start(source)
    source.step(expected=[SourceExpected("t", "p-t")])
    source.step(progress=[SourceProgress("t", FROM[:2], 8)])
    (only,) = target.ranks
    until(lambda: all(share.received_blocks for share in only.half.links.targets), only)
    (link,) = links_between(source.ranks[broken], only)
    link.close("the test cuts it")
    until(lambda: only.ended, only)
    assert (only.ended, only.failed) == (["d-t"], ["d-t"])
    assert only.failures == {"d-t": "the test cuts it"}
    source.step(ended=[SourceEnded("t", TOKENS, held=True)])
    settle(source, target)
    assert [rank.sent for rank in source.ranks] == [["p-t"]] * 2


def test_a_reader_that_is_lost_takes_the_others_with_it(rig: Rig) -> None:
    """One source rank, two readers: their request fails as a whole, at once on both."""
    source, target = pool(rig, 1, name="s"), pool(rig, 2, name="t")
    target.start(source)
    (only,) = source.ranks
    until(lambda: sum(1 for _ in only.half.links.sources.early()) == 2, only)
    (link,) = links_between(only, target.ranks[0])
    link.close("the test cuts it")
    settle_targets(target)
    assert [rank.failed for rank in target.ranks] == [["d-t"], ["d-t"]]
    assert target.ranks[1].failures == {"d-t": "the decode worker went away"}
    source.prefill()
    settle(source, target)
    assert only.sent == ["p-t"]


def test_a_reader_that_never_comes_costs_no_more_than_the_lease(tcp_rig: Rig) -> None:
    source, target = pool(tcp_rig, 1, name="s"), pool(tcp_rig, 2, name="t")
    first, second = target.ranks
    first.step(starts=[TargetStart("t", "d-t", source.addresses, source.instance_id, 0, N, TO)])
    source.prefill()
    (only,) = source.ranks
    until(lambda: first.ended, first, only)
    assert first.failed == []
    assert only.sent == []
    only.end_lease("t")
    until(lambda: only.sent, only)
    assert only.sent == ["p-t"]
    assert not second.ended
    settle(source, target)


def test_ranks_in_the_wrong_order_are_found_out(rig: Rig) -> None:
    source, target = pool(rig, 2, name="s"), pool(rig, 2, name="t")
    before = [rank.cache.snapshot() for rank in target.ranks]
    source.step(expected=[SourceExpected("t", "p-t")])
    target.start(source, source.addresses[::-1])
    settle_targets(target)
    assert target.ranks[0].failures == {"d-t": "heads 0-1 are not held here (this rank holds 2-3)"}
    assert target.ranks[1].failures == {"d-t": "heads 2-3 are not held here (this rank holds 0-1)"}
    source.step(progress=[SourceProgress("t", FROM, N)])
    source.step(ended=[SourceEnded("t", TOKENS, held=True)])
    settle(source, target)
    assert [rank.cache.snapshot() for rank in target.ranks] == before


def test_a_source_of_so_many_ranks_that_no_plan_fits_is_refused(tcp_rig: Rig) -> None:
    target = pool(tcp_rig, 1, name="t")
    addresses = ("127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3")
    target.step(starts=[TargetStart("t", "d-t", addresses, "e", 0, N, TO)])
    assert target.ranks[0].failures == {"d-t": "4 KV heads cannot be split over 3 ranks"}
    settle(target)


@pytest.mark.parametrize(("source_tp", "target_tp"), [(2, 1), (1, 2), (4, 2)])
def test_every_rank_asks_for_the_one_right_to_the_transfer(
    tcp_rig: Rig, source_tp: int, target_tp: int
) -> None:
    """One capability for all: the ranks of a worker have its name and its one instance id."""
    key = CapabilityKey(b"k" * KEY_BYTES)
    source = pool(tcp_rig, source_tp, name="s", worker_id="p0", kv_key=key)
    target = pool(tcp_rig, target_tp, name="t", worker_id="d0")
    ends = (WorkerStart("p0", source.instance_id), WorkerStart("d0", target.instance_id))
    right = mint(key, Capability("t", *ends, int(time.time()) + 3600))
    source.prefill()
    for transfer_id, capability in (("t", ""), ("other", right), ("t", right)):
        start = TargetStart(
            transfer_id,
            f"d-{capability}",
            source.addresses,
            source.instance_id,
            0,
            N,
            TO,
            capability,
        )
        target.step(starts=[start])
        until(lambda: all(rank.is_empty for rank in target.ranks), *target.ranks, *source.ranks)
    for rank in target.ranks:
        assert rank.failed == ["d-", f"d-{right}"]
        assert list(rank.arrivals) == [f"d-{right}"]
        assert rank.failures["d-"] == "refused: no capability was presented"
    settle(source, target)
    assert [rank.sent for rank in source.ranks] == [["p-t"]] * source_tp
    refused = sum(rank.half.counters.refused_capabilities for rank in source.ranks)
    assert refused >= 2 * max(source_tp, target_tp)
