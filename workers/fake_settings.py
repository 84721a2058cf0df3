"""What a fake engine is told: its size, its latencies, its faults."""

from __future__ import annotations

from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from _typeshed import DataclassInstance


def _refuse_negative(settings: DataclassInstance) -> None:
    for item in fields(settings):
        value = getattr(settings, item.name)
        if isinstance(value, int | float) and not value >= 0:
            raise ConfigError(f"{item.name} must not be negative", field=item.name)


@dataclass(frozen=True, slots=True)
class FakeShape:
    """Size of the engine. `block_bytes` is what transfers report for a block. With `clock_text`
    tokens read as the time at which their step ended (CLOCK_MONOTONIC, s): how old they are can be
    told. With `prefix_cache` prompts' blocks are cached, and a step computes what is not."""

    block_size: int = 16
    total_blocks: int = 4096
    max_num_seqs: int = 64
    block_bytes: int = 4096
    clock_text: bool = False
    prefix_cache: bool = False

    def __post_init__(self) -> None:
        for item in fields(self):
            if item.type == "int" and getattr(self, item.name) < 1:
                raise ConfigError(f"{item.name} must be at least 1", field=item.name)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)


@dataclass(frozen=True, slots=True)
class FakeTiming:
    """Scripted latencies: a step takes `step_s` and `prefill_s` for each prompt token in it."""

    start_s: float = 0.0
    prefill_s: float = 0.0
    step_s: float = 0.0
    transfer_s: float = 0.0

    def __post_init__(self) -> None:
        _refuse_negative(self)

    def of_step(self, prefill_tokens: int) -> float:
        return self.step_s + self.prefill_s * prefill_tokens


@dataclass(frozen=True, slots=True)
class FakeKv:
    """KV that can leave the engine: where, and how long each side waits for the other.

    `pairing_s` is how long a decode worker may ask for a transfer that is not known yet.
    """

    instance_id: str
    host: str = "127.0.0.1"
    lease_s: float = 30.0
    pairing_s: float = 30.0
    receive_timeout_s: float = 60.0


@dataclass(frozen=True, slots=True)
class FakeFaults:
    """Scripted faults. The first two are patterns (`*`, `?`) over request ids; empty hits none.

    fail_prefill    the prefill of such a request ends with worker_failed
    drop_transfer   the link breaks where such a request's blocks should travel
    delay_transfer_s  is added to every transfer
    stalled         work is taken, and no step is ever made
    stall_at_step   that step is not made, nor one after it, counted from 1; 0 for never
    crash_at_step   the engine dies in place of that step, counted from 1; 0 for never
    """

    fail_prefill: str = ""
    drop_transfer: str = ""
    delay_transfer_s: float = 0.0
    stalled: bool = False
    stall_at_step: int = 0
    crash_at_step: int = 0

    def __post_init__(self) -> None:
        _refuse_negative(self)

    def stalls(self, step: int) -> bool:
        return self.stalled or 0 < self.stall_at_step <= step

    def fails_prefill(self, request_id: str) -> bool:
        return bool(self.fail_prefill) and fnmatchcase(request_id, self.fail_prefill)

    def drops_transfer(self, request_id: str) -> bool:
        return bool(self.drop_transfer) and fnmatchcase(request_id, self.drop_transfer)


@dataclass(frozen=True, slots=True)
class FakeSettings:
    """All of it. `kv` is None where KV cannot leave the engine."""

    shape: FakeShape = FakeShape()
    timing: FakeTiming = FakeTiming()
    faults: FakeFaults = FakeFaults()
    kv: FakeKv | None = None


def settings_from_args(args: Mapping[str, object], *, kv: FakeKv | None) -> FakeSettings:
    """Reads a worker's `engine_args`, flat and by the fields' names. Raises ConfigError."""
    values: dict[type, dict[str, Any]] = {FakeShape: {}, FakeTiming: {}, FakeFaults: {}}
    for name, value in args.items():
        for cls, found in values.items():
            default = {x.name: x.default for x in fields(cls)}.get(name)
            if default is not None and _fits(value, default):
                found[name] = value
                break
        else:
            raise ConfigError(
                f"engine_args.{name} is not a setting of the fake engine, or of another type",
                field=f"engine_args.{name}",
            )
    return FakeSettings(
        FakeShape(**values[FakeShape]),
        FakeTiming(**values[FakeTiming]),
        FakeFaults(**values[FakeFaults]),
        kv=kv,
    )


def _fits(value: object, default: object) -> bool:
    if isinstance(default, float):
        return isinstance(value, int | float) and not isinstance(value, bool)
    return type(value) is type(default)
