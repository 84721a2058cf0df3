"""A profile as a file: JSON, with the fitted step costs of each worker and every sample."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from pdserve.errors import ConfigError
from pdserve.step_moments import FEATURES
from pdserve.types import Role

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

SCHEMA = "pdserve-profile/1"


@dataclass(frozen=True, slots=True)
class StepProfile:
    """Seconds of a step by the features of pdserve/step_moments.py, and what they rest on: see
    StepCosts in the protos."""

    coefficients: tuple[float, ...]
    prefill_steps: float
    decode_steps: float
    prefill_end: int
    error: float
    chunk_tokens: int


@dataclass(frozen=True, slots=True)
class WorkerProfile:
    """One worker and its engine; `steps` is None where it said nothing."""

    worker_id: str
    role: Role
    model: str
    engine: str
    block_size: int
    total_blocks: int
    max_num_seqs: int
    settings: Mapping[str, str]
    steps: StepProfile | None


@dataclass(frozen=True, slots=True)
class Sample:
    """One answered request of the grid; seconds and tokens. `tpot_s` is the mean gap after the
    second token, `max_gap_s` the longest."""

    prompt_tokens: int
    concurrency: int
    output_tokens: int
    ttft_s: float
    tpot_s: float
    max_gap_s: float
    queue_s: float
    prefill_s: float
    exposed_transfer_s: float
    transfer_bytes: int
    prefill_worker: str
    decode_worker: str


@dataclass(frozen=True, slots=True)
class Profile:
    """`host` says on what it was measured, `seed` what the prompts were drawn with."""

    model: str
    created_at: str
    seed: int
    host: Mapping[str, str]
    workers: tuple[WorkerProfile, ...]
    samples: tuple[Sample, ...]
    version: str = ""
    schema: str = field(default=SCHEMA)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"


def read(path: Path) -> Profile:
    """The profile in a file. Raises ConfigError naming the key that is not as it should be."""
    try:
        return parse(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"cannot read the profile {path}: {error}") from error


def parse(raw: Any) -> Profile:
    """The profile in loaded JSON. Raises ConfigError."""
    if not isinstance(raw, dict) or raw.get("schema") != SCHEMA:
        raise ConfigError(f"schema: this is no {SCHEMA}", field="schema")
    try:
        workers = tuple(_worker(x) for x in raw["workers"])
        samples = tuple(Sample(**x) for x in raw["samples"])
        return Profile(**{**raw, "workers": workers, "samples": samples})
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"the profile is not complete: {error}", field="workers") from error


def _worker(raw: dict[str, Any]) -> WorkerProfile:
    steps = raw["steps"]
    if steps is not None:
        steps = StepProfile(**{**steps, "coefficients": tuple(steps["coefficients"])})
        if len(steps.coefficients) != FEATURES:
            raise ValueError(f"steps.coefficients has {len(steps.coefficients)} numbers")
    return WorkerProfile(**{**raw, "role": Role(raw["role"]), "steps": steps})
