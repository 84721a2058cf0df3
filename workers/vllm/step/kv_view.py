"""The engine's KV, as far as the event loop can see it without waiting for a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kv_transfer.protocol.snapshot import KvState
from pdserve.types import KvLedger

if TYPE_CHECKING:
    from kv_transfer.protocol.snapshot import KvSnapshot
    from workers.vllm.core import KvLook, VllmCore
    from workers.vllm.step.inbox import StepInbox


class KvView:
    """State: the `ledger` after the last step, `look`, and the last answer of other processes. The
    step thread writes, the event loop reads. `look` is set if this process has all of the KV plane,
    which any thread may then look at."""

    def __init__(self) -> None:
        self.ledger = KvLedger()
        self.look: KvLook | None = None
        self._ranks: tuple[KvSnapshot, ...] = ()
        self._is_asked = False

    def state(self, inbox: StepInbox) -> KvState:
        """Return the state. Only the step thread may ask other processes: return their last answer,
        and request a new one."""
        if self.look is not None:
            return KvState(self.ledger, (self.look(),))
        if not self._is_asked:
            self._is_asked = True  # before the thread may answer
            inbox.put(self._ask_ranks)
        return KvState(self.ledger, self._ranks)

    def _ask_ranks(self, core: VllmCore) -> None:
        self._ranks, self._is_asked = core.kv_ranks(), False
