"""A prefill and a decode engine used as the router uses them, without the router."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pdserve.types import Constraint, FinishReason, SamplingParams, StructuredOutput
from workers.engine import DecodePhase, PrefillPhase

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.types import PositionLogprobs
    from tests.e2e.engines import Answer, EngineProcess

# Tokens of a block and of a prefill chunk, in the engines of fixtures.py.
BLOCK, CHUNK = 32, 256
_TRANSFERS = itertools.count(1)


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(f"{length}/{seed}")
    return [rng.randrange(3, 400) for _ in range(length)]


def params(max_tokens: int = 16, **more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, **more})


# What the tokens of an answer can depend on.
KINDS: dict[str, dict[str, Any]] = {
    "seeded": {"temperature": 0.9, "seed": 1234},
    "seeded top_p top_k": {"temperature": 1.0, "seed": 5, "top_p": 0.9, "top_k": 50},
    "seeded min_p": {"temperature": 1.1, "seed": 6, "min_p": 0.01},
    "penalties": {"presence_penalty": 1.5, "frequency_penalty": 0.7, "repetition_penalty": 1.3},
    "seeded penalties logprobs": {
        "temperature": 0.8,
        "seed": 77,
        "presence_penalty": 0.8,
        "repetition_penalty": 1.2,
        "logprobs": 3,
    },
    "logprobs": {"logprobs": 5},
    "min_tokens and stop ids": {"min_tokens": 5, "stop_token_ids": tuple(range(3, 200))},
    "logit_bias": {"logit_bias": {7: 40.0, 99: 30.0}},
    "regex": {
        "structured_output": StructuredOutput(Constraint.REGEX, "[a-c]{4}-[0-9]{10}-(foo|bar)+")
    },
    "json, seeded": {
        "temperature": 1.0,
        "seed": 4,
        "structured_output": StructuredOutput(
            Constraint.JSON_SCHEMA,
            '{"type":"object","properties":{"a":{"type":"integer"},'
            '"b":{"type":"string","maxLength":8}},"required":["a","b"],'
            '"additionalProperties":false}',
        ),
    },
    "structural tag, seeded": {
        "temperature": 1.0,
        "seed": 8,
        "structured_output": StructuredOutput(
            Constraint.STRUCTURAL_TAG,
            '{"type":"structural_tag","format":{"type":"tag","begin":"<call>",'
            '"content":{"type":"json_schema","json_schema":{"type":"object","properties":'
            '{"a":{"type":"integer","maximum":9}},"required":["a"]}},"end":"</call>"}}',
        ),
    },
    "choice": {
        "structured_output": StructuredOutput(Constraint.CHOICE, choices=("yes", "no", "maybe"))
    },
}


@dataclass(frozen=True, slots=True)
class Joined:
    """One answer, whoever made its parts; what exactness compares."""

    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[PositionLogprobs, ...]
    finish_reason: FinishReason | None
    stop_reason: str | int | None


def joined(*parts: Answer) -> Joined:
    """Join answers of engines, or deltas of a client, in order; the last says why it ended."""
    return Joined(
        tuple(t for part in parts for t in part.token_ids),
        "".join(part.text for part in parts),
        tuple(p for part in parts for p in part.logprobs),
        parts[-1].finish_reason,
        parts[-1].stop_reason,
    )


@dataclass(slots=True)
class Pair:
    """`instance_id` is the prefill engine's; `last` holds the parts of the last answer."""

    prefill: EngineProcess
    decode: EngineProcess
    instance_id: str
    last: list[Answer] = field(default_factory=list)

    def submit(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        *,
        resume: Sequence[int] = (),
    ) -> tuple[int, int]:
        """Both at once, as the coordinator does; returns (prefill stream, decode stream)."""
        transfer_id = f"t{next(_TRANSFERS)}"
        source = DecodePhase(transfer_id, self.prefill.addresses, self.instance_id)
        return (
            self.prefill.submit(prompt, sampling, PrefillPhase(transfer_id), resume=resume),
            self.decode.submit(prompt, sampling, source, resume=resume),
        )

    async def collect(self, streams: tuple[int, int]) -> Joined:
        """The whole answer; a first token that ends it cancels the decode part."""
        first = await self.prefill.collect(streams[0])
        assert first.error is None, first.error
        if first.finish_reason is not FinishReason.LENGTH:
            self.decode.cancel(streams[1])
            self.last = [first]
            return joined(first)
        rest = await self.decode.collect(streams[1])
        self.last = [first, rest]
        return joined(first, rest)

    async def run(
        self, prompt: Sequence[int], sampling: SamplingParams, *, resume: Sequence[int] = ()
    ) -> Joined:
        """One request from end to end, after the tokens of `resume`."""
        return await self.collect(self.submit(prompt, sampling, resume=resume))

    async def until_empty(self) -> None:
        """Both sides' ledgers and caches are back to nothing."""
        await self.prefill.until_empty()
        await self.decode.until_empty()
