"""A prefill and a decode engine, used as by the router, without the router."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pdserve.types import Constraint, FinishReason, SamplingParams, StructuredOutput
from workers.engine import PrefillPhase

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.types import MediaItem, PositionLogprobs
    from tests.support.engines import EngineAnswer, EngineProcess

# Tokens per block and per prefill chunk, in the engines of fixtures.py.
BLOCK, CHUNK = 32, 256
_TRANSFERS = itertools.count(1)


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(f"{length}/{seed}")
    return [rng.randrange(3, 400) for _ in range(length)]


def params(max_tokens: int = 16, **more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, **more})


# Sampling parameters on which the tokens of an answer can depend.
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
class JoinedAnswer:
    """One answer, joined from the parts of one or more engines, for exact comparison."""

    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[PositionLogprobs, ...]
    finish_reason: FinishReason | None
    stop_reason: str | int | None


def joined(*parts: EngineAnswer) -> JoinedAnswer:
    """Join answers of engines, or deltas of a client, in order. The last one has the finish
    reason."""
    return JoinedAnswer(
        tuple(t for part in parts for t in part.token_ids),
        "".join(part.text for part in parts),
        tuple(p for part in parts for p in part.logprobs),
        parts[-1].finish_reason,
        parts[-1].stop_reason,
    )


@dataclass(slots=True)
class EnginePair:
    """The two engines. `instance_id` is the prefill engine's; `last` has the parts of the last
    answer."""

    prefill: EngineProcess
    decode: EngineProcess
    instance_id: str
    last: list[EngineAnswer] = field(default_factory=list)

    def submit(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        *,
        resume: Sequence[int] = (),
        media: Sequence[MediaItem] = (),
    ) -> tuple[int, int]:
        """Submit to both engines at once, as the router does. Return (prefill stream, decode
        stream)."""
        transfer_id = f"t{next(_TRANSFERS)}"
        source = replace(
            self.prefill.decode_phase(transfer_id), producer_instance_id=self.instance_id
        )
        return (
            self.prefill.submit(
                prompt, sampling, PrefillPhase(transfer_id), resume=resume, media=media
            ),
            self.decode.submit(
                prompt, sampling, source, resume=resume, media=[x.without_data() for x in media]
            ),
        )

    async def collect(self, streams: tuple[int, int]) -> JoinedAnswer:
        """Return the whole answer. If the first token ends it, cancel the decode part."""
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
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        *,
        resume: Sequence[int] = (),
        media: Sequence[MediaItem] = (),
    ) -> JoinedAnswer:
        """Run one request from end to end, continued after the tokens of `resume`."""
        return await self.collect(self.submit(prompt, sampling, resume=resume, media=media))

    async def until_empty(self) -> None:
        """Wait until the ledgers and caches of both sides are empty."""
        await self.prefill.until_empty()
        await self.decode.until_empty()
