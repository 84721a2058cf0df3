"""The board: what stands there is read whole and while its blocks are held, or not at all."""

from __future__ import annotations

import threading
import zlib
from typing import TYPE_CHECKING

import pytest

from kv_transfer import copying
from kv_transfer.board import BOARD_BYTES, SLOT_BYTES, SLOTS, Board, PeerBoard, Ready
from tests.patience import WAIT_S

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.skipif(
    not copying.WORDS, reason="the extension was not built: no C compiler at install"
)


def ready(transfer_id: str, tokens: int = 8, **parts: object) -> Ready:
    return Ready(transfer_id, tokens, 4, [1, 2], [7], 1.0, **parts)  # type: ignore[arg-type]


@pytest.fixture
def ends(clean: None) -> Iterator[tuple[Board, PeerBoard]]:
    board = Board()
    peer = PeerBoard(board.memory.path, board.memory.inode)
    yield board, peer
    for end in (peer, board, peer, board):
        end.close()


def test_what_is_published_is_found_until_it_is_withdrawn(ends: tuple[Board, PeerBoard]) -> None:
    board, peer = ends
    assert peer.find("t") is None
    said = ready("t", source="p0", signing=b"s" * 32, digest=2**64 - 1)
    assert board.publish(said)
    found = peer.find("t")
    assert found is not None
    assert found.ready == said
    assert "sss" not in repr(found)
    assert peer.find("u") is None
    assert peer.stands(found)
    board.withdraw("t")
    assert not peer.stands(found)
    assert peer.find("t") is None


def test_a_slot_that_is_used_again_is_not_taken_for_what_stood_there(
    ends: tuple[Board, PeerBoard],
) -> None:
    board, peer = ends
    board.publish(ready("t"))
    found = peer.find("t")
    assert found is not None
    board.withdraw("t")
    board.publish(ready("t", 12))
    assert not peer.stands(found)
    again = peer.find("t")
    assert again is not None
    assert again.ready.num_tokens == 12
    # Another transfer's word takes nothing away.
    board.withdraw("elsewhere")
    assert peer.stands(again)


def test_what_has_no_room_is_not_published_and_disturbs_nothing(
    ends: tuple[Board, PeerBoard],
) -> None:
    board, peer = ends
    names = [f"t{i}" for i in range(4 * SLOTS)]
    slots: dict[int, list[str]] = {}
    for name in names:
        slots.setdefault(zlib.crc32(name.encode()) % SLOTS, []).append(name)
    first, second = next(same for same in slots.values() if len(same) > 1)[:2]
    assert board.publish(ready(first))
    assert not board.publish(ready(second))
    board.withdraw(second)
    assert peer.find(first) is not None
    assert peer.find(second) is None
    assert not board.publish(_long("long"))
    assert peer.find("long") is None
    board.withdraw(first)
    assert board.publish(ready(second))


def _long(transfer_id: str) -> Ready:
    return Ready(transfer_id, 8, 4, [2**32] * SLOT_BYTES, [7], 1.0)


def test_a_board_that_is_closed_says_nothing_more(ends: tuple[Board, PeerBoard]) -> None:
    board, peer = ends
    board.publish(ready("t"))
    found = peer.find("t")
    assert found is not None
    board.close()
    assert not peer.stands(found)
    assert peer.find("t") is None
    assert not board.publish(ready("u"))
    board.withdraw("t")


def test_only_the_source_can_write(ends: tuple[Board, PeerBoard]) -> None:
    _, peer = ends
    with pytest.raises(TypeError, match="read"):
        peer._map[0] = 1


def test_a_reader_beside_the_writer_finds_whole_records_alone(
    ends: tuple[Board, PeerBoard],
) -> None:
    """The record and its blocks change under the reader, as often as they can."""
    board, peer = ends
    cell, stop = [0], threading.Event()

    def write() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            cell[0] = number  # what lies in the blocks
            board.publish(ready("t", number))
            board.withdraw("t")
            cell[0] = -number  # they are another's

    writer = threading.Thread(target=write)
    writer.start()
    try:
        whole = 0
        limit = threading.Timer(WAIT_S, stop.set)
        limit.start()
        while whole < 200 and not stop.is_set():
            found = peer.find("t")
            if found is None:
                continue
            held = cell[0]
            if peer.stands(found):
                assert held == found.ready.num_tokens
                whole += 1
        assert whole == 200
    finally:
        stop.set()
        limit.cancel()
        writer.join()


@pytest.mark.parametrize("word", [0, 1, 2])
def test_a_slot_of_nonsense_is_nothing(ends: tuple[Board, PeerBoard], word: int) -> None:
    board, peer = ends
    slot = zlib.crc32(b"t") % SLOTS
    at = slot * SLOT_BYTES
    for length in (0, 3, 40, SLOT_BYTES, BOARD_BYTES, 2**64 - 1):
        board._map[at + 8 : at + 16] = length.to_bytes(8, "little")
        board._map[at + 16 : at + 56] = bytes(range(40))
        copying.store_word(board._address + at, word)
        assert peer.find("t") is None
