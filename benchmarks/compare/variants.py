"""The variants of a comparison, and their equal shares of a machine's cores."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import yaml

from benchmarks.compare.vllm_stack import STACKS, StackConfig
from benchmarks.errors import BenchError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_SHAPE: Final = re.compile(r"(?:([1-9]\d?)P([1-9]\d?)D)?(?:([1-9]\d?)A)?", re.ASCII)
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,31}", re.ASCII)
_OF_ENGINE: Final = "worker.engine_args."
_SPARE_CORES: Final = 2  # for router and client, if each worker still gets a core


@dataclass(frozen=True, slots=True)
class Variant:
    """One system under test: workers that the comparison starts, or an existing endpoint.

    `overrides`: configuration keys of this variant only. `config`: its whole configuration. `url`
    is "" unless it is an endpoint. `stack` is set for servers of vLLM: `is_vllm`.
    """

    name: str
    prefill: int = 0
    decode: int = 0
    aggregated: int = 0
    url: str = ""
    overrides: tuple[tuple[str, object], ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    is_vllm: bool = False
    stack: StackConfig | None = None

    @property
    def workers(self) -> int:
        """The number of workers or servers to start; 0 for an endpoint."""
        return self.prefill + self.decode + self.aggregated


def parse_variant(text: str) -> Variant:
    """Parse `1P1D`, `2A`, `1P1D1A`, `small=2A`, `vllm-pd` or `peer=http://host:port`."""
    name, equals, what = text.strip().partition("=")
    what = what if equals else name
    if not _NAME.fullmatch(name):
        raise BenchError(f"variant name {name!r}: use letters, digits and . _ + -")
    if what.startswith(("http://", "https://")):
        return Variant(name, url=what)
    if what in STACKS:
        return Variant(name, *STACKS[what], is_vllm=True)
    found = _SHAPE.fullmatch(what)
    if not what or found is None:
        raise BenchError(
            f"{text!r} is not a variant: give 1P1D (prefill and decode workers), 2A (aggregated "
            f"workers), {', '.join(STACKS)} (vLLM's servers), or name=http://host:port"
        )
    prefill, decode, aggregated = (int(count or 0) for count in found.groups())
    return Variant(name, prefill, decode, aggregated)


def parse_variants(texts: Sequence[str], settings: Sequence[str] = ()) -> tuple[Variant, ...]:
    """Parse all variants with their `NAME:KEY=VALUE` settings. Raises BenchError."""
    variants = [parse_variant(text) for text in texts]
    found = {variant.name: variant for variant in variants}
    if len(found) < len(variants):
        raise BenchError("two variants have the same name; rename one, such as other=2A")
    if len(found) < 2:
        raise BenchError("a comparison needs at least two variants, such as --arms 1P1D,2A")
    for text in settings:
        name, _, setting = text.partition(":")
        key, equals, value = setting.partition("=")
        if not equals or not key:
            raise BenchError(f"--arm-set must be NAME:KEY=VALUE, not {text!r}")
        if name not in found or found[name].url:
            raise BenchError(f"--arm-set {text!r}: no variant called {name!r} is started here")
        if found[name].is_vllm and not key.startswith(_OF_ENGINE):
            raise BenchError(f"--arm-set {text!r}: {name} takes only keys of {_OF_ENGINE}")
        more = (*found[name].overrides, (key, yaml.safe_load(value)))
        found[name] = replace(found[name], overrides=more)
    return tuple(found.values())


def share_cores(variants: Sequence[Variant], available: int) -> int:
    """Return the total number of cores for the workers of each variant.

    It is the largest number that is equal for all variants and can be divided evenly among the
    workers of each. Two cores are left for router and client if each worker still gets one. Raises
    BenchError if there are not enough cores for an equal number.
    """
    counts = sorted({variant.workers for variant in variants if not variant.url})
    step, each = math.lcm(*counts), " and ".join(map(str, counts))
    if step > available:
        raise BenchError(
            f"variants of {each} workers need {step} cores to have equally many; this process may "
            f"use {available}"
        )
    spare = _SPARE_CORES if available - _SPARE_CORES >= step else 0
    return (available - spare) // step * step


def config_changes(
    variant: Variant, cores: int, kv_cache_bytes: int | None, engine: str
) -> dict[str, Any]:
    """Return the dotted configuration keys of this variant. Raises BenchError."""
    changes: dict[str, Any] = {
        "up.prefill.workers": variant.prefill,
        "up.decode.workers": variant.decode,
        "up.aggregated.workers": variant.aggregated,
        "up.cores_per_worker": cores // variant.workers,
        "router.http.port": 0,
        "router.grpc.port": 0,
    }
    if kv_cache_bytes is not None:
        if engine == "fake":
            raise BenchError(
                "--kv-cache-mib: the fake engine takes worker.engine_args.total_blocks"
            )
        changes["worker.engine_args.kv_cache_memory_bytes"] = kv_cache_bytes // variant.workers
    return changes | dict(variant.overrides)
