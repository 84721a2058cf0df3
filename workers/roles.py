"""A worker's role, and its way from one to the other: a state machine without I/O.

serving ──begin──► draining ──drained──► proving ──settle(keep)──► serving, in the new role
   ▲                  │ give_up             │ settle(not keep), or nobody settles it
   └──────────────────┴─────────────────────┘ in the old role
"""

from __future__ import annotations

from enum import StrEnum

from pdserve.errors import InvalidRequest, Unavailable
from pdserve.types import Role


class RoleState(StrEnum):
    """Only a worker that serves takes work of everyone; one that proves its role, canaries."""

    SERVING = "serving"
    DRAINING = "draining"
    PROVING = "proving"


class RoleChange:
    """State: the role, the one before it, and how far the change is."""

    __slots__ = ("before", "role", "state")

    def __init__(self, role: Role) -> None:
        self.role = self.before = role
        self.state = RoleState.SERVING

    def begin(self, role: Role) -> None:
        """Raises InvalidRequest for a role that this worker cannot take, and Unavailable while it
        changes already."""
        if self.state is not RoleState.SERVING:
            raise Unavailable(
                f"this worker is {self.state} a change of its role", retry_after_s=1.0
            )
        if Role.AGGREGATED in (role, self.role):
            raise InvalidRequest(
                f"a worker does not change from {self.role} to {role}: only between prefill and "
                f"decode",
                field="role",
            )
        if role is self.role:
            raise InvalidRequest(f"this worker's role is {role} already", field="role")
        self.state = RoleState.DRAINING

    def give_up(self) -> None:
        """Its work did not end: the role stays."""
        self.state = RoleState.SERVING

    def drained(self) -> None:
        """No work is left: the role changes, and is to be proved."""
        self.before = self.role
        self.role = Role.DECODE if self.role is Role.PREFILL else Role.PREFILL
        self.state = RoleState.PROVING

    def settle(self, *, keep: bool) -> bool:
        """The role was proved, or was not. False where nothing was to be settled."""
        if self.state is not RoleState.PROVING:
            return False
        if not keep:
            self.role = self.before
        self.state = RoleState.SERVING
        return True
