"""Settings of a fake engine, and its faults."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta, Struct, ValidationError, convert

from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

Count = Annotated[int, Meta(ge=1)]
Step = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(ge=0)]


class FakeFaults(Struct, frozen=True, forbid_unknown_fields=True):
    """Faults. The first three are patterns (`*`, `?`), the first two over request ids; "" matches
    none."""

    fail_prefill: str = ""  # the prefill of such a request ends with worker_failed
    drop_transfer: str = ""  # the transfer of such a request fails
    wrong_kv_from: str = ""  # KV from producers with such an instance id is taken for other KV
    computes_wrong: bool = False  # tokens of new requests are those of other weights
    delay_transfer_s: Seconds = 0.0  # is added to every transfer
    cannot_compute: bool = (
        False  # the engine fails when it computes for the first time, at its start
    )
    stalled: bool = False  # the engine accepts requests and runs no step
    stall_at_step: Step = 0  # first step that does not run; from 1, 0 for never
    kill_on_token: Step = 0  # a step with it in a prompt kills the process; 0 for never
    crash_at_step: Step = 0  # the engine dies at this step; from 1, 0 for never
    fail_weights: bool = False  # new weights cannot be loaded

    def stalls(self, step: int) -> bool:
        return self.stalled or 0 < self.stall_at_step <= step


def matches(pattern: str, request_id: str) -> bool:
    return bool(pattern) and fnmatchcase(request_id, pattern)


class FakeSettings(FakeFaults, frozen=True, kw_only=True):
    """Settings, and the faults from the start on.

    A step takes `step_s`, `prefill_s` for each prompt token in it, and `decode_s` for each request
    that decodes in it. With `clock_text`, the text of a token is the time at which its step ended
    (CLOCK_MONOTONIC, s), from which a reader computes its age. KV from producers whose instance ids
    match the pattern `far_producers` takes `far_transfer_s` longer. With `prefix_cache`, the blocks
    of prompts are cached. Prompts may have `max_images`. A consumer waits `pairing_s` for the end
    of a prefill. Without `listens`, only engines in this process can fetch KV.
    """

    block_size: Count = 16
    total_blocks: Count = 4096
    max_num_seqs: Count = 64
    max_loras: Step = 0
    max_images: Step = 0
    start_s: Seconds = 0.0
    prefill_s: Seconds = 0.0
    decode_s: Seconds = 0.0
    step_s: Seconds = 0.0
    transfer_s: Seconds = 0.0
    far_transfer_s: Seconds = 0.0
    far_producers: str = ""
    clock_text: bool = False
    prefix_cache: bool = False
    pairing_s: Seconds = 30.0
    listens: bool = True


def settings_from_args(args: Mapping[str, object]) -> FakeSettings:
    """Read a worker's `engine_args`. Raises ConfigError."""
    try:
        return convert(dict(args), FakeSettings)
    except ValidationError as error:
        # "... unknown field `name`", or "... - at `$.name`".
        field = "engine_args." + re.findall(r"`\$?\.?(\w+)`", str(error))[-1]
        raise ConfigError(f"{field}: {error}", field=field) from None
