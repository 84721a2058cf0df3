"""Settings of a fake engine, and its faults."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class FakeFaults:
    """Faults. The first three are patterns (`*`, `?`) over request ids; "" matches none.

    fail_prefill      the prefill of such a request ends with worker_failed
    drop_transfer     the transfer of such a request fails
    corrupt_transfer  the KV of such a request arrives changed, and nothing notices
    delay_transfer_s  is added to every transfer
    stalled           the engine accepts requests and makes no step
    stall_at_step     it makes neither this step nor later ones; counted from 1, 0 for never
    crash_at_step     the engine dies at this step; counted from 1, 0 for never
    """

    fail_prefill: str = ""
    drop_transfer: str = ""
    corrupt_transfer: str = ""
    delay_transfer_s: float = 0.0
    stalled: bool = False
    stall_at_step: int = 0
    crash_at_step: int = 0

    def stalls(self, step: int) -> bool:
        return self.stalled or 0 < self.stall_at_step <= step


def matches(pattern: str, request_id: str) -> bool:
    return bool(pattern) and fnmatchcase(request_id, pattern)


@dataclass(frozen=True, slots=True)
class FakeKv:
    """KV transfers. `pairing_s` is how long a consumer may ask for a transfer whose prefill is not
    known yet. Without `host` only engines in this process can fetch."""

    instance_id: str
    host: str = "127.0.0.1"
    lease_s: float = 30.0
    pairing_s: float = 30.0
    receive_timeout_s: float = 30.0


@dataclass(frozen=True, slots=True)
class FakeSettings:
    """A step takes `step_s`, `prefill_s` for each prompt token in it, and `decode_s` for each
    request that decodes in it.

    Transfers report `block_bytes` a block. With `clock_text`, tokens read as the time at which
    their step ended (CLOCK_MONOTONIC, s), so that a reader can tell their age. With `prefix_cache`,
    the blocks of prompts are cached. `kv` is None if KV cannot leave the engine.
    """

    block_size: int = 16
    total_blocks: int = 4096
    max_num_seqs: int = 64
    block_bytes: int = 4096
    start_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    step_s: float = 0.0
    transfer_s: float = 0.0
    clock_text: bool = False
    prefix_cache: bool = False
    faults: FakeFaults = FakeFaults()
    kv: FakeKv | None = None

    def __post_init__(self) -> None:
        for part, item in [(self, x) for x in fields(self)] + [
            (self.faults, x) for x in fields(self.faults)
        ]:
            value = getattr(part, item.name)
            least = 1 if part is self and isinstance(item.default, int) else 0
            if type(value) in (int, float) and not value >= least:
                raise ConfigError(f"{item.name} must be at least {least}", field=item.name)


def settings_from_args(args: Mapping[str, object], *, kv: FakeKv | None) -> FakeSettings:
    """Read a worker's `engine_args`: the fields of FakeSettings and FakeFaults by name. Raises
    ConfigError."""
    defaults = {x.name: x.default for cls in (FakeSettings, FakeFaults) for x in fields(cls)}
    of_faults = {x.name for x in fields(FakeFaults)}
    found: dict[str, Any] = {}
    faults: dict[str, Any] = {}
    for name, value in args.items():
        default = defaults.get(name)
        allowed = (int, float) if isinstance(default, float) else (type(default),)
        if name in ("kv", "faults") or default is None or type(value) not in allowed:
            raise ConfigError(
                f"engine_args.{name} is not a setting of the fake engine, or has another type",
                field=f"engine_args.{name}",
            )
        (faults if name in of_faults else found)[name] = value
    return replace(FakeSettings(**found, faults=FakeFaults(**faults)), kv=kv)
