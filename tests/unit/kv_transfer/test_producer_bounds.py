"""What subscriptions hold of a producer's memory that it has no request for."""

from __future__ import annotations

import pytest

from kv_transfer.cache.geometry import KvGroup
from kv_transfer.errors import ProtocolError
from kv_transfer.protocol.messages import (
    MAX_GROUPS,
    MAX_ID_CHARS,
    Fail,
    GroupBlocks,
    Send,
    Subscribe,
    decode,
    pack,
)
from kv_transfer.protocol.plan import CopyPlan, Shard
from kv_transfer.protocol.producer import MAX_EARLY_ITEMS, Producer


def subscription(name: str, blocks: int) -> Subscribe:
    return Subscribe(name, 8, [GroupBlocks(0, 0, list(range(blocks)), [0, 1, 0], [0, 1, 0])])


def test_early_subscriptions_are_bounded_by_their_items() -> None:
    plan = CopyPlan((Shard(1, 16, KvGroup(0, 4), (1,)),))
    producer = Producer[str](plan=plan, chunk_blocks={0: 1}, hold_s=30.0, heartbeat_s=5.0)

    links = {name: f"link of {name}" for name in "abcdefg"}

    def refused(name: str, share: float = 0.4) -> bool:
        blocks = int(share * MAX_EARLY_ITEMS)
        actions = producer.subscribe(links[name], subscription(name, blocks), 0.0)
        return any(isinstance(x, Send) and isinstance(x.message, Fail) for x in actions)

    assert not refused("a")
    assert not refused("b")
    assert refused("c")
    producer.link_down(links["a"])
    assert not refused("d")
    assert refused("e")
    producer.expect("b", "request", 0.0)
    assert not refused("f")
    producer.tick(100.0)
    assert not refused("g", 0.9)


@pytest.mark.parametrize(
    "wrong",
    [
        Subscribe("t" * (MAX_ID_CHARS + 1), 8, []),
        Subscribe("t", 8, [GroupBlocks(0, 0, [], [], [])] * (MAX_GROUPS + 1)),
    ],
)
def test_a_subscription_holds_no_more_than_it_counts(wrong: Subscribe) -> None:
    with pytest.raises(ProtocolError):
        decode(pack(wrong))
