"""A prefill and a decode engine used as the router uses them, without the router."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdserve.types import FinishReason, SamplingParams
from workers.engine import DecodePhase, PrefillPhase

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.types import PositionLogprobs
    from tests.e2e.engines import Answer, EngineProcess

_TRANSFERS = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Joined:
    """One answer, whoever made its parts; what exactness compares."""

    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[PositionLogprobs, ...]
    finish_reason: FinishReason | None
    stop_reason: str | int | None


def joined(*parts: Answer) -> Joined:
    """The parts in order; the last one says why it ended."""
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
