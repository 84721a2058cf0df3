"""Whether arms are set alike in all that matters, from what their workers say of themselves."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

# A profiled KV cache differs from start to start by a few blocks.
KV_TOLERANCE: Final = 0.01
ROLES: Final = ("prefill", "decode", "aggregated")
CORES, GPUS, KV_TOKENS = "cores", "gpus", "kv_cache_tokens"
# Of which workers say what is theirs; an arm has the sum.
_SHARES: Final = (CORES, GPUS)


@dataclass(frozen=True, slots=True)
class ArmSettings:
    """What an arm runs with: its workers by role, sums over them, and every other setting with the
    distinct values that its workers have."""

    workers: Mapping[str, int]
    cores: int
    kv_cache_tokens: int
    of_workers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    gpus: int = 0


@dataclass(frozen=True, slots=True)
class Difference:
    """A setting in which arms differ, with each arm's value."""

    name: str
    values: Mapping[str, str]

    def __str__(self) -> str:
        return f"{self.name}: " + ", ".join(f"{arm} {value}" for arm, value in self.values.items())


def settings_of(workers: Sequence[Mapping[str, Any]]) -> ArmSettings:
    """Sum up workers' own words: ``role``, ``block_size``, ``total_blocks`` and ``settings`` of
    each, where ``settings`` has ``cores`` and, as numbers with commas, the ``gpus`` that it may
    use, which others may use too; all other keys are compared as they are."""
    roles = Counter(worker["role"] for worker in workers)
    values: dict[str, set[str]] = {}
    for worker in workers:
        for name, value in _compared(worker).items():
            values.setdefault(name, set()).add(value)
    return ArmSettings(
        workers={role: roles[role] for role in ROLES if role in roles},
        cores=sum(int(worker["settings"].get(CORES, 0)) for worker in workers),
        kv_cache_tokens=sum(worker["block_size"] * worker["total_blocks"] for worker in workers),
        of_workers={name: tuple(sorted(found)) for name, found in sorted(values.items())},
        gpus=len({gpu for worker in workers for gpu in _gpus(worker)}),
    )


def _gpus(worker: Mapping[str, Any]) -> list[str]:
    said = str(worker["settings"].get(GPUS, ""))
    return said.split(",") if said else []


def _compared(worker: Mapping[str, Any]) -> dict[str, str]:
    own = {name: str(x) for name, x in worker["settings"].items() if name not in _SHARES}
    not_compared = ("role", "total_blocks", "settings")
    return {name: str(x) for name, x in worker.items() if name not in not_compared} | own


def differences(
    arms: Mapping[str, ArmSettings | None], meant: Collection[str] = ()
) -> list[Difference]:
    """Where arms whose settings are known differ, except in what is ``meant`` to differ."""
    known = {name: found for name, found in arms.items() if found is not None}
    found = []
    for name in sorted({key for arm in known.values() for key in arm.of_workers}):
        values = {arm: "/".join(s.of_workers.get(name, ("-",))) for arm, s in known.items()}
        if len(set(values.values())) > 1:
            found.append(Difference(name, values))
    for share in _SHARES:
        counts = {arm: getattr(s, share) for arm, s in known.items()}
        if len(set(counts.values())) > 1:
            found.append(Difference(share, {arm: str(n) for arm, n in counts.items()}))
    tokens = {arm: s.kv_cache_tokens for arm, s in known.items()}
    if tokens and max(tokens.values()) - min(tokens.values()) > KV_TOLERANCE * max(tokens.values()):
        found.append(Difference(KV_TOKENS, {arm: str(n) for arm, n in tokens.items()}))
    return [difference for difference in found if difference.name not in meant]
