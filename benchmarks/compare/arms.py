"""What is compared: arms, and their equal shares of a machine. No I/O."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from benchmarks.errors import BenchError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_SHAPE: Final = re.compile(r"(?:([1-9]\d?)P([1-9]\d?)D)?(?:([1-9]\d?)A)?", re.ASCII)
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,31}", re.ASCII)
# Cores left to router and client where there are enough for that.
_SPARE_CORES: Final = 2
FAKE_BLOCK_BYTES: Final = 4096
NIXL: Final = "nixl"
_OF_PLAIN_SERVERS: Final = ("worker.engine_args.", "worker.model")


@dataclass(frozen=True, slots=True)
class Arm:
    """One contender: workers that are started for it, or an endpoint that runs already.

    ``overrides`` are configuration keys (dotted) that this arm alone has. ``is_nixl`` is whether
    vLLM's own P/D serves in place of pdserve.
    """

    name: str
    prefill: int = 0
    decode: int = 0
    aggregated: int = 0
    url: str | None = None
    overrides: tuple[tuple[str, object], ...] = ()
    is_nixl: bool = False

    @property
    def workers(self) -> int:
        """How many are started; 0 for an endpoint."""
        return self.prefill + self.decode + self.aggregated

    @property
    def needs_http(self) -> bool:
        """Whether it has no other face."""
        return self.is_nixl or self.url is not None


def parse_arm(text: str) -> Arm:
    """``1P1D``, ``2A``, ``1P1D1A``, ``small=2A``, ``nixl`` or ``peer=http://host:port``.

    Raises :class:`BenchError`.
    """
    name, equals, what = text.strip().partition("=")
    if not equals:
        name, what = text.strip(), text.strip()
    if not _NAME.fullmatch(name):
        raise BenchError(f"an arm cannot be called {name!r}; use letters, digits and . _ + -")
    if what.startswith(("http://", "https://")):
        return Arm(name, url=what)
    if what == NIXL:
        return Arm(name, prefill=1, decode=1, is_nixl=True)
    found = _SHAPE.fullmatch(what)
    if not what or found is None:
        raise BenchError(
            f"{text!r} is not an arm: give 1P1D (prefill and decode workers), 2A "
            "(aggregated ones), nixl, or name=http://host:port"
        )
    prefill, decode, aggregated = (int(count or 0) for count in found.groups())
    return Arm(name, prefill, decode, aggregated)


def parse_arms(texts: Sequence[str]) -> tuple[Arm, ...]:
    """All arms, in the order given; raises :class:`BenchError` for fewer than two."""
    arms = tuple(parse_arm(text) for text in texts)
    names = [arm.name for arm in arms]
    for name in names:
        if names.count(name) > 1:
            raise BenchError(f"two arms are called {name}; name one otherwise, such as other=2A")
    if len(arms) < 2:
        raise BenchError("a comparison needs at least two arms, such as --arms 1P1D,2A")
    return arms


def with_overrides(arms: Sequence[Arm], texts: Sequence[str]) -> tuple[Arm, ...]:
    """Arms with their ``ARM:KEY=VALUE`` of ``--arm-set``; raises :class:`BenchError`."""
    import yaml

    found = {arm.name: arm for arm in arms}
    for text in texts:
        name, colon, setting = text.partition(":")
        key, equals, value = setting.partition("=")
        if not colon or not equals or not key:
            raise BenchError(f"--arm-set must be ARM:KEY=VALUE, not {text!r}")
        if name not in found or found[name].url is not None:
            raise BenchError(f"--arm-set {text!r}: no arm called {name!r} is started here")
        if found[name].is_nixl and not key.startswith(_OF_PLAIN_SERVERS):
            raise BenchError(f"--arm-set {text!r}: a plain vLLM server has no {key}")
        more = (*found[name].overrides, (key, yaml.safe_load(value)))
        found[name] = replace(found[name], overrides=more)
    return tuple(found.values())


def share_cores(arms: Sequence[Arm], available: int, wanted: int | None = None) -> int:
    """How many cores the workers of each arm have together: as many for every arm, split evenly.

    Without ``wanted`` the most that can be, leaving two to router and client where every worker
    still has one. Raises :class:`BenchError` where the arms cannot have equally many.
    """
    counts = [arm.workers for arm in arms if arm.url is None]
    step = math.lcm(*counts) if counts else 1
    if wanted is not None:
        if wanted > available:
            raise BenchError(f"--cores {wanted}: this process may use {available}")
        if wanted % step:
            raise BenchError(
                f"--cores {wanted} cannot be shared out evenly between {_each(counts)} workers; "
                f"use a multiple of {step}"
            )
        return wanted
    if step > available:
        raise BenchError(
            f"arms of {_each(counts)} workers need {step} cores to have equally many; "
            f"this process may use {available}"
        )
    spare = _SPARE_CORES if available - _SPARE_CORES >= step else 0
    return (available - spare) // step * step


def _each(counts: Sequence[int]) -> str:
    return " and ".join(str(count) for count in sorted(set(counts)))


def arm_changes(arm: Arm, *, cores: int, kv_cache_bytes: int | None, engine: str) -> dict[str, Any]:
    """The configuration keys, dotted, in which this arm differs from the common configuration.

    Raises :class:`BenchError` for a KV cache that is too small to be shared out, and for an engine
    that the arm cannot have.
    """
    if arm.is_nixl and engine != "vllm":
        raise BenchError(f"{arm.name}: vLLM's own P/D has no engine {engine}")
    changes: dict[str, Any] = {
        "up.prefill": arm.prefill,
        "up.decode": arm.decode,
        "up.aggregated": arm.aggregated,
        "up.cores_per_worker": cores // arm.workers,
        "router.http_port": 0,
        "router.grpc_port": 0,
    }
    if kv_cache_bytes is not None:
        changes |= _kv_share(kv_cache_bytes // arm.workers, engine)
    return changes | dict(arm.overrides)


def _kv_share(kv_cache_bytes: int, engine: str) -> Mapping[str, object]:
    if engine == "fake":
        blocks = kv_cache_bytes // FAKE_BLOCK_BYTES
        if blocks < 1:
            raise BenchError("--kv-cache-mib is less than a block for each worker")
        return {"worker.engine_args.total_blocks": blocks}
    return {"worker.engine_args.kv_cache_memory_bytes": kv_cache_bytes}
