"""How much of what waits is released to the engines, whose queues are first come, first served.

A prompt that lies in an engine's queue can be overtaken no more. So a worker is given what keeps it
busy and little beyond: prompts up to a few of its own chunks, or one that is longer than that when
it has no other. The rest waits in the router's queue, where the order of admission holds: a short
prompt has at most the prompts before it that one worker has been given, never ten long ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve.types import Role
from router.member import MemberState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.types import WorkerInfo
    from router.placement.values import Candidate

# Of a worker that does not say how many prompt tokens it computes in a step.
ASSUMED_CHUNK_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class PrefillQueue:
    """Releases up to `chunks_ahead` chunks of prompts to each worker; 0 releases everything."""

    chunks_ahead: int = 0

    def takes(self, candidate: Candidate, prompt_tokens: int) -> bool:
        """Whether the worker is given a prompt of which it has to compute `prompt_tokens`."""
        if not self.chunks_ahead or not candidate.outstanding_tokens:
            return True
        quantum = self.chunks_ahead * chunk_tokens(candidate.info)
        return candidate.outstanding_tokens + prompt_tokens <= quantum

    def busy(self, candidates: Sequence[Candidate], prompt_tokens: int) -> set[str]:
        """Of prefill workers those that are not given it: their engines have prompts enough."""
        return {
            c.worker_id
            for c in candidates
            if c.outstanding_tokens
            and c.role is not Role.DECODE
            and c.state is MemberState.READY
            and not self.takes(c, prompt_tokens)
        }


EVERYTHING = PrefillQueue()


def chunk_tokens(info: WorkerInfo) -> int:
    """Prompt tokens that a worker computes in one step."""
    told = info.settings.get("max_num_batched_tokens", "")
    return int(told) if told.isdecimal() and int(told) else ASSUMED_CHUNK_TOKENS
