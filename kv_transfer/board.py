"""A source's board: the transfers that lie ready in its KV cache, for targets on the same host to
take by themselves. Nobody at the source has to run for that.

The board is shared memory, which the source alone can write. Each slot begins with a word that is
even while what stands there may be read and its blocks are held, and another one each time. Before
a block can be used for anything else its slot is withdrawn; who reads looks at the word first and
last, and throws away what was read under another. So the source waits for no reader, and a reader
that dies holds nothing. (A sequence lock: https://docs.kernel.org/locking/seqlock.html)
"""

from __future__ import annotations

import mmap
import struct
import zlib
from typing import NamedTuple

from kv_transfer.copying import load_word, store_word
from kv_transfer.digest import NO_DIGEST
from kv_transfer.errors import ProtocolError
from kv_transfer.memory import PeerMapping, SharedMemory, address_of
from kv_transfer.messages import Count, Message, Seconds, decode, kinds_of, pack

SLOTS = 256
SLOT_BYTES = 8 << 10
BOARD_BYTES = SLOTS * SLOT_BYTES
_WORD_BYTES = 8
_LENGTH = struct.Struct("<Q")
_BODY_AT = _WORD_BYTES + _LENGTH.size


class Ready(Message, frozen=True):
    """One transfer: the KV of the request's first `num_tokens` tokens lies in `block_ids` of the
    source's cache, and the source sampled `token_ids`. Prefill ended at `ended_at`, on the host's
    monotonic clock. Whoever takes it needs a capability that `signing` has signed for the source's
    name `source` (pdserve/capability.py); it is empty where none is asked for. `digest` is that of
    the blocks when prefill ended, NO_DIGEST where none was made."""

    transfer_id: str
    num_tokens: Count
    block_size: Count
    block_ids: list[Count]
    token_ids: list[Count]
    ended_at: Seconds
    source: str = ""
    signing: bytes = b""
    digest: Count = NO_DIGEST

    def __repr__(self) -> str:
        return f"Ready({self.transfer_id!r}, {self.num_tokens} tokens)"  # `signing` gives a right


_KINDS = kinds_of(Ready)


class Found(NamedTuple):
    """What stood in a slot when its word was `word`."""

    ready: Ready
    slot: int
    word: int


def _slot_of(transfer_id: str) -> int:
    return zlib.crc32(transfer_id.encode("utf-8", "surrogatepass")) % SLOTS


class Board:
    """The source's end; the caller holds one lock around all but `close`, which comes last.
    Released by `close`."""

    def __init__(self) -> None:
        self.memory = SharedMemory("pdserve-kv-board")
        self.memory.grow(BOARD_BYTES)
        self._map = mmap.mmap(self.memory.fd, BOARD_BYTES)
        self._address = address_of(self._map)
        self._words = [1] * SLOTS
        self._held: dict[int, str] = {}

    def publish(self, ready: Ready) -> bool:
        """False, and nothing changed, where its slot is taken or too small."""
        slot, body = _slot_of(ready.transfer_id), pack(ready)
        is_full = slot in self._held or len(body) > SLOT_BYTES - _BODY_AT
        if is_full or self._map.closed:
            return False
        self._held[slot] = ready.transfer_id
        at = slot * SLOT_BYTES
        _LENGTH.pack_into(self._map, at + _WORD_BYTES, len(body))
        self._map[at + _BODY_AT : at + _BODY_AT + len(body)] = body
        self._turn(slot)
        return True

    def withdraw(self, transfer_id: str) -> None:
        """When it returns, whoever still reads the transfer's blocks will throw them away."""
        slot = _slot_of(transfer_id)
        if self._held.get(slot) == transfer_id:
            del self._held[slot]
            self._turn(slot)

    def _turn(self, slot: int) -> None:
        self._words[slot] += 1
        store_word(self._address + slot * SLOT_BYTES, self._words[slot])

    def close(self) -> None:
        """Withdraws all. Idempotent."""
        if self.memory.fd >= 0:
            for transfer_id in list(self._held.values()):
                self.withdraw(transfer_id)
            self._map.close()
            self.memory.close()


class PeerBoard(PeerMapping):
    """A target's end."""

    def __init__(self, path: str, inode: int) -> None:
        super().__init__(path, inode, BOARD_BYTES, writable=False)

    def find(self, transfer_id: str) -> Found | None:
        """What is said of the transfer now. None where nothing is, or nothing that makes sense."""
        slot = _slot_of(transfer_id)
        word = self._word(slot)
        if word == 0 or word % 2:
            return None
        start = slot * SLOT_BYTES + _WORD_BYTES
        (length,) = _LENGTH.unpack_from(self._map, start)
        start += _LENGTH.size
        body = self._map[start : start + min(length, SLOT_BYTES - _BODY_AT)]
        try:
            ready = decode(body, _KINDS)
        except ProtocolError:
            return None  # it is just being replaced
        if not isinstance(ready, Ready) or ready.transfer_id != transfer_id:
            return None
        found = Found(ready, slot, word)
        return found if self.stands(found) else None

    def stands(self, found: Found) -> bool:
        """Whether all that was read since `find` was the transfer's."""
        return self._word(found.slot) == found.word

    def _word(self, slot: int) -> int:
        return load_word(self.address + slot * SLOT_BYTES)
