"""Whoever has no right to a transfer gets nothing of it, and disturbs nobody who has one."""

from __future__ import annotations

import ctypes
import socket
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

from kv_transfer.guard import MAX_STRIKES
from kv_transfer.handshake import Identity
from kv_transfer.layout import KvGeometry
from kv_transfer.memory import KvRegion
from kv_transfer.messages import (
    HEADER,
    PROTOCOL_VERSION,
    Cancel,
    Chunk,
    Fail,
    Grant,
    Hello,
    Message,
    Welcome,
    body_length,
    decode,
    encode,
)
from kv_transfer.protocol.plan import Shard
from kv_transfer.settings import KvSettings
from kv_transfer.target import SendCancel, TargetTable
from kv_transfer.transport.base import LocalKv
from kv_transfer.transport.loopback import LoopbackTransport
from kv_transfer.transport.tcp import TcpTransport
from kv_transfer.vllm.step import (
    SourceEnded,
    SourceExpected,
    SourceProgress,
    StepMetadata,
    TargetStart,
    Unneeded,
)
from kv_transfer.vllm.worker import WorkerHalf
from pdserve.capability import KEY_BYTES, Capability, CapabilityKey, WorkerStart, mint
from tests.patience import WAIT_S
from tests.unit.kv_transfer.rig import PATIENT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kv_transfer.transport.base import Transport

KEY, OTHER_KEY = CapabilityKey(b"k" * KEY_BYTES), CapabilityKey(b"o" * KEY_BYTES)
P, D = WorkerStart("p0", "source-instance"), WorkerStart("d0", "target-instance")
BLOCKS, TOKENS, BLOCK_SIZE = [1, 2, 3], 12, 4
FAR = 86_400
SHAPE = KvGeometry(2, 4, 64, 256, 64)


def right(
    transfer_id: str = "t",
    *,
    key: CapabilityKey = KEY,
    source: WorkerStart = P,
    target: WorkerStart = D,
    in_s: int = FAR,
) -> str:
    return mint(key, Capability(transfer_id, source, target, int(time.time()) + in_s))


class End:
    """A worker half, its cache and what it reported. Released by `close`."""

    def __init__(self, start: WorkerStart, transport: Transport, **settings: Any) -> None:
        self._cache = (ctypes.c_char * SHAPE.span_bytes)()
        self._cache.raw = start.worker_id[:1].encode() * SHAPE.span_bytes
        region = KvRegion(ctypes.addressof(self._cache), SHAPE.span_bytes, SHAPE)
        config = KvSettings(worker_id=start.worker_id, **{**PATIENT, **settings})
        self.half = WorkerHalf(config, start.instance_id, [transport])
        identity = Identity(start.instance_id, "same", start.worker_id)
        self.half.register(LocalKv(region, None), identity, Shard(1, SHAPE.page_bytes, BLOCK_SIZE))
        self.arrived: set[str] = set()
        self.failures: dict[str, str] = {}
        self.released: set[str] = set()

    def step(self, **parts: Any) -> None:
        metadata = StepMetadata(**parts)
        self.half.before_step(metadata)
        self.half.after_step(metadata)
        self.collect()

    def collect(self) -> None:
        self.released |= self.half.take_results()[0]
        output = self.half.take_output()
        if output is not None:
            self.arrived |= output.arrivals.keys()
            self.failures |= {k: error.message for k, error in output.failures.items()}

    def prefill(self, transfer_id: str = "t") -> None:
        self.step(expected=[SourceExpected(transfer_id, f"p-{transfer_id}")])
        self.step(progress=[SourceProgress(transfer_id, BLOCKS, TOKENS)])
        self.step(ended=[SourceEnded(transfer_id, (7,), held=True)])

    def ask(self, source: End, capability: str, transfer_id: str = "t") -> None:
        self.step(
            starts=[
                TargetStart(
                    transfer_id,
                    f"d-{transfer_id}",
                    (source.half.address,),
                    P.instance_id,
                    0,
                    TOKENS,
                    BLOCKS,
                    capability,
                )
            ]
        )

    @property
    def cache(self) -> bytes:
        return self._cache.raw

    def close(self) -> None:
        self.half.close()


def until(condition: Callable[[], object], *ends: End) -> None:
    limit = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < limit
        for end in ends:
            end.collect()


@pytest.fixture(params=["loopback", "tcp"])
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[End, End]]:
    """A source that asks for capabilities, and the target D."""
    loopback = LoopbackTransport()
    made: list[Transport] = [
        loopback if request.param == "loopback" else TcpTransport() for _ in range(2)
    ]
    source = End(P, made[0], kv_key=KEY)
    target = End(D, made[1])
    yield source, target
    target.close()
    source.close()


WRONG = {
    "missing": ("", "no capability"),
    "malformed": ("1.2.3", "malformed"),
    "forged": (f"2.{KEY.key_id}.{2**40}.{'0' * 64}", "not for this transfer"),
    "of another key": (right(key=OTHER_KEY), "another key"),
    "of another transfer": (right("u"), "not for this transfer"),
    "of another source": (right(source=WorkerStart("p1", P.instance_id)), "not for this transfer"),
    "of an earlier source": (right(source=WorkerStart("p0", "old")), "not for this transfer"),
    "of another target": (right(target=WorkerStart("d1", D.instance_id)), "not for this transfer"),
    "of an earlier target": (right(target=WorkerStart("d0", "old")), "not for this transfer"),
    "expired": (right(in_s=-1), "expired"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_capability_gets_nothing_and_the_right_one_all(
    ends: tuple[End, End], wrong: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    source, target = ends
    capability, reason = WRONG[wrong]
    before = target.cache
    source.prefill()
    target.ask(source, capability)
    until(lambda: target.failures, target)
    assert target.failures["d-t"].startswith("refused: the capability" if capability else "refused")
    assert reason in target.failures["d-t"]
    assert source.half.counters.refused_capabilities == 1
    assert source.half.counters.pushed_blocks == 0
    assert target.cache == before
    # The refusal cost the transfer nothing.
    target.ask(source, right())
    until(lambda: target.arrived and source.released, source, target)
    assert source.half.counters.pushed_blocks == len(BLOCKS)
    assert target.cache.count(b"p") == len(BLOCKS) * SHAPE.block_bytes
    for secret in (right(), capability or "-" * 9, KEY.reveal().hex(), repr(KEY.reveal())):
        assert secret not in caplog.text


def test_a_transfer_is_given_once(ends: tuple[End, End]) -> None:
    source, target = ends
    source.prefill()
    target.ask(source, right())
    until(lambda: target.arrived and source.released, source, target)
    for _ in range(2):
        target.failures.clear()
        target.ask(source, right())
        until(lambda: target.failures, target)
        assert target.failures == {"d-t": "finished"}
    assert source.half.counters.refused_grants == 2
    assert source.half.counters.pushed_blocks == len(BLOCKS)
    assert source.half.counters.refused_capabilities == 0


def test_nobody_else_can_cancel_a_transfer(ends: tuple[End, End]) -> None:
    source, target = ends
    source.prefill()
    for capability in ("", right("u")):
        target.step(unneeded=[Unneeded("t", (source.half.address,), P.instance_id, capability)])
    until(lambda: source.half.counters.refused_capabilities == 2, source)
    assert not source.released
    target.step(unneeded=[Unneeded("t", (source.half.address,), P.instance_id, right())])
    until(lambda: source.released, source)


def test_a_target_cancels_what_it_was_given_even_when_its_right_has_expired(
    ends: tuple[End, End],
) -> None:
    source, target = ends
    target.ask(source, right(in_s=FAR // 2))
    until(lambda: len(source.half.links.sources), source)
    source.half.links._guard._clock = lambda: time.time() + FAR
    target.step(cancels=["t"])
    until(lambda: target.failures, source, target)
    assert target.failures == {"d-t": "cancelled"}
    assert source.half.counters.refused_capabilities == 0


def test_a_target_cancels_by_the_right_that_it_was_granted_by() -> None:
    """Its source may have let go of the transfer meanwhile, and would take it for a stranger."""
    table: TargetTable[str] = TargetTable(receive_timeout_s=1.0, cancel_timeout_s=1.0)
    table.start("r", [("L", grant("t", "right"), None)], 0.0)
    assert table.cancel("t", "cancelled", 0.0) == [SendCancel("L", "t", "right")]
    table.start("s", [("L", grant("u", "other"), None)], 0.0)
    assert table.begin_chunk("L", Chunk("u", 2, 1, 64)) is None
    assert table.tick(0.5) == [SendCancel("L", "u", "other")]


@pytest.mark.parametrize(
    "settings",
    [{}, {"kv_key": None}, {"kv_key": KEY, "require_capability": False}],
)
def test_without_a_key_or_where_it_is_turned_off_nothing_is_asked_for(
    settings: dict[str, Any],
) -> None:
    source, target = End(P, TcpTransport(), **settings), End(D, TcpTransport())
    with closing(target), closing(source):
        source.prefill()
        target.ask(source, "")
        until(lambda: target.arrived, source, target)


class Stranger:
    """A peer that says what the test says, under any name."""

    def __init__(self, source: End, name: WorkerStart) -> None:
        host, _, port = source.half.address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), WAIT_S)
        self._file = self._socket.makefile("rb")
        offers = [{"transport": "tcp"}]
        self.say(
            Hello(PROTOCOL_VERSION, name.instance_id, P.instance_id, "same", offers, name.worker_id)
        )
        assert isinstance(self.hear(), Welcome)

    def say(self, message: Message) -> None:
        self._socket.sendall(encode(message))

    def hear(self) -> Message | None:
        """The next message, or None where the link is down."""
        header = self._file.read(HEADER.size)
        return decode(self._file.read(body_length(header))) if header else None

    def close(self) -> None:
        self._file.close()
        self._socket.close()


@pytest.fixture
def source() -> Iterator[End]:
    source = End(P, TcpTransport(), kv_key=KEY)
    yield source
    source.close()


def grant(transfer_id: str, capability: str) -> Grant:
    return Grant(transfer_id, 0, TOKENS, BLOCKS, capability)


@pytest.mark.parametrize("message", [grant("t", ""), grant("t", right("u")), Cancel("t", "x")])
def test_a_link_survives_some_wrong_capabilities_and_no_more(source: End, message: Message) -> None:
    source.prefill()
    with closing(Stranger(source, D)) as stranger:
        for _ in range(MAX_STRIKES):
            stranger.say(message)
            answer = stranger.hear()
            assert isinstance(answer, Fail)
            assert answer.reason.startswith("refused: ")
        stranger.say(message)
        assert stranger.hear() is None
    assert source.half.counters.refused_capabilities == MAX_STRIKES + 1
    assert source.half.counters.pushed_bytes == 0
    assert not source.released
    with closing(Stranger(source, D)) as rightful:
        rightful.say(grant("t", right()))
        assert isinstance(rightful.hear(), Chunk)


def test_slow_honest_workers_keep_their_link(source: End) -> None:
    source.prefill("late")
    with closing(Stranger(source, D)) as slow:
        for _ in range(2 * MAX_STRIKES):
            slow.say(grant("t", right(in_s=-1)))
            answer = slow.hear()
            assert isinstance(answer, Fail)
            assert "expired" in answer.reason
        slow.say(grant("late", right("late")))
        assert isinstance(slow.hear(), Chunk)


def test_a_right_overheard_serves_nobody_under_another_name(source: End) -> None:
    source.prefill()
    for name in (WorkerStart("d1", D.instance_id), WorkerStart("d0", "other"), WorkerStart("", "")):
        with closing(Stranger(source, name)) as stranger:
            stranger.say(grant("t", right()))
            answer = stranger.hear()
            assert isinstance(answer, Fail)
            assert "not for this transfer" in answer.reason
    assert source.half.counters.pushed_bytes == 0


def test_a_replay_over_another_link_gets_nothing(source: End) -> None:
    source.prefill()
    with closing(Stranger(source, D)) as first, closing(Stranger(source, D)) as second:
        first.say(grant("t", right()))
        assert isinstance(first.hear(), Chunk)
        second.say(grant("t", right()))
        assert second.hear() == Fail("t", "the transfer was granted before")
    assert source.half.counters.refused_grants == 1
