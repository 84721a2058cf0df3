"""Configuration keys about failures: how they are found out, and what is done."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.config_schema import check, key

# What a drain may take beyond the time that streams have to end: routers find another place for
# what goes on elsewhere, and the blocks of what was ended are free within a step, or a fence of
# their transfer.
MOVE_S = 10.0
UNPIN_S = 30.0


@dataclass(frozen=True, slots=True)
class FallbackConfig:
    """What is computed again when a worker fails, and when to give up."""

    max_fallbacks: int = key(
        16, "Times one request goes on elsewhere, in all.", minimum=0, maximum=1000
    )
    progress_tokens: int = key(
        16, "Tokens of progress after which all ways to go on are tried anew.", minimum=1
    )
    tokens_per_s: float = key(
        20000.0,
        "Tokens of prompts and answers that may be computed again for a model, on average; what "
        "is beyond fails with 503. 0 for no bound.",
        minimum=0,
    )
    burst_s: float = key(
        30.0, "How many seconds of that may be used at once.", minimum=0.001, maximum=86400
    )
    live_kv: bool = key(
        True,
        "Whether answers that leave a worker which is well take their KV along.",
    )

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True)
class DetectionConfig:
    """When a worker that lives is given no work."""

    stall_s: float = key(
        2.0,
        "How long a worker with work may say nothing, or make no step, until its requests go on "
        "elsewhere; longer in a step whose like takes longer. 0 never does.",
        minimum=0,
        maximum=3600,
    )
    failures: int = key(
        3,
        "Failures in a row after which a worker gets no work, or two workers are kept apart.",
        minimum=1,
    )
    suspend_s: float = key(
        10.0,
        "How long such a worker gets none, until a request of the router's own tries it; doubled "
        "when that fails. 0 never does.",
        minimum=0,
        maximum=86400,
    )
    max_suspend_s: float = key(120.0, "The longest such time.", minimum=0, maximum=86400)
    probe_s: float = key(
        60.0,
        "How long no KV may come between two workers until the router tries them with a request of "
        "its own. 0 never does, and clients' requests try what got no work.",
        minimum=0,
        maximum=86400,
    )

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True)
class GpuConfig:
    """What a worker's GPUs may be like before it takes no more work."""

    look_s: float = key(
        10.0, "How often they are looked at; 0 never does.", minimum=0, maximum=86400
    )
    max_temperature_c: int = key(95, "Degrees, at the most; 0 for any.", minimum=0)
    max_ecc_errors: int = key(
        0, "Uncorrected memory errors since the driver was loaded, at the most.", minimum=0
    )
    min_free_memory_bytes: int = key(
        0, "Memory that must be left, beside all that the engine has taken.", minimum=0
    )

    def __post_init__(self) -> None:
        check(self)
