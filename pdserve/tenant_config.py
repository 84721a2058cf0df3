"""Tenants as the configuration names them."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.api_keys import is_hash
from pdserve.config_schema import check, key, refuse


@dataclass(frozen=True, slots=True)
class TenantConfig:
    """Whom some API keys belong to, and what they may ask for."""

    name: str = key("", "Name of the tenant, as metrics show it.", not_empty=True)
    keys: tuple[str, ...] = key((), "Hashes of its API keys, as `pdserve hash-key` makes them.")
    weight: float = key(
        1.0, "Its share, beside those of others, where requests wait.", minimum=0.001, maximum=1e6
    )
    requests_per_minute: float = key(0.0, "Requests it may send; 0 for any number.", minimum=0)
    tokens_per_minute: float = key(
        0.0, "Tokens it may use, prompts and predicted answers; 0 for any number.", minimum=0
    )
    max_concurrent_requests: int = key(
        0, "Requests it may have waiting and running; 0 for any number.", minimum=0
    )

    def __post_init__(self) -> None:
        check(self)
        for i, text in enumerate(self.keys):
            if not is_hash(text):
                # Whoever put a key here by mistake does not want to read it in a log.
                refuse(f"keys[{i}]", "must be a hash, as `pdserve hash-key` prints it")
