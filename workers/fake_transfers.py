"""Blocks that a fake prefill engine holds for decode workers: one state machine, no I/O, no clock.

computing ──ready──► leased ──begin──► in flight ──release──► gone
    └──────────── drop (abort, answer ended, lease over) ──────► gone
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from kv_transfer.snapshot import SOURCE, TransferView
from pdserve.errors import TransferFailed

if TYPE_CHECKING:
    from workers.fake_sequence import Handoff

_REMEMBERED = 4096


class TransferState(StrEnum):
    """Where a transfer stands on the prefill side."""

    COMPUTING = "computing"
    LEASED = "leased"
    IN_FLIGHT = "in_flight"


@dataclass(slots=True)
class _Transfer:
    stream_id: int
    request_id: str
    state: TransferState = TransferState.COMPUTING
    handoff: Handoff | None = None

    @property
    def blocks(self) -> int:
        return 0 if self.handoff is None else self.handoff.blocks


class SourceTransfers:
    """State: open transfers by id, and why the last few thousand others are gone."""

    def __init__(self) -> None:
        self._open: dict[str, _Transfer] = {}
        self._by_stream: dict[int, str] = {}
        self._gone: OrderedDict[str, str] = OrderedDict()
        self._leased: list[str] = []

    def __len__(self) -> int:
        return sum(x.state is not TransferState.COMPUTING for x in self._open.values())

    def blocks_in(self, state: TransferState) -> int:
        return sum(x.blocks for x in self._open.values() if x.state is state)

    def views(self) -> tuple[TransferView, ...]:
        """Every open transfer, to look at."""
        return tuple(
            TransferView(x, t.request_id, SOURCE, t.state.value, "", "fake", t.blocks, 0, 0)
            for x, t in self._open.items()
        )

    def is_open(self, transfer_id: str) -> bool:
        return transfer_id in self._open

    def request_id(self, transfer_id: str) -> str:
        return self._open[transfer_id].request_id

    def open(self, transfer_id: str, stream_id: int, request_id: str) -> None:
        """Blocks are being computed. One that its decode worker gave up already stays gone."""
        if transfer_id in self._gone:
            return
        self._open[transfer_id] = _Transfer(stream_id, request_id)
        self._by_stream[stream_id] = transfer_id

    def ready(self, transfer_id: str, handoff: Handoff) -> bool:
        """The blocks are computed; False where nobody wants them any more."""
        transfer = self._open.get(transfer_id)
        if transfer is None:
            return False
        transfer.handoff, transfer.state = handoff, TransferState.LEASED
        self._leased.append(transfer_id)
        return True

    def take_leased(self) -> list[str]:
        """The transfers whose lease has begun since the last call."""
        leased, self._leased = self._leased, []
        return leased

    def begin(self, transfer_id: str) -> Handoff | None:
        """Puts leased blocks in flight; None while they are being computed, or not yet asked for.

        Raises TransferFailed for a transfer that is gone, or that goes to someone else already.
        """
        if transfer_id in self._gone:
            raise TransferFailed(f"transfer {transfer_id}: {self._gone[transfer_id]}")
        transfer = self._open.get(transfer_id)
        if transfer is None or transfer.state is TransferState.COMPUTING:
            return None
        if transfer.state is TransferState.IN_FLIGHT:
            raise TransferFailed(f"transfer {transfer_id} is in flight already")
        transfer.state = TransferState.IN_FLIGHT
        return transfer.handoff

    def drop(self, transfer_id: str, reason: str) -> int:
        """Ends a transfer in any state, also one not open yet; returns the blocks that it held."""
        self._gone.setdefault(transfer_id, reason)
        while len(self._gone) > _REMEMBERED:
            self._gone.popitem(last=False)
        transfer = self._open.pop(transfer_id, None)
        if transfer is None:
            return 0
        del self._by_stream[transfer.stream_id]
        return transfer.blocks

    def drop_stream(self, stream_id: int, reason: str) -> int:
        transfer_id = self._by_stream.get(stream_id)
        return 0 if transfer_id is None else self.drop(transfer_id, reason)

    def expire(self, transfer_id: str) -> int:
        """The lease is over: frees blocks that nobody began to fetch."""
        transfer = self._open.get(transfer_id)
        if transfer is None or transfer.state is not TransferState.LEASED:
            return 0
        return self.drop(transfer_id, "its lease is over")
