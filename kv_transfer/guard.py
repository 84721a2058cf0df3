"""Who may have which transfer: the source's check of what comes over a link; and how many may have
a link before they have said who they are.

A capability (pdserve/capability.py) is a right that its text gives to whoever is the target by the
word of its Hello. It keeps out whoever was given none; it does not hide what travels.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from kv_transfer.errors import ProtocolError
from kv_transfer.messages import Fail
from pdserve.capability import CapabilityExpired, CapabilityRefused, WorkerStart, verify

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from kv_transfer.counters import TransferCounters
    from kv_transfer.link import Link
    from kv_transfer.messages import Cancel, Grant, Taken
    from kv_transfer.settings import KvSettings

logger = logging.getLogger(__name__)

# Wrong capabilities that a link survives. Routers make none, so nobody honest comes this far.
MAX_STRIKES = 3
# Connections that have not got through the handshake: each has a thread.
MAX_STRANGERS = 256
_SHOWN = 64


def keep_few(links: Collection[Link]) -> None:
    """Makes room for one more whom nobody knows. The one that has kept us waiting for longest goes:
    those that mean well need a moment only."""
    strangers = [link for link in links if link.is_stranger]
    if len(strangers) >= MAX_STRANGERS:
        min(strangers, key=lambda link: link.opened_at).close("too many do not say who they are")


class Guard:
    """Counts what it turns away. Without a key, or where the settings say so, it lets everything
    through. `clock` is the wall's."""

    def __init__(
        self,
        settings: KvSettings,
        instance_id: str,
        counters: TransferCounters,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._key = settings.kv_key if settings.checks_capabilities else None
        self._source = WorkerStart(settings.worker_id, instance_id)
        self._clock = clock
        self._counters = counters

    def refusal(self, link: Link, message: Grant | Cancel | Taken) -> Fail | None:
        """What to answer where the link's peer has no right to the transfer, or None.

        Raises ProtocolError where it has presented too many that no router made for it: the link
        must go down.
        """
        if self._key is None:
            return None
        try:
            verify(
                self._key,
                message.capability,
                transfer_id=message.transfer_id,
                source=self._source,
                target=WorkerStart(link.peer_id, link.peer_instance_id),
                now=self._clock(),
            )
        except CapabilityRefused as error:
            self._note(link, message, error)
            return Fail(message.transfer_id, f"refused: {error}")
        return None

    def _note(self, link: Link, message: Grant | Cancel | Taken, error: CapabilityRefused) -> None:
        self._counters.refused_capabilities += 1
        logger.warning(
            "transfer %r refused to worker %r: %s",
            message.transfer_id[:_SHOWN],
            link.peer_id[:_SHOWN],
            error,
        )
        if isinstance(error, CapabilityExpired):
            return  # once it was good: this is somebody slow, not a stranger
        link.strikes += 1
        if link.strikes > MAX_STRIKES:
            raise ProtocolError(f"the peer presented {link.strikes} wrong capabilities") from error
