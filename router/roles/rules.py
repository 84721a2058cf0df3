"""Whether a worker may change its role, and with whom it proves the new one. Pure functions."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pdserve.errors import InvalidRequest, Unavailable
from pdserve.kv_pairs import exchange, kind_of
from pdserve.types import Role
from router.member import MemberState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from router.member import Member


def partner_for(members: Sequence[Member], worker_id: str, role: Role) -> Member:
    """The worker with which `worker_id` proves itself as a `role` worker.

    Raises InvalidRequest for a worker or a role that cannot be, and Unavailable where the worker is
    not ready, or its model would be left without one of its own role, or without a partner.
    """
    member = next((m for m in members if m.worker_id == worker_id and not m.lost), None)
    if member is None:
        raise InvalidRequest(f"no worker {worker_id} is registered", field="worker_id")
    before = member.info.role
    if Role.AGGREGATED in (role, before) or role is before:
        raise InvalidRequest(
            f"worker {worker_id} is a {before} worker and cannot become a {role} worker",
            field="role",
        )
    if member.state is not MemberState.READY:
        raise Unavailable(f"worker {worker_id} is {member.state}", retry_after_s=1.0)
    model = member.info.model.name
    others = [
        m
        for m in members
        if m is not member and m.state is MemberState.READY and m.info.model.name == model
    ]
    if not any(m.info.role is before for m in others):
        raise Unavailable(f"worker {worker_id} is the last {before} worker of model {model}")
    own = kind_of(replace(member.info, role=role))
    for other in others:
        if other.info.role is not before:
            continue
        pair = (kind_of(other.info), own) if role is Role.DECODE else (own, kind_of(other.info))
        if exchange(*pair):
            return other
    raise Unavailable(f"no {before} worker can exchange KV with worker {worker_id}")
