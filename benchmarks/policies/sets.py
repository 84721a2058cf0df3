"""Which policies are compared on which traffic."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from benchmarks.errors import BenchError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

DEFAULT: Final = "slo_aware"
FIXED: Final = ("round_robin", "least_loaded", "always_local")
"""Choices that look at no prediction. The first two always hand over."""

_LIMITS: Final = ("--slo-ttft", "1000", "--slo-tpot", "50")
_ROUNDS: Final = ("--requests", "60", "--rounds", "7")

SETS: Final[Mapping[str, tuple[str, ...]]] = {
    "chat": ("--trace", "chat", "--rate", "14", *_ROUNDS, *_LIMITS),
    "code": ("--trace", "code", "--rate", "8", *_ROUNDS, *_LIMITS),
    "longchat": ("--trace", "longchat", "--rate", "10", *_ROUNDS, *_LIMITS),
    "mix": ("--trace", "chat+code+longchat", "--rate", "12", *_ROUNDS, *_LIMITS),
}
"""The options of `pdserve bench compare` for each traffic."""

QUICK: Final = (
    *("--engine", "fake", "--rate", "30", "--requests", "6", "--rounds", "3"),
    *("--max-total-tokens", "1024", "--max-output-tokens", "8", "--drain-timeout", "20"),
    *("--set", "worker.engine_args.step_s=0.002", "--set", "worker.engine_args.prefill_s=0.00005"),
)
"""Shows that all parts work, and nothing else: scripted engines, a few requests."""


def options_of(
    traffic: str, policies: Sequence[str], shape: str, *, is_quick: bool, more: Sequence[str] = ()
) -> list[str]:
    """The options of one comparison: an arm for each policy, alike in all else. Raises
    :class:`BenchError` without the default policy or another to compare it with."""
    if DEFAULT not in policies or len(policies) < 2:
        raise BenchError(f"--policies needs {DEFAULT} and another, such as {DEFAULT},{FIXED[-1]}")
    quick = QUICK if is_quick else ()
    arms = ",".join(f"{policy}={shape}" for policy in policies)
    options = ["--arms", arms, "--baseline", DEFAULT, *SETS[traffic], *quick, *more]
    for policy in policies:
        options += ["--arm-set", f"{policy}:router.policy={policy}"]
    return options
