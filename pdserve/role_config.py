"""Configuration keys about which worker prefills and which decodes, while they run."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.config_schema import check, key


@dataclass(frozen=True, slots=True)
class RolesConfig:
    """When workers are moved between prefill and decode."""

    auto: bool = key(
        False, "Move workers by load; else `pdserve flip` alone does. For one router of several."
    )
    interval_s: float = key(
        1.0, "Seconds between two looks at the loads.", minimum=0.001, maximum=3600
    )
    window_s: float = key(
        30.0, "How far back looks count; older ones less and less.", minimum=0.001, maximum=86400
    )
    min_load: float = key(
        0.7,
        "Nothing is moved while neither phase is loaded more; 1 is all that its workers can do.",
        minimum=0.0,
        maximum=100.0,
    )
    min_improvement: float = key(
        0.15,
        "By what share the load of the phase that is loaded more must fall.",
        minimum=0.01,
        maximum=1.0,
    )
    dwell_s: float = key(
        30.0,
        "How long another split must have been better without a break.",
        minimum=0,
        maximum=86400,
    )
    settle_s: float = key(
        60.0,
        "Pause after a role has changed, or workers came or went.",
        minimum=0,
        maximum=86400,
    )
    failure_pause_s: float = key(
        60.0,
        "Pause after a flip that failed; doubled with each further one, up to an hour.",
        minimum=0,
        maximum=3600,
    )
    drain_timeout_s: float = key(
        30.0,
        "Streams that have not ended by then, on a worker that is moved, go on elsewhere.",
        minimum=0,
        maximum=86400,
    )

    def __post_init__(self) -> None:
        check(self)
