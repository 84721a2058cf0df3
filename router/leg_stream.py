"""One leg of a flight at its worker: the sink of its stream, and what it takes of the worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.errors import PdserveError, Unavailable, WorkerFailed
from pdserve.types import StreamDelta
from pdserve.v1 import worker_pb2 as w
from router.leg import LegKind

if TYPE_CHECKING:
    from router.flight import Flight
    from router.leg import Leg
    from router.member import Charge, Member


class LegStream:
    """The sink of one leg: its stream on a link and its charge, both gone when the leg ends."""

    __slots__ = (
        *("_buffer", "_charge", "_flight", "_handoff", "_leg"),
        *("_member", "_prefilling", "_stream_id"),
    )

    def __init__(self, flight: Flight, leg: Leg, member: Member, charge: Charge) -> None:
        self._flight = flight
        self._handoff = flight.handoff
        self._buffer = flight.buffer
        self._leg = leg
        self._member = member
        self._charge = charge
        self._prefilling = True
        self._stream_id: int | None = None

    def submit(self, command: w.Command) -> None:
        """Send; a worker that does not take it is one that failed."""
        if not self._leg.open:
            return
        if self._member.lost:
            self.on_lost(Unavailable(f"worker {self._member.worker_id} is gone"))
            return
        forks = self._flight.forks_for(self._leg, self._member)
        command.submit.forks.extend(w.Fork(seed=fork.seed) for fork in forks)
        try:
            first = self._flight.fleet.link(self._member).submit(command, self, forks)
            self._flight.fleet.placed(self._member)
        except PdserveError as error:
            self.on_lost(error)
            return
        for stream_id, stream in enumerate((self, *forks), start=first):
            stream.submitted(stream_id)

    def submitted(self, stream_id: int) -> None:
        """It is known to its worker from now on."""
        self._stream_id = stream_id

    @property
    def seed(self) -> int | None:
        """The seed of its answer."""
        return self._flight.seed

    def on_delta(self, delta: StreamDelta) -> None:
        if self._prefilling:
            self._prefilling = False
            self._charge.prefilled()
            if delta.error is None:
                self._flight.fleet.succeeded(self._member)
            if delta.token_ids:
                self._flight.spoke(self._leg)
        if delta.finish_reason is not None:
            self._charge.release()
            if delta.error is not None and delta.error.code == WorkerFailed.code:
                self._flight.fleet.failed(self._member, delta.error.message)
            if self._leg.kind is LegKind.DECODE:
                self._flight.judge_pair(delta)
        self._flight.perform(self._flight.handoff.on_delta(self._leg, delta))

    def on_token(self, token_id: int, text: str) -> None:
        # Of all that runs for a token, as little as can be: see "A token's way out".
        if self._prefilling or not self._handoff.goes_on(self._leg, token_id):
            self.on_delta(StreamDelta(0, (token_id,), text))
        elif not self._buffer.push_token(token_id, text):
            self._flight.cut_off()

    def export(self, transfer_id: str) -> None:
        """Ask for the leg's end, with its KV kept."""
        if self._stream_id is None or self._member.lost:
            return  # its loss is told of
        try:
            self._flight.fleet.link(self._member).export(self._stream_id, transfer_id)
        except PdserveError as error:
            self.on_lost(error)

    def on_lost(self, error: PdserveError) -> None:
        self._charge.release()
        self._flight.perform(self._flight.handoff.on_lost(self._leg, error))

    def cancel(self) -> None:
        """Stop the leg, where it has not ended; again does nothing."""
        self._charge.release()
        if self._stream_id is not None and not self._member.lost:
            link = self._flight.fleet.link(self._member)
            link.cancel(self._stream_id, ended=self._leg.holds)
