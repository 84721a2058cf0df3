"""vLLM's scheduler with the connectors in it: what it waits for, and which blocks they hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.ec_transfer import get_ec_transfer

from kv_transfer.vllm.connector import first_of
from pdserve.types import KvLedger

if TYPE_CHECKING:
    from workers.vllm.start.settings import VllmSettings


@dataclass(frozen=True, slots=True)
class SchedulerView:
    """`connector` is the half of our KV connector in the scheduler, None if the worker moves no KV.
    `features` is the connector of image features, if there is one: on an encode worker the half
    that runs with the model."""

    scheduler: Any
    connector: Any
    features: Any

    def ledger(self) -> KvLedger:
        """Return the blocks that transfers hold."""
        ledger: KvLedger = KvLedger() if self.connector is None else self.connector.ledger()
        return ledger

    def has_runnable(self) -> bool:
        """Return True if a step could compute something. Requests that wait for KV, a grammar, or
        blocks that a transfer holds, do not count, nor any while the scheduler is paused."""
        scheduler = self.scheduler
        if scheduler.pause_state:
            return False
        if scheduler.running:
            return True
        waiting = len(scheduler.waiting) + len(scheduler.kv_holding_waiting)
        blocked = len(scheduler.deferred_waiting)
        if self.features is not None:
            blocked += self.features.waiting_requests
        return waiting > blocked and not self.ledger().pinned_blocks


def view_of(scheduler: Any, settings: VllmSettings) -> SchedulerView:
    """Return the view of an engine's scheduler, once the model is loaded."""
    has_kv = settings.kv is not None and not settings.encodes
    features = scheduler.ec_connector
    if features is not None and settings.encodes:
        features = get_ec_transfer()
    return SchedulerView(
        scheduler, first_of(scheduler.get_kv_connector()) if has_kv else None, features
    )
