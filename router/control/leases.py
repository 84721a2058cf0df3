"""Leases of workers: what a registration, a renewal and a deregistration change in this router.

A worker registers and leaves by gRPC. It renews over its link, because a call of gRPC costs the
router fifty times as much, and by gRPC only while it has no link.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from pdserve import wire
from pdserve.config import is_address
from pdserve.errors import InvalidRequest
from pdserve.v1 import worker_pb2 as w
from router.fleet.billing import WORKER_LOST

if TYPE_CHECKING:
    from pdserve.types import Account
    from router.control.adapters import ServedAdapters
    from router.fleet.open import OpenedFleet
    from router.serve import Answering

logger = logging.getLogger(__name__)


class WorkerLeases:
    """`served` follows the adapters that workers report. `generating` moves answers off workers
    that drain."""

    def __init__(self, workers: OpenedFleet, served: ServedAdapters, generating: Answering) -> None:
        self._fleet, self._pool, self._billing = workers.fleet, workers.link_pool, workers.billing
        self._served, self._generating = served, generating

    def register(self, request: w.RegisterRequest) -> w.RegisterResponse:
        """Add a worker. Raises InvalidRequest, see `Fleet.register`."""
        info = wire.worker_from_pb(request.worker)
        _check_address(info.address, "worker.address")
        _check_address(info.session_address, "worker.session_address")
        died = self._fleet.register(
            info,
            draining=request.draining,
            adapters=[wire.adapter_from_pb(x) for x in request.adapters],
            weights=wire.weights_from_pb(request.weights),
            updating=request.updating,
        )
        if died is not None:
            self._billing.wasted(died.info, WORKER_LOST, died.open_s)
        members = self._fleet.members
        self._served.report(members[info.worker_id], members.values())
        return w.RegisterResponse(lease_s=self._fleet.lease_s, router_id=self._pool.router_id)

    def renew(self, renewal: w.RenewRequest) -> w.RenewResponse | None:
        """Renew a lease and take the report of the worker. Return None if the worker must register
        again. Raises InvalidRequest for figures that are none."""
        fleet, worker_id, number = self._fleet, renewal.worker_id, renewal.number
        if (member := fleet.current(worker_id, renewal.instance_id)) is None:
            return None
        renewed = w.RenewResponse(lease_s=fleet.lease_s, number=number)
        if 0 < number <= member.renewals:
            return renewed
        account = _account(renewal)
        fleet.renew(
            worker_id,
            renewal.instance_id,
            load=wire.load_from_pb(renewal.load) if renewal.HasField("load") else None,
            draining=renewal.draining,
            kv=wire.kv_report_from_pb(renewal.kv) if renewal.HasField("kv") else None,
            unhealthy=renewal.unhealthy,
            adapters=[wire.adapter_from_pb(x) for x in renewal.adapters],
            gpus=renewal.gpus,
            account=account,
            weights=wire.weights_from_pb(renewal.weights),
            updating=renewal.updating,
        )
        member.renewals = number
        if account is not None:
            self._billing.reported(member.info, account)
        self._served.report(member, fleet.members.values())
        if renewal.moving or renewal.draining:
            # A draining worker can wait. Until it sets `moving`, move only requests whose KV can
            # be sent along: any other move computes the prompt again.
            reason = f"worker {worker_id} is draining"
            self._generating.move_off(worker_id, reason, live_only=not renewal.moving)
        return renewed

    def deregister(self, request: w.DeregisterRequest) -> None:
        """Remove a worker that leaves. Ignored if it is unknown."""
        instance = request.worker_id, request.instance_id
        member = self._fleet.deregister(*instance, failure=request.failure)
        if member is not None and (account := _account(request)) is not None:
            self._billing.reported(member.info, account)

    async def renew_over_links(self) -> None:
        """Renew the leases of workers whose links bring a renewal, until cancelled."""
        links, renewals = self._pool.links, self._pool.renewals
        while True:
            member, renewal = await renewals.get()
            if member.lost:
                continue  # its link is about to close, and it registers again
            try:
                renewed = self.renew(renewal)
            except InvalidRequest as error:
                # Not acknowledged, so the worker renews by gRPC and gets the error.
                logger.warning("worker %s: bad renewal: %s", member.worker_id, error.message)
                continue
            if renewed is not None:
                links[member].acknowledge(renewed)


def _account(request: w.RenewRequest | w.DeregisterRequest) -> Account | None:
    return wire.account_from_pb(request.account) if request.HasField("account") else None


def _check_address(address: str, field: str) -> None:
    """Raise InvalidRequest unless `address` is host:port."""
    if not is_address(address):
        raise InvalidRequest(f"{field} is {address!r}, which is not host:port", field=field)
