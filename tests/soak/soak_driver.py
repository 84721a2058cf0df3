"""Plays the router of the soak test: launches transfers between worker processes, disturbs them,
and keeps account of each until both of its sides have said that it is over."""

from __future__ import annotations

import heapq
import itertools
import select
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pdserve.capability import Capability, mint

from tests.patience import WAIT_S
from tests.unit.kv_transfer.rig import BLOCK_SIZE

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

    from tests.soak.soak_peer import Peer

MAX_BLOCKS = 10
MAX_OPEN = 48

# What happens to a transfer, and how often of a hundred.
FATES = {
    "nothing": 50,
    "decode aborted": 12,
    "prefill aborted": 10,
    "both aborted": 6,
    "preempted": 10,
    "never taken": 4,
    "never prefilled": 4,
    "wrong capability": 4,
}
ABORT_AFTER_S = (0.0, 0.0, 0.002, 0.01, 0.05, 0.3)
FROZEN_S = (0.05, 0.4, 2.0)


@dataclass(slots=True)
class Transfer:
    """One transfer between two lives. A side is open until it said that the blocks are free."""

    transfer_id: str
    fate: str
    prefill: Peer
    decode: Peer
    lives: tuple[int, int]
    tokens: int
    source_open: bool = True
    target_open: bool = True
    outcome: str = ""
    transport: str = ""

    @property
    def is_open(self) -> bool:
        return self.source_open or self.target_open


@dataclass
class Driver:
    """State: the transfers that are open, and what is to happen when."""

    prefills: Sequence[Peer]
    decodes: Sequence[Peer]
    rng: random.Random
    tally: Counter[str] = field(default_factory=Counter)
    transfers: dict[str, Transfer] = field(default_factory=dict)
    last: dict[str, dict[str, Any]] = field(
        default_factory=dict
    )  # by peer: the last word asked for
    _ids: itertools.count[int] = field(default_factory=itertools.count)
    _order: itertools.count[int] = field(default_factory=itertools.count)
    _due: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)

    @property
    def peers(self) -> list[Peer]:
        return [*self.prefills, *self.decodes]

    def begin(self) -> None:
        """Starts every worker."""
        for peer in self.peers:
            peer.start(self.rng.randrange(1 << 30))
        self.until(lambda: all(peer.address for peer in self.peers))

    def end(self) -> None:
        """Kills what is left."""
        for peer in self.peers:
            if peer.life:
                peer.kill()

    # -- transfers

    def launch(self, fate: str, prefill: Peer, decode: Peer) -> Transfer:
        """One more transfer, whatever is to become of it."""
        lives = (prefill.life, decode.life)
        tokens = self.rng.randint(1, MAX_BLOCKS * BLOCK_SIZE)
        transfer = Transfer(f"t{next(self._ids)}", fate, prefill, decode, lives, tokens)
        self.transfers[transfer.transfer_id] = transfer
        self.tally[fate] += 1
        sides = [self._tell_prefill, self._tell_decode]
        self.rng.shuffle(sides)
        for tell in sides:
            tell(transfer)
        after = self.rng.choice(ABORT_AFTER_S)
        if fate in ("prefill aborted", "both aborted"):
            self.after(after, lambda: self.abort(transfer, "prefill"))
        if fate in ("decode aborted", "both aborted"):
            self.after(after, lambda: self.abort(transfer, "decode"))
        return transfer

    def prefill_late(self, transfer: Transfer) -> None:
        """One that was launched as never prefilled is, after all."""
        transfer.fate, transfer.source_open = "nothing", True
        self._tell_prefill(transfer)

    def _tell_prefill(self, transfer: Transfer) -> None:
        if transfer.fate == "never prefilled":
            transfer.source_open = False
            return
        blocks = -(-transfer.tokens // BLOCK_SIZE)
        preempted = transfer.fate == "preempted" and blocks > 1
        transfer.prefill.tell(
            "prefill",
            transfer_id=transfer.transfer_id,
            tokens=transfer.tokens,
            step_blocks=self.rng.randint(1, 3),
            preempt_at=self.rng.randint(1, blocks - 1) if preempted else 0,
        )

    def _tell_decode(self, transfer: Transfer) -> None:
        if transfer.fate == "never taken":
            transfer.target_open = False
            return
        source, target = transfer.prefill, transfer.decode
        meant = "another" if transfer.fate == "wrong capability" else transfer.transfer_id
        expiry = int(time.time()) + 600
        capability = Capability(meant, source.start_of, target.start_of, expiry)
        hits = self.rng.random() < 0.2
        target.tell(
            "decode",
            transfer_id=transfer.transfer_id,
            tokens=transfer.tokens,
            first=self.rng.randrange(-(-transfer.tokens // BLOCK_SIZE)) if hits else 0,
            address=source.address,
            instance_id=source.instance_id,
            capability=mint(source.key, capability),
        )

    def abort(self, transfer: Transfer, side: str) -> None:
        """Nothing where that life is over."""
        peer, life = {
            "prefill": (transfer.prefill, transfer.lives[0]),
            "decode": (transfer.decode, transfer.lives[1]),
        }[side]
        if peer.life == life:
            peer.tell(f"abort_{side}", transfer_id=transfer.transfer_id)

    # -- faults

    def kill(self, peer: Peer) -> None:
        """SIGKILL, and the next life. Whatever it had is gone with it."""
        peer.kill()
        self.tally[f"{peer.name.partition('-')[0]} killed"] += 1
        for transfer in list(self.transfers.values()):
            if transfer.prefill is peer:
                transfer.source_open = False
            if transfer.decode is peer:
                transfer.target_open = False
                transfer.outcome = transfer.outcome or "killed"
            self._close_if_over(transfer)
        peer.start(self.rng.randrange(1 << 30))

    def freeze(self, peer: Peer, seconds: float) -> None:
        """SIGSTOP, and SIGCONT later unless it was killed meanwhile."""
        if peer.is_frozen or not peer.address:
            return
        life = peer.life
        peer.freeze()
        self.tally["frozen"] += 1

        def thaw() -> None:
            if peer.life == life:
                peer.thaw()

        self.after(seconds, thaw)

    # -- time

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        """`act` in so many seconds."""
        heapq.heappush(self._due, (time.monotonic() + seconds, next(self._order), act))

    def until(self, condition: Callable[[], object]) -> None:
        """Handles events and deadlines until the condition holds."""
        end = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < end, f"{self.tally}: {[*self.transfers.values()][:5]}"
            self._turn()

    def _turn(self) -> None:
        now = time.monotonic()
        while self._due and self._due[0][0] <= now:
            heapq.heappop(self._due)[2]()
        wait_s = min(0.1, self._due[0][0] - now) if self._due else 0.1
        by_fd = {peer.fd: peer for peer in self.peers}
        for fd in select.select([*by_fd], [], [], max(0.0, wait_s))[0]:
            for event in by_fd[fd].read():
                self._hear(by_fd[fd], event)

    def _hear(self, peer: Peer, event: dict[str, Any]) -> None:
        match event["event"]:
            case "ready":
                peer.address = event["address"]
            case "status" | "closed":
                self.last[peer.name] = event
            case "broken":
                raise AssertionError(f"{peer.instance_id}: {event['reason']}")
            case "freed":
                transfer = self.transfers[event["id"]]
                transfer.source_open = False
                self._close_if_over(transfer)
            case outcome:
                transfer = self.transfers[event["id"]]
                transfer.target_open = False
                transfer.outcome = outcome
                transfer.transport = event.get("transport", "")
                self._close_if_over(transfer)

    def _close_if_over(self, transfer: Transfer) -> None:
        if not transfer.is_open and self.transfers.pop(transfer.transfer_id, None):
            self.tally[" ".join([transfer.outcome or "no target", transfer.transport]).strip()] += 1
            self.tally["over"] += 1

    # -- questions

    def ask(self, peer: Peer, what: str = "status") -> dict[str, Any]:
        """A worker's answer."""
        self.last.pop(peer.name, None)
        peer.tell(what)
        self.until(lambda: peer.name in self.last)
        return self.last.pop(peer.name)
