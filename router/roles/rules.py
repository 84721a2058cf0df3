"""Whether a worker may change its role, and with whom it proves the new one. Pure functions."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from pdserve.errors import InvalidRequest, Unavailable
from pdserve.kv_pairs import exchange, kind_of
from pdserve.types import Role
from router.fleet.member import MemberState

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from router.fleet.member import Member


def spare_for(members: Sequence[Member], role: Role, failed: Collection[str]) -> Member | None:
    """The worker of one model's `members` that can become a `role` worker at the least cost: with
    the least work, and of those that have not `failed` to, if there are such."""
    ready = [m for m in members if m.state is MemberState.READY and m.info.role is not role]
    ready.sort(
        key=lambda m: (
            m.worker_id in failed,
            m.outstanding_tokens,
            m.outstanding_requests if m.load is None else m.load.num_running_reqs,
            m.reserved_blocks,
            m.worker_id,
        )
    )
    for member in ready:
        with suppress(InvalidRequest, Unavailable):
            partner_for(members, member.worker_id, role)
            return member
    return None


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
    if not is_left(others, model, before):
        raise Unavailable(f"worker {worker_id} is the last {before} worker of model {model}")
    own = kind_of(replace(member.info, role=role))
    for other in others:
        if other.info.role is not before:
            continue
        pair = (kind_of(other.info), own) if role is Role.DECODE else (own, kind_of(other.info))
        if exchange(*pair):
            return other
    raise Unavailable(f"no {before} worker can exchange KV with worker {worker_id}")


def is_left(members: Sequence[Member], model: str, role: Role) -> bool:
    """Whether a `role` worker of a model is ready."""
    return any(
        m.state is MemberState.READY and m.info.role is role and m.info.model.name == model
        for m in members
    )


def other_role(role: Role) -> Role:
    """Of a worker that has one of the two."""
    return Role.DECODE if role is Role.PREFILL else Role.PREFILL
