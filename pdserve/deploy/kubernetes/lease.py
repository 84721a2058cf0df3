"""One leader among several processes, elected by a Lease as Kubernetes' own controllers do."""

from __future__ import annotations

import math
import socket
import uuid
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from pdserve.deploy.kubernetes.api import CALL_S, Lease, LeaseSpec, ObjectMeta
from pdserve.errors import Conflict, NotFound, PdserveError

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.deploy.kubernetes.api import Kubernetes

DURATION_S = 15
# What the leader began before this has ended when another may lead.
_WRITES_FOR_S = DURATION_S - CALL_S - 2.0


class LeaderLease:
    """State: the version of the Lease seen last and since when, and when this process renewed it.
    Times are of this process's clock alone, for those of others may be wrong."""

    def __init__(self, api: Kubernetes, name: str, clock: Callable[[], float]) -> None:
        self._api = api
        self._name = name
        self._clock = clock
        self._identity = f"{socket.gethostname()}_{uuid.uuid4().hex}"
        self._seen, self._seen_at, self._renewed_at = "", 0.0, -math.inf

    @property
    def is_held(self) -> bool:
        """True if this process is the leader, and may begin to write."""
        return self._clock() - self._renewed_at < _WRITES_FOR_S

    async def renew(self) -> bool:
        """Take or renew the lease. Return `is_held`. Raises PdserveError."""
        now = self._clock()
        try:
            found = await self._api.get(Lease, self._name)
        except NotFound:
            empty = Lease(metadata=ObjectMeta(name=self._name), spec=LeaseSpec())
            with suppress(Conflict):
                await self._api.create(empty)
            found = await self._api.get(Lease, self._name)
        spec, version = found.spec or LeaseSpec(), found.metadata.resourceVersion
        if version != self._seen:
            self._seen, self._seen_at = version, now
        is_ours = spec.holderIdentity == self._identity
        if spec.holderIdentity and not is_ours:
            self._renewed_at = -math.inf
            if now - self._seen_at < (spec.leaseDurationSeconds or DURATION_S):
                return False
        change = {"holderIdentity": self._identity, "leaseDurationSeconds": DURATION_S}
        if not is_ours:
            change |= {"acquireTime": _time(), "leaseTransitions": (spec.leaseTransitions or 0) + 1}
        try:
            await self._write(version, change | {"renewTime": _time()})
        except Conflict:  # another process was faster
            self._renewed_at = -math.inf
            return False
        self._renewed_at = now
        return self.is_held

    async def release(self) -> None:
        """Let another process lead at once, if this one does."""
        if not self.is_held:
            return
        self._renewed_at = -math.inf
        with suppress(PdserveError):  # then it ends by itself
            found = await self._api.get(Lease, self._name)
            if found.spec.holderIdentity == self._identity:
                await self._write(found.metadata.resourceVersion, {"holderIdentity": ""})

    async def _write(self, version: str, change: dict[str, Any]) -> None:
        metadata = {"resourceVersion": version}
        await self._api.patch(Lease, self._name, {"metadata": metadata, "spec": change})


def _time() -> str:
    """Return the time as Kubernetes reads it: it wants six digits after the point."""
    return datetime.now(UTC).isoformat(timespec="microseconds")
