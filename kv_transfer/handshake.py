"""What two workers say of themselves when a link begins, and why one would refuse the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kv_transfer.messages import PROTOCOL_VERSION, Hello

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Identity:
    """What a worker says of itself in a handshake."""

    instance_id: str
    compatibility: str


def hello_of(
    identity: Identity, producer_instance_id: str, offers: Sequence[dict[str, Any] | None]
) -> Hello:
    """A target's first message. None is a transport that it cannot offer."""
    return Hello(
        PROTOCOL_VERSION,
        identity.instance_id,
        producer_instance_id,
        identity.compatibility,
        [offer for offer in offers if offer is not None],
    )


def refusal_of(hello: Hello, identity: Identity) -> str | None:
    """Why a source that is `identity` exchanges nothing with who said `hello`, or None."""
    if hello.version != PROTOCOL_VERSION:
        return f"protocol version {hello.version}, not {PROTOCOL_VERSION}"
    if hello.producer_instance_id != identity.instance_id:
        return "the source has been restarted"
    if hello.compatibility != identity.compatibility:
        return f"KV layout {hello.compatibility}, not {identity.compatibility}"
    return None
