"""Whole transfers between two worker halves in one process, the same over every transport."""

from __future__ import annotations

import queue
from select import select

import pytest

from kv_transfer.protocol.link import ProducerChannel
from tests.support.kv_caches import geometry
from tests.support.kv_pair import (
    FROM,
    TO,
    TOKENS,
    KvWorkers,
    N,
    check_exact,
    settle,
    transfer,
    until,
)
from tests.support.timeouts import WAIT_S


@pytest.mark.parametrize("order", ["subscription first", "prefill first", "between"])
def test_a_transfer_brings_every_block_and_the_tokens(kv_workers: KvWorkers, order: str) -> None:
    source, target = kv_workers.pair()
    before = target.cache.blocks()
    if order == "subscription first":
        target.start(source, "t", TO, N)
        until(lambda: len(source.driver.producer), source)
        source.prefill("t", FROM, N)
    elif order == "prefill first":
        source.prefill("t", FROM, N)
        target.start(source, "t", TO, N)
    else:
        source.expect("t")
        target.start(source, "t", TO, N)
        source.compute("t", FROM, N)
        source.finish("t")
    settle(source, target)
    assert (target.ended, target.failed, source.sent) == (["d-t"], [], ["p-t"])
    check_exact(source, target, before)
    arrival = target.arrivals["d-t"]
    assert arrival.token_ids == TOKENS
    assert arrival.report.blocks == 4
    assert arrival.report.bytes == 4 * geometry().block_bytes
    assert arrival.report.transport == kv_workers.workers[0].transports[0].name
    assert source.driver.counters.pushed_bytes == target.driver.counters.received_bytes


def test_the_wake_up_is_set_until_the_results_are_taken(kv_workers: KvWorkers) -> None:
    source, target = kv_workers.pair()
    target.start(source, "t", TO, N)
    source.prefill("t", FROM, N)
    assert select([target.driver.wakeup], [], [], WAIT_S)[0]
    target.collect()
    assert target.ended == ["d-t"]
    assert not select([target.driver.wakeup], [], [], 0)[0]


def test_blocks_that_the_target_has_are_not_sent(kv_workers: KvWorkers) -> None:
    source, target = kv_workers.pair()
    before = target.cache.blocks()
    target.start(source, "t", TO[2:], N, first=2)
    source.prefill("t", FROM, N)
    settle(source, target)
    assert target.arrivals["d-t"].report.blocks == 2
    assert target.cache.block(TO[2]) == source.cache.block(FROM[2])
    assert target.cache.block(TO[3]) == source.cache.block(FROM[3])
    assert target.cache.block(TO[0]) == before[TO[0]]


@pytest.mark.parametrize("early", [True, False])
def test_unneeded_blocks_are_freed_when_prefill_ends(kv_workers: KvWorkers, early: bool) -> None:
    source, target = kv_workers.pair()
    if not early:
        source.expect("t")
    target.refuse(source, "t")
    until(lambda: source.driver.producer._tombstones, source, target)
    if early:
        source.expect("t")
    source.compute("t", FROM, N)
    source.finish("t")
    settle(source, target)
    assert source.sent == ["p-t"]


@pytest.mark.parametrize(
    ("to", "tokens", "first", "reason"),
    [
        (TO, 18, 0, "blocks 0 to 4 of group 0 were subscribed, expected 0 to 5"),
        (TO[:3], 14, 0, "blocks 0 to 3 of group 0 were subscribed, expected 0 to 4"),
        (TO, 14, 1, "blocks 1 to 5 of group 0 were subscribed, expected 0 to 4"),
        ([*TO, 18], 18, 0, "18 tokens were subscribed, 14 were computed"),
    ],
)
def test_a_grant_that_does_not_fit_its_request_is_refused(
    kv_workers: KvWorkers, to: list[int], tokens: int, first: int, reason: str
) -> None:
    source, target = kv_workers.pair()
    before = target.cache.blocks()
    target.start(source, "t", to, tokens, first=first)
    source.prefill("t", FROM, N)
    settle(source, target)
    assert target.failures == {"d-t": reason}
    assert source.sent == ["p-t"]
    untouched = [b for i, b in enumerate(target.cache.blocks()) if i not in to]
    assert untouched == [b for i, b in enumerate(before) if i not in to]


@pytest.mark.parametrize("block", [24, 2**40])
def test_blocks_outside_the_cache_are_not_written(kv_workers: KvWorkers, block: int) -> None:
    source, target = kv_workers.pair()
    before = target.cache.snapshot()
    target.start(source, "t", [block, 0], 8)
    source.prefill("t", FROM, N)
    settle(source, target)
    assert target.failed == ["d-t"]
    assert source.sent == ["p-t"]
    assert target.cache.snapshot() == before
    # Its thread closes the link after the transfer has failed: what uses it until then fails too.
    until(lambda: not target.look().links)
    transfer(source, target, "u")
    assert target.arrivals.keys() == {"d-u"}


def test_a_transfer_that_is_started_twice_is_served_once(kv_workers: KvWorkers) -> None:
    source, target = kv_workers.pair()
    target.start(source, "t", TO, N)
    target.start(source, "t", [0, 1, 2, 3], N)
    assert target.failures == {"d-t": "transfer id t is in use"}
    source.prefill("t", FROM, N)
    settle(source, target)
    assert target.ended == ["d-t", "d-t"]
    assert target.cache.block(TO[0]) == source.cache.block(FROM[0])


@pytest.mark.parametrize("who", ["source", "target"])
def test_a_worker_that_closes_ends_its_transfers_at_the_other(
    kv_workers: KvWorkers, who: str
) -> None:
    source, target = kv_workers.pair()
    target.start(source, "t", TO, N)
    source.expect("t")
    source.compute("t", FROM[:2], 8)
    until(lambda: source.driver.counters.pushed_blocks == 2, source, target)
    if who == "source":
        source.close()
        until(lambda: target.is_empty, target)
        assert target.failed == ["d-t"]
        return
    target.close()
    until(lambda: source.links and all(k.is_down for k in source.links), source)
    source.finish("t")
    until(lambda: source.is_empty, source)
    assert source.sent == ["p-t"]


def test_a_link_that_broke_is_made_again_for_the_next_transfer(kv_workers: KvWorkers) -> None:
    source, target = kv_workers.pair()
    target.start(source, "t", TO, N)
    until(lambda: source.links, source, target)
    for link in list(source.links):
        source.driver.drop_link(link, "broken by the test")
    until(lambda: target.failed, source, target)
    transfer(source, target, "u")
    assert target.arrivals.keys() == {"d-u"}


@pytest.mark.parametrize("who", ["source", "target", "cancel"])
@pytest.mark.parametrize("blocks", [1, 3])
def test_memory_that_was_given_back_is_not_written_again(
    kv_workers: KvWorkers, who: str, blocks: int
) -> None:
    """Between two chunks the link breaks at either end, or the target gives up."""
    source, target = kv_workers.pair(chunk_bytes=blocks * geometry().block_bytes)
    target.start(source, "t", TO, N)
    source.expect("t")
    source.compute("t", FROM[:3], 12)
    until(lambda: target.links and source.links, source, target)
    if who == "cancel":
        target.cancel("t")
    for link in {"source": source.links, "target": target.links}.get(who, []):
        (source if who == "source" else target).driver.drop_link(link, "broken by the test")
    until(lambda: target.ended, source, target)
    given_back = target.cache.snapshot()
    for block in range(geometry().num_blocks):
        source.cache.write(block, seed=1000 + block)
    source.compute("t", FROM, N)
    source.finish("t")
    # A source whose target never reached it holds its blocks until somebody says no.
    source.step(released=["t"])
    settle(source, target)
    assert target.cache.snapshot() == given_back


def test_a_channel_is_opened_once_and_only_when_a_subscription_comes(
    tcp_workers: KvWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link that only cancels would take a communicator's memory from those that send."""
    opened: queue.SimpleQueue[object] = queue.SimpleQueue()

    def note(channel: ProducerChannel) -> None:
        opened.put(channel)

    monkeypatch.setattr(ProducerChannel, "open", note)
    source, target = tcp_workers.pair()
    target.refuse(source, "none")
    source.prefill("none", FROM, N)
    settle(source, target)
    assert opened.empty()
    for name in ("t", "u"):
        transfer(source, target, name)
    opened.get(timeout=WAIT_S)
    assert opened.empty()
