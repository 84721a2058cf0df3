"""Leader election with a Lease, as in Kubernetes' own controllers."""

from __future__ import annotations

import math
import socket
import uuid
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from pdserve.deploy.kubernetes.api import CALL_S, Lease, LeaseSpec, ObjectMeta, call, merge
from pdserve.errors import Conflict, NotFound

if TYPE_CHECKING:
    from collections.abc import Callable

DURATION_S = 15
# A leader starts no write later than this after a renewal. Each call ends within CALL_S, so all its
# writes have ended before another process can lead.
_WRITES_FOR_S = DURATION_S - CALL_S - 2.0


class LeaderLease:
    """This process's part in the election. State: the last seen version of the Lease, the time when
    it was first seen, and the time of this process's last renewal. All times are from this
    process's clock, because clocks of other machines may be wrong."""

    def __init__(self, client: Any, name: str, clock: Callable[[], float]) -> None:
        self._client = client
        self._name = name
        self._clock = clock
        self._identity = f"{socket.gethostname()}_{uuid.uuid4().hex}"
        self._seen, self._seen_at, self._renewed_at = "", 0.0, -math.inf

    @property
    def is_held(self) -> bool:
        """True if this process is the leader and may start a write."""
        return self._clock() - self._renewed_at < _WRITES_FOR_S

    async def renew(self) -> bool:
        """Take or renew the lease. Return `is_held`. Raises PdserveError."""
        now, found = self._clock(), await self._get()
        spec, version = found.spec or LeaseSpec(), found.metadata.resourceVersion
        if version != self._seen:
            self._seen, self._seen_at = version, now
        is_ours = spec.holderIdentity == self._identity
        if not is_ours:
            self._renewed_at = -math.inf
            left_s = self._seen_at + (spec.leaseDurationSeconds or DURATION_S) - now
            if spec.holderIdentity and left_s > 0:
                return False
        # Kubernetes requires exactly six decimal places.
        time = datetime.now(UTC).isoformat(timespec="microseconds")
        change: dict[str, Any] = {"renewTime": time}
        if not is_ours:
            change |= {"holderIdentity": self._identity, "acquireTime": time}
            change |= {"leaseDurationSeconds": DURATION_S}
            change |= {"leaseTransitions": (spec.leaseTransitions or 0) + 1}
        try:
            metadata = {"resourceVersion": version}
            await merge(self._client, Lease, self._name, {"metadata": metadata, "spec": change})
        except Conflict:  # another process took the lease first
            self._renewed_at = -math.inf
            return False
        # Count from before the calls. Other processes count from when they see the renewal, so the
        # lease ends here before it ends for them.
        self._renewed_at = now
        return self.is_held

    async def release(self) -> None:
        """Release the lease, so that another process can lead at once. Raises PdserveError."""
        found = await self._get()
        if (found.spec or LeaseSpec()).holderIdentity == self._identity:
            self._renewed_at = -math.inf
            metadata = {"resourceVersion": found.metadata.resourceVersion}
            change = {"metadata": metadata, "spec": {"holderIdentity": ""}}
            await merge(self._client, Lease, self._name, change)

    async def _get(self) -> Any:
        with suppress(NotFound):
            return await call(self._client.get(Lease, self._name))
        with suppress(Conflict):  # another process created it first
            await call(self._client.create(Lease(metadata=ObjectMeta(name=self._name))))
        return await call(self._client.get(Lease, self._name))
